"""Figures of an evaluation, also of a grid that is no product."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from matplotlib.image import imread

from hub_cards.figures import draw_all, draw_asymmetric_searches, draw_prefix_residual_correlation
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


@pytest.mark.parametrize("dim", [1, 16, 31])
def test_correlations_of_any_prefix_are_drawn(tmp_path, dim):
    correlation = np.corrcoef(np.random.default_rng(0).normal(size=(32, 100)))
    file = tmp_path / "figures" / "correlation.png"
    draw_prefix_residual_correlation(correlation, dim, "layer 6", file)
    height, width = imread(file).shape[:2]
    assert 0.15 < height / width < 1


def test_what_was_not_measured_is_not_drawn(results, tmp_path):
    results.latency, results.variances = None, {}
    results.scores = [score for score in results.scores if score.task_type == "geometry"]
    assert draw_all(results, tmp_path) == []


def test_a_figure_without_matplotlib_names_the_extra(results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"A figure needs the package matplotlib: pip install 'm3bert\[publish\]'"):
        draw_all(results, tmp_path)
