"""Figures of an evaluation, also of a grid that is no product."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Annotation, Text

from hub_cards.figures import (
    CODE_STYLES,
    blank_figure,
    draw_all,
    draw_asymmetric_searches,
    draw_codes,
    draw_comparison,
    draw_quality,
    set_cost_scale,
)
from trainers import Granularity, Grid
from trainers.core.codes import CODES, bytes_per_vector
from trainers.evaluation import AsymmetricSearch, GridResults, Score


def test_every_figure_is_drawn(results, tmp_path):
    files = draw_all(results, tmp_path)
    assert [file.stem for file in files] == [
        "heat_map_sts",
        "heat_map_retrieval",
        "quality_and_bytes",
        "quality_and_latency",
        "variances_stsb-geometry",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


@pytest.mark.parametrize(
    "grid, expected",
    [
        ("4,6x8,16@float32,int8,qama-2,binary", {"quality_and_bytes", "quality_by_code"}),
        ("4x8@binary,6x16@int8", {"quality_by_code"}),  # nothing in float32
        ("4x8,6x16@int8", {"quality_and_bytes", "quality_by_code"}),
        ("4,6x8,16", {"quality_and_bytes"}),
    ],
)
def test_codes_have_a_figure_of_their_own_and_are_in_no_other(coded, tmp_path, grid, expected):
    kept = Grid.parse(grid)
    coded.grid, coded.scores = str(kept), [s for s in coded.scores if Granularity.parse(s.granularity) in kept]
    drawn = {file.stem for file in draw_all(coded, tmp_path)}
    assert {stem for stem in drawn if stem.startswith("quality") and "latency" not in stem} == expected
    floats = any(g.code == "float32" for g in kept)
    assert ({"heat_map_sts", "quality_and_latency"} <= drawn) == floats == ("heat_map_retrieval" in drawn)


def test_the_figure_of_codes_has_one_line_per_code_at_the_deepest_layer(coded, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("hub_cards.figures.save", lambda figure, file: figures.append(figure))
    draw_codes(coded, tmp_path / "codes.png")
    (figure,) = figures
    by_type = {axes.get_title(): axes for axes in figure.axes}
    assert list(by_type) == ["semantic similarity, stsb", "retrieval, mean of 2 tasks"]
    retrieval = by_type["retrieval, mean of 2 tasks"]
    quality = coded.quality(["cranfield", "cisi"])
    lines = {line.get_label(): line for line in retrieval.lines}
    assert list(lines) == ["float32", "int8", "qama-2", "binary", "6x16 in float32"]
    for code in ("float32", "int8", "qama-2", "binary"):
        assert list(lines[code].get_xdata()) == [bytes_per_vector(code, dim) for dim in (8, 16)]
        expected = [100 * quality[Granularity(6, dim, code)] for dim in (8, 16)]
        assert list(lines[code].get_ydata()) == pytest.approx(expected)
    assert lines["6x16 in float32"].get_ydata()[0] == pytest.approx(100 * quality[Granularity(6, 16)])
    assert len({line.get_color() for code, line in lines.items() if code in CODES}) == 4
    assert retrieval.get_xscale() == "log"


@pytest.mark.parametrize("task_types", [("retrieval",), ("retrieval", "sts")])
def test_the_legend_of_all_codes_is_within_the_figure(coded, tmp_path, monkeypatch, task_types):
    figures = []
    monkeypatch.setattr("hub_cards.figures.save", lambda figure, file: figures.append(figure))
    grid = Grid.product([6], [8, 16], CODES)
    tasks = [("cranfield", "retrieval"), ("stsb", "sts")]
    coded.grid = str(grid)
    coded.scores = [
        Score(task, task_type, "test", "ndcg@10", True, str(g), 0.5)
        for task, task_type in tasks
        if task_type in task_types
        for g in grid
    ]
    draw_codes(coded, tmp_path / "codes.png")
    (figure,) = figures
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == len(CODES) + 1
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0


def test_each_search_is_a_panel_with_a_line_per_layer(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr("hub_cards.figures.save", lambda figure, file: figures.append(figure))
    scores = {Granularity(layer, dim): {"recall@10": layer * dim / 100} for layer in (2, 6) for dim in (4, 8)}
    draw_comparison({"a": scores, "b": scores}, "recall@10", {"TF-IDF": {"recall@10": 0.5}}, tmp_path / "it.png")
    for axes, title in zip(figures[0].axes, "ab", strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        assert axes.get_title() == title and list(lines) == ["layer 2", "layer 6", "TF-IDF"]
        assert list(lines["layer 6"].get_xdata()) == [16, 32]
        assert list(lines["layer 6"].get_ydata()) == pytest.approx([24, 48])
        assert lines["TF-IDF"].get_ydata()[0] == 50


def named_at(axes, sizes):
    """Size -> box of the label that says it. There is one label for each size."""
    labels = [text for text in axes.texts if isinstance(text, Annotation)]
    assert sorted(label.get_text() for label in labels) == sorted(map(str, sizes))
    return {label.get_text(): Text.get_window_extent(label) for label in labels}


@pytest.mark.parametrize("grid", ["2,6x8,32", "0,1,2,3,4,5,6x8,16,32,64,128"])
def test_every_point_says_layers_x_dims_and_nothing_hides_another(results, tmp_path, monkeypatch, grid):
    figures = []
    monkeypatch.setattr("hub_cards.figures.save", lambda figure, file: figures.append(figure))
    grid = Grid.parse(grid)
    results.grid = str(grid)
    results.scores = [
        Score("stsb", "sts", "test", "spearman", True, str(g), 0.5 + g.layer / 50 + math.log(g.dim) / 20) for g in grid
    ]
    draw_quality(results, lambda g: 1 + g.layer + g.dim / 64, "ms", tmp_path / "quality.png")
    (figure,) = figures
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = list(named_at(axes, grid).values())
    lines = [line for line in axes.lines if line.get_label().isdigit()]
    assert [line.get_label() for line in lines] == [str(layer) for layer in grid.layers]
    points = axes.transData.transform(np.concatenate([line.get_xydata() for line in lines]))
    assert len(points) == len(grid) and all(axes.bbox.contains(*point) for point in points)
    assert not any(a.overlaps(b) for row, a in enumerate(boxes) for b in boxes[:row])
    assert not any(box.contains(*point) for box in boxes for point in points)
    assert all(axes.bbox.contains(x, y) for box in boxes for x, y in box.corners())
    rings = next(line for line in axes.lines if line.get_label() == "no other is better in both")
    assert rings.get_linestyle() == "None" and rings.get_markerfacecolor() == "none"


@pytest.mark.parametrize("costs", [[3.0, 3.5, 4.1, 4.6], [128, 256, 512, 3072], [0.2, 1.0, 7.0, 90.0], [5.0], [2, 2]])
def test_an_axis_of_costs_can_be_read(costs):
    axes = blank_figure(6, 4).subplots()
    axes.plot(costs, costs, "o")
    set_cost_scale(axes, costs)
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    ticks = [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
    assert len([label for label in ticks if label.get_text()]) >= min(3, len(set(costs)))
    boxes = [label.get_window_extent() for label in ticks]
    assert not any(a.overlaps(b) for row, a in enumerate(boxes) for b in boxes[:row])


def test_every_code_has_a_colour_and_a_marker_of_its_own():
    assert list(CODE_STYLES) and CODE_STYLES.keys() == CODES.keys()
    assert all(len(set(values)) == len(CODES) for values in zip(*CODE_STYLES.values(), strict=True))


@pytest.mark.parametrize(("count", "layers"), [(1, 2), (3, 5), (5, 13)])
def test_searches_between_layers_are_drawn(tmp_path, count, layers):
    tasks = [f"task {number}" for number in range(count)]
    results = GridResults(
        model="m",
        revision=None,
        grid=f"{','.join(map(str, range(layers)))}x8,32",
        seed=0,
        date="",
        machine="",
        versions={},
        settings={},
        scores=[
            Score(task, "retrieval", "test", "ndcg@10", True, f"{layer}x{dim}", 0.5)
            for task in tasks
            for layer in range(layers)
            for dim in (8, 32)
        ],
        asymmetric_searches=[  # one pair was not measured
            AsymmetricSearch(task, 50, queries, layers - 1, 32, "ndcg@10", queries / layers)
            for task in tasks
            for queries in range(layers - 1)
        ],
    )
    draw_asymmetric_searches(results, tmp_path / "alone.png")
    assert imread(tmp_path / "alone.png").shape[1] >= 500
    assert "asymmetric_search" in [file.stem for file in draw_all(results, tmp_path)]


def test_what_was_not_measured_is_not_drawn(results, tmp_path):
    results.latency, results.variances = None, {}
    results.scores = [score for score in results.scores if score.task_type == "geometry"]
    assert draw_all(results, tmp_path) == []


def test_a_figure_without_matplotlib_names_the_extra(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"A figure needs the package matplotlib: pip install 'm3bert\[publish\]'"):
        draw_all(results, tmp_path)
