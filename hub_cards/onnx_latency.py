"""An encoder in onnxruntime, in float32 and in 8 bits, as runtimes whose latency is measured beside that of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from trainers.core.granularity import Granularity
from trainers.evaluation.encoding import GridEncoder

from .onnx_export import embed, export_onnx, open_session, quantize_onnx, require_onnx


FLOAT32, INT8 = "ONNX float32", "ONNX int8"


def onnx_engines(encoder: GridEncoder, layers: Iterable[int]) -> dict[str, dict[int, Callable[[str], np.ndarray]]]:
    """
    Export an encoder at some layers, and open the graphs with as many threads as torch has.

    Args:
        encoder ([`GridEncoder`]): The encoder. It is not changed.
        layers (`Iterable[int]`): Layers of its grid, each at the layer's largest dim. Two graphs per layer stay in
            memory, each with all token embeddings.

    Returns:
        `dict[str, dict[int, Callable]]`: runtime (`"ONNX float32"`, `"ONNX int8"`) -> layer -> function that encodes a
        query, given with its prompt, on the CPU. These are the `engines` of `measure_latency`.

    Raises:
        ValueError: if a layer is not in the grid, the extra is missing, or the encoder cannot be exported.
    """
    require_onnx()
    layers = list(layers)
    if unknown := [layer for layer in layers if layer not in encoder.grid.layers]:
        legal = ", ".join(map(str, encoder.grid.layers))
        raise ValueError(f"The grid has no layer {unknown[0]} to measure in onnxruntime; its layers: {legal}.")
    queries = replace(encoder, max_length=encoder.max_length_of("query"))
    engines: dict[str, dict[int, Callable[[str], np.ndarray]]] = {FLOAT32: {}, INT8: {}}
    with TemporaryDirectory() as folder:
        for layer in layers:
            granularity = Granularity(layer, encoder.grid.dims_of(layer)[-1])
            file = export_onnx(queries, granularity, Path(folder, f"{layer}.onnx"))
            quantized = quantize_onnx(file, Path(folder, f"{layer}_quantized.onnx"))
            engines[FLOAT32][layer] = _encode_with(file, queries)
            engines[INT8][layer] = _encode_with(quantized, queries)
    return engines


def _encode_with(file: Path, encoder: GridEncoder) -> Callable[[str], np.ndarray]:
    session = open_session(file, threads=torch.get_num_threads())
    return lambda text: embed(session, encoder, [text])
