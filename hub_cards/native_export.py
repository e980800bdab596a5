"""
Export a checkpoint, or one granularity of it, as a plain BERT, RoBERTa, XLM-R, ... model with modules of
sentence-transformers. Any version of transformers and any server that knows BERT loads it, without remote code.
"""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModel

import modeling_m3bert
from modeling_m3bert import M3BertModel, convert_to_native
from modeling_m3bert.native_m3bert import output_map
from trainers.core.granularity import Granularity, Grid
from trainers.core.projection import Projection
from trainers.hub.quantizer import QUANTIZER_FOLDER

from .checkpoint import LICENSES, Checkpoint


logger = logging.getLogger(__name__)


def export_native(
    checkpoint: Checkpoint,
    folder: Path,
    granularity: Granularity | None = None,
    *,
    model_type: str | None = None,
    encoder_only: bool = False,
) -> Checkpoint:
    """
    Write a checkpoint as a native model. sentence-transformers gives the same embeddings for both, except at layers
    that read the static table.

    The folder holds the encoder, the tokenizer, and for an embedding model the modules of sentence-transformers:
    pooling, prompts, normalisation, and a Dense module with the exit, the output dim and the projection, where there
    are any. It also holds the quantizer, if there is one that fits the granularity; that is loaded with remote code.
    The config says under `exported_from` which granularity of which weights it is. A layer that reads the static table
    is exported with the map of its hidden state alone ([`state_only`]), which gives other embeddings.

    Args:
        checkpoint ([`Checkpoint`]): A post-norm m3BERT.
        folder (`Path`): Folder to write.
        granularity ([`Granularity`], *optional*): The granularity to export. Default: the full size.
        model_type (`str`, *optional*): Model type to export to; see [`convert_to_native`].
        encoder_only (`bool`, *optional*, defaults to `False`): Leave out the head.

    Returns:
        [`Checkpoint`]: the exported model.

    Raises:
        ValueError: if the checkpoint is not an m3BERT, has no native equivalent, lacks the granularity, or reads a
            granularity below the layer of its projection.
    """
    if not checkpoint.elastic:
        raise ValueError(
            f"{checkpoint.folder} is not an m3BERT: it is a native {checkpoint.config.model_type} already."
        )
    size, projection = granularity or checkpoint.full, checkpoint.projection
    if projection is not None:
        projection.validate_grid(Grid((size,)), checkpoint.config)
    width = size.dim if projection is None else checkpoint.config.hidden_size
    options = {"output_layer": size.layer, "output_dim": width}
    loaded = AutoModel.from_pretrained(checkpoint.folder, **options) if encoder_only else checkpoint.load(**options)
    native = convert_to_native(loaded, model_type)
    native.config.exported_from = {
        "granularity": str(size),
        "full_size": str(checkpoint.full),
        "weights": checkpoint.weights_fingerprint,
        "converted_from": checkpoint.config.converted_from,
        **({"state_only": True} if state_only(checkpoint, size.layer) else {}),
    }
    native.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)
    if loaded is loaded.base_model:
        dense = dense_of(loaded, projection, size.dim)
        settings = replace(checkpoint.settings, max_length=checkpoint.max_length, projection=dense)
        settings.write(folder, width=native.config.hidden_size)
    if checkpoint.record is not None:
        lost = lost_layers(checkpoint, size)
        kept = [g for g in Grid.parse(checkpoint.record.grid) if g.layer not in lost]
        kept = [g for g in kept if g.layer <= size.layer and g.dim <= size.dim]
        replace(checkpoint.record, grid=str(Grid(tuple(kept) or (size,)))).save(folder)
    copy_quantizer(checkpoint, folder, size)
    for file in checkpoint.folder.iterdir():
        if LICENSES.fullmatch(file.name):
            shutil.copyfile(file, folder / file.name)
    return Checkpoint(folder)


def copy_quantizer(checkpoint: Checkpoint, folder: Path, size: Granularity) -> None:
    """Copy the quantizer of a checkpoint, if it has one that fits this size, with the code that loads it."""
    if checkpoint.quantizer_config is None:
        return
    if misfit := checkpoint.quantizer_misfit(size):
        logger.warning(f"The quantizer is left out: {misfit}.")
        return
    (folder / QUANTIZER_FOLDER).mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(checkpoint.folder / QUANTIZER_FOLDER / name, folder / QUANTIZER_FOLDER / name)
    for name in checkpoint.quantizer_code():
        own = checkpoint.folder / name
        shutil.copyfile(own if own.is_file() else Path(modeling_m3bert.__file__).with_name(name), folder / name)


def dense_of(model: M3BertModel, projection: Projection | None, dim: int) -> Projection | None:
    """
    The map from the pooled hidden state of a native encoder to the embedding.

    Args:
        model ([`M3BertModel`]): The m3BERT at the granularity that is exported.
        projection ([`Projection`], *optional*): The projection of its checkpoint.
        dim (`int`): Dims of the embedding.

    Returns:
        [`Projection`], or `None` if the pooled hidden state is the embedding.
    """
    width, found = model.config.hidden_size, output_map(model)
    if found is None and projection is None:
        return None
    weight, bias = found or (torch.eye(width), None)
    weight, bias = weight.float(), bias if bias is None else bias.float()
    if projection is not None:
        outer, own = projection.weight.detach()[:dim], projection.bias
        bias = bias if bias is None else outer @ bias
        if own is not None:
            bias = own.detach()[:dim] + (0 if bias is None else bias)
        weight = outer @ weight
    dense = Projection(width, len(weight), bias=bias is not None)
    dense.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
    return dense


def state_only(checkpoint: Checkpoint, layer: int) -> bool:
    """Whether the exit of a native export at this layer reads the hidden state alone, where that of the m3BERT also
    reads the static table. No module of sentence-transformers adds the two."""
    return layer > 0 and layer in getattr(checkpoint.config, "static_layers", [])


def lost_layers(checkpoint: Checkpoint, size: Granularity) -> set[int]:
    """
    The layers whose granularities a native export at a size does not have. A Dense module belongs to the last layer;
    without one, the layers below are lost only if they have an exit.
    """
    narrow = checkpoint.projection is not None or size.dim < checkpoint.config.hidden_size
    if narrow or size.layer in checkpoint.exit_layers:
        return {*range(size.layer)}
    return {*checkpoint.exit_layers}
