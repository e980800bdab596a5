"""Figures of an evaluation, also of a grid that is no product."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from m3bert.encode.precisions import bytes_per_vector
from m3bert.evaluation import MeasuredSearch, Score
from m3bert.hub_cards.figures import draw_all, draw_asymmetric_searches
from m3bert.trainers import Granularity, Grid


@pytest.fixture
def drawn(monkeypatch):
    """Name of a file -> its figure, in place of the files."""
    figures = {}
    monkeypatch.setattr("m3bert.hub_cards.figures.save", lambda figure, file: figures.update({file.stem: figure}))
    return figures


def test_every_figure_is_drawn(results, tmp_path):
    widest = [g.layer for g in results.granularities if g.dim == 32]
    results.asymmetric_searches = [
        MeasuredSearch("cranfield", 9, "ndcg@10", 0.5, query_layer=6, document_layer=max(widest), dim=32)
    ]
    files = draw_all(results, tmp_path)
    assert [file.stem for file in files] == [
        "quality_and_latency", "quality_and_bytes", "heat_map_sts", "heat_map_retrieval", "asymmetric_search",
        "variances_stsb-geometry",
    ]  # fmt: skip
    assert all(min(imread(file).shape[:2]) > 200 for file in files)


def test_the_cells_are_the_results(results, tmp_path, drawn):
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


def test_each_precision_is_a_curve_over_depths_and_one_over_dims(coded, tmp_path, drawn):
    times = {f"{dim}{code}": 1.0 + dim / 8 for dim in (8, 16) for code in ("", "@int8", "@qama-2", "@binary")}
    coded.latency = replace(coded.latency, search_ms=times)
    draw_all(coded, tmp_path)
    quality, full = coded.quality(["cranfield", "cisi"]), Granularity(6, 16)
    for name, along in (("latency", [Granularity(layer, 16) for layer in (4, 6)]), ("bytes", [*Grid.parse("6x8,16")])):
        (axes,) = drawn[f"quality_and_{name}"].axes
        points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
        assert list(points) == ["float32", "int8", "binary"]
        for code, curve in points.items():
            for (cost, share), size in zip(curve, along, strict=True):
                g = replace(size, code=code)
                assert share == pytest.approx(100 * quality[g] / quality[full])
                assert cost == (coded.latency.of(g) if name == "latency" else bytes_per_vector(code, g.dim))
        labels = {text.get_text() for text in axes.texts}
        assert labels == ({"4", "6"} if name == "latency" else {"8", "16"})


def test_queries_of_each_depth_search_the_documents_of_the_last(results, tmp_path, drawn):
    results.grid, results.latency = "2,4,6x32", replace(results.latency, search_ms={"32": 3.0})
    results.scores = [Score("cisi", "retrieval", "test", "ndcg@10", True, f"{n}x32", n / 10) for n in (2, 4, 6)]
    results.asymmetric_searches = [
        MeasuredSearch("cisi", 50, "ndcg@10", n / 8, query_layer=n, document_layer=6, dim=32) for n in (2, 4)
    ]
    results.hybrid_searches = [MeasuredSearch("cisi", 50, "ndcg@10", 0.3)]
    draw_all(results, tmp_path)
    curve, bm25 = drawn["quality_and_latency"].axes[0].lines
    assert curve.get_xydata().tolist() == [pytest.approx(p) for p in ([5, 25 / 0.6], [6, 50 / 0.6], [8, 100])]
    assert (bm25.get_label(), list(bm25.get_ydata())) == ("BM25 alone", [50.0, 50.0])


def test_pairs_of_layers_are_cells_and_what_was_not_measured_is_blank(results, tmp_path, drawn):
    results.grid = "2,4,6x32"
    results.scores = [
        Score("cisi", "retrieval", "test", "ndcg@10", True, f"{layer}x32", layer / 10) for layer in (2, 4, 6)
    ]
    results.asymmetric_searches = [
        MeasuredSearch("cisi", 50, "ndcg@10", query / 100, query_layer=query, document_layer=6, dim=32)
        for query in (2, 4)
    ]
    results.asymmetric_searches.append(
        MeasuredSearch("cisi", 50, "ndcg@10", 0.5, query_layer=6, document_layer=4, dim=32)
    )
    draw_asymmetric_searches(results, tmp_path / "asymmetric.png")
    cells = drawn["asymmetric"].axes[0].images[0].get_array().filled(np.nan)
    np.testing.assert_allclose(cells, [[20, np.nan, 2], [np.nan, 40, 4], [np.nan, 50, 60]])


def test_what_was_not_measured_is_not_drawn(results, tmp_path):
    results.latency, results.variances = None, {}
    results.scores = [score for score in results.scores if score.task_type == "geometry"]
    assert draw_all(results, tmp_path) == {}
