"""
Which layers a depth runs: candidates, and the measure that chooses among them.

Both measures need no labels. Queries are short spans of texts, embedded by the candidate; passages are texts of the
fit at full depth. [`divergence`] compares all similarities of a query with those at full depth, and chooses.
[`retrieval_kept`] compares the nearest ten alone, and is for the reader: the nearest ten of a span are often texts
with the same words, which the first layers find as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from ..encode.ranks import rank
from ..encode.tokenized_texts import TokenizedText
from .passes import RawStates
from .paths import Groups, gaps_of, quick_refits, with_refits
from .spans import is_query
from .sums import on_all_ranks


NEAREST, RELEVANT = 10, 100
TEMPERATURE = 1.5
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
    def of(cls, groups: Iterable[TextGroup], passages: torch.Tensor) -> Queries:
        """The queries among some texts. ValueError if there are none."""
        groups = list(groups)
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


def choose(
    raw: RawStates,
    depths: Sequence[int],
    texts: Groups,
    queries: Queries,
    after: Callable[[torch.Tensor], torch.Tensor],
    description: str | None = None,
) -> dict[int, dict[tuple[int, ...], float]]:
    """
    Compare lists of layers for each depth: those with one gap, and then those that differ from the best one in a layer
    beside its gap. All are refitted quickly ([`quick_refits`]).

    Args:
        raw ([`RawStates`]): The encoder. Its depths are changed.
        depths (`Sequence[int]`): The depths.
        texts (`Sequence[Sequence[TokenizedText]]`): Groups of texts, for the refits.
        queries ([`Queries`]): What the lists are measured on.
        after (`Callable`): What follows the last layer: a map of pooled hidden states.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `dict[int, dict[tuple[int, ...], float]]`: Depth -> layers -> the retrieval that they keep, by [`divergence`],
        the best ones first.
    """
    encoder = raw.encoder
    last = encoder.config.num_hidden_layers
    refits = quick_refits(raw, texts, last, description)
    found: dict[int, dict[tuple[int, ...], Measured]] = {depth: {} for depth in depths}

    def measure(lists: Mapping[int, Sequence[tuple[int, ...]]]) -> None:
        most, quiet = max(map(len, lists.values()), default=0), description is None or rank() > 0
        for number in tqdm(range(most), f"{description}: lists", unit=" lists", disable=quiet, leave=False):
            some = {depth: its[number] for depth, its in lists.items() if number < len(its)}
            encoder.set_depths(
                paths={depth: ([*its], with_refits(encoder, its, refits)) for depth, its in some.items()}
            )
            for depth, states in raw.pooled(queries.ids, [*some]).items():
                found[depth][some[depth]] = queries.measured(after(states))

    measure({depth: candidates_of(depth, last) for depth in depths})
    best = {depth: min(its, key=its.__getitem__) for depth, its in found.items()}
    measure({depth: [its for its in neighbours_of(best[depth]) if its not in found[depth]] for depth in depths})
    return {
        depth: {layers: its[layers].kept for layers in sorted(its, key=its.__getitem__)}
        for depth, its in found.items()
    }


def default_depths(last: int) -> list[int]:
    """About a sixth, a third, a half and two thirds of `last` layers."""
    depths = {max(1, round(last * share)) for share in SHARES}
    return sorted(depth for depth in depths if depth < last)


def candidates_of(depth: int, last: int) -> list[tuple[int, ...]]:
    """The lists of `depth` layers of a model with `last` layers that have one gap and end in the last layer: the first
    a layers and the last b, for every a and b above 0."""
    if depth >= last:
        return []
    return [(*range(1, depth - top + 1), *range(last - top + 1, last + 1)) for top in range(1, depth)]


def neighbours_of(layers: Sequence[int]) -> list[tuple[int, ...]]:
    """The lists of layers that have a skipped layer in place of one beside a gap, which is neither the first nor the
    last one."""
    skipped = {*range(1, layers[-1])} - {*layers}
    beside = {layers[place + side] for place in gaps_of(layers) for side in (0, 1)} - {layers[0], layers[-1]}
    lists = {tuple(sorted({*layers, other} - {layer})) for layer in beside for other in skipped}
    return sorted(lists - {tuple(layers)})


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
