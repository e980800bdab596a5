"""Tables of an evaluation: one row per granularity, also where the grid is no product."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from hub_cards.tables import (
    asymmetric_table,
    code_table,
    comparison_table,
    engine_table,
    hybrid_table,
    latency_report,
    markdown,
    report,
    rescored_table,
    task_table,
    task_type_table,
    two_stage_table,
)
from trainers import Granularity, Grid
from trainers.evaluation import AsymmetricSearch, HybridSearch


def test_tables_hold_every_granularity(results):
    lines = task_type_table(results).splitlines()
    assert (
        lines[0] == "| granularity | sts (mean of 2 tasks) | retrieval (cranfield) | bytes per vector | ms per query |"
    )
    # The mean of 0.208 and 0.308, 32 bytes, 2 + 1 ms.
    assert lines[2] == "| 2x8 | 25.8 | 20.8 | 32 | 3.0 |"
    assert len(lines) == 2 + len(results.granularities)
    assert task_table(results, "sts").splitlines()[2] == "| 2x8 | 20.8 | 30.8 |"
    assert task_table(results, "geometry").splitlines()[2] == "| 2x8 | 0.208 |"


def test_without_latency_there_is_no_column_for_it(results):
    results.latency = None
    assert (
        task_type_table(results).splitlines()[0]
        == "| granularity | sts (mean of 2 tasks) | retrieval (cranfield) | bytes per vector |"
    )


def test_searches_in_two_stages_are_compared_with_the_exact_search(results):
    lines = two_stage_table(results, Granularity(6, 32)).splitlines()
    assert lines[2:] == [f"| cranfield | 1,398 | 8 | 50 | 30.0 | 50.0 | {100 * 0.5 / 0.632:.1f} |"]
    assert len(two_stage_table(results, Granularity(6, 8)).splitlines()) == 2
    results.scores = [replace(score, value=0.0) for score in results.scores]
    assert two_stage_table(results, Granularity(6, 32)).endswith("| 30.0 | 50.0 | - |"), "no share of nothing"


def test_bm25_is_shown_beside_embeddings_and_alone(results):
    found = [(6, "scores", 0.7), (6, "ranks", 0.65)]
    results.hybrid_searches = [
        HybridSearch("cranfield", 1398, layer, 6, 32, fusion, "ndcg@10", value) for layer, fusion, value in found
    ]
    results.hybrid_searches.append(HybridSearch("cranfield", 1398, None, None, None, None, "ndcg@10", 0.4))
    assert hybrid_table(results).splitlines()[2:] == [
        "| 6x32 | 63.2 | 70.0 | 65.0 |",
        "| BM25 alone |  | 40.0 | 40.0 |",
    ]


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
        with pytest.raises(ValueError, match="No queries at other layers were measured at 32 dims; measured: none"):
            asymmetric_table(results, 32)
        return
    assert asymmetric_table(results, 32).splitlines() == [
        "| query layer | cranfield, documents at 6 | cranfield, same layer | ms per query |",
        "| --- | --: | --: | --: |",
        "| 2 | 8.0 | 23.2 | 5.0 |",  # 2 + 3 ms
        "| 6 | 63.2 | 63.2 | 8.0 |",
    ]
    with pytest.raises(ValueError, match="No queries at other layers were measured at 8 dims; measured: 32"):
        asymmetric_table(results, 8)
    assert "## Queries at one layer, documents at another, 32 dims" in report(results)
    results.latency = None
    assert asymmetric_table(results, 32).splitlines()[2] == "| 2 | 8.0 | 23.2 |"


def test_engines_are_beside_torch_at_the_layers_that_they_were_measured_at(results):
    layers = results.granularities.layers
    assert engine_table(results.latency, layers) == "" and "by runtime" not in report(results)
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
    assert latency_report(results.latency, layers).endswith(
        "ms to encode one query:\n\n" + engine_table(results.latency, layers)
    )


def test_searches_are_compared_at_every_granularity_and_with_a_baseline(results):
    scores = {g: {"recall@10": g.dim / 100, "mrr@10": g.layer / 100} for g in results.granularities}
    searches, baselines = {"one": scores, "another": scores}, {"TF-IDF": {"recall@10": 1.0, "mrr@10": 0.125}}
    lines = comparison_table(searches, ("recall@10", "mrr@10"), results.latency, baselines).splitlines()
    assert lines[0] == "| granularity | one | another | ms per query | bytes per vector |"
    for g, line in zip(results.granularities, lines[2:], strict=False):
        cell = f"{g.dim:.1f} / {g.layer:.1f}"
        assert line == f"| {g} | {cell} | {cell} | {results.latency.of(g):.1f} | {4 * g.dim} |"
    assert lines[-1] == "| TF-IDF | 100.0 / 12.5 | 100.0 / 12.5 |  |  |"


def test_a_report_has_all_tables(results):
    whole = report(results)
    assert whole.startswith("# user/model over ") and "pooling mean" in whole
    for title in ("Means per task type", "sts (spearman)", "geometry (uniformity)", "Search in two stages"):
        assert f"## {title}" in whole
    results.two_stage_searches = []
    assert "Search in two stages" not in report(results) and "Queries at one layer" not in report(results)


def test_tables_of_sizes_are_those_of_float32(coded):
    for table in (task_type_table(coded), task_table(coded, "sts"), task_table(coded, "retrieval")):
        assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| 4x8", "| 4x16", "| 6x8", "| 6x16"]
    assert task_type_table(coded).splitlines()[-1] == "| 6x16 | 64.0 | 44.0 | 64 | 7.0 |"


def test_each_code_is_a_column_with_its_bytes_and_its_share_of_float32(coded):
    lines = code_table(coded, "retrieval").splitlines()
    assert lines[0] == "| size | float32 | int8 | qama-2 | binary |"
    # 55% on average at 16 dims of layer 6, times 0.8; each code loses as many percent as its place in the list.
    assert lines[-1] == "| 6x16 | 44.0 (64 B) | 43.1 (98.0%, 16 B) | 42.2 (96.0%, 6 B) | 40.9 (93.0%, 2 B) |"
    assert len(lines) == 2 + 4


def test_codes_that_were_not_measured_at_a_size_stay_blank(coded):
    kept = Grid.parse("4x8@binary,6x16,6x16@int8")
    coded.grid, coded.scores = str(kept), [s for s in coded.scores if Granularity.parse(s.granularity) in kept]
    assert code_table(coded, "sts").splitlines() == [
        "| size | float32 | int8 | binary |",
        "| --- | --: | --: | --: |",
        "| 4x8 |  |  | 52.1 (1 B) |",
        "| 6x16 | 64.0 (64 B) | 62.7 (98.0%, 16 B) |  |",
    ]
    assert "| 4x8 |" not in task_type_table(coded), "it was not measured in float32"


def test_searches_that_are_scored_again_are_beside_the_code_alone(coded):
    lines = rescored_table(coded, Granularity(6, 16)).splitlines()
    assert lines[0] == (
        "| collection | documents | precision | alone | 100 rescored by codes | 100 rescored by int8 "
        "| 100 rescored by float32 |"
    )
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        [f"| {name}", documents, code]
        for name, documents in (("cranfield", "1,398"), ("cisi", "1,460"), ("mean of 2", ""))
        for code in ("qama-2", "binary")
    ]
    # 0.4, and what re-scoring gains; of 0.4 in float32.
    assert lines[2].endswith("| 38.4 (96.0%, 6 B) | 50.0 (125.0%, 6 B) | 51.0 (127.5%, 22 B) | 52.0 (130.0%, 70 B) |")
    assert lines[-1].endswith("| 40.9 (93.0%, 2 B) | 50.0 (113.6%, 2 B) | 51.0 (115.9%, 18 B) | 52.0 (118.2%, 66 B) |")
    assert "6x16" in report(coded) and rescored_table(coded, Granularity(6, 16)) in report(coded)


def test_shortlists_have_the_length_that_every_collection_has(coded):
    searches = coded.rescored_searches
    coded.rescored_searches = [s for s in searches if (s.task, s.shortlist) != ("cisi", 100)]
    assert "| 10 rescored by codes |" in rescored_table(coded, Granularity(6, 16))
    coded.rescored_searches = [s for s in searches if (s.task, s.code, s.rescore) != ("cisi", "binary", "int8")]
    last = rescored_table(coded, Granularity(6, 16)).splitlines()[-1]
    assert last.endswith("| 50.0 (113.6%, 2 B) |  | 52.0 (118.2%, 66 B) |"), "no mean of one of two"


def test_a_report_shows_bits_only_where_codes_were_measured(coded, results):
    assert "## Bits" not in report(results) and "rescored" not in report(results)
    whole = report(coded)
    assert whole.index("## sts (spearman)\n") < whole.index("## Bits") < whole.index("### sts (spearman) by precision")
    assert code_table(coded, "sts") in whole and code_table(coded, "retrieval") in whole


def test_words_are_aligned_left_and_numbers_right():
    assert markdown(["a", "b", "c"], [["x", "y", "1"]], words=2) == "| a | b | c |\n| --- | --- | --: |\n| x | y | 1 |"


def test_a_bar_does_not_split_a_cell():
    assert markdown(["a"], [["KL(p || q)"]]).splitlines()[-1] == r"| KL(p \|\| q) |"


def test_tables_need_neither_torch_nor_transformers():
    """The command that chooses a granularity answers at once."""
    code = "import sys, hub_cards.tables; print({'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr
