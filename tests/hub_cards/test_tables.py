"""Tables of an evaluation: one row per granularity, also where the grid is no product."""

import subprocess
import sys
from dataclasses import replace

import pytest

from m3bert.evaluation import MeasuredSearch
from m3bert.hub_cards import tables
from m3bert.trainers import Granularity, Grid


def test_tables_hold_every_granularity(results):
    lines = tables.task_type_table(results).splitlines()
    header = "| granularity | sts (mean of 2 tasks) | retrieval (cranfield) | bytes per vector |"
    assert lines[0] == f"{header} ms per query |"
    # The mean of 0.208 and 0.308, 32 bytes, 2 + 1 ms.
    assert lines[2] == "| 2x8 | 25.8 | 20.8 | 32 | 3.0 |"
    assert len(lines) == 2 + len(results.granularities)
    assert tables.task_table(results, "sts").splitlines()[2] == "| 2x8 | 20.8 | 30.8 |"
    assert tables.task_table(results, "geometry").splitlines()[2] == "| 2x8 | 0.208 |"
    results.latency = None
    assert tables.task_type_table(results).splitlines()[0] == header


def test_searches_in_two_stages_are_compared_with_the_exact_search(results):
    lines = tables.two_stage_table(results, Granularity(6, 32)).splitlines()
    assert lines[2:] == [f"| cranfield | 1,398 | 8 | 50 | 30.0 | 50.0 | {100 * 0.5 / 0.632:.1f} |"]
    assert len(tables.two_stage_table(results, Granularity(6, 8)).splitlines()) == 2
    results.scores = [replace(score, value=0.0) for score in results.scores]
    assert tables.two_stage_table(results, Granularity(6, 32)).endswith("| 30.0 | 50.0 | - |"), "no share of nothing"


def test_bm25_is_shown_beside_embeddings_and_alone(results):
    results.hybrid_searches = [MeasuredSearch("cranfield", 1398, "ndcg@10", 0.4)]
    assert tables.hybrid_table(results) == "", "a part of a model may have lost the others"
    searches = [(6, "scores", 0.7), (6, "ranks", 0.65)]
    results.hybrid_searches += [
        MeasuredSearch("cranfield", 1398, "ndcg@10", value, query_layer=layer, document_layer=6, dim=32, fusion=fusion)
        for layer, fusion, value in searches
    ]
    assert tables.hybrid_table(results).splitlines()[2:] == [
        "| 6x32 | 63.2 | 70.0 | 65.0 |",
        "| BM25 alone |  | 40.0 | 40.0 |",
    ]


@pytest.mark.parametrize("results", ["2,6x8,32"], indirect=True)
def test_queries_at_each_layer_are_beside_symmetric_search(results):
    results.asymmetric_searches = [
        MeasuredSearch(
            "cranfield", 1398, "ndcg@10", (queries + documents) / 100, query_layer=queries, document_layer=documents,
            dim=32,
        )
        for queries, documents in ((2, 6), (6, 2))
    ]  # fmt: skip
    assert tables.asymmetric_table(results, 32).splitlines() == [
        "| query layer | cranfield, documents at 6 | cranfield, same layer | ms per query |",
        "| --- | --: | --: | --: |",
        "| 2 | 8.0 | 23.2 | 5.0 |",  # 2 + 3 ms
        "| 6 | 63.2 | 63.2 | 8.0 |",
    ]
    results.latency = None
    assert tables.asymmetric_table(results, 32).splitlines()[2] == "| 2 | 8.0 | 23.2 |"


def test_engines_are_beside_torch_at_the_layers_that_they_were_measured_at(results):
    layers = results.granularities.layers
    assert tables.engine_table(results.latency, layers) == ""
    engines = {"ONNX float32": {"2": 1.0, "6": 2.5}, "ONNX int8": {"6": 1.25}}
    results.latency = replace(results.latency, engine_ms=engines)
    assert tables.engine_table(results.latency, layers).splitlines() == [
        "| layer | torch | ONNX float32 | ONNX int8 |", "| --- | --: | --: | --: |", "| 2 | 2.00 | 1.00 |  |",
        "| 6 | 5.00 | 2.50 | 1.25 |",
    ]  # fmt: skip


def test_a_report_has_the_tables_of_what_was_measured(results, coded):
    whole = tables.report(results)
    assert all(table in whole for table in (tables.task_type_table(results), tables.task_table(results, "geometry")))
    assert tables.two_stage_table(results, results.granularities.full) in whole and "Bits" not in whole
    whole = tables.report(coded)
    assert tables.code_table(coded, "sts") in whole and tables.rescored_table(coded, Granularity(6, 16)) in whole
    assert "Search in two stages" not in whole and "BM25" not in whole


def test_each_code_is_a_column_with_its_bytes_and_its_share_of_float32(coded):
    lines = tables.code_table(coded, "retrieval").splitlines()
    assert lines[0] == "| size | float32 | int8 | qama-2 | binary |"
    # 55% on average at 16 dims of layer 6, times 0.8; each code loses as many percent as its place in the list.
    assert lines[-1] == "| 6x16 | 44.0 (64 B) | 43.1 (98.0%, 16 B) | 42.2 (96.0%, 6 B) | 40.9 (93.0%, 2 B) |"
    assert tables.task_type_table(coded).splitlines()[-1] == "| 6x16 | 64.0 | 44.0 | 64 | 7.0 |", "that of float32"


def test_codes_that_were_not_measured_at_a_size_stay_blank(coded):
    left = Grid.parse("4x8@binary,6x16,6x16@int8")
    coded.grid, coded.scores = str(left), [s for s in coded.scores if Granularity.parse(s.granularity) in left]
    assert tables.code_table(coded, "sts").splitlines()[2:] == [
        "| 4x8 |  |  | 52.1 (1 B) |",
        "| 6x16 | 64.0 (64 B) | 62.7 (98.0%, 16 B) |  |",
    ]
    assert "| 4x8 |" not in tables.task_type_table(coded), "it was not measured in float32"


def test_searches_that_are_scored_again_are_beside_the_code_alone(coded):
    lines = tables.rescored_table(coded, Granularity(6, 16)).splitlines()
    assert [line.split(" | ")[:3] for line in lines[2:]] == [
        [f"| {name}", documents, code]
        for name, documents in (("cranfield", "1,398"), ("cisi", "1,460"), ("mean of 2", ""))
        for code in ("qama-2", "binary")
    ]
    # 0.4, and what re-scoring gains; of 0.4 in float32.
    assert lines[2].endswith("| 38.4 (96.0%, 6 B) | 50.0 (125.0%, 6 B) | 51.0 (127.5%, 22 B) | 52.0 (130.0%, 70 B) |")
    assert lines[-1].endswith("| 40.9 (93.0%, 2 B) | 50.0 (113.6%, 2 B) | 51.0 (115.9%, 18 B) | 52.0 (118.2%, 66 B) |")


def test_shortlists_have_the_length_that_every_collection_has(coded):
    searches = coded.rescored_searches
    coded.rescored_searches = [s for s in searches if (s.task, s.shortlist) != ("cisi", 100)]
    assert "| 10 rescored by codes |" in tables.rescored_table(coded, Granularity(6, 16))
    coded.rescored_searches = [s for s in searches if (s.task, s.code, s.rescore) != ("cisi", "binary", "int8")]
    last = tables.rescored_table(coded, Granularity(6, 16)).splitlines()[-1]
    assert last.endswith("| 50.0 (113.6%, 2 B) |  | 52.0 (118.2%, 66 B) |"), "no mean of one of two"


def test_words_are_aligned_left_numbers_right_and_a_bar_splits_no_cell():
    expected = "| a | b | c |\n| --- | --- | --: |\n| x | KL(p \\|\\| q) | 1 |"
    assert tables.markdown(["a", "b", "c"], [["x", "KL(p || q)", "1"]], words=2) == expected


def test_tables_need_neither_torch_nor_transformers():
    """The command that chooses a granularity answers at once."""
    code = "import sys, m3bert.hub_cards.tables\n"
    code += "print({'torch', 'transformers', 'matplotlib', 'jinja2'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stderr
