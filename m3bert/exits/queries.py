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
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from ..utils.words import word_spans
from .sums import on_all_ranks
from .tokenized_texts import TokenizedText


QUERIES = 0.1  # share of the texts whose spans are queries
SPAN_WORDS = (3, 16)
NEAREST, RELEVANT = 10, 100
TEMPERATURE = 1.5


def is_query(text: str) -> bool:
    """Whether the span of a text is a query of the comparison."""
    return blake2b(text.encode(), digest_size=4, person=b"query").digest()[0] < QUERIES * 256


def span_of(text: str) -> str:
    """Some words in a row of a text, in place of a query: 3 to 16 ([`word_spans`]), or all of a shorter text. The same
    text always gives the same span."""
    words = word_spans(text) or [(0, len(text))]
    digest = blake2b(text.encode(), digest_size=8).digest()
    fewest, most = SPAN_WORDS
    count = fewest + int.from_bytes(digest[:4], "big") % (most - fewest + 1)
    start = int.from_bytes(digest[4:], "big") % max(1, len(words) - count + 1)
    chosen = words[start : start + count]
    return text[chosen[0][0] : chosen[-1][1]]


class Measured(NamedTuple):
    """How far queries are from the whole model ([`divergence`]), and the retrieval that they keep
    ([`retrieval_kept`]). `shift` was added to the pooled hidden states, if it helps."""

    divergence: float
    retrieval: float
    shift: torch.Tensor | None = None

    @classmethod
    def of(cls, similarities: torch.Tensor, at_full_depth: torch.Tensor) -> Measured:
        """The measures of similarities `(queries, passages)`, of a smaller size and at full depth."""
        return cls(divergence(similarities, at_full_depth), retrieval_kept(similarities, at_full_depth))


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
        queries, full, passages = (
            normalize(vectors.float(), dim=1) for vectors in (on_all_ranks(embeddings), self.full, self.passages)
        )
        return Measured.of(queries @ passages.T, full @ passages.T)


def divergence(similarities: torch.Tensor, at_full_depth: torch.Tensor) -> float:
    """
    Mean KL divergence between the softmax of a query's similarities to the passages and that at full depth, from
    similarities `(queries, passages)`. The temperature is 1.5 standard deviations of a query's similarities at full
    depth: encoders differ in how much of the range of cosines they use.
    """
    temperature = TEMPERATURE * at_full_depth.std(dim=1).mean().clamp(min=1e-6)
    log_p = (at_full_depth / temperature).log_softmax(dim=1)
    log_q = (similarities / temperature).log_softmax(dim=1)
    return float((log_p.exp() * (log_p - log_q)).sum(dim=1).mean()) if len(similarities) else 0.0


def retrieval_kept(similarities: torch.Tensor, at_full_depth: torch.Tensor) -> float:
    """
    Share of the nDCG@10 of the whole model that queries of a smaller size keep, from similarities `(queries,
    passages)`. The relevance of a passage is how much more similar it is to the query at full depth than the passage
    at rank 100, so the whole model has 1.
    """
    passages = at_full_depth.shape[1]
    most = min(NEAREST, passages)
    top = at_full_depth.topk(min(RELEVANT, passages), dim=1).values
    gains = (at_full_depth.gather(1, similarities.topk(most, dim=1).indices) - top[:, -1:]).clamp(min=0)
    discounts = 1 / torch.arange(2, most + 2, device=gains.device).log2()
    ideal = ((top[:, :most] - top[:, -1:]) * discounts).sum(dim=1)
    shares = ((gains * discounts).sum(dim=1) / ideal.clamp(min=1e-12))[ideal > 0]
    return float(shares.mean()) if len(shares) else 0.0
