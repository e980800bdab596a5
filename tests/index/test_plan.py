"""Plans: what a choice becomes, which encoder they are for, and files that are none."""

import json

import pytest

from m3bert.evaluation import GridEncoder, GridResults, MeasuredSearch, Score
from m3bert.evaluation.choice import Budget, choose
from m3bert.index import Plan
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,6x32"), prompts={"query": "find "})


def results_of(**searches) -> GridResults:
    scores = [
        Score("cranfield", "retrieval", "test", "ndcg@10", True, name, value)
        for name, value in (("6x32", 0.5), ("6x8", 0.3), ("6x32@binary", 0.42))
    ]
    return GridResults(
        model="user/model", revision="abc", grid="6x8,6x32,6x32@binary", seed=0, date="2026-01-01", machine="x86",
        versions={}, settings={"pooling": "mean", "prompts": {"query": "find "}, "max_length": 64, "max_lengths": {}},
        scores=scores, weights="1234", **searches,
    )  # fmt: skip


def plan_of(results: GridResults, **limits) -> Plan:
    choice = choose(results, ["cranfield"], Budget(1000, **limits))
    return Plan.of(choice, results, ["cranfield"], 1000)


def test_a_plan_is_what_was_chosen(tmp_path):
    plan = plan_of(results_of())
    assert plan.documents == plan.query == Granularity(6, 32) and plan.shortlist is None
    assert (plan.model, plan.revision, plan.encoder["weights"]) == ("user/model", "abc", "1234")
    assert (plan.quality, plan.tasks, plan.vectors, plan.memory_gb) == (0.5, ("cranfield",), 1000, 1000 * 128 / 1e9)
    two_stages = MeasuredSearch(
        "cranfield", 500, "ndcg@10", 0.499, layer=6, first_dim=8, second_dim=32, shortlist=50, products_share=0.3
    )
    plan = plan_of(results_of(two_stage_searches=[two_stages]))
    assert (plan.first_dim, plan.shortlist, plan.rescore, plan.quality) == (8, 50, None, 0.499)
    plan = plan_of(
        results_of(
            asymmetric_searches=[
                MeasuredSearch("cranfield", 500, "ndcg@10", 0.9, query_layer=2, document_layer=6, dim=32)
            ]
        )
    )
    assert (str(plan.documents), str(plan.query), str(plan.grid())) == ("6x32", "2x32", "2,6x32")
    rescored = MeasuredSearch(
        "cranfield", 500, "ndcg@10", 0.49, layer=6, dim=32, code="binary", rescore="int8", shortlist=100
    )
    plan = plan_of(results_of(rescored_searches=[rescored]), memory_gb=1000 * 40 / 1e9)
    assert str(plan.documents) == "6x32@binary" and plan.needs_sample
    assert (plan.first_dim, plan.rescore, plan.shortlist) == (None, "int8", 100)
    plan.save(tmp_path / "new" / "plan.json")
    assert Plan.load(tmp_path / "new" / "plan.json") == plan


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"layers": 4}, "documents"),
        ({"documents": "4x16", "shortlists": 3}, "unknown field.* 'shortlists'"),
        ({"documents": "4x16", "schema_version": 9}, "schema version 9; this version of m3bert reads 1"),
        ({"documents": "4x16", "shortlist": 10}, "shortlist if it has first_dim or rescore"),
        ({"documents": "4x16", "first_dim": 8}, "shortlist if it has first_dim or rescore"),
        ({"documents": "4x16", "first_dim": 8, "rescore": "int8", "shortlist": 9}, "but not both"),
    ],
)
def test_other_files_are_refused(tmp_path, content, reason):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    refused(rf"plan\.json is not .*{reason}", Plan.load, file)


def test_the_layout_has_the_codes_of_the_plan(encoder, sentences):
    def coders(plan: Plan) -> list[tuple[str, int]]:
        layout = plan.layout(encoder, encoder.encode(sentences).widest(6))
        assert layout.shortlist == (None if plan.rescore == "codes" else plan.shortlist)
        return [(coder.code, coder.dim) for coder in (layout.first, layout.second) if coder is not None]

    sign = Granularity(6, 16, "binary")
    assert coders(Plan(Granularity(6, 16))) == [("float32", 16)]
    assert coders(Plan(Granularity(6, 32), first_dim=8, shortlist=50)) == [("float32", 8), ("float32", 32)]
    assert coders(Plan(sign, rescore="int8", shortlist=50)) == [("binary", 16), ("int8", 16)]
    assert coders(Plan(Granularity(6, 16, "int8"), rescore="codes", shortlist=50)) == [("int8", 16)]
