"""What an evaluation found, as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from trainers import Granularity, Grid
from trainers.evaluation import (
    AsymmetricSearch,
    GridResults,
    Latency,
    RescoredSearch,
    evaluate_grid,
    find_tasks,
    measure_latency,
)
from trainers.evaluation.results import rescored_bytes


GRID = Grid.parse("2,6x8,32")
NAMES = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]


def test_results_say_what_was_run_and_survive_a_file(encoder, data, tmp_path):
    results = evaluate_grid(encoder, find_tasks(NAMES), data, seed=3)
    engines = {"other": {6: len}}
    results.latency = measure_latency(encoder, ["open the file"], documents=50, rounds=2, engines=engines)
    assert set(results.latency.engine_ms["other"]) == {"6"} and results.latency.quantile < 0.5
    assert {dim: set(sizes) for dim, sizes in results.latency.rerank_ms.items()} == {
        dim: {"10", "20", "50"} for dim in ("8", "32")
    }
    exact, staged = results.latency.of(GRID.full), results.latency.of_two_stages(GRID.full, 8, 20)
    times = results.latency
    assert exact == times.encode_ms["6"] + times.search_ms["32"]
    assert staged == times.encode_ms["6"] + times.search_ms["8"] + times.rerank_ms["32"]["20"]
    assert times.of(GRID.full, 100) == pytest.approx(times.encode_ms["6"] + 2 * times.search_ms["32"])
    assert results.tasks() == NAMES and results.seed == 3 and results.granularities == GRID
    assert results.task_types() == ["sts", "pair_classification", "bitext", "classification", "retrieval", "geometry"]
    assert results.settings["pooling"] == "mean" and results.settings["max_length"] == 48
    assert set(results.variances["stsb-geometry"]) == {"2", "6"}
    assert all(0 <= score.value <= 1 for score in results.scores if score.task_type in ("retrieval", "bitext"))
    results.asymmetric_searches = [AsymmetricSearch("cranfield", 48, 2, 6, 8, "ndcg@10", 0.5)]
    results.save(tmp_path / "out" / "results.json")
    assert GridResults.load(tmp_path / "out" / "results.json") == results
    mains = {score.task: score.value for score in results.scores if score.main and score.granularity == "2x8"}
    assert results.quality(NAMES[:2])[Granularity(2, 8)] == (mains["stsb"] + mains["mrpc"]) / 2
    with pytest.raises(ValueError, match="No scores of snli; scored: stsb, "):
        results.quality(["snli"])
    broken = asdict(results) | {"schema_version": 99}
    (tmp_path / "old.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="schema version 99; this version of m3bert reads 3"):
        GridResults.load(tmp_path / "old.json")
    (tmp_path / "cut.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cut.json is not JSON"):
        GridResults.load(tmp_path / "cut.json")


def test_a_file_without_engines_and_quantile_holds_medians(results_of_pairs, tmp_path):
    results_of_pairs.latency = Latency({"2": 1.0}, {"8": 1.0}, {}, 9, "m3bert", 1)
    content = asdict(results_of_pairs)
    del content["latency"]["quantile"], content["latency"]["engine_ms"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert GridResults.load(tmp_path / "results.json") == results_of_pairs
    assert results_of_pairs.latency.quantile == 0.5


def test_a_file_of_the_schema_before_codes_is_read(results_of_pairs, tmp_path):
    content = asdict(results_of_pairs) | {"schema_version": 3}
    del content["rescored_searches"], content["hybrid_searches"], content["texts"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert GridResults.load(tmp_path / "results.json") == results_of_pairs
    del content["two_stage_searches"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="results.json lacks two_stage_searches"):
        GridResults.load(tmp_path / "results.json")
    (tmp_path / "results.json").write_text(json.dumps(content | {"schema_version": 6}))
    with pytest.raises(
        ValueError, match="results.json lacks hybrid_searches, rescored_searches, texts, two_stage_searches"
    ):
        GridResults.load(tmp_path / "results.json")


def test_the_earlier_name_of_a_precision_is_read(results_of_pairs, tmp_path):
    search = RescoredSearch("cranfield", 48, 6, 8, "binary", "int8", 10, "ndcg@10", 0.5)
    latency = Latency({"6": 1.0}, {"8@binary": 1.0}, {}, 9, "m3bert", 1)
    content = asdict(replace(results_of_pairs, grid="6x8@binary", rescored_searches=[search], latency=latency))
    earlier = json.dumps(content | {"schema_version": 6}).replace("binary", "sign")
    (tmp_path / "results.json").write_text(earlier)
    assert asdict(GridResults.load(tmp_path / "results.json")) == content
    assert str(Grid.parse("2,6x8@float32,sign")) == "2,6x8@binary,float32"
    assert str(Granularity.parse("6x8@sign")) == "6x8@binary"


def test_re_scored_searches_survive_a_file_and_a_cut(results_of_pairs, tmp_path):
    results = results_of_pairs
    results.grid = "2,6x8,32@binary,float32"
    results.rescored_searches = [
        RescoredSearch(task, 48, layer, 8, "binary", by, 10, "ndcg@10", value)
        for task, layer, by, value in [
            ("cranfield", 6, "int8", 0.3),
            ("cisi", 6, "int8", 0.5),
            ("cranfield", 6, "codes", 0.9),
            ("cranfield", 2, "int8", 0.1),
        ]
    ]
    results.save(tmp_path / "results.json")
    assert GridResults.load(tmp_path / "results.json") == results
    coded = Granularity(6, 8, "binary")
    assert results.rescored_quality(["cranfield", "cisi"]) == {(coded, "int8", 10): pytest.approx(0.4)}
    assert len(results.rescored_quality(["cranfield"])) == 3 and not results.rescored_quality(["stsb"])
    cut = results.within(Granularity(2, 32))
    assert cut.grid == "2x8,32@binary,float32" and [search.layer for search in cut.rescored_searches] == [2]
    assert [rescored_bytes(coded, by) for by in ("codes", "int8", "float32")] == [1, 1 + 8, 1 + 32]


def test_times_of_codes_are_those_that_were_measured():
    times = Latency(
        {"6": 2.0}, {"8": 1.0, "8@binary": 0.25}, {"8": {"10": 0.5}, "8@int8": {"10": 0.125}}, 100, "m3bert", 1
    )
    coded = Granularity(6, 8, "binary")
    assert times.has(coded) and times.of(coded, 200) == 2.5 and times.of(Granularity(6, 8)) == 3
    assert not times.has(Granularity(6, 8, "int8")) and not times.has(Granularity(2, 8))
    assert times.of_rescored(coded, "float32", 10) == 2.75 and times.of_rescored(coded, "int8", 10, 200) == 2.625
    assert times.of_rescored(coded, "codes", 10) is None and times.of_rescored(coded, "int8", 20) is None
    assert times.of_rescored(Granularity(6, 8, "int4"), "int8", 10) is None


def test_a_cut_keeps_the_asymmetric_searches_whose_layers_are_both_within(encoder, data):
    results = evaluate_grid(replace(encoder, grid=Grid.parse("2,4,6x8,32")), find_tasks(["cranfield"]), data)
    results.asymmetric_searches = [
        AsymmetricSearch("cranfield", 48, queries, documents, dim, "ndcg@10", 0.5)
        for queries, documents in ((2, 4), (4, 2), (2, 6), (6, 4))
        for dim in (8, 32)
    ]
    kept = results.within(Granularity(4, 8)).asymmetric_searches
    assert [(search.query_layer, search.document_layer, search.dim) for search in kept] == [(2, 4, 8), (4, 2, 8)]
    assert results.within(Granularity(6, 32)).asymmetric_searches == results.asymmetric_searches


def test_scores_of_layers_that_lost_their_exit_do_not_hold_for_a_cut(encoder, data):
    results = evaluate_grid(encoder, find_tasks(["stsb", "stsb-geometry"]), data)
    kept = results.within(Granularity(6, 32), lost_layers={2})
    assert kept.grid == "6x8,32" and {score.granularity for score in kept.scores} == {"6x8", "6x32"}
    assert set(kept.variances["stsb-geometry"]) == {"6"}
    with pytest.raises(ValueError, match="Nothing within 4x32 was scored; scored: 2,6x8,32"):
        results.within(Granularity(4, 32), lost_layers={2})


def test_the_quality_of_a_pair_of_layers_needs_every_task(results_of_pairs):
    quality = results_of_pairs.asymmetric_quality(["cranfield", "cisi"])
    assert quality == {(Granularity(6, 8), 2): pytest.approx(0.4)}
    assert set(results_of_pairs.asymmetric_quality(["cranfield"])) == {(Granularity(6, 8), 2), (Granularity(6, 32), 2)}
    assert results_of_pairs.asymmetric_quality(["cranfield", "stsb"]) == {}
    assert results_of_pairs.asymmetric_quality([]) == {}


@pytest.fixture
def results_of_pairs() -> GridResults:
    """Asymmetric searches of two tasks, one of them at one dim only."""
    searches = [("cranfield", 8, 0.3), ("cranfield", 32, 0.7), ("cisi", 8, 0.5)]
    return GridResults(
        model="m", revision=None, grid="2,6x8,32", seed=0, date="", machine="", versions={}, settings={},
        asymmetric_searches=[AsymmetricSearch(task, 48, 2, 6, dim, "ndcg@10", value) for task, dim, value in searches],
    )  # fmt: skip
