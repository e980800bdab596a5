"""Figures of an evaluation. They need the extra `publish`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.core.codes import CODES, FLOAT, bytes_per_vector
from trainers.core.extras import require_extra
from trainers.core.granularity import Granularity, Grid
from trainers.evaluation.choice import pareto_front
from trainers.evaluation.results import GridResults

from .labels import label_points
from .tables import has_codes, sizes_in
from .task_words import tasks_counted, title_of


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


DOTS_PER_INCH = 150
Points = Mapping[Granularity, tuple[float, float]]  # size -> its place in a panel
# Colours that people with any colour vision tell apart (Okabe and Ito, Tol), with a marker of its own for each code.
CODE_STYLES = {
    FLOAT: ("#000000", "o"),
    "float16": ("#999999", "s"),
    "int8": ("#0072B2", "D"),
    "int4": ("#56B4E9", "v"),
    "qama-2": ("#D55E00", "^"),
    "qama-1.5": ("#E69F00", "<"),
    "qama-hybrid": ("#CC79A7", ">"),
    "binary": ("#009E73", "X"),
    "qama-1": ("#882255", "P"),
    "qama-0.5": ("#999933", "*"),
}


def blank_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches."""
    return require_extra("matplotlib.figure", "publish", "A figure").Figure((width, height), layout="constrained")


def palette(count: int) -> list[Any]:
    """Colours in an order that the eye sees, all of them dark enough for a white page."""
    colormap = require_extra("matplotlib", "publish", "A figure").colormaps["viridis"]
    return [colormap(0.85 * index / max(1, count - 1)) for index in range(count)]


def save(figure: Figure, file: Path) -> None:
    """Write a figure as PNG; its folder is made if it is not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DOTS_PER_INCH)


def _write_cells(axes: Axes, cells: Sequence[Sequence[float]]) -> AxesImage:
    """Draw a matrix of colours, with its numbers in them. Cells that are NaN stay blank."""
    image = axes.imshow(cells, cmap="viridis", aspect="auto")
    known = [value for values in cells for value in values if not math.isnan(value)]
    middle = (min(known) + max(known)) / 2
    for row, values in enumerate(cells):
        for column, value in enumerate(values):
            if not math.isnan(value):
                color = "white" if value < middle else "black"
                axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=color)
    return image


def draw_heat_map(results: GridResults, task_type: str, file: Path) -> None:
    """
    Layers x dims in float32: the mean over the tasks of a type, in percent. Granularities outside of the grid stay
    blank.
    """
    sizes, quality = Grid(tuple(sizes_in(results))), results.quality(results.tasks(task_type))
    layers, dims = sizes.layers[::-1], sizes.dims
    cells = [[100 * quality.get(Granularity(layer, dim), math.nan) for dim in dims] for layer in layers]
    figure = blank_figure(2 + 0.75 * len(dims), 1.6 + 0.5 * len(layers))
    axes = figure.subplots()
    image = _write_cells(axes, cells)
    axes.set_xticks(range(len(dims)), [str(dim) for dim in dims])
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set_xlabel("dims")
    axes.set_ylabel("layers")
    title = f"{title_of(task_type)}: {results.main_metric(task_type)} (%), {tasks_counted(results, task_type)}"
    axes.set_title(title, fontsize="medium")
    figure.colorbar(image)
    save(figure, file)


def draw_quality(results: GridResults, cost: Callable[[Granularity], float], label: str, file: Path) -> None:
    """
    Quality of every size in float32 against a cost: one panel per task type, one line per layer, one labelled point
    per size. Circles are around the Pareto front, which is what no other size beats in both.
    """
    task_types, members = results.judged_task_types(), sizes_in(results)
    layers = Grid(tuple(members)).layers
    figure, panels = _panels(task_types, len(members))
    drawn: dict[Axes, Points] = {}
    for axes, task_type in zip(panels, task_types, strict=True):
        quality = results.quality(results.tasks(task_type))
        drawn[axes] = points = {g: (cost(g), 100 * quality[g]) for g in members}
        for layer, color in zip(layers, palette(len(layers)), strict=True):
            own = [point for g, point in points.items() if g.layer == layer]
            axes.plot(*zip(*own, strict=True), "o-", color=color, linewidth=0.6, markersize=4, label=str(layer))
        every = list(points.values())
        front = [every[index] for index in pareto_front(every)]
        ring: dict[str, Any] = {"color": "black", "markerfacecolor": "none", "markersize": 8, "markeredgewidth": 0.8}
        axes.plot(*zip(*front, strict=True), "o", **ring, label="no other is better in both")
        _label(axes, results, task_type, label, points)
    _finish(figure, drawn, "layers", 8, file)


def draw_codes(results: GridResults, file: Path) -> None:
    """
    Quality against bytes per vector at the deepest layer: one panel per task type, one colour and marker per
    precision, one labelled point per dim. A dashed line marks the quality of the widest dim in float32.
    """
    task_types, grid = results.judged_task_types(), results.granularities
    layer = max(g.layer for g in grid if g.code != FLOAT)
    figure, panels = _panels(task_types, len([g for g in grid if g.layer == layer]))
    drawn: dict[Axes, Points] = {}
    for axes, task_type in zip(panels, task_types, strict=True):
        quality = {g: value for g, value in results.quality(results.tasks(task_type)).items() if g.layer == layer}
        drawn[axes] = points = {g: (bytes_per_vector(g.code, g.dim), 100 * value) for g, value in quality.items()}
        for code in (code for code in CODES if code in grid.codes):
            own = [point for g, point in points.items() if g.code == code]
            if own:
                color, marker = CODE_STYLES[code]
                axes.plot(*zip(*own, strict=True), marker=marker, color=color, linewidth=0.6, markersize=5, label=code)
        floats = [g for g in quality if g.code == FLOAT]
        if floats:
            axes.axhline(
                100 * quality[floats[-1]],
                color="black",
                linestyle="--",
                linewidth=0.8,
                label=f"{floats[-1]} in {FLOAT}",
            )
        _label(axes, results, task_type, "bytes per vector", points)
    _finish(figure, drawn, "code", 4 * min(2, len(panels)), file)


def _panels(task_types: Sequence[str], points: int) -> tuple[Figure, list[Axes]]:
    """A figure with a panel per task type, two in a row, with room for the labelled points of each."""
    columns = min(2, len(task_types))
    rows = math.ceil(len(task_types) / columns)
    figure = blank_figure(6.4 * columns, max(3.6, 2.4 + 0.08 * points) * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(task_types) :]:
        axes.set_visible(False)
    return figure, panels[: len(task_types)]


def _label(axes: Axes, results: GridResults, task_type: str, cost: str, points: Points) -> None:
    """Label a panel of quality against a cost."""
    set_cost_scale(axes, [x for x, _ in points.values()])
    axes.set_xlabel(cost)
    axes.set_ylabel(f"{results.main_metric(task_type)} (%)")
    axes.set_title(f"{title_of(task_type)}, {tasks_counted(results, task_type)}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.margins(0.08)


def set_cost_scale(axes: Axes, costs: Sequence[float]) -> None:
    """A logarithmic axis for costs that differ by a factor of 4 or more. A tick is at each cost where they are few."""
    ticker = require_extra("matplotlib.ticker", "publish", "A figure")
    different = sorted(set(costs))
    wide = different[-1] >= 4 * different[0] > 0
    if wide:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(10, subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    if len(different) <= 8 and all(high > 1.25 * low for low, high in pairwise(different)):
        axes.set_xticks(different)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _finish(figure: Figure, drawn: Mapping[Axes, Points], title: str, columns: int, file: Path) -> None:
    """Put the legend below the panels, say the size at each point, and write the figure."""
    handles, labels = next(iter(drawn)).get_legend_handles_labels()
    figure.legend(handles, labels, title=title, loc="outside lower center", ncols=columns, fontsize="small")
    name_sizes(figure, drawn)
    save(figure, file)


def name_sizes(figure: Figure, drawn: Mapping[Axes, Points]) -> None:
    """Say layers x dims at each point of the panels of a figure that is complete otherwise."""
    figure.draw_without_rendering()  # the layout is known from here on
    for axes, points in drawn.items():
        label_points(axes, list(points.values()), [str(g.size) for g in points])


def draw_asymmetric_searches(results: GridResults, file: Path) -> None:
    """
    Query layers x document layers at the widest dim with searches with asymmetric encoders: one panel per retrieval
    task, the main metric in percent. One layer for both sides is on the diagonal, in boxes. Pairs that were not
    measured stay blank.
    """
    dim = max(search.dim for search in results.asymmetric_searches)
    searches = [search for search in results.asymmetric_searches if search.dim == dim]
    tasks = list(dict.fromkeys(search.task for search in searches))
    layers = sorted({search.query_layer for search in searches})
    values = {(search.task, search.query_layer, search.document_layer): 100 * search.value for search in searches}
    for task in tasks:
        quality = results.quality([task])
        values |= {(task, layer, layer): 100 * quality[Granularity(layer, dim)] for layer in layers}
    columns = len(tasks) if len(tasks) <= 3 else math.ceil(math.sqrt(len(tasks)))
    rows = math.ceil(len(tasks) / columns)
    figure = blank_figure(max(3.4, 1.2 + 0.55 * len(layers)) * columns, (1.2 + 0.45 * len(layers)) * rows + 0.4)
    panels = figure.subplots(rows, columns, squeeze=False)
    patches = require_extra("matplotlib.patches", "publish", "A figure")
    for axes, task in zip(panels.flat, tasks, strict=False):
        cells = [[values.get((task, query, document), math.nan) for document in layers] for query in layers[::-1]]
        _write_cells(axes, cells)
        for place in range(len(layers)):
            corner = place - 0.46, len(layers) - 1.46 - place
            axes.add_patch(patches.Rectangle(corner, 0.92, 0.92, fill=False, edgecolor="white", linewidth=2))
        axes.set_xticks(range(len(layers)), [str(layer) for layer in layers])
        axes.set_yticks(range(len(layers)), [str(layer) for layer in layers[::-1]])
        axes.set_xlabel("document layer")
        axes.set_ylabel("query layer")
        axes.set_title(task, fontsize="medium")
    for axes in list(panels.flat)[len(tasks) :]:
        axes.set_visible(False)
    figure.suptitle(f"{results.main_metric('retrieval')} (%), {dim} dims; boxes: same layer", fontsize="medium")
    save(figure, file)


def draw_variances(spectrum: Sequence[float], dims: Sequence[int], title: str, file: Path) -> None:
    """
    Variance of every dim over texts, divided by the mean variance (MIC, Figure 1). Dashed lines mark the ends of
    prefixes.

    Args:
        spectrum (`Sequence[float]`): Variance of each dim.
        dims (`Sequence[int]`): Lengths of the prefixes.
        title (`str`): Title of the figure.
        file (`Path`): PNG file to write.
    """
    mean = sum(spectrum) / len(spectrum)
    figure = blank_figure(8, 3)
    axes = figure.subplots()
    axes.bar(range(1, len(spectrum) + 1), [value / mean for value in spectrum], width=1.0, color="#7570b3")
    for dim in dims:
        if dim < len(spectrum):
            axes.axvline(dim + 0.5, color="#d95f02", linestyle="--", linewidth=1)
    axes.set_xlabel("dim (prefixes end at the dashed lines)")
    axes.set_ylabel("variance / mean variance")
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(0.5, len(spectrum) + 0.5)
    save(figure, file)


def draw_comparison(
    searches: Mapping[str, Mapping[Granularity, Mapping[str, float]]],
    metric: str,
    baselines: Mapping[str, Mapping[str, float]],
    file: Path,
) -> None:
    """
    Quality over bytes per vector in float32: one panel per encoder or way to search, one line per layer, one labelled
    point per size.

    Args:
        searches (`dict[str, dict[Granularity, dict[str, float]]]`): Title -> granularity -> metric -> value.
        metric (`str`): Metric to draw, in percent.
        baselines (`dict[str, dict[str, float]]`): Name of a horizontal line -> metric -> value.
        file (`Path`): PNG file to write.
    """
    columns = min(3, len(searches))
    rows = math.ceil(len(searches) / columns)
    figure = blank_figure(1 + 3.8 * columns, 4 * rows)
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    drawn: dict[Axes, Points] = {}
    for axes, (title, scores) in zip(panels, searches.items(), strict=False):
        layers = sorted({g.layer for g in scores})
        drawn[axes] = points = {g: (4 * g.dim, 100 * found[metric]) for g, found in sorted(scores.items())}
        for layer, color in zip(layers, palette(len(layers)), strict=True):
            own = [point for g, point in points.items() if g.layer == layer]
            axes.plot(*zip(*own, strict=True), "o-", color=color, linewidth=0.6, ms=4, label=f"layer {layer}")
        for (name, found), style in zip(baselines.items(), cycle(("--", ":", "-.")), strict=False):
            axes.axhline(100 * found[metric], color="black", linestyle=style, linewidth=0.8, label=name)
        axes.set_title(title, fontsize="small")
        axes.set_xlabel("bytes per vector")
        axes.set_ylabel(f"{metric} (%)")
        set_cost_scale(axes, [x for x, _ in points.values()])
        axes.set_ylim(0, 100)
        axes.margins(x=0.1)
        axes.grid(alpha=0.3)
    for axes in panels[len(searches) :]:
        axes.set_visible(False)
    _finish(figure, drawn, "", 8, file)


def draw_all(results: GridResults, folder: Path) -> list[Path]:
    """Draw every figure that there is data for, as PNG files in a folder; returns the files."""
    files = []

    def file(name: str) -> Path:
        files.append(folder / f"{name}.png")
        return files[-1]

    judged = results.judged_task_types()
    floats = judged if sizes_in(results) else []
    for task_type in floats:
        draw_heat_map(results, task_type, file(f"heat_map_{task_type}"))
    if floats:
        draw_quality(results, lambda g: bytes_per_vector(g.code, g.dim), "bytes per vector", file("quality_and_bytes"))
    if judged and has_codes(results):
        draw_codes(results, file("quality_by_code"))
    if results.latency is not None and floats:
        latency = results.latency
        label = f"ms per query, searching {latency.documents:,} documents"
        draw_quality(results, latency.of, label, file("quality_and_latency"))
    if results.asymmetric_searches:
        draw_asymmetric_searches(results, file("asymmetric_search"))
    for task, spectra in results.variances.items():
        layer = results.granularities.layers[-1]
        dims = results.granularities.dims_of(layer)
        draw_variances(spectra[str(layer)], dims, f"layer {layer}, texts of {task}", file(f"variances_{task}"))
    return files
