"""Figures of an evaluation. They need the extra `publish`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..encode.granularity import Granularity, Grid
from ..evaluation.results import GridResults
from ..utils.extras import require_extra
from .sizes import CODES_SHOWN, Headline
from .tables import sizes_in, tasks_counted, title_of


LEADS = ("quality_and_latency", "quality_and_bytes")  # the first that is drawn is at the top of a card


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def panels_of(titles: Iterable[str], width: float, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure with a titled panel of this size in inches per title, up to three in a row."""
    figures, titles = require_extra("matplotlib.figure", "publish", "A figure"), list(titles)
    columns = min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = figures.Figure((width * columns, height * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **options).flat)
    for axes, title in zip(panels, titles, strict=False):
        axes.set_title(title, fontsize="medium")
    for axes in panels[len(titles) :]:
        axes.set_visible(False)
    return figure, panels[: len(titles)]


def save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def draw_heat_maps(
    panels: Mapping[str, np.ndarray], rows: Sequence[int], columns: Sequence[int], labels: tuple[str, str], file: Path
) -> None:
    """One matrix of percentages per title, the first row at the bottom, with its numbers in the cells."""
    figure, drawn = panels_of(panels, max(4.2, 1.6 + 0.7 * len(columns)), 1.6 + 0.5 * len(rows))
    for axes, cells in zip(drawn, panels.values(), strict=True):
        axes.imshow(cells, cmap="viridis", aspect="auto", origin="lower")
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
        for (row, column), value in np.ndenumerate(cells):
            if not math.isnan(value):
                color = "white" if value < middle else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color)
        axes.set_yticks(range(len(rows)), [*map(str, rows)])
        axes.set_xticks(range(len(columns)), [*map(str, columns)])
        axes.set(ylabel=labels[0], xlabel=labels[1])
    save(figure, file)


def draw_curves(
    panels: Mapping[str, Sequence[tuple[str, float, float]]],
    cost: str,
    file: Path,
    baselines: Mapping[str, float] | None = None,
    *,
    labels: Sequence[tuple[str, float, float]] = (),
    quality: str = "percent",
    width: float = 4.4,
) -> None:
    """Per title: curve, cost and percent of each point; baselines are horizontal lines. Costs that differ by a factor
    of 4 or more have a logarithmic axis. `labels` are texts at a cost and a percent, about ten of which are shown."""
    colors = require_extra("matplotlib", "publish", "A figure").colormaps["viridis"]
    figure, drawn = panels_of(panels, width, 3.8)
    names = list(dict.fromkeys(name for points in panels.values() for name, *_ in points))
    legend = {}
    for axes, points in zip(drawn, panels.values(), strict=True):
        for place, name in enumerate(names):
            curve = sorted(point for label, *point in points if label == name)
            style = {"color": colors(0.85 * place / max(1, len(names) - 1)), "marker": "osDv^<>XP*"[place % 10]}
            (legend[name],) = axes.plot(*np.reshape(curve, (-1, 2)).T, label=name, markersize=4, **style)
        for place, (name, value) in enumerate((baselines or {}).items()):
            legend[name] = axes.axhline(value, color="black", linestyle=("--", ":", "-.")[place % 3], label=name)
        for label, x, y in labels[:: -math.ceil(len(labels) / 10) or 1]:
            axes.annotate(label, (x, y), xytext=(4, -12), textcoords="offset points", fontsize="small")
        costs = [x for _, x, _ in points]
        if max(costs) >= 4 * min(costs) > 0:
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.margins(0.08, 0.15)
        axes.set(xlabel=cost, ylabel=quality)
        axes.grid(alpha=0.3)
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=5, fontsize="small")
    save(figure, file)


def curves_of(headline: Headline, timed: bool) -> dict[str, list[tuple[str, float, float]]]:
    """
    Precision -> its points by ascending cost: label, ms per query (`timed`) or bytes per vector, and percent of the
    quality of the full size. Against ms, they are the depths at the dims of the full size; against bytes, the dims at
    its depth; where these are one size, all sizes. A precision of one size has no curve.
    """
    full = headline.full
    curves: dict[str, list[tuple[str, float, float]]] = {code: [] for code in CODES_SHOWN}
    offers = [offer for offer in headline.offers if offer.granularity.code in curves and full.quality]
    offers = [offer for offer in offers if not timed or math.isfinite(offer.ms)]
    fixed, varied = ("dim", "layer") if timed else ("layer", "dim")
    line = [o for o in offers if getattr(o.granularity, fixed) == getattr(full.granularity, fixed)]
    on_line = len({getattr(offer.granularity, varied) for offer in line}) > 1
    for offer in line if on_line else offers:
        label = str(getattr(offer.granularity, varied) if on_line else offer.granularity.size)
        point = (label, offer.ms if timed else offer.bytes, 100 * offer.quality / full.quality)
        curves[offer.granularity.code].append(point)
    return {code: sorted(points, key=lambda point: point[1]) for code, points in curves.items() if len(points) > 1}


def draw_lead(headline: Headline, cost: str, timed: bool, file: Path) -> None:
    """The top of a card: the share kept of the quality of the full size against a cost ([`curves_of`]), and BM25."""
    full, curves = headline.full, curves_of(headline, timed)
    first = next(iter(curves.values()))  # it costs the most, so there is room for labels below it
    varied = "size" if "x" in first[0][0] else "layers" if timed else "dims"
    sides = f" of the queries, documents at all {full.granularity.layer} layers"
    title = f"{headline.metric} by {varied}{sides if headline.asymmetric and timed else ''}"
    points = [(code, x, y) for code, curve in curves.items() for _, x, y in curve]
    bm25 = {} if headline.bm25 is None else {"BM25 alone": 100 * headline.bm25 / full.quality}
    quality = f"kept, % of {full.granularity}"
    draw_curves({title: points}, cost, file, bm25, labels=first, quality=quality, width=6.4)


def draw_heat_map(results: GridResults, task_type: str, file: Path) -> None:
    """Layers x dims in float32: the mean over the tasks of a type, in percent."""
    sizes, quality = Grid(tuple(sizes_in(results))), results.quality(results.tasks(task_type))
    cells = [[100 * quality.get(Granularity(layer, dim), math.nan) for dim in sizes.dims] for layer in sizes.layers]
    title = f"{title_of(task_type)}: {results.main_metric(task_type)} (%), {tasks_counted(results, task_type)}"
    draw_heat_maps({title: np.array(cells)}, sizes.layers, sizes.dims, ("layers", "dims"), file)


def draw_asymmetric_searches(results: GridResults, file: Path) -> None:
    """Query layers x document layers at the widest measured dim: one panel per retrieval task. The diagonal has one
    layer for both sides."""
    dim = max(search.dim for search in results.asymmetric_searches)
    searches = [search for search in results.asymmetric_searches if search.dim == dim]
    layers = sorted({search.query_layer or 0 for search in searches})
    panels = {}
    for task in dict.fromkeys(search.task for search in searches):
        quality = results.quality([task])
        values = {(layer, layer): quality[Granularity(layer, dim)] for layer in layers}
        values |= {(s.query_layer or 0, s.document_layer): s.value for s in searches if s.task == task}
        cells = [[100 * values.get((query, document), math.nan) for document in layers] for query in layers]
        panels[f"{task}: {results.main_metric('retrieval')} (%), {dim} dims"] = np.array(cells)
    draw_heat_maps(panels, layers, layers, ("query layer", "document layer"), file)


def draw_variances(spectrum: Sequence[float], dims: Sequence[int], title: str, file: Path) -> None:
    """Variance of every dim over texts, divided by the mean variance (MIC, Figure 1). Dashed lines are the ends of the
    prefixes of these dims."""
    figure, (axes,) = panels_of([title], 8, 3)
    axes.bar(range(1, len(spectrum) + 1), np.divide(spectrum, np.mean(spectrum)), width=1.0)
    for dim in dims:
        if dim < len(spectrum):
            axes.axvline(dim + 0.5, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="dim (prefixes end at the dashed lines)", ylabel="variance / mean variance")
    save(figure, file)


def draw_all(results: GridResults, folder: Path) -> dict[Path, str]:
    """Draw every figure that there is data for, as PNG files in a folder. Returns file -> title."""
    titles: dict[str, str] = {}
    headline, latency, grid = Headline.of(results), results.latency, results.granularities
    if headline is not None and latency is not None and curves_of(headline, timed=True):
        titles[LEADS[0]] = "quality against milliseconds per query"
        cost = f"ms per query, searching {latency.documents:,} vectors"
        draw_lead(headline, cost, True, folder / f"{LEADS[0]}.png")
    if headline is not None and curves_of(headline, timed=False):
        titles[LEADS[1]] = "quality against bytes per vector"
        draw_lead(headline, "bytes per vector", False, folder / f"{LEADS[1]}.png")
    for kind in results.judged_task_types() if sizes_in(results) else ():
        titles[f"heat_map_{kind}"] = f"{title_of(kind)} by layer and dim"
        draw_heat_map(results, kind, folder / f"heat_map_{kind}.png")
    if results.asymmetric_searches:
        titles["asymmetric_search"] = "search with queries and documents at different layers"
        draw_asymmetric_searches(results, folder / "asymmetric_search.png")
    for task, spectra in results.variances.items():
        titles[f"variances_{task}"] = "variance of each dim over texts"
        layer, file = grid.layers[-1], folder / f"variances_{task}.png"
        draw_variances(spectra[str(layer)], grid.dims_of(layer), f"layer {layer}, texts of {task}", file)
    return {folder / f"{name}.png": title for name, title in titles.items()}
