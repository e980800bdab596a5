"""The few sizes that a card offers: what each finds, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from ..encode.granularity import Granularity
from ..encode.precisions import bytes_per_vector
from ..evaluation.results import GridResults
from .tables import markdown, milliseconds, percent, share


METRICS = {"ndcg@10": "nDCG@10", "spearman": "Spearman correlation", "macro_f1": "macro F1"}  # as papers spell them
ROWS = 8  # most rows of the table of a card
WORTH = 0.5  # share of the quality of the full size below which a size is not offered
ENOUGH = 0.9  # share that the size which a card advises keeps at least


class Offer(NamedTuple):
    """A size, the mean of the main metrics of its tasks, and ms per query; infinite if they were not measured."""

    granularity: Granularity
    quality: float
    ms: float = math.inf

    @property
    def bytes(self) -> int:
        return bytes_per_vector(self.granularity.code, self.granularity.dim)


def choose_rows(offers: Sequence[Offer], most: int = ROWS) -> list[Offer]:
    """
    The sizes to choose from, the best first: the full size, the fewest layers at all their dims, and those that keep
    half of the quality of the full size and that no other one equals or beats in quality, time and bytes. While there
    are more than `most`, drop the size whose neighbours differ least in quality.
    """
    full, shallow = max(offers), max(o for o in offers if o.granularity.layer == min(offers).granularity.layer)
    order = sorted(offers, key=lambda offer: (-offer.quality, offer.ms, offer.bytes))
    rows = [
        offer
        for place, offer in enumerate(order)
        if offer in (full, shallow)
        or offer.quality >= WORTH * full.quality
        and not any(better.ms <= offer.ms and better.bytes <= offer.bytes for better in order[:place])
    ]
    while len(rows) > most:
        inner = [place for place in range(1, len(rows) - 1) if rows[place] not in (full, shallow)]
        del rows[min(inner, key=lambda place: rows[place - 1].quality - rows[place + 1].quality)]
    return rows


@dataclass(frozen=True)
class Headline:
    """
    The main result of an evaluation.

    Args:
        metric (`str`): Main metric of the task type that is judged by: of retrieval, if it was scored.
        tasks (`list[str]`): Tasks of this type, over which quality is a mean.
        offers (`list[Offer]`): Every size, the full one last. If `asymmetric`, sizes are those of the queries, and the
            documents have the same dims and the layer of the full size.
        asymmetric (`bool`): Whether queries of fewer layers were compared with documents of the last one.
        bm25 (`float`, *optional*): Quality of BM25 alone.
    """

    metric: str
    tasks: list[str]
    offers: list[Offer]
    asymmetric: bool
    bm25: float | None

    @classmethod
    def of(cls, results: GridResults | None) -> Headline | None:
        """The main result of an evaluation; `None` if no task measures quality."""
        judged = results.judged_task_types() if results else []
        if results is None or not judged:
            return None
        kind = next((name for name in ("retrieval", "mteb_retrieval") if name in judged), judged[0])
        tasks, metric, latency = results.tasks(kind), results.main_metric(kind), results.latency
        quality = results.quality(tasks)
        last = max(quality).layer
        searches = results.asymmetric_quality(tasks).items()
        mixed = {Granularity(layer, g.dim): value for (g, layer), value in searches if layer < g.layer == last}
        if mixed:
            quality = mixed | {g: value for g, value in quality.items() if g.layer == last}
        offers = [Offer(g, quality[g], latency.of(g) if latency else math.inf) for g in sorted(quality)]
        alone = [search.value for search in results.hybrid_searches if search.query_layer is None]
        bm25 = mean(alone) if alone and kind == "retrieval" else None
        return cls(METRICS.get(metric, metric), tasks, offers, bool(mixed), bm25)

    @property
    def full(self) -> Offer:
        return self.offers[-1]

    @property
    def rows(self) -> list[Offer]:
        """The sizes to choose from, in the precision of the full size; BM25 takes a row of the table as well."""
        code = self.full.granularity.code
        offers = [offer for offer in self.offers if offer.granularity.code == code]
        return choose_rows(offers, ROWS - (self.bm25 is not None))

    def table(self, timed: bool) -> str:
        """One row per size to choose from, and one for BM25: quality, its share of the full size's, time and bytes."""
        rows, whole, time = [], self.full.quality, ["ms per query"] * timed
        for row in self.rows:
            size = f"`{row.granularity}`{'' if row.granularity.layer else ', table look-up'}"
            costs = [*[milliseconds(row.ms)] * timed, str(row.bytes)]
            rows.append([size, percent(row.quality), share(row.quality, whole), *costs])
        if self.bm25 is not None:
            rows.append(["BM25 alone", percent(self.bm25), share(self.bm25, whole), *[""] * (1 + timed)])
        return markdown(["size", f"{self.metric}, %", "kept, %", *time, "bytes per vector"], rows)

    @property
    def advised(self) -> Offer | None:
        """The fastest of the rows below the full size that keeps enough of its quality; `None` if none does. Without
        times, the smallest."""
        enough = [row for row in self.rows if row != self.full and row.quality >= ENOUGH * self.full.quality]
        return min(enough, key=lambda row: (row.ms, row.bytes), default=None)
