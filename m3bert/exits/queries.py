"""
Queries without labels, and how close a smaller size comes to the whole model on them.

Queries are short spans of texts, embedded by the smaller size; passages are texts of the fit at full depth.
[`divergence`] compares all similarities of a query with its similarities at full depth, and chooses layers.
[`retrieval_kept`] compares the nearest ten alone, and is for the reader: the nearest ten of a span are often texts
with the same words, which the first layers find as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from .spans import is_query
from .sums import on_all_ranks
from .tokenized_texts import TokenizedText


NEAREST, RELEVANT = 10, 100
TEMPERATURE = 1.5


class Measured(NamedTuple):
    """How far queries are from the whole model ([`divergence`]), and the retrieval that they keep."""

    divergence: float
    retrieval: float


@dataclass(frozen=True)
class Queries:
    """
    What retrieval is measured on.

    Args:
        ids (`list[list[int]]`): Token ids of this rank's queries.
        full (`torch.Tensor` of shape `(queries, width)`): Embeddings at full depth of all ranks' queries.
        passages (`torch.Tensor` of shape `(passages, width)`): Embeddings at full depth of all ranks' passages.
    """

    ids: list[list[int]]
    full: torch.Tensor
    passages: torch.Tensor

    @classmethod
    def of(cls, groups: Iterable[tuple[list[TokenizedText], torch.Tensor]], passages: torch.Tensor) -> Queries:
        """The queries among groups of texts with their targets `(texts, width)`. ValueError if there are none."""
        ids, targets = [], [passages[:0]]
        for texts, vectors in groups:
            rows = [row for row, text in enumerate(texts) if is_query(text.text)]
            ids += [texts[row].ids for row in rows]
            targets.append(vectors[rows])
        full = on_all_ranks(torch.cat(targets))
        if not len(full):
            raise ValueError("These texts are too few, or too often equal, for some to be queries: fit to more.")
        return cls(ids, full, on_all_ranks(passages))

    def mapped(self, to_space: torch.Tensor) -> Queries:
        """The embeddings at full depth in another space: times `(width, new width)`."""
        return Queries(self.ids, self.full @ to_space, self.passages @ to_space)

    def measured(self, embeddings: torch.Tensor) -> Measured:
        """The measures of all ranks' queries, from the embeddings of this rank's."""
        queries = on_all_ranks(embeddings)
        return Measured(
            divergence(queries, self.full, self.passages), retrieval_kept(queries, self.full, self.passages)
        )


def divergence(queries: torch.Tensor, full: torch.Tensor, passages: torch.Tensor) -> float:
    """
    Mean KL divergence between the softmax of a query's similarities to the passages and that at full depth. The
    temperature is 1.5 standard deviations of a query's similarities at full depth: encoders differ in how much of the
    range of cosines they use. Arguments as in [`retrieval_kept`].
    """
    queries, full, passages = (normalize(vectors.float(), dim=1) for vectors in (queries, full, passages))
    return divergence_of(queries @ passages.T, full @ passages.T)


def divergence_of(similarities: torch.Tensor, at_full_depth: torch.Tensor) -> float:
    """As [`divergence`], of similarities `(queries, passages)`."""
    temperature = TEMPERATURE * at_full_depth.std(dim=1).mean().clamp(min=1e-6)
    log_p = (at_full_depth / temperature).log_softmax(dim=1)
    log_q = (similarities / temperature).log_softmax(dim=1)
    return float((log_p.exp() * (log_p - log_q)).sum(dim=1).mean()) if len(similarities) else 0.0


def retrieval_kept(queries: torch.Tensor, full: torch.Tensor, passages: torch.Tensor) -> float:
    """
    Share of the nDCG@10 of the whole model that queries of a smaller size keep. The relevance of a passage is how much
    more similar it is to the query at full depth than the passage at rank 100, so the whole model has 1.

    Args:
        queries (`torch.Tensor` of shape `(queries, width)`): Embeddings of the queries at the smaller size.
        full (`torch.Tensor` of shape `(queries, width)`): Embeddings of the queries at full depth.
        passages (`torch.Tensor` of shape `(passages, width)`): Embeddings of the passages at full depth.
    """
    queries, full, passages = (normalize(vectors.float(), dim=1) for vectors in (queries, full, passages))
    return kept_of(queries @ passages.T, full @ passages.T)


def kept_of(similarities: torch.Tensor, relevance: torch.Tensor) -> float:
    """As [`retrieval_kept`], of similarities `(queries, passages)` of a smaller size and at full depth."""
    passages = relevance.shape[1]
    most = min(NEAREST, passages)
    top = relevance.topk(min(RELEVANT, passages), dim=1).values
    gains = (relevance.gather(1, similarities.topk(most, dim=1).indices) - top[:, -1:]).clamp(min=0)
    discounts = 1 / torch.arange(2, most + 2, device=gains.device).log2()
    ideal = ((top[:, :most] - top[:, -1:]) * discounts).sum(dim=1)
    shares = ((gains * discounts).sum(dim=1) / ideal.clamp(min=1e-12))[ideal > 0]
    return float(shares.mean()) if len(shares) else 0.0
