"""Tables of an evaluation: one row per granularity, also where the grid is no product."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from hub_cards.tables import (
    asymmetric_table,
    engine_table,
    markdown,
    report,
    task_table,
    task_type_table,
    two_stage_table,
)
from trainers import Granularity
from trainers.evaluation import AsymmetricSearch


def test_tables_hold_every_granularity(results):
    lines = task_type_table(results).splitlines()
    assert lines[0] == "| granularity | sts (2) | retrieval (1) | bytes per vector | ms per query |"
    # The mean of 0.208 and 0.308, 32 bytes, 2 + 1 ms.
    assert lines[2] == "| 2x8 | 25.8 | 20.8 | 32 | 3.0 |"
    assert len(lines) == 2 + len(results.granularities)
    assert task_table(results, "sts").splitlines()[2] == "| 2x8 | 20.8 | 30.8 |"
    assert task_table(results, "geometry").splitlines()[2] == "| 2x8 | 0.208 |"


def test_without_latency_there_is_no_column_for_it(results):
    results.latency = None
    assert task_type_table(results).splitlines()[0] == "| granularity | sts (2) | retrieval (1) | bytes per vector |"


def test_searches_in_two_stages_are_compared_with_the_exact_search(results):
    lines = two_stage_table(results, Granularity(6, 32)).splitlines()
    assert lines[2:] == [f"| cranfield | 1,398 | 8 | 50 | 30.0 | 50.0 | {100 * 0.5 / 0.632:.1f} |"]
    assert len(two_stage_table(results, Granularity(6, 8)).splitlines()) == 2
    results.scores = [replace(score, value=0.0) for score in results.scores]
    assert two_stage_table(results, Granularity(6, 32)).endswith("| 30.0 | 50.0 | - |"), "no share of nothing"


def test_queries_at_each_layer_are_beside_symmetric_search(results):
    grid = results.granularities
    layers = [layer for layer in grid.layers if 32 in grid.dims_of(layer)]
    results.asymmetric_searches = [
        AsymmetricSearch("cranfield", 1398, queries, documents, 32, "ndcg@10", (queries + documents) / 100)
        for queries in layers
        for documents in layers
        if queries != documents
    ]
    if len(layers) < 2:  # the grid that is no product has 32 dims at one layer only
        with pytest.raises(ValueError, match="No asymmetric search at 32 dims was measured; measured: none"):
            asymmetric_table(results, 32)
        return
    assert asymmetric_table(results, 32).splitlines() == [
        "| query layer | cranfield, documents at 6 | cranfield, same layer | ms per query |",
        "| --- | --: | --: | --: |",
        "| 2 | 8.0 | 23.2 | 5.0 |",  # 2 + 3 ms
        "| 6 | 63.2 | 63.2 | 8.0 |",
    ]
    with pytest.raises(ValueError, match="No asymmetric search at 8 dims was measured; measured: 32"):
        asymmetric_table(results, 8)
    assert "## Queries at one layer, documents at another, 32 dims" in report(results)
    results.latency = None
    assert asymmetric_table(results, 32).splitlines()[2] == "| 2 | 8.0 | 23.2 |"


def test_engines_are_beside_torch_at_the_layers_that_they_were_measured_at(results):
    layers = results.granularities.layers
    assert engine_table(results.latency, layers) == "" and "by engine" not in report(results)
    engines = {"ONNX float32": {"2": 1.0, "6": 2.5}, "ONNX int8": {"6": 1.25}}
    results.latency = replace(results.latency, engine_ms=engines, quantile=0.1)
    assert engine_table(results.latency, layers).splitlines() == [
        "| layer | torch | ONNX float32 | ONNX int8 |",
        "| --- | --: | --: | --: |",
        "| 2 | 2.00 | 1.00 |  |",
        "| 6 | 5.00 | 2.50 | 1.25 |",
    ]
    assert engine_table(results.latency, [6]).count("\n") == 2
    whole = report(results)
    assert "Each time is the 10th percentile of its measurements" in whole
    assert engine_table(results.latency, layers) in whole


def test_a_report_has_all_tables(results):
    whole = report(results)
    assert whole.startswith("# user/model over ") and "pooling mean" in whole
    for title in ("Means per task type", "sts (spearman)", "geometry (uniformity)", "Search in two stages"):
        assert f"## {title}" in whole
    results.two_stage_searches = []
    assert "Search in two stages" not in report(results) and "Queries at one layer" not in report(results)


def test_words_are_aligned_left_and_numbers_right():
    assert markdown(["a", "b", "c"], [["x", "y", "1"]], words=2) == "| a | b | c |\n| --- | --- | --: |\n| x | y | 1 |"


def test_a_bar_does_not_split_a_cell():
    assert markdown(["a"], [["KL(p || q)"]]).splitlines()[-1] == r"| KL(p \|\| q) |"


def test_tables_need_neither_torch_nor_transformers():
    """The command that chooses a granularity answers at once."""
    code = "import sys, hub_cards.tables; print({'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr
