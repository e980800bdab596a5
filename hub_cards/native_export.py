"""
Export a checkpoint, or one granularity of it, as a plain encoder of transformers with modules of
sentence-transformers: an m3BERT as BERT, RoBERTa, XLM-R, ..., any other elastic encoder as its own class with fewer
layers. Any server that knows this class loads it, without remote code.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch
import transformers
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from ..encode.granularity import Granularity, Grid
from ..encode.projection import Projection
from ..encode.quantizer import QUANTIZER_FOLDER
from ..encode.states import shared_layers
from ..modeling.files_elastic import CODE_FILES, Source
from ..models.auto import load_model
from ..models.native import architecture_differs, convert_to_native, output_map
from .checkpoint import Checkpoint
from .export_files import PLACE, write_readme
from .files import LICENSES, TOKENIZER_FILES, copy_files


logger = logging.getLogger(__name__)
# Native model types that text-embeddings-inference runs (`backends/candle/src/models/`, read 2026-11-27).
SERVED_TYPES = (
    *("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet", "deberta-v2", "modernbert", "gte"),
    *("nomic_bert", "qwen2", "qwen3", "gemma3_text", "mistral", "llama"),
)
SERVED = "text-embeddings-inference"
OutputMap = tuple[torch.Tensor, torch.Tensor | None]  # weight `(dim, hidden_size)` and bias `(dim,)`


def export_native(
    checkpoint: Checkpoint,
    folder: Path,
    granularity: Granularity | None = None,
    *,
    model_type: str | None = None,
    encoder_only: bool = False,
    place: str = PLACE,
) -> Checkpoint:
    """
    Write a checkpoint as a native model. sentence-transformers gives the same embeddings for both, except at depths
    that read the static table.

    The folder holds the encoder, the tokenizer, for an embedding model the modules of sentence-transformers (exit,
    output dim and projection as one Dense module; those of the checkpoint for late interaction), and a quantizer that
    fits the granularity. The config says under `exported_from` which granularity of which weights it is. A depth that
    reads the static table is exported with the map of its hidden state alone ([`state_only`]).

    Args:
        checkpoint ([`Checkpoint`]): A post-norm m3BERT, or an elastic repository of another encoder.
        folder (`Path`): Folder to write.
        granularity ([`Granularity`], *optional*): The granularity to export. Default: the full size.
        model_type (`str`, *optional*): Model type to export an m3BERT to; see [`convert_to_native`].
        encoder_only (`bool`, *optional*, defaults to `False`): Leave out the head.
        place (`str`, *optional*): What the code in the README loads, as Python arguments.

    Raises:
        ValueError: if the checkpoint is not elastic, has no native equivalent, or lacks the granularity.
    """
    config = checkpoint.config
    if not checkpoint.elastic:
        raise ValueError(f"{checkpoint.folder} is not elastic: it is a native {config.model_type} already.")
    size, projection = granularity or checkpoint.full, checkpoint.projection
    if checkpoint.settings.is_late and size.dim != checkpoint.full.dim:
        raise ValueError(f"{size} of a model for late interaction: its modules read all {checkpoint.full.dim} dims.")
    if projection is not None:
        projection.validate_grid(Grid((size,)), config)
    head = AutoModel if encoder_only else getattr(transformers, checkpoint.head)
    width = size.dim if projection is None else config.hidden_size
    model = load_model(checkpoint.folder, head, output_layer=size.layer, output_dim=width, **checkpoint.code_options)
    embeds = model is model.base_model
    native = convert_to_native(model, model_type) if checkpoint.is_m3bert else native_of(model, size.layer, width)
    native.config.exported_from = checkpoint.origin_of(size)
    if state_only(checkpoint, size.layer):
        native.config.exported_from["state_only"] = True
    native.save_pretrained(folder)
    code = () if checkpoint.is_m3bert else checkpoint.code().keys() - {*CODE_FILES}
    copy_files(checkpoint.folder, folder, *TOKENIZER_FILES, *LICENSES, *code)
    if not checkpoint.is_m3bert:
        require_equal(model, folder, head)
    if embeds:
        dense = dense_of(output_map(model), projection, size.dim, config.hidden_size)
        write_embedding_modules(checkpoint, folder, size, native.config, dense, place)
    if checkpoint.record is not None:
        lost, trained = lost_layers(checkpoint, size), Grid.parse(checkpoint.record.grid)
        left = tuple(g for g in trained if g.layer not in lost and g.layer <= size.layer and g.dim <= size.dim)
        replace(checkpoint.record, grid=str(Grid(left or (size,)))).save(folder)
    copy_quantizer(checkpoint, folder, size)
    return Checkpoint(folder)


def write_embedding_modules(
    checkpoint: Checkpoint,
    folder: Path,
    size: Granularity,
    config: PreTrainedConfig,
    dense: Projection | None,
    place: str,
) -> None:
    """Write the modules of sentence-transformers behind an encoder that was exported at a size, or copy those of late
    interaction, and the README. `config` is that of the export."""
    widths = checkpoint.settings.token_widths  # of late interaction
    if widths is None:
        settings = replace(checkpoint.settings, max_length=checkpoint.max_length, projection=dense)
        settings.write(folder, width=config.hidden_size)
    else:
        for name, content in Source.at(checkpoint.folder, {}).with_settings().settings.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    facts = {
        "architecture": config.architectures[0],
        "late": widths is not None,
        "dim": widths[1] if widths else size.dim,
        "reads_state_only": state_only(checkpoint, size.layer),
        "has_dense": dense is not None,
        "place": place,
    }
    served = [SERVED] if config.model_type in SERVED_TYPES and widths is None else []
    write_readme(checkpoint, folder, "native", size, [config.model_type, *served], **facts)


def native_of(model: PreTrainedModel, layer: int, dim: int) -> PreTrainedModel:
    """The native model with the weights of an elastic one that was loaded at a size."""
    if layer == 0:
        raise ValueError("Depth 0 is a static table, not an encoder: export it with `m3bert export --format static`.")
    config = copy.deepcopy(model.config)
    source_code = (config.elastic or {}).get("source_auto_map")
    for name in ("elastic", "auto_map", "output_layer", "output_dim", "matryoshka_layers", "matryoshka_dims"):
        config.__dict__.pop(name, None)
    if source_code:
        config.auto_map = source_code
    if served := getattr(config, "matryoshka_dimensions", None):  # dims that servers accept requests for
        config.matryoshka_dimensions = [size for size in served if size <= dim]
    native_class, _ = type(model).made_of
    native = native_class._from_config(config).to(model.dtype)
    weights = model.state_dict()
    native.load_state_dict({name: weights[name] for name in native.state_dict()})
    return native


@torch.no_grad()
def require_equal(model: PreTrainedModel, folder: Path, auto_class: type[AutoModel]) -> None:
    """Raise a ValueError if the native model in a folder gives other hidden states than the elastic one that it was
    made from: a few encoders read the number of a layer, which changes in a path."""
    ids = torch.arange(min(model.config.vocab_size, 16))[None]
    code = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map")
    native = auto_class.from_pretrained(folder, trust_remote_code=bool(code)).eval()
    expected = model.eval().base_model(input_ids=ids, before_exit=True)[0]
    if not torch.equal(native.base_model(input_ids=ids)[0], expected):
        raise ValueError(
            f"These layers of {type(native).__name__} give other vectors when they are loaded without our code: load "
            "the elastic repository with trust_remote_code, or export it to ONNX."
        )


def copy_quantizer(checkpoint: Checkpoint, folder: Path, size: Granularity) -> None:
    """Copy the quantizer of a checkpoint, if it has one that fits this size, with the code that loads it."""
    if checkpoint.quantizer_config is None:
        return
    if misfit := checkpoint.quantizer_misfit(size):
        logger.warning(f"The quantizer is left out: {misfit}.")
        return
    (folder / QUANTIZER_FOLDER).mkdir(parents=True, exist_ok=True)
    copy_files(checkpoint.folder / QUANTIZER_FOLDER, folder / QUANTIZER_FOLDER, "config.json", "model.safetensors")
    for name in checkpoint.quantizer_code():
        shutil.copyfile(checkpoint.code()[name], folder / name)


def dense_of(to_output: OutputMap | None, projection: Projection | None, dim: int, width: int) -> Projection | None:
    """The map from the pooled hidden state of a native encoder to the embedding: `to_output`, which gives the output
    of the elastic encoder, then the projection of its checkpoint. `None` if the hidden state is the embedding."""
    if to_output is None and projection is None:
        return None
    weight, bias = to_output or (torch.eye(width), None)
    weight, bias = weight.float(), None if bias is None else bias.float()
    if projection is not None:
        outer, shift = projection.weight.detach()[:dim], projection.bias
        bias = None if bias is None else outer @ bias
        if shift is not None:
            bias = shift.detach()[:dim] + (0 if bias is None else bias)
        weight = outer @ weight
    dense = Projection(width, len(weight), bias=bias is not None)
    dense.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return dense


def is_plain(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether a native export at this depth is an embedding model with the vectors of the checkpoint."""
    if not checkpoint.elastic or checkpoint.head != "AutoModel" or checkpoint.quantized:
        return False
    known = not checkpoint.is_m3bert or architecture_differs(checkpoint.config) is None
    projected = checkpoint.projection is None or layer in shared_layers(checkpoint.config)
    return known and projected and layer > 0 and not state_only(checkpoint, layer)


def state_only(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether the exit of a native export at this depth reads the hidden state alone, where that of the checkpoint
    also reads the static table. No module of sentence-transformers adds the two."""
    return layer > 0 and layer in checkpoint.depths.table


def lost_layers(checkpoint: Checkpoint, size: Granularity) -> set[int]:
    """
    The layers whose granularities a native export at a size does not have. A Dense module belongs to the last layer;
    without one, and without a gap between the layers, those below are lost only if they have an exit or are paths.
    """
    narrow = checkpoint.projection is not None or size.dim < checkpoint.config.hidden_size
    if narrow or size.layer in checkpoint.depths.exits or checkpoint.depths.is_path(size.layer):
        return {*range(size.layer)}
    return {*checkpoint.depths.aligned}
