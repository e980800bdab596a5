"""The sizes that a card shows: what each costs, and the few that it offers, by what they find."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModel, PreTrainedConfig

from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT, bytes_per_vector
from ..encode.states import max_positions
from ..evaluation.results import GridResults, Latency
from ..modeling.configuration_elastic import Elasticity, cut_config
from ..modeling.parts_elastic import Exit, static_vectors
from .tables import markdown, milliseconds, percent, share


CODES_SHOWN = (FLOAT, "int8", "binary")  # whose bytes a card lists, measured or not
METRICS = {"ndcg@10": "nDCG@10", "spearman": "Spearman correlation", "macro_f1": "macro F1"}  # as papers spell them
ROWS = 8  # most rows of the table of a card
WORTH = 0.5  # share of the quality of the full size below which a size is not offered
ENOUGH = 0.9  # share that the size which a card advises keeps at least


class Cost(NamedTuple):
    """The cost of one granularity: of its layers and its exit, and of the static table where it is read."""

    parameters: int
    layer_parameters: int  # without the tables of tokens and positions
    # Operations of matrix products per token of a text of [`tokens_counted`] tokens; a multiplication and an addition
    # count as two. Attention costs more per token in longer texts. Of an exit, only the rows of `dim` are computed.
    flops_per_token: int


def tokens_counted(config: PreTrainedConfig) -> int:
    """Length in tokens of the text whose operations are counted: 128, or all that the model reads."""
    return min(128, max_positions(config))


def costs(config: PreTrainedConfig, granularities: Iterable[Granularity]) -> dict[Granularity, Cost]:
    """The cost of each granularity of the encoder with this config, counted on the architecture without weights."""
    modules = cache(lambda layer: _modules(config, layer))
    return {g: _cost(config, modules(g.layer), g) for g in granularities}


def depth_table(config: PreTrainedConfig, grid: Grid, latency: Latency | None) -> str:
    """One row per depth of a grid, at its most dims: parameters, operations, and ms to encode in each runtime."""
    runtimes, rows = {}, []
    if latency is not None:
        runtimes = {"": latency.encode_ms, **{f", {name}": times for name, times in latency.engine_ms.items()}}
    for size, cost in costs(config, [Granularity(layer, grid.dims_of(layer)[-1]) for layer in grid.layers]).items():
        numbers = f"{cost.parameters:,}", f"{cost.layer_parameters:,}", f"{cost.flops_per_token / 1e6:.1f}"
        times = [milliseconds(encode.get(str(size.layer)), 2) for encode in runtimes.values()]
        rows.append([str(size.layer), *numbers, *times])
    header = ["layers", "parameters", "without embeddings", "million operations per token"]
    return markdown([*header, *(f"ms to encode{name}" for name in runtimes)], rows)


def dim_table(grid: Grid, latency: Latency | None) -> str:
    """One row per number of dims of a grid: ms to search, and bytes per vector in each precision."""
    searches, rows = [latency.search_ms] if latency else [], []
    for dim in grid.dims:
        times = [milliseconds(search.get(str(dim)), 2) for search in searches]
        rows.append([str(dim), *times, *(str(bytes_per_vector(code, dim)) for code in CODES_SHOWN)])
    header = ["dims", *["ms to search"] * len(searches), *(f"bytes per vector, {code}" for code in CODES_SHOWN)]
    return markdown(header, rows)


def _modules(config: PreTrainedConfig, layers: int) -> nn.ModuleDict:
    """The encoder up to a layer, its exit, and the static table that it reads, without weights."""
    spec, width, modules = Elasticity.of(config), config.hidden_size, nn.ModuleDict()
    shallow, code = copy.deepcopy(config), (getattr(config, "elastic", None) or {}).get("source_auto_map")
    cut_config(shallow, layers)
    shallow.elastic = None
    if code:
        shallow.auto_map = code
    for name in ("output_layer", "output_dim"):  # any granularity can be counted, trained or not
        if hasattr(shallow, name):
            setattr(shallow, name, None)
    with torch.device("meta"):
        if layers:
            # Eager attention consists of matrix products, which the counter knows on every device.
            loading = {"attn_implementation": "eager", "trust_remote_code": bool(code)}
            modules["model"] = AutoModel.from_config(shallow, **loading).eval()
        if layers in spec.table:
            modules["table"] = nn.Embedding(config.vocab_size, width)
        if layers and layers in spec.exits:
            tensors = {"weight": torch.empty(width, width), "bias": torch.empty(width)}
            if layers in spec.table:
                tensors |= {"joint.weight": torch.empty(width, 2 * width), "joint.bias": torch.empty(width)}
            modules["exit"] = Exit(tensors)
    return modules


@torch.no_grad()
def _cost(config: PreTrainedConfig, modules: nn.ModuleDict, g: Granularity) -> Cost:
    """The cost of a granularity that runs these modules."""
    tokens, width, static = tokens_counted(config), config.hidden_size, None
    ids = torch.ones(1, tokens, dtype=torch.long, device="meta")
    read = min(g.dim, width)  # a projection may have more dims than the states that it reads
    with FlopCounterMode(display=False) as counter:
        if "model" in modules:
            modules["model"](input_ids=ids)
        if "table" in modules:
            static = static_vectors(modules["table"].get_parameter("weight")[:, : width if g.layer else read], (), ids)
        if "exit" in modules:
            modules["exit"](torch.empty(1, tokens, width, device="meta"), read, static)
    parameters = sum(parameter.numel() for parameter in modules.parameters())
    tables = sum(module.weight.numel() for module in modules.modules() if isinstance(module, nn.Embedding))
    return Cost(parameters, parameters - tables, counter.get_total_flops() // tokens)


class Offer(NamedTuple):
    """A size, the mean of the main metrics of its tasks, and ms per query; infinite if they were not measured."""

    granularity: Granularity
    quality: float
    ms: float = math.inf

    @property
    def bytes(self) -> int:
        return bytes_per_vector(self.granularity.code, self.granularity.dim)


def choose_rows(offers: Sequence[Offer], most: int = ROWS) -> list[Offer]:
    """The sizes to choose from, the best first: the full size, the fewest layers at all their dims, and those that
    keep half of the quality of the full size and that no other one equals or beats in quality, time and bytes. While
    there are more than `most`, drop the size whose neighbours differ least in quality."""
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
    """The main result of an evaluation: the quality of each size in the task type that is judged by, which is
    retrieval, if it was scored."""

    metric: str  # the main one of the task type
    tasks: list[str]  # of this type, over which quality is a mean
    offers: list[Offer]  # the full size last; if `asymmetric`, sizes are those of the queries
    asymmetric: bool  # queries of fewer layers search documents of the same dims and the layer of the full size
    bm25: float | None  # quality of BM25 alone

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
