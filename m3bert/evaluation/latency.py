"""Latency of one query at each granularity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import cycle
from typing import TypeVar

import torch

from ..encode.coding import Coder, PackedIndex
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT
from ..encode.states import truncate, unwrap_encoder
from .results import Latency, rescorers_of, stored_as
from .search import SHORTLISTS, nearest, rerank


# Other work on the machine only adds time, often to more than half of the rounds, so a median measures that work too.
QUANTILE = 0.1
ENGINE = "torch" if find_spec("faiss") is None else "faiss"  # which searches in float32
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
    """Lower quantile of the times, without interpolation."""
    return round(1000 * sorted(times)[int(QUANTILE * (len(times) - 1))], 3)


def encode_milliseconds(
    engines: Mapping[str, Mapping[int, Callable[[str], object]]], texts: Sequence[str], rounds: int
) -> dict[str, dict[str, float]]:
    """
    The 10th percentile of the milliseconds per text: runtime -> layer as text -> milliseconds. The texts are used in
    turn. Runtimes take turns of several rounds. The threads of one slow down the next for a moment, whose first call
    therefore does not count.
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
    milliseconds: dict[str, dict[str, float]] = {engine: {} for engine in engines}
    for (engine, layer), values in times.items():
        milliseconds[engine][str(layer)] = _milliseconds(values)
    return milliseconds


def _torch_encoder(encoder: GridEncoder, layer: int) -> Callable[[str], torch.Tensor]:
    """A function that encodes a query, given with its prompt, at the widest dim of a layer: `(1, dim)`, on the CPU."""
    device = unwrap_encoder(encoder.model).device
    longest = encoder.max_length_of("query")
    alone = replace(encoder, grid=Grid((Granularity(layer, encoder.encoded_grid.dims_of(layer)[-1]),)))

    def encode(text: str) -> torch.Tensor:
        inputs = encoder.tokenizer(
            [text], truncation=True, max_length=longest, return_token_type_ids=False, return_tensors="pt"
        )
        return alone.pooled(inputs.to(device))[layer].cpu()

    return encode


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
    precision, with coding the query, and reranking of shortlists at each dim.

    Args:
        encoder ([`GridEncoder`]): The encoder as it would be deployed. An elastic encoder stops at the layer;
            others run all layers.
        queries (`Sequence[str]`): Realistic queries, used in turn.
        documents (`int`, *optional*, defaults to 100,000): Number of random vectors to search.
        rounds (`int`, *optional*, defaults to 20): Measurements per step. The result is their 10th percentile.
        seed (`int`, *optional*, defaults to 0): Seed of the random vectors.
        engines (`dict[str, dict[int, Callable]]`, *optional*): Other runtime -> layer -> function that encodes a query
            with its prompt, such as `onnx_engines` of `hub_cards`.
    """
    was_training = encoder.model.training
    encoder.model.eval()
    texts = [encoder.prompt_of("query") + text for text in queries]
    runtimes = {"torch": {layer: _torch_encoder(encoder, layer) for layer in encoder.grid.layers}, **(engines or {})}
    encode_ms = encode_milliseconds(runtimes, texts, rounds)
    width = encoder.encoded_grid.dims[-1]
    vectors = torch.randn(documents, width, generator=torch.Generator().manual_seed(seed))
    search_ms, rerank_ms = search_milliseconds(encoder, vectors, rounds)
    encoder.model.train(was_training)
    return Latency(
        encode_ms=encode_ms.pop("torch"),
        search_ms=search_ms,
        rerank_ms=rerank_ms,
        documents=documents,
        encoder=unwrap_encoder(encoder.model).config.model_type,
        threads=torch.get_num_threads(),
        engine=ENGINE,
        quantile=QUANTILE,
        engine_ms=encode_ms,
    )


def search_milliseconds(
    encoder: GridEncoder, vectors: torch.Tensor, rounds: int
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """`search_ms` and `rerank_ms` of [`Latency`], for documents with these embeddings `(documents, width)`."""

    def search(dim: int, code: str) -> Callable[[], object]:
        if code == FLOAT and ENGINE == "torch":
            return lambda: nearest(vectors[:1, :dim], vectors[:, :dim], 10)
        index = PackedIndex.pack(vectors, code, dim, encoder.quantizer)
        return lambda: index.search(vectors[:1], 10)

    def reorder(dim: int, code: str, length: int) -> Callable[[], object]:
        if code == FLOAT:
            # Rows spread over the whole collection, as in a real shortlist.
            shortlist = torch.linspace(0, len(vectors) - 1, length).long().unsqueeze(0).numpy()
            query, narrowed = truncate(vectors[:1], dim), truncate(vectors, dim)
            return lambda: rerank(query, narrowed, shortlist, [length])
        coder = Coder.fit(vectors, code, dim, encoder.quantizer)
        packed, shortlist = coder.pack(vectors[:length]), torch.arange(length).unsqueeze(0).numpy()
        return lambda: rerank(coder.float_queries(vectors[:1]), coder.decode(packed), shortlist, [length])

    grid, lengths = encoder.grid, [length for length in SHORTLISTS if length <= len(vectors)]
    floats = [(dim, FLOAT) for dim in grid.dims]
    search_ms: dict[str, float] = {}
    for stored in (floats, sorted({(g.dim, g.code) for g in grid.coded})):
        search_ms |= milliseconds_in_turn({stored_as(*each): search(*each) for each in stored}, rounds)
    rerank_ms: dict[str, dict[str, float]] = {}
    rescorers = {(g.dim, g.code if by == "codes" else by) for g in grid.coded for by in rescorers_of(g.code)}
    for stored in (floats, sorted(rescorers - {*floats})):
        functions = {(stored_as(*each), length): reorder(*each, length) for each in stored for length in lengths}
        for (name, length), value in milliseconds_in_turn(functions, rounds).items():
            rerank_ms.setdefault(name, {})[str(length)] = value
    return search_ms, rerank_ms
