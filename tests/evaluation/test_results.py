"""Results of an evaluation: their file, cuts, means and times."""

import json
from dataclasses import asdict, replace

import pytest

from m3bert.evaluation import GridResults, Latency, MeasuredSearch, Score
from m3bert.evaluation.results import rescored_bytes
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused


CODED = Granularity(6, 8, "binary")


@pytest.fixture
def results() -> GridResults:
    """Scores and searches of two tasks, one of them with fewer searches; every value is another one."""
    grid = Grid.parse("2,4,6x8,32@binary,float32")
    pairs = [("cranfield", 2, 6, 8), ("cranfield", 2, 6, 32), ("cranfield", 2, 4, 8), ("cisi", 2, 6, 8)]
    rescored = [("cranfield", 6, "int8"), ("cisi", 6, "int8"), ("cranfield", 6, "codes"), ("cranfield", 2, "int8")]
    return GridResults(
        model="m", revision=None, grid=str(grid), seed=3, date="", machine="", versions={}, settings={},
        scores=[
            Score(task, "retrieval", "test", metric, metric == "ndcg@10", str(g), value + number / 100)
            for value, task in enumerate(("cranfield", "cisi"))
            for number, g in enumerate(grid)
            for metric in ("mrr@10", "ndcg@10")
        ],
        two_stage_searches=[
            MeasuredSearch("cisi", 48, "ndcg@10", 0.5, layer, first_dim=8, second_dim=32, shortlist=10)
            for layer in (2, 6)
        ],
        asymmetric_searches=[
            MeasuredSearch(task, 48, "ndcg@10", number / 10, query_layer=queries, document_layer=documents, dim=dim)
            for number, (task, queries, documents, dim) in enumerate(pairs)
        ],
        rescored_searches=[
            MeasuredSearch(task, 48, "ndcg@10", number / 10, layer, 8, code="binary", rescore=by, shortlist=10)
            for number, (task, layer, by) in enumerate(rescored)
        ],
        hybrid_searches=[
            MeasuredSearch("cisi", 48, "ndcg@10", 0.5),
            MeasuredSearch("cisi", 48, "ndcg@10", 0.5, dim=8, query_layer=2, document_layer=6, fusion="ranks"),
        ],
        variances={"stsb-geometry": {"2": [1.0] * 32, "6": [2.0] * 32}},
        latency=Latency(
            {"6": 2.0}, {"8": 1.0, "32": 4.0, "8@binary": 0.25}, {"8": {"10": 0.5}, "8@int8": {"10": 0.125}}, 100,
            "m3bert", 1,
        ),
    )  # fmt: skip


def test_results_survive_a_file_and_another_version_is_refused(results, tmp_path):
    results.save(tmp_path / "out" / "results.json")
    assert GridResults.load(tmp_path / "out" / "results.json") == results
    (tmp_path / "old.json").write_text(json.dumps(asdict(results) | {"schema_version": 6}))
    refused(r"old.json has schema version 6; this version of m3bert reads 7", GridResults.load, tmp_path / "old.json")


def test_quality_is_the_mean_of_the_main_metrics(results):
    assert results.quality(["cranfield", "cisi"]) == pytest.approx(
        {g: 0.5 + number / 100 for number, g in enumerate(results.granularities)}
    )
    assert results.tasks() == ["cranfield", "cisi"] and results.main_metric("retrieval") == "ndcg@10"
    refused("No scores of snli; scored: cranfield, cisi", results.quality, ["snli"])
    assert results.asymmetric_quality(["cranfield", "cisi"]) == {(Granularity(6, 8), 2): pytest.approx(0.15)}
    assert len(results.asymmetric_quality(["cranfield"])) == 3 and not results.asymmetric_quality([])
    assert results.rescored_quality(["cranfield", "cisi"]) == {(CODED, "int8", 10): pytest.approx(0.05)}
    assert len(results.rescored_quality(["cranfield"])) == 3 and not results.rescored_quality(["stsb"])
    assert [rescored_bytes(CODED, by) for by in ("codes", "int8", "float32")] == [1, 1 + 8, 1 + 32]


def test_a_cut_keeps_what_is_within(results):
    cut = results.within(Granularity(4, 8))
    assert cut.grid == "2,4x8@binary,float32" and {score.granularity for score in cut.scores} == set(
        map(str, cut.granularities)
    )
    assert cut.asymmetric_searches == [results.asymmetric_searches[2]] and not cut.two_stage_searches
    assert cut.rescored_searches == [results.rescored_searches[3]]
    assert cut.hybrid_searches == results.hybrid_searches[:1], "BM25 alone needs no layer"
    assert cut.variances == {"stsb-geometry": {"2": [1.0] * 8}}
    whole = results.within(Granularity(6, 32))
    assert whole == results
    lost = results.within(Granularity(6, 32), lost_layers={2, 4})
    assert lost.granularities.layers == [6] and set(lost.variances["stsb-geometry"]) == {"6"}
    refused("Nothing within 4x32 was scored", results.within, Granularity(4, 32), lost_layers={2, 4})


def test_times_are_those_that_were_measured(results):
    times, size = results.latency, Granularity(6, 8)
    assert times.of(size) == 3 and times.of(size, 200) == 4 and times.of(CODED, 200) == 2.5
    assert times.of(CODED, rescore="float32", shortlist=10) == 2.75
    assert times.of(CODED, 200, rescore="int8", shortlist=10) == 2.625
    assert replace(times, rerank_ms={"32": {"20": 0.5}}).of(Granularity(6, 32), first_dim=8, shortlist=20) == 3.5
    unknown = [
        times.of(replace(size, code="int8")), times.of(Granularity(2, 8)), times.of(CODED, shortlist=10),
        times.of(CODED, rescore="int8", shortlist=20),
    ]  # fmt: skip
    assert unknown == [float("inf")] * 4
