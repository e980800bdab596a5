"""An encoder in onnxruntime, in float32 and in 8 bits, as runtimes whose latency is measured beside that of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from .onnx_export import embed, export_onnx, open_session, quantize_onnx


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
    """
    queries = replace(encoder, max_length=encoder.max_length_of("query"))
    engines: dict[str, dict[int, Callable[[str], np.ndarray]]] = {"ONNX float32": {}, "ONNX int8": {}}

    def engine(file: Path) -> Callable[[str], np.ndarray]:
        session = open_session(file, threads=torch.get_num_threads())
        return lambda text: embed(session, queries, [text])

    with TemporaryDirectory() as folder:
        for layer in layers:
            granularity = Granularity(layer, encoder.grid.dims_of(layer)[-1])
            file = export_onnx(queries, granularity, Path(folder, f"{layer}.onnx"))
            engines["ONNX float32"][layer] = engine(file)
            engines["ONNX int8"][layer] = engine(quantize_onnx(file, Path(folder, f"{layer}_quantized.onnx")))
    return engines
