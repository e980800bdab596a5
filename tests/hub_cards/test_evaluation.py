"""Tables and figures of an evaluation, also of a grid that is no product."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.image import imread

from hub_cards.figures import draw_all, draw_prefix_residual_correlation
from hub_cards.tables import family_table, report, task_table, two_stage_table
from trainers import Granularity, Grid
from trainers.evaluation import GridResults, Latency, Plan, Score


@pytest.fixture(params=["2,6x8,32", "2x8,4x16,6x32"])
def results(request) -> GridResults:
    grid = Grid.parse(request.param)
    families = {
        "stsb": ("sts", "spearman"),
        "sick": ("sts", "spearman"),
        "cranfield": ("retrieval", "ndcg@10"),
        "stsb-geometry": ("geometry", "uniformity"),
    }
    scores = [
        Score(task, family, "test", metric, True, str(g), (g.layer + g.dim / 100) / 10 + 0.1 * (task == "sick"))
        for task, (family, metric) in families.items()
        for g in grid
    ]
    return GridResults(
        model="user/model",
        revision="abc",
        grid=str(grid),
        seed=0,
        date="2026-11-21",
        machine="a machine",
        versions={},
        settings={"pooling": "mean", "prompts": {}},
        scores=scores,
        plans=[Plan("cranfield", 1398, 6, 8, 32, 50, 0.3, "ndcg@10", 0.5)],
        variances={"stsb-geometry": {str(layer): [1.0, 2.0, 0.5] for layer in grid.layers}},
        latency=Latency({"2": 2.0, "4": 3.0, "6": 5.0}, {"8": 1.0, "16": 2.0, "32": 3.0}, {}, 100, "m3bert", 2),
    )


def test_tables_hold_every_granularity(results):
    lines = family_table(results).splitlines()
    assert lines[0] == "| granularity | sts (2) | retrieval (1) | bytes a vector | ms a query |"
    # The mean of 0.208 and 0.308, 32 bytes, 2 + 1 ms.
    assert lines[2] == "| 2x8 | 25.8 | 20.8 | 32 | 3.0 |"
    assert len(lines) == 2 + len(results.granularities)
    assert task_table(results, "sts").splitlines()[2] == "| 2x8 | 20.8 | 30.8 |"
    assert task_table(results, "geometry").splitlines()[2] == "| 2x8 | 0.208 |"
    plans = two_stage_table(results, Granularity(6, 32)).splitlines()
    assert plans[2] == f"| cranfield | 1,398 | 8 | 50 | 30.0 | 50.0 | {100 * 0.5 / 0.632:.1f} |"
    whole = report(results)
    assert whole.startswith("# user/model over ") and "## sts (spearman)" in whole and "pooling mean" in whole


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


@pytest.mark.parametrize("dim", [1, 16, 31])
def test_correlations_of_any_prefix_are_drawn(tmp_path, dim):
    correlation = np.corrcoef(np.random.default_rng(0).normal(size=(32, 100)))
    file = tmp_path / "figures" / "correlation.png"
    draw_prefix_residual_correlation(correlation, dim, "layer 6", file)
    height, width = imread(file).shape[:2]
    assert 0.15 < height / width < 1


def test_figures_are_of_what_was_measured(results, tmp_path):
    results.latency, results.variances = None, {}
    results.scores = [score for score in results.scores if score.family == "geometry"]
    assert draw_all(results, tmp_path) == []
