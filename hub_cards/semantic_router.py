"""
The layout in which the semantic router of vLLM reads an encoder that exits early: one ONNX graph for each number of
layers, and a file that lists them.

The router (`onnx-binding` at 3d48f8c, 2026-08-22: its sources were read, not run) tokenises with `tokenizer.json`,
takes the mean of `last_hidden_state` over the tokens, truncates it, and L2-normalises it. It adds no prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..encode.states import longest_text, shared_layers, unwrap_encoder
from ..utils.durable import remove_files
from .checkpoint import full_size
from .onnx_export import export_onnx
from .onnx_graphs import write_encoder_files


def write_layers(
    encoder: GridEncoder, granularities: Sequence[Granularity], folder: Path, stale: Sequence[str]
) -> list[int]:
    """
    Write config, tokenizer, `onnx/layer-4/model.onnx` and the like, and `onnx/model_config.json`. Returns the layers:
    those of the granularities, by default each in the space of the last layer, and the last. Files that match `stale`
    are removed first. ValueError as [`export_onnx`], or, before that, if the router would make other embeddings.
    """
    config = unwrap_encoder(encoder.model).config
    full = full_size(config, encoder.projection)
    if encoder.pooling != "mean":
        raise ValueError(f"pooling={encoder.pooling!r}: the semantic router takes the mean over the tokens.")
    if not encoder.tokenizer.is_fast:
        raise ValueError(f"{type(encoder.tokenizer).__name__} has no tokenizer.json, which the semantic router reads.")
    for g in granularities:
        if g.layer == 0 or g.dim != full.dim:
            legal = f"1x{full.dim} to {full}"
            raise ValueError(f"{g}: the semantic router reads {legal}, and truncates the embeddings itself.")
    layers = sorted({g.layer for g in granularities} or {*shared_layers(config)} - {0})
    layers += [full.layer] * (full.layer not in layers)
    remove_files(folder, stale)
    write_encoder_files(encoder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # the router pads, and takes each token of the tokenizer for a real one
    tokenizer.enable_truncation(longest_text(config, encoder.tokenizer, encoder.max_length))
    tokenizer.save(str(folder / "tokenizer.json"))
    for layer in layers:
        file = folder / "onnx" / f"layer-{layer}" / "model.onnx"
        export_onnx(encoder, Granularity(layer, full.dim), file, project_tokens=True)
    listed = {"total_layers": full.layer, "hidden_size": full.dim, "available_layers": layers}
    (folder / "onnx" / "model_config.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return layers
