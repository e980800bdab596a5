"""Trimming: an encoder in its repository, with the tokens that some texts use and those that spell all other text."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ..modeling.files_elastic import PARTS_FILE, write_parts
from ..utils.durable import remove_files, replacing
from .auto import load_model
from .repository import copy_source, loading_from
from .vocabulary import Vocabulary


Texts = Callable[[], Iterable[str | None]]  # gives the texts, each time that it is called
AsRead = Callable[[Iterable[str]], list[str]]  # texts -> what a model reads of them
OTHER_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "*.model", "added_tokens.json")
HELD_OUT, MOST_HELD_OUT = 10, 2000  # every tenth text, up to this number
FIRST_IDS = 100
COMPARED_TEXTS, COMPARED_TOKENS = 8, 16  # in hidden states, before and after
STATE_TOLERANCE = 1e-3  # of the largest value; kernels may round by where tensors lie in memory


def trim(
    source: str,
    folder: Path,
    texts: Texts,
    *,
    other: Texts | None = None,
    every_character: bool = True,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> dict[str, dict[str, float]]:
    """
    Write the repository of an encoder with the tokens of some texts ([`~Vocabulary.needed_ids`]). These texts have the
    same tokens and hidden states as before.

    Args:
        source (`str`): Folder or Hub id of an encoder with a fast tokenizer.
        folder (`Path`): An empty folder to write to.
        texts (`Callable`): Returns the texts, each time that it is called.
        other (`Callable`, *optional*): Returns texts to measure on. Default: every tenth text, up to 2,000 of them.
        every_character (`bool`, *optional*, defaults to `True`): Keep all single characters, not only the texts'.
        revision (`str`, *optional*): Branch, tag or commit of the source.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the source.

    Returns:
        `dict`: tokens and [`size_of`] the weights `"before"` and `"after"`; [`compare`] of `"other"` texts.

    Raises:
        ValueError: if a text would have other tokens than before, or one of the first texts other hidden states.
    """
    with loading_from(source):
        copy_source(source, folder, revision, others=("elastic", "quantizer"))
    vocabulary, config = read_vocabulary(folder, source), contents(folder, "config.json")
    as_read = reader_of(folder)
    held_out = use_texts(vocabulary, config, texts, as_read, hold_out=other is None)
    smaller = vocabulary.smaller(every_character=every_character)
    measured = compare(vocabulary, smaller, held_out if other is None else other())
    vocabulary.add_texts(as_read(held_out))
    first = as_read(next(batches(texts()))[:COMPARED_TEXTS])
    states = hidden_states(folder, first, trust_remote_code=trust_remote_code)
    ids = vocabulary.needed_ids(every_character=every_character)
    content = json.dumps(vocabulary.trimmed(ids), ensure_ascii=False)
    (folder / "tokenizer.json").write_text(content + "\n", encoding="utf-8")
    remove_files(folder, OTHER_VOCABULARIES)
    trim_settings(folder, ids)
    before, after = trim_weights(folder, ids, config["vocab_size"])
    require_same_tokens(vocabulary, Vocabulary(tokenizer_of(folder)), ids, map(as_read, batches(texts())))
    others = hidden_states(folder, first, trust_remote_code=trust_remote_code)
    for text, old, new in zip(first, states, others, strict=True):
        if (old - new).abs().max() > STATE_TOLERANCE * old.abs().max():
            raise ValueError(f"{text[:60]!r} would have other hidden states: {source} needs the ids of its tokens.")
    tokens = vocabulary.tokenizer.get_vocab_size()
    return {"before": {"tokens": tokens, **before}, "after": {"tokens": len(ids), **after}, "other": measured}


def tokenizer_of(folder: Path) -> Tokenizer:
    """The tokenizer of a folder, as transformers loads it."""
    return AutoTokenizer.from_pretrained(folder).backend_tokenizer


def contents(folder: Path, pattern: str) -> dict[str, Any]:
    """The settings in the JSON files of a pattern."""
    return dict(chain(*(json.loads(file.read_text("utf-8")).items() for file in folder.glob(pattern))))


def read_vocabulary(folder: Path, source: str) -> Vocabulary:
    """The vocabulary of a copy of the source. ValueError if it cannot be trimmed."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{source} has no tokenizer.json, which a fast tokenizer has: its vocabulary stays as it is.")
    content = json.loads(Tokenizer.from_file(str(folder / "tokenizer.json")).to_str())
    vocabulary, config = Vocabulary(tokenizer_of(folder), content), contents(folder, "config.json")
    rows, tokens = config.get("vocab_size", 0), vocabulary.tokenizer.get_vocab_size()
    alike = [name for name, value in config.items() if value == rows and name != "vocab_size"]
    if rows < tokens or alike or not [*folder.glob("model*.safetensors")]:
        raise ValueError(
            f"{source} needs weights in safetensors, and in its config a vocab_size of at least its {tokens} tokens "
            "that no other setting equals."
        )
    return vocabulary


def reader_of(folder: Path) -> AsRead:
    """What a model reads of texts: also with its prompts, and in lower case if its settings say so."""
    prompts = [prompt for prompt in (contents(folder, "config_sentence_*").get("prompts") or {}).values() if prompt]
    lower = contents(folder, "sentence_*_config.json").get("do_lower_case")

    def as_read(texts: Iterable[str]) -> list[str]:
        prompted = [prompt + text for text in texts for prompt in ("", *prompts)]
        return [text.lower() for text in prompted] if lower else prompted

    return as_read


def use_texts(
    vocabulary: Vocabulary, config: Mapping[str, Any], texts: Texts, as_read: AsRead, *, hold_out: bool
) -> list[str]:
    """Use the special tokens of a config and the tokens of texts. Returns every tenth text, up to 2,000 of them, which
    is left out with `hold_out`. ValueError if there are no texts."""
    special = [value for name, value in config.items() if name.endswith("_token_id") and value is not None]
    vocabulary.used_ids |= {*chain(*(value if isinstance(value, list) else [value] for value in special))}
    vocabulary.used_ids |= {*vocabulary.tokenizer.encode("", "").ids}
    if (config.get("pad_token_id") or 0) < FIRST_IDS:  # positions of RoBERTa and its like count from the padding token
        vocabulary.used_ids |= {*range(config.get("pad_token_id") or 0)}
    special_tokens, held_out = len(vocabulary.used_ids), list[str]()
    for batch in batches(texts()):
        apart = batch[HELD_OUT - 1 :: HELD_OUT] if hold_out and len(held_out) < MOST_HELD_OUT else []
        held_out += apart
        vocabulary.add_texts(as_read({*batch} - {*apart}))
    if len(vocabulary.used_ids) == special_tokens:
        raise ValueError("There are no texts, or all are empty.")
    return held_out


def batches(texts: Iterable[str | None], size: int = 1000) -> Iterator[list[str]]:
    """The texts that are not empty, in lists."""
    filled = (text for text in texts if text and text.strip())
    while batch := list(islice(filled, size)):
        yield batch


def compare(old: Vocabulary, new: Vocabulary, texts: Iterable[str | None]) -> dict[str, float]:
    """What two tokenizers, of a source and trimmed, make of other texts: how many more tokens there are, as a share,
    and the share of unknown tokens before and after."""
    count, tokens, unknown = 0, [0, 0], [0, 0]
    for batch in batches(texts):
        count += len(batch)
        for side, vocabulary in enumerate((old, new)):
            encoded = vocabulary.tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            tokens[side] += sum(map(len, encoded))
            unknown[side] += sum(token == vocabulary.unknown for encoding in encoded for token in encoding.ids)
    before, after = (number / max(1, total) for number, total in zip(unknown, tokens, strict=True))
    longer = tokens[1] / max(1, tokens[0]) - 1
    return {"texts": count, "longer": longer, "unknown_before": before, "unknown_after": after}


def require_same_tokens(old: Vocabulary, new: Vocabulary, ids: Sequence[int], texts: Iterable[list[str]]) -> None:
    """Raise a ValueError if a text has other tokens in the new vocabulary, whose tokens had these ids."""
    for batch in texts:
        encoded = [vocabulary.tokenizer.encode_batch_fast(batch) for vocabulary in (old, new)]
        for text, before, after in zip(batch, *encoded, strict=True):
            if before.ids != [ids[token] for token in after.ids]:
                raise ValueError(f"{text[:60]!r} would have other tokens: this tokenizer cannot be trimmed.")


def hidden_states(folder: Path, texts: Sequence[str], **loading: Any) -> list[torch.Tensor]:
    """The last hidden states of the first tokens of some texts, `(1, tokens, hidden_size)` each."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder, **loading), load_model(folder, **loading).eval()
    encoder = model.get_encoder() if model.config.is_encoder_decoder else model
    options = {"truncation": True, "max_length": COMPARED_TOKENS, "return_tensors": "pt"}
    with torch.inference_mode():
        return [encoder(**tokenizer(text, return_token_type_ids=False, **options))[0] for text in texts]


def trim_settings(folder: Path, ids: Sequence[int]) -> None:
    """Renumber the tokens in the settings of a model, of its generation and of its tokenizer."""
    new = {old: number for number, old in enumerate(ids)}
    for file in (folder / name for name in ("config.json", "generation_config.json", "tokenizer_config.json")):
        settings = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        for name, value in settings.items():
            if name.endswith("_token_id"):
                many = isinstance(value, list)
                settings[name] = [new.get(old, old) for old in value] if many else new.get(value, value)
        if "vocab_size" in settings:
            settings["vocab_size"] = len(ids)
        if elastic := settings.get("elastic"):
            elastic["ignored_ids"] = [new[old] for old in elastic.get("ignored_ids", ()) if old in new]
            (elastic.get("fit") or {}).pop("source_sha256", None)  # it no longer has the source's weights
        if added := settings.get("added_tokens_decoder"):
            settings["added_tokens_decoder"] = {str(new[int(old)]): token for old, token in added.items()}
        if settings:
            file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def size_of(tensors: Mapping[str, torch.Tensor]) -> Counter[str]:
    """Parameters, bytes, and about the bytes of an ONNX graph with 8-bit weights: one per weight of a matrix, four per
    weight of a vector."""
    size: Counter[str] = Counter()
    for tensor in tensors.values():
        graph = tensor.numel() * (1 if tensor.dim() > 1 else 4)
        size += Counter(parameters=tensor.numel(), bytes=tensor.nbytes, graph_bytes=graph)
    return size


def trim_weights(folder: Path, ids: Sequence[int], rows: int) -> tuple[Counter[str], Counter[str]]:
    """Leave only the rows of some tokens in tensors with `rows` rows: embeddings, a head and its bias, a static table.
    Other tensors stay as they are. Returns the [`size_of`] the weights before and after, without what a fit added."""

    def trimmed(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor[list(ids)] if tensor.shape[:1] == (rows,) else tensor for name, tensor in tensors.items()}

    parts_file, index = folder / PARTS_FILE, folder / "model.safetensors.index.json"
    before, after = Counter[str](), Counter[str]()
    for file in folder.glob("model*.safetensors"):
        old = load_file(file)
        new = trimmed(old)
        before, after = before + size_of(old), after + size_of(new)
        with replacing(file) as draft:
            save_file(new, draft, {"format": "pt"})
    if parts_file.is_file():
        parts = trimmed(load_file(parts_file))
        parts_file.unlink()  # not while its tensors are mapped from it
        write_parts(folder, parts, exact=True)  # which records the weights that they are for
    if index.is_file():
        values = {**json.loads(index.read_text("utf-8")), "metadata": {"total_size": after["bytes"]}}
        index.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return before, after
