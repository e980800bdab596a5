"""
Which layers a depth runs: candidates, and the measure that chooses among them.

Both measures need no labels. Queries are short spans of held-out texts, embedded by the candidate; passages are texts
of the fit at full depth. [`divergence`] compares all similarities of a query with those at full depth, and chooses.
[`retrieval_kept`] compares the nearest ten alone, and is for the reader: the nearest ten of a span are often texts
with the same words, which the first layers find as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import torch
from tqdm.auto import tqdm

from ..encode.ranks import rank, sum_over_ranks
from ..encode.tokenized_texts import TokenizedText
from ..encode.words import word_spans
from .ridge import Regression, apply_affine
from .sums import ExitSums, PathFit, on_all_ranks


if TYPE_CHECKING:
    from .passes import RawStates
    from .paths import Tensors

    Refits = tuple[PathFit, Tensors]


QUERIES = 0.1  # share of the texts whose spans are queries; nothing is fitted to these spans
SPAN_WORDS = (3, 16)
NEAREST, RELEVANT = 10, 100
PENALTIES = (1e-2, 1e-1)
TEMPERATURE = 1.5
TABLE_GAIN = 0.01
SHARES = (1 / 6, 1 / 3, 1 / 2, 2 / 3)


TextGroup = tuple[list[TokenizedText], torch.Tensor]  # texts and their targets `(texts, width)`


class Measured(NamedTuple):
    """How close queries come to the whole model ([`divergence`]), and the retrieval that they keep."""

    divergence: float
    kept: float


@dataclass(frozen=True)
class Queries:
    """
    What retrieval is measured on.

    Args:
        ids (`list[list[int]]`): Token ids of this rank's queries.
        wanted (`torch.Tensor` of shape `(queries, width)`): The embeddings at full depth of all ranks' queries.
        passages (`torch.Tensor` of shape `(passages, width)`): Those of the passages.
    """

    ids: list[list[int]]
    wanted: torch.Tensor
    passages: torch.Tensor

    @classmethod
    def of(cls, groups: Sequence[TextGroup], passages: torch.Tensor) -> Queries:
        """The queries among some texts. ValueError if there are none."""
        own = [[row for row, its in enumerate(texts) if is_query(its.text)] for texts, _ in groups]
        ids = [texts[row].ids for (texts, _), rows in zip(groups, own, strict=True) for row in rows]
        wanted = [targets[rows] for (_, targets), rows in zip(groups, own, strict=True)]
        every = on_all_ranks(torch.cat([*wanted, passages[:0]]))
        if not len(every):
            raise ValueError("These texts are too few, or too often equal, for some to be queries: fit to more.")
        return cls(ids, every, on_all_ranks(passages))

    def measured(self, embeddings: torch.Tensor) -> Measured:
        """The measures of all ranks' queries, from the embeddings of this rank's."""
        found = on_all_ranks(embeddings), self.wanted, self.passages
        return Measured(divergence(*found), retrieval_kept(*found))


def without_queries(groups: Sequence[TextGroup]) -> list[TextGroup]:
    """The texts that are no queries."""
    kept = [[row for row, its in enumerate(texts) if not is_query(its.text)] for texts, _ in groups]
    return [([texts[row] for row in rows], targets[rows]) for (texts, targets), rows in zip(groups, kept, strict=True)]


def choose(
    raw: RawStates,
    refits: Mapping[int, list[Refits]],
    rows: Sequence[TextGroup],
    queries: Queries,
    sums: ExitSums,
    description: str | None = None,
) -> tuple[dict[int, Refits], dict[int, dict[str, float]]]:
    """
    The best of some paths for each depth, which is the one whose hidden state comes closest to the whole model with an
    exit that is fitted to `rows`; and the retrieval that each of them keeps, by its layers and kind, best first.
    """
    ids, targets = [its.ids for texts, _ in rows for its in texts], torch.cat([its for _, its in rows])
    found: dict[int, list[Measured]] = {depth: [] for depth in refits}
    quiet, most = description is None or rank() > 0, max(map(len, refits.values()))
    for number in tqdm(range(most), f"{description}: layers", unit=" lists", disable=quiet, leave=False):
        some = {depth: its[number] for depth, its in refits.items() if number < len(its)}
        raw.encoder.set_depths(paths={depth: (fit.layers, tensors) for depth, (fit, tensors) in some.items()})
        states, asked = raw.pooled(ids, [*some]), raw.pooled(queries.ids, [*some])
        for depth in some:
            own = Regression.of(states[depth], targets)
            regression = Regression(sum_over_ranks(own.products), sum_over_ranks(own.cross_products))
            maps = (sums.matched(regression, penalty) for penalty in PENALTIES)
            found[depth].append(min(queries.measured(apply_affine(its, asked[depth].double())) for its in maps))
    order = {depth: sorted(range(len(its)), key=its.__getitem__) for depth, its in found.items()}
    names = {depth: [str(fit) for fit, _ in its] for depth, its in refits.items()}
    return (
        {depth: refits[depth][its[0]] for depth, its in order.items()},
        {depth: {names[depth][place]: found[depth][place].kept for place in its} for depth, its in order.items()},
    )


def reads_table(joint: Measured, state_only: Measured) -> bool:
    """Whether the exit of a path reads the table, too: it comes closer and keeps at least one point more of the
    retrieval. Spans share more words with their texts than questions do, so they flatter the table."""
    return joint.divergence < state_only.divergence and joint.kept >= state_only.kept + TABLE_GAIN


def default_depths(last: int) -> list[int]:
    """About a sixth, a third, a half and two thirds of `last` layers."""
    depths = {max(1, round(last * share)) for share in SHARES}
    return sorted(depth for depth in depths if depth < last)


def candidates_of(depth: int, last: int) -> list[list[int]]:
    """The lists of layers to compare for a depth of a model with `last` layers: the first ones, and the first and the
    last ones for the splits that are closest to one half. `benchmarks.reproduction.paths --candidates` scores these
    and others."""
    tops = [top for top in (depth // 2 - 1, depth // 2, depth // 2 + 1) if 0 < top < depth]
    paths = [[*range(1, depth - top + 1), *range(last - top + 1, last + 1)] for top in tops]
    return [[*range(1, depth + 1)], *(path for path in paths if len(set(path)) == depth)]


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


def divergence(queries: torch.Tensor, wanted: torch.Tensor, passages: torch.Tensor) -> float:
    """
    Mean KL divergence between the softmax of a query's similarities to the passages and that at full depth. The
    temperature is 1.5 standard deviations of a query's similarities at full depth: encoders differ in how much of the
    range of cosines they use. Arguments are those of [`retrieval_kept`].
    """
    every = (queries, wanted, passages)
    queries, wanted, passages = (torch.nn.functional.normalize(its.float(), dim=1) for its in every)
    similarities = wanted @ passages.T
    temperature = TEMPERATURE * similarities.std(dim=1).mean().clamp(min=1e-6)
    full, own = ((its / temperature).log_softmax(dim=1) for its in (similarities, queries @ passages.T))
    return float((full.exp() * (full - own)).sum(dim=1).mean()) if len(queries) else 0.0


def retrieval_kept(queries: torch.Tensor, wanted: torch.Tensor, passages: torch.Tensor) -> float:
    """
    Share of the nDCG@10 of the whole model that queries of a smaller size keep. The relevance of a passage is how much
    more similar it is to the query at full depth than the passage at rank 100, so the whole model has 1.

    Args:
        queries (`torch.Tensor` of shape `(queries, width)`): Embeddings of the queries at the smaller size.
        wanted (`torch.Tensor` of shape `(queries, width)`): Those at full depth.
        passages (`torch.Tensor` of shape `(passages, width)`): Embeddings of the passages at full depth.
    """
    queries, wanted, passages = (
        torch.nn.functional.normalize(its.float(), dim=1) for its in (queries, wanted, passages)
    )
    relevance = wanted @ passages.T
    most = min(NEAREST, len(passages))
    top = relevance.topk(min(RELEVANT, len(passages)), dim=1).values
    gains = (relevance.gather(1, (queries @ passages.T).topk(most, dim=1).indices) - top[:, -1:]).clamp(min=0)
    discounts = 1 / torch.arange(2, most + 2, device=gains.device).log2()
    ideal = ((top[:, :most] - top[:, -1:]) * discounts).sum(dim=1)
    shares = ((gains * discounts).sum(dim=1) / ideal.clamp(min=1e-12))[ideal > 0]
    return float(shares.mean()) if len(shares) else 0.0
