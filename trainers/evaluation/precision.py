"""One query on documents stored in several precisions: what it finds, the size of the index, and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..core.granularity import Granularity, Grid
from .coding import PackedIndex
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .latency import seconds_in_turn


@dataclass(frozen=True)
class Setting:
    """
    How documents are stored and searched.

    Args:
        granularity ([`Granularity`]): Granularity of the documents, with their precision.
        query_layer (`int`, *optional*): Layer of the query, for an encoder with exits. Default: that of the documents.
    """

    granularity: Granularity
    query_layer: int | None = None

    @property
    def query(self) -> Granularity:
        """Granularity of the query."""
        layer = self.granularity.layer if self.query_layer is None else self.query_layer
        return replace(self.granularity, layer=layer)


@dataclass(frozen=True)
class Search:
    """
    Result and cost of one query at one setting.

    Args:
        setting ([`Setting`]): The setting.
        rows (`list[int]`): Documents found, best first.
        scores (`list[float]`): Scores of these documents, from [`PackedIndex.search`].
        encode_ms (`float`): Milliseconds to encode the query.
        search_ms (`float`): Milliseconds to search the index.
        bytes_per_vector (`int`): Bytes per document vector.
        index_bytes (`int`): Bytes of the whole index.
    """

    setting: Setting
    rows: list[int]
    scores: list[float]
    encode_ms: float
    search_ms: float
    bytes_per_vector: int
    index_bytes: int


def search_at(
    encoder: GridEncoder,
    documents: GridEmbeddings,
    query: str,
    settings: Sequence[Setting],
    *,
    k: int = 5,
    rounds: int = 5,
) -> list[Search]:
    """
    Run the same query at several settings. The query is encoded separately for each setting, only up to its layer if
    the encoder is an m3BERT.

    Args:
        encoder ([`GridEncoder`]): Encoder of queries and documents.
        documents ([`GridEmbeddings`]): Embeddings of the documents by this encoder.
        query (`str`): Query.
        settings (`Sequence[Setting]`): Settings, with sizes of the grid of the documents.
        k (`int`, *optional*, defaults to 5): Number of documents to find; all documents if there are fewer.
        rounds (`int`, *optional*, defaults to 5): Measurements per setting; the times are their medians.

    Returns:
        `list[Search]`: one result per setting.

    Raises:
        ValueError: if a precision needs a quantizer that the encoder does not have, or an embedding is not finite.
    """

    def encoded(granularity: Granularity) -> torch.Tensor:
        alone = replace(encoder, grid=Grid((granularity,)))
        return alone.encode([query], role="query").require_finite().widest(granularity.layer)

    stored = [setting.granularity for setting in settings]
    indexes = [PackedIndex.pack(documents.widest(g.layer), g.code, g.dim, encoder.quantizer) for g in stored]
    encodings = [partial(encoded, setting.query) for setting in settings]
    searches = [partial(index.search, encode(), k) for index, encode in zip(indexes, encodings, strict=True)]
    encode_seconds = seconds_in_turn(dict(enumerate(encodings)), rounds)
    search_seconds = seconds_in_turn(dict(enumerate(searches)), rounds)
    found = []
    for turn, (setting, index, search) in enumerate(zip(settings, indexes, searches, strict=True)):
        (scores,), (rows,) = search()
        times = 1000 * encode_seconds[turn], 1000 * search_seconds[turn]
        found.append(Search(setting, rows.tolist(), scores.tolist(), *times, index.bytes_per_vector, index.nbytes))
    return found
