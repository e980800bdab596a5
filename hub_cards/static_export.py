"""
Export the static table of a checkpoint in the layout of model2vec, which is a `StaticEmbedding` of
sentence-transformers: both load the folder without remote code.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from ..encode.granularity import Granularity, Grid
from ..models.auto import load_model
from ..utils.numerics import quantize_rows
from .checkpoint import Checkpoint
from .export_files import PLACE, write_json, write_modules, write_readme


DTYPES = ("float32", "float16", "int8")


def export_static(
    checkpoint: Checkpoint, folder: Path, dim: int | None = None, *, dtype: str = "float32", place: str = PLACE
) -> Granularity:
    """
    Write the static table of a checkpoint, which is its layer 0, with its tokenizer and prompts.

    `SentenceTransformer(folder)` and model2vec's `StaticModel.from_pretrained(folder)` give vectors with the direction
    of the checkpoint's at layer 0. Rows of ignored tokens are zero: they add nothing to a sum. Texts are
    truncated to the checkpoint's limit without the special tokens that its tokenizer adds.

    Args:
        checkpoint ([`Checkpoint`]): An elastic checkpoint with a static table.
        folder (`Path`): Folder to write.
        dim (`int`, *optional*): Leading dims to keep. Default: those of the checkpoint.
        dtype (`str`, *optional*, defaults to `"float32"`): Type of the rows. `"int8"` has one scale per row, and
            vectors in float32. With `"float16"`, vectors are float16, too, in which sentence-transformers normalises
            an empty text to NaN; its `.float()` avoids that.
        place (`str`, *optional*): What the code in the README loads, as Python arguments.

    Returns:
        [`Granularity`]: what was exported.

    Raises:
        ValueError: if the type is unknown, the checkpoint has no static table of these dims, its tokenizer adds tokens
            that the table counts, or a row is not finite.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is unknown; legal values: {', '.join(DTYPES)}.")
    if 0 not in checkpoint.depths.table:
        raise ValueError(f"{checkpoint.folder} has no static table: fit one with `m3bert fit`.")
    size, settings = Granularity(0, dim or checkpoint.full.dim), checkpoint.settings
    tokenizer, ignored = checkpoint.tokenizer, list(checkpoint.depths.ignored_ids)
    bare, max_length = tokenizer_of_content(tokenizer, checkpoint.max_length, ignored)
    tensors = table_tensors(checkpoint, size, dtype)
    if bare.get_vocab_size() < len(tensors["embeddings"]):  # ids with gaps; else model2vec wants a row per token
        tensors["mapping"] = torch.arange(len(tensors["embeddings"]))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    bare.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "model2vec",
        "architectures": ["StaticModel"],
        "normalize": settings.normalize,
        "max_length": max_length,
        "hidden_dim": size.dim,
        "embedding_dtype": dtype,
        "exported_from": checkpoint.origin_of(size),
    }
    write_json(folder / "config.json", config)
    write_modules(folder, "StaticEmbedding", ".", settings, dtype)
    facts = {
        "dtype": dtype,
        "max_length": max_length,
        "characters": max_length * int(median(map(len, bare.get_vocab()))),
        "counts_unknown": tokenizer.unk_token_id is not None and tokenizer.unk_token_id not in ignored,
    }
    write_readme(checkpoint, folder, "static", size, ("model2vec", "static-embeddings"), place=place, **facts)
    return size


def table_tensors(checkpoint: Checkpoint, size: Granularity, dtype: str) -> dict[str, torch.Tensor]:
    """The rows of a static table `(tokens, dim)` as `embeddings`, in 8 bits with their scales as `weights`. Rows of
    ignored tokens are zero. Raises a ValueError if a row is not finite."""
    projection, ids = checkpoint.projection, max(checkpoint.tokenizer.get_vocab().values()) + 1
    if projection is not None:
        projection.validate_grid(Grid((size,)), checkpoint.config)
    width = size.dim if projection is None else checkpoint.config.hidden_size
    table = load_model(
        checkpoint.folder, output_layer=0, output_dim=width, **checkpoint.code_options
    ).elastic.table.weight.detach()
    if projection is not None:  # the map of a mean is the mean of the maps
        table = projection(table).detach()
    rows = table[:ids, : size.dim].to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    rows[[token for token in checkpoint.depths.ignored_ids if token < len(rows)]] = 0
    if dtype == "float16":
        rows = rows.half()
    if not rows.isfinite().all():
        raise ValueError(f"The static table of {checkpoint.folder} has rows that are not finite in {dtype}.")
    return dict(zip(("embeddings", "weights"), quantize_rows(rows) if dtype == "int8" else (rows,), strict=False))


def tokenizer_of_content(
    tokenizer: PreTrainedTokenizerBase, max_length: int, ignored: list[int]
) -> tuple[Tokenizer, int]:
    """A tokenizer for clients that ask for no special tokens, truncated as a text that has them, and the longest text
    in tokens without special ones. `ignored` are token ids that the table does not count."""
    added = tokenizer("")["input_ids"]
    if counted := [token for token in added if token not in ignored]:
        names = ", ".join(tokenizer.convert_ids_to_tokens(counted))
        raise ValueError(
            f"The tokenizer adds {names} to each text, which the static table counts and StaticEmbedding does not: "
            "fit the table again with this tokenizer."
        )
    bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bare.no_padding()
    longest = max_length - len(added)
    bare.enable_truncation(longest, direction=tokenizer.truncation_side)
    return bare, longest
