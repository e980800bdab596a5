"""Latency of one query at each granularity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any, TypeVar

import torch

from ..encode.codes import FLOAT, code_of
from ..encode.coding import Coder, PackedIndex
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid
from ..encode.search import SHORTLISTS, ExactIndex, rerank
from ..encode.states import truncate, unwrap_encoder
from .results import Latency


# Other work on the machine only adds time, often to more than half of the rounds, so a median measures that work too.
QUANTILE = 0.1
BLOCK = 5  # rounds of one engine before the next one has its turn

Name = TypeVar("Name")


def times_in_turn(functions: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, list[float]]:
    """Seconds of each call of each function. Every round calls each function once; a first round is not counted."""
    times: dict[Name, list[float]] = {name: [] for name in functions}
    for counted in [False, *[True] * rounds]:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if counted:
                times[name].append(time.perf_counter() - start)
    return times


def milliseconds_in_turn(functions: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """The 10th percentile of the milliseconds per call of each function, measured in turn."""
    return {name: _milliseconds(values) for name, values in times_in_turn(functions, rounds).items()}


def _milliseconds(times: Sequence[float]) -> float:
    """The next lower time at [`QUANTILE`]: times between two are not interpolated."""
    return round(1000 * sorted(times)[int(QUANTILE * (len(times) - 1))], 3)


def encode_milliseconds(
    engines: Mapping[str, Mapping[int, Callable[[str], object]]], texts: Sequence[str], rounds: int
) -> dict[str, dict[str, float]]:
    """
    The 10th percentile of the milliseconds per text of several runtimes: runtime -> layer as text -> milliseconds.

    Runtimes have their turns in blocks of rounds. The threads of a runtime stay active for a moment and slow down the
    next one, whose first call is therefore not counted.

    Args:
        engines (`dict[str, dict[int, Callable]]`): Runtime -> layer -> function that encodes a text.
        texts (`Sequence[str]`): Texts, used in turn.
        rounds (`int`): Calls that count, per function.
    """

    def with_texts(function: Callable[[str], object]) -> Callable[[], object]:
        turn = cycle(texts)
        return lambda: function(next(turn))

    timed = {
        engine: {layer: with_texts(function) for layer, function in functions.items()}
        for engine, functions in engines.items()
    }
    times: dict[tuple[str, int], list[float]] = {}
    for start in range(0, rounds, BLOCK):
        for engine, functions in timed.items():
            for layer, values in times_in_turn(functions, min(BLOCK, rounds - start)).items():
                times.setdefault((engine, layer), []).extend(values)
    found: dict[str, dict[str, float]] = {engine: {} for engine in engines}
    for (engine, layer), values in times.items():
        found[engine][str(layer)] = _milliseconds(values)
    return found


def _torch_encoder(encoder: GridEncoder, layer: int) -> Callable[[str], torch.Tensor]:
    """A function that encodes a query, given with its prompt, at the widest dim of a layer: `(1, dim)`, on the CPU."""
    device = unwrap_encoder(encoder.model).device
    options: dict[str, Any] = {"truncation": True, "return_token_type_ids": False, "return_tensors": "pt"}
    options["max_length"] = encoder.max_length_of("query")
    alone = replace(encoder, grid=Grid((Granularity(layer, encoder.encoded_grid.dims_of(layer)[-1]),)))
    return lambda text: alone.pooled(encoder.tokenizer([text], **options).to(device))[layer].cpu()


@torch.no_grad()
def measure_latency(
    encoder: GridEncoder,
    queries: Sequence[str],
    *,
    documents: int = 100_000,
    rounds: int = 20,
    seed: int = 0,
    engines: Mapping[str, Mapping[int, Callable[[str], object]]] | None = None,
) -> Latency:
    """
    Measure the latency of a single query: encoding at each layer (text to vector), exact search at each dim and
    precision, and reranking of shortlists at each dim. The time of a search in a precision includes coding the query.

    Args:
        encoder ([`GridEncoder`]): The encoder as it would be deployed. An m3BERT stops at the layer; other encoders
            run all layers.
        queries (`Sequence[str]`): Realistic queries, used in turn.
        documents (`int`, *optional*, defaults to 100,000): Number of vectors to search. They are random, because the
            time of an exact search does not depend on their values.
        rounds (`int`, *optional*, defaults to 20): Measurements per step. The result is their 10th percentile
            (`QUANTILE`) and not their median, because a busy machine disturbs measurements in one direction only.
        seed (`int`, *optional*, defaults to 0): Seed of the random vectors.
        engines (`dict[str, dict[int, Callable]]`, *optional*): Runtime -> layer -> function that encodes a query,
            given with its prompt, in another runtime than torch. `onnx_engines` of `hub_cards` makes those of
            onnxruntime.

    Returns:
        [`Latency`]
    """
    was_training = encoder.model.training
    encoder.model.eval()
    width = encoder.encoded_grid.dims[-1]
    vectors = torch.randn(documents, width, generator=torch.Generator().manual_seed(seed))

    def search(dim: int) -> Callable[[], object]:
        index, query = ExactIndex(truncate(vectors, dim)), truncate(vectors[:1], dim, normalize=True)
        return lambda: index.search(query, 10)

    def reorder(dim: int, size: int) -> Callable[[], object]:
        # Rows spread over the whole collection, like those of a real shortlist.
        shortlist = torch.linspace(0, documents - 1, size).long().unsqueeze(0).numpy()
        query, narrowed = truncate(vectors[:1], dim), truncate(vectors, dim)
        return lambda: rerank(query, narrowed, shortlist, [size])

    def search_coded(dim: int, code: str) -> Callable[[], object]:
        index = PackedIndex.pack(vectors, code, dim, encoder.quantizer)
        return lambda: index.search(vectors[:1], 10)

    def reorder_coded(dim: int, code: str, size: int) -> Callable[[], object]:
        coder = Coder.fit(vectors, code, dim, encoder.quantizer)
        packed, shortlist = coder.pack(vectors[:size]), torch.arange(size).unsqueeze(0).numpy()
        return lambda: rerank(coder.float_queries(vectors[:1]), coder.decode(packed), shortlist, [size])

    sizes = [size for size in SHORTLISTS if size <= documents]
    coded = sorted({(g.dim, g.code) for g in encoder.grid if g.code != FLOAT})
    rescoring = _rescoring_codes(encoder.grid)
    texts = [encoder.prompts.get("query", "") + text for text in queries]
    every = {"torch": {layer: _torch_encoder(encoder, layer) for layer in encoder.grid.layers}, **(engines or {})}
    encode_ms = encode_milliseconds(every, texts, rounds)
    search_ms = milliseconds_in_turn({str(dim): search(dim) for dim in encoder.grid.dims}, rounds)
    search_ms |= milliseconds_in_turn({f"{dim}@{code}": search_coded(dim, code) for dim, code in coded}, rounds)
    reordering = (
        {(str(dim), size): reorder(dim, size) for dim in encoder.grid.dims for size in sizes},
        {(f"{dim}@{code}", size): reorder_coded(dim, code, size) for dim, code in rescoring for size in sizes},
    )
    rerank_ms: dict[str, dict[str, float]] = {}
    for functions in reordering:
        for (name, size), value in milliseconds_in_turn(functions, rounds).items():
            rerank_ms.setdefault(name, {})[str(size)] = value
    encoder.model.train(was_training)
    return Latency(
        encode_ms=encode_ms.pop("torch"),
        search_ms=search_ms,
        rerank_ms=rerank_ms,
        documents=documents,
        encoder=unwrap_encoder(encoder.model).config.model_type,
        threads=torch.get_num_threads(),
        engine=ExactIndex.engine,
        quantile=QUANTILE,
        engine_ms=encode_ms,
    )


def _rescoring_codes(grid: Grid) -> list[tuple[int, str]]:
    """Dims and precisions besides float32 that rescore shortlists: `binary` and `qama-*` themselves, and int8 beside
    codes of fewer bits."""
    codes = [(g.dim, code_of(g.code)) for g in grid]
    own = {(dim, code.name) for dim, code in codes if code.learned or code.name == "binary"}
    return sorted(own | {(dim, "int8") for dim, code in codes if code.bits < code_of("int8").bits})
