"""Figures of an evaluation, also of a grid that is no product."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from m3bert.encode.codes import bytes_per_vector
from m3bert.evaluation import AsymmetricSearch, Score
from m3bert.hub_cards.figures import draw_all, draw_asymmetric_searches, draw_curves
from m3bert.trainers import Granularity, Grid


@pytest.fixture
def drawn(monkeypatch):
    """Name of a file -> its figure, in place of the files."""
    figures = {}
    monkeypatch.setattr("m3bert.hub_cards.figures.save", lambda figure, file: figures.update({file.stem: figure}))
    return figures


def test_every_figure_is_drawn(results, tmp_path):
    widest = [g.layer for g in results.granularities if g.dim == 32]
    results.asymmetric_searches = [AsymmetricSearch("cranfield", 9, 6, max(widest), 32, "ndcg@10", 0.5)]
    files = draw_all(results, tmp_path)
    assert [file.stem for file in files] == [
        "heat_map_sts",
        "heat_map_retrieval",
        "quality_and_bytes",
        "quality_and_latency",
        "asymmetric_search",
        "variances_stsb-geometry",
    ]
    assert all(min(imread(file).shape[:2]) > 200 for file in files)


def test_the_cells_and_points_are_the_results(results, tmp_path, drawn):
    draw_all(results, tmp_path)
    sizes, quality = results.granularities, results.quality(["stsb", "sick"])
    (axes,) = drawn["heat_map_sts"].axes
    cells = {
        Granularity(layer, dim): axes.images[0].get_array().filled(np.nan)[row, column]
        for row, layer in enumerate(sizes.layers)
        for column, dim in enumerate(sizes.dims)
    }
    known = {g: value for g, value in cells.items() if not np.isnan(value)}
    assert known == pytest.approx({g: 100 * value for g, value in quality.items()})
    axes = drawn["quality_and_latency"].axes[0]
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    for layer in sizes.layers:
        expected = [[results.latency.of(g), 100 * quality[g]] for g in sizes if g.layer == layer]
        assert points[f"layer {layer}"] == [pytest.approx(point) for point in expected]


@pytest.mark.parametrize(
    "grid, expected",
    [
        ("4,6x8,16@float32,int8,qama-2,binary", {"quality_and_bytes", "quality_by_code"}),
        ("4x8@binary,6x16@int8", {"quality_by_code"}),  # nothing in float32
        ("4x8,6x16@int8", {"quality_and_bytes", "quality_by_code"}),
        ("4,6x8,16", {"quality_and_bytes"}),
    ],
)
def test_codes_have_a_figure_of_their_own_and_are_in_no_other(coded, tmp_path, drawn, grid, expected):
    kept = Grid.parse(grid)
    coded.grid, coded.scores = str(kept), [s for s in coded.scores if Granularity.parse(s.granularity) in kept]
    draw_all(coded, tmp_path)
    assert {name for name in drawn if name.startswith("quality") and "latency" not in name} == expected
    if "quality_by_code" in drawn:
        quality = coded.quality(["cranfield", "cisi"])
        for line in drawn["quality_by_code"].axes[1].lines:
            own = [g for g in kept if (g.code, g.layer) == (line.get_label(), max(kept.layers))]
            expected = [[bytes_per_vector(g.code, g.dim), 100 * quality[g]] for g in own]
            assert line.get_xydata().tolist() == [pytest.approx(point) for point in expected]


def test_pairs_of_layers_are_cells_and_what_was_not_measured_is_blank(results, tmp_path, drawn):
    results.grid = "2,4,6x32"
    results.scores = [
        Score("cisi", "retrieval", "test", "ndcg@10", True, f"{layer}x32", layer / 10) for layer in (2, 4, 6)
    ]
    results.asymmetric_searches = [
        AsymmetricSearch("cisi", 50, query, 6, 32, "ndcg@10", query / 100) for query in (2, 4)
    ]
    results.asymmetric_searches.append(AsymmetricSearch("cisi", 50, 6, 4, 32, "ndcg@10", 0.5))
    draw_asymmetric_searches(results, tmp_path / "asymmetric.png")
    cells = drawn["asymmetric"].axes[0].images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(cells, [[20, np.nan, 2], [np.nan, 40, 4], [np.nan, 50, 60]])


def test_baselines_are_horizontal_lines(tmp_path, drawn):
    panels = {"one": [("layer 2", 16, 20.0), ("layer 2", 128, 30.0)], "other": [("layer 6", 16, 40.0)]}
    draw_curves(panels, "bytes", tmp_path / "curves.png", {"BM25": 25.0})
    first, second = drawn["curves"].axes
    assert {line.get_label(): list(line.get_ydata()) for line in first.lines}["BM25"] == [25.0, 25.0]
    assert (first.get_xscale(), second.get_xscale()) == ("log", "linear")


def test_what_was_not_measured_is_not_drawn(results, tmp_path):
    results.latency, results.variances = None, {}
    results.scores = [score for score in results.scores if score.task_type == "geometry"]
    assert draw_all(results, tmp_path) == []
