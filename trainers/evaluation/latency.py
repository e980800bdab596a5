"""What one query costs at each granularity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

import faiss
import torch

from ..nested import nested_states, prefix, unwrap_encoder
from .encoding import GridEncoder
from .results import Latency
from .search import SHORTLISTS, rerank


Name = TypeVar("Name")


def seconds_in_turn(functions: Mapping[Name, Callable[[], object]], rounds: int) -> dict[Name, float]:
    """Median seconds of each function, called in turn, round by round, after one round that is not counted."""
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
    Time one query at a time: its encoding at each layer, from text to vector, its exact search at each dim, and the
    re-ranking of a shortlist.

    Args:
        encoder ([`GridEncoder`]): The encoder as it would be deployed. An m3BERT stops at the layer; others run whole.
        queries (`Sequence[str]`): Texts to take turns with, as they come in practice.
        documents (`int`, *optional*, defaults to 100,000): Vectors to search, random ones: an exact search does not
            depend on what they are.
        rounds (`int`, *optional*, defaults to 20): Times of each; medians are taken.
        seed (`int`, *optional*, defaults to 0): Of the random vectors.

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
                max_length=encoder.max_length,
                return_token_type_ids=False,
                return_tensors="pt",
            )
            nested_states(encoder.model, inputs.to(device), [layer]).pooled(layer, encoder.pooling).cpu()

        return run

    vectors = torch.randn(documents, encoder.grid.dims[-1], generator=torch.Generator().manual_seed(seed))

    def search(dim: int) -> Callable[[], object]:
        index = faiss.IndexFlatIP(dim)
        index.add(prefix(vectors, dim, normalize=True).numpy())
        query = prefix(vectors[:1], dim, normalize=True).numpy()
        return lambda: index.search(query, 10)

    def reorder(dim: int, size: int) -> Callable[[], object]:
        # Rows from all over the collection, as a shortlist's are.
        shortlist = torch.linspace(0, documents - 1, size).long().unsqueeze(0).numpy()
        query, narrowed = prefix(vectors[:1], dim), prefix(vectors, dim)
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
    )
