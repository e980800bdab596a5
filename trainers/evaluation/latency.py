"""Latency of one query at each granularity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import torch

from ..core.states import truncate, unwrap_encoder
from .encoding import GridEncoder
from .results import Latency
from .search import SHORTLISTS, ExactIndex, rerank


Name = TypeVar("Name")


def seconds_in_turn(functions: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Median seconds per call of each function. Every round calls each function once; a first round is not counted."""
    times: dict[Name, list[float]] = {name: [] for name in functions}
    for counted in [False, *[True] * rounds]:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if counted:
                times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


@torch.no_grad()
def measure_latency(
    encoder: GridEncoder, queries: Sequence[str], *, documents: int = 100_000, rounds: int = 20, seed: int = 0
) -> Latency:
    """
    Measure the latency of a single query: encoding at each layer (text to vector), exact search at each dim, and
    re-ranking of shortlists at each dim.

    Args:
        encoder ([`GridEncoder`]): The encoder as it would be deployed. An m3BERT stops at the layer; other encoders
            run all layers.
        queries (`Sequence[str]`): Realistic queries, used in turn.
        documents (`int`, *optional*, defaults to 100,000): Number of vectors to search. They are random, because the
            time of an exact search does not depend on their values.
        rounds (`int`, *optional*, defaults to 20): Measurements per step; the result is their median.
        seed (`int`, *optional*, defaults to 0): Seed of the random vectors.

    Returns:
        [`Latency`]
    """
    device = next(encoder.model.parameters()).device
    was_training = encoder.model.training
    encoder.model.eval()

    def encode(layer: int) -> Callable[[], None]:
        turn = iter(range(rounds + 1))

        def run() -> None:
            text = queries[next(turn) % len(queries)]
            inputs = encoder.tokenizer(
                [encoder.prompts.get("query", "") + text],
                truncation=True,
                max_length=encoder.max_length_of("query"),
                return_token_type_ids=False,
                return_tensors="pt",
            )
            encoder.states(inputs.to(device), [layer]).pooled(layer, encoder.pooling).cpu()

        return run

    vectors = torch.randn(documents, encoder.grid.dims[-1], generator=torch.Generator().manual_seed(seed))

    def search(dim: int) -> Callable[[], object]:
        index, query = ExactIndex(truncate(vectors, dim)), truncate(vectors[:1], dim, normalize=True)
        return lambda: index.search(query, 10)

    def reorder(dim: int, size: int) -> Callable[[], object]:
        # Rows spread over the whole collection, like those of a real shortlist.
        shortlist = torch.linspace(0, documents - 1, size).long().unsqueeze(0).numpy()
        query, narrowed = truncate(vectors[:1], dim), truncate(vectors, dim)
        return lambda: rerank(query, narrowed, shortlist, [size])

    sizes = [size for size in SHORTLISTS if size <= documents]
    encode_seconds = seconds_in_turn({layer: encode(layer) for layer in encoder.grid.layers}, rounds)
    search_seconds = seconds_in_turn({dim: search(dim) for dim in encoder.grid.dims}, rounds)
    rerank_seconds = seconds_in_turn(
        {(dim, size): reorder(dim, size) for dim in encoder.grid.dims for size in sizes}, rounds
    )
    encoder.model.train(was_training)
    return Latency(
        encode_ms={str(layer): round(1000 * seconds, 3) for layer, seconds in encode_seconds.items()},
        search_ms={str(dim): round(1000 * seconds, 3) for dim, seconds in search_seconds.items()},
        rerank_ms={
            str(dim): {str(size): round(1000 * rerank_seconds[dim, size], 3) for size in sizes}
            for dim in encoder.grid.dims
        },
        documents=documents,
        encoder=unwrap_encoder(encoder.model).config.model_type,
        threads=torch.get_num_threads(),
        engine=ExactIndex.engine,
    )
