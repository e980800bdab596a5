"""Which granularity a budget buys."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trainers import Granularity
from trainers.evaluation import AsymmetricSearch, GridResults, Latency, RescoredSearch, Score, TwoStageSearch
from trainers.evaluation.choice import Budget, choose, deployments, pareto_front, two_stage_plans


QUALITY = {"2x8": 0.30, "2x32": 0.40, "6x8": 0.45, "6x32": 0.50}


RETRIEVAL = ["cranfield", "cisi"]


RERANKING = {"8": {}, "32": {"5": 0.1, "10": 0.1, "20": 0.2, "50": 0.4}}


@pytest.fixture
def results() -> GridResults:
    scores = [
        Score(task, "retrieval", "test", "ndcg@10", True, granularity, value + shift)
        for task, shift in (("cranfield", 0.0), ("cisi", 0.1))
        for granularity, value in QUALITY.items()
    ]
    scores += [Score("stsb", "sts", "test", "spearman", True, granularity, 0.9) for granularity in QUALITY]
    plans = [
        TwoStageSearch(task, 1000, 6, 8, 32, size, share, "ndcg@10", value)
        for size, share, value in ((10, 0.26, 0.47), (20, 0.27, 0.497), (50, 0.30, 0.50))
        for task, value in (("cranfield", value), ("cisi", value + 0.1))
    ]
    plans.append(
        TwoStageSearch("cranfield", 1000, 6, 8, 32, 5, 0.255, "ndcg@10", 0.50)
    )  # not measured on the other one
    return GridResults(
        model="m",
        revision=None,
        grid="2,6x8,32",
        seed=0,
        date="2026-11-21",
        machine="",
        versions={},
        settings={},
        scores=scores,
        two_stage_searches=plans,
        latency=Latency({"2": 2.0, "6": 5.0}, {"8": 1.0, "32": 3.0}, RERANKING, 100_000, "m3bert", 2),
    )


def test_the_best_within_the_budget(results):
    def best(**limits):
        return str(choose(results, RETRIEVAL, Budget(1_000_000, **limits)).granularity)

    assert best() == "6x32"
    assert best(memory_gb=0.1) == "6x8"  # 1e6 x 32 x 4 bytes are 0.128 GB
    # Ten times as many documents as measured: 5 + 30 ms exactly, 5 + 10 + 0.2 ms in two stages, 5 + 10 ms with 8 dims.
    assert best(latency_ms=16) == "6x32"
    assert best(latency_ms=15.1) == "6x8"
    assert best(latency_ms=13) == "2x8"
    assert best(memory_gb=0.1, latency_ms=13) == "2x8"


def test_a_quality_that_is_enough_takes_the_cheapest(results):
    choice = choose(results, RETRIEVAL, Budget(1000, min_quality=0.44))
    assert str(choice.granularity) == "6x8"  # 0.50 on the mean of both, in fewer bytes than 2x32
    assert choice.memory_gb == 1000 * 8 * 4 / 1e9 and choice.latency_ms == 5 + 0.01
    assert "the cheapest of them" in choice.explanation


def test_equal_quality_takes_fewer_bytes_and_less_time(results):
    assert str(choose(results, ["stsb"], Budget(1000)).granularity) == "2x8"


def test_the_plan_is_the_fastest_that_keeps_the_quality(results):
    million = Budget(1_000_000)
    choice = choose(results, RETRIEVAL, million)
    assert (choice.plan.first_dim, choice.plan.shortlist, choice.plan.products_share) == (8, 20, 0.27)
    assert choice.plan.exact_quality == pytest.approx(0.55) and choice.plan.quality == pytest.approx(0.547)
    assert choice.latency_ms == pytest.approx(15.2)
    assert "shortlist 20 documents by 8 dims and rerank them by 32 dims. This takes 27.0%" in choice.explanation
    assert "measured on cranfield (1,000 documents), cisi (1,000 documents)." in choice.explanation
    assert choice.explanation.endswith("A much larger index may need a longer shortlist.")
    assert choose(results, RETRIEVAL, million, tolerance=0.001).plan.shortlist == 50
    assert choose(results, ["cranfield"], million).plan.shortlist == 5
    assert choose(results, ["stsb"], million).plan is None
    assert len(two_stage_plans(results, RETRIEVAL, Granularity(6, 32))) == 3
    assert choose(results, RETRIEVAL, Budget(1000)).plan is None, "of few documents the exact search is faster"
    narrow = choose(results, RETRIEVAL, Budget(1_000_000, memory_gb=0.1))
    assert narrow.plan is None and "Use exact search: no measured two-stage search" in narrow.explanation
    results.latency = None
    assert "longer shortlist" not in choose(results, RETRIEVAL, Budget(1000)).explanation
    assert choose(results, RETRIEVAL, million).plan.shortlist == 20, "by multiplications, where no time was measured"


def measured_between_layers(tasks, values):
    """Asymmetric searches of these tasks with queries at 2 layers, documents at 6: dim -> value."""
    return [
        AsymmetricSearch(task, 1000, 2, 6, dim, "ndcg@10", value) for task in tasks for dim, value in values.items()
    ]


def test_queries_at_few_layers_are_chosen_where_they_are_better(results):
    results.asymmetric_searches = measured_between_layers(RETRIEVAL, {8: 0.44, 32: 0.52})
    symmetric = choose(results, RETRIEVAL, Budget(100_000))
    assert (str(symmetric.granularity), symmetric.query_layer) == ("6x32", 6) and not symmetric.asymmetric
    assert "Deploy 6x32: 6 of 6 plans fit the budget" in symmetric.explanation

    fast = choose(results, RETRIEVAL, Budget(100_000, latency_ms=5))  # 2 + 3 ms; symmetric, 2x32 has 0.45
    assert (str(fast.granularity), fast.query_layer, fast.quality) == ("6x32", 2, pytest.approx(0.52))
    assert fast.asymmetric and fast.plan is None and fast.latency_ms == 5.0
    assert fast.memory_gb == 100_000 * 32 * 4 / 1e9
    assert fast.explanation == (
        "Deploy 6x32 for documents and embed queries at 2 layers: 4 of 6 plans fit the budget, and it is the best of "
        "them. Its quality is 0.520 (94.5% of 6x32). 100,000 vectors take 0.0128 GB, and a query takes 5 ms for "
        "encoding and search. Queries at 6 layers would reach 0.550 in 6.2 ms. Use exact search."
    )
    # Searched exactly, ten times as many documents take ten times as long.
    assert choose(results, RETRIEVAL, Budget(1_000_000, latency_ms=12.5)).latency_ms == 12.0

    results.asymmetric_searches = measured_between_layers(RETRIEVAL, {8: 0.44, 32: 0.56})
    assert choose(results, RETRIEVAL, Budget(100_000)).query_layer == 2
    assert choose(results, RETRIEVAL, Budget(100_000, min_quality=0.53)).query_layer == 2, "the faster of 32 dims"


def test_equal_quality_takes_the_cheaper_queries(results):
    for latency in (results.latency, None):
        results.latency = latency
        results.asymmetric_searches = measured_between_layers(["cranfield"], {32: 0.50})
        choice = choose(results, ["cranfield"], Budget(1000))
        assert (str(choice.granularity), choice.query_layer) == ("6x32", 2)
    assert "ms" not in choice.explanation and "Queries at 6 layers would reach 0.500. " in choice.explanation


def test_pairs_of_layers_need_a_measurement_on_every_judge(results):
    results.asymmetric_searches = measured_between_layers(["cranfield"], {32: 0.99})
    assert choose(results, ["cranfield"], Budget(1000)).query_layer == 2
    for tasks in (RETRIEVAL, ["cranfield", "stsb"], ["stsb"]):
        choice = choose(results, tasks, Budget(1000))
        assert choice.query_layer == choice.granularity.layer and "of 4 granularities fit" in choice.explanation
    assert len(deployments(results, ["cranfield"], 1000, 0.01)) == 5


def test_the_quickest_engine_is_named_for_the_layer_of_the_queries(results):
    results.latency = replace(results.latency, engine_ms={"other": {"2": 0.5, "6": 7.0}, "third": {"6": 1.25}})
    deep = choose(results, RETRIEVAL, Budget(1000))
    assert deep.encode_ms == {"torch": 5.0, "other": 7.0, "third": 1.25}
    sentence = "Encoding alone takes 5 ms in torch, 7 ms in other and 1.25 ms in third: third is quickest. The quality"
    assert sentence in deep.explanation
    results.asymmetric_searches = measured_between_layers(RETRIEVAL, {32: 0.99})
    shallow = choose(results, RETRIEVAL, Budget(1000))
    assert shallow.query_layer == 2 and "takes 2 ms in torch and 0.5 ms in other: other is" in shallow.explanation
    results.latency = replace(results.latency, engine_ms={})
    assert "Encoding alone" not in choose(results, RETRIEVAL, Budget(1000)).explanation


def test_nothing_that_fits_says_why(results):
    with pytest.raises(ValueError, match=r"fits the budget: none is within memory_gb=0.01 \(smallest: 0.032\)"):
        choose(results, RETRIEVAL, Budget(1_000_000, memory_gb=0.01))
    with pytest.raises(ValueError, match=r"latency_ms=1 \(smallest: 3\) or min_quality=0.9 \(best: 0.550\)"):
        choose(results, RETRIEVAL, Budget(100_000, min_quality=0.9, latency_ms=1.0))
    with pytest.raises(ValueError, match=r"all limits \(latency_ms=6 \(smallest: 3\): 3, min_quality=0.54 .*: 1\)"):
        choose(results, RETRIEVAL, Budget(100_000, min_quality=0.54, latency_ms=6))
    results.latency = None
    assert choose(results, RETRIEVAL, Budget(1000)).latency_ms is None
    with pytest.raises(ValueError, match="latency_ms=6 is set, but this evaluation did not measure latency"):
        choose(results, RETRIEVAL, Budget(1000, latency_ms=6))
    with pytest.raises(ValueError, match="documents=0 must be above 0"):
        Budget(0)


def test_the_pareto_front_is_what_nothing_beats():
    draw = random.Random(0)
    points = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(40)]

    def beaten(index):
        cost, value = points[index]
        return any(c <= cost and v >= value and (c, v) != (cost, value) for c, v in points)

    front = pareto_front(points)
    assert {points[index] for index in front} == {points[i] for i in range(40) if not beaten(i)}
    assert [points[index][0] for index in front] == sorted({points[index][0] for index in front})


@pytest.fixture
def coded(results) -> GridResults:
    """Codes of 6x32 beside float32; `binary` loses much, and re-scoring makes up for it."""
    values = {"6x32@int8": 0.498, "6x32@qama-2": 0.49, "6x32@binary": 0.42}
    results.scores += [
        Score(task, "retrieval", "test", "ndcg@10", True, granularity, value + shift)
        for task, shift in (("cranfield", 0.0), ("cisi", 0.1))
        for granularity, value in values.items()
    ]
    results.grid = "2x8,2x32,6x8,6x32@binary,6x32@qama-2,6x32@int8,6x32"
    results.rescored_searches = [
        RescoredSearch(task, 1000, 6, 32, "binary", by, size, "ndcg@10", value + shift)
        for task, shift in (("cranfield", 0.0), ("cisi", 0.1))
        for by, size, value in (("codes", 100, 0.46), ("int8", 50, 0.47), ("int8", 100, 0.495), ("float32", 100, 0.5))
    ]
    return results


def test_little_memory_takes_fewer_bits_before_fewer_dims(coded):
    coded.latency = None

    def best(memory_gb):
        choice = choose(coded, RETRIEVAL, Budget(1_000_000, memory_gb=memory_gb))
        assert choice.memory_gb == 1_000_000 * choice.bytes_per_vector / 1e9 <= memory_gb
        return str(choice.granularity), choice.rescoring.by if choice.rescoring else None, choice.bytes_per_vector

    assert best(1) == ("6x32", None, 128)
    assert best(0.1) == ("6x32@int8", None, 32)  # 32 bytes; 6x8 in float32 takes as many and has 0.45
    assert best(0.0359) == best(0.032) == ("6x32@int8", None, 32)
    assert best(0.03) == ("6x32@qama-2", None, 12)
    assert best(0.011) == ("6x32@binary", "codes", 4)
    coded.scores = [replace(s, value=0.2) if s.granularity == "6x32@int8" else s for s in coded.scores]
    assert best(0.036) == ("6x32@binary", "int8", 4 + 32), "re-scored by int8, the signs are better than levels"
    for lost in ("6x32@int8", "6x32@qama-2", "6x32@binary"):
        coded.scores = [replace(s, value=0.2) if s.granularity == lost else s for s in coded.scores]
    coded.rescored_searches = []
    assert best(0.1) == ("6x8", None, 32), "where fewer bits are measured to be worse, fewer dims"


def test_re_scoring_takes_the_memory_of_what_it_reads(coded):
    coded.latency = None
    found = {
        (str(c.granularity), c.rescoring.by if c.rescoring else ""): c.bytes_per_vector
        for c in deployments(coded, RETRIEVAL, 1000, 0.01)
    }
    assert found["6x32@binary", ""] == found["6x32@binary", "codes"] == 4
    assert found["6x32@binary", "int8"] == 4 + 32 and found["6x32@binary", "float32"] == 4 + 128
    coded.rescored_searches = [search for search in coded.rescored_searches if search.task == "cranfield"]
    assert all(c.rescoring is None for c in deployments(coded, RETRIEVAL, 1000, 0.01)), "not measured on both"


def test_a_choice_of_a_code_says_what_is_stored_and_how_to_search(coded):
    coded.latency = None
    choice = choose(coded, RETRIEVAL, Budget(1_000_000, memory_gb=0.011))
    assert choice.explanation == (
        "Deploy 6x32@binary: 2 of 11 plans fit the budget, and it is the best of them. Its quality is 0.510 (92.7% of "
        "6x32). A vector is stored as binary, the sign of each dim: 4 bytes instead of 128 in float32. 1,000,000 "
        "vectors take 0.004 GB. Search in two stages: shortlist 100 documents by the Hamming distance of their codes, "
        "and rescore them by the float query against the codes decoded. Without that, the quality is 0.470. A "
        "much larger index may need a longer shortlist."
    )
    choice = choose(coded, RETRIEVAL, Budget(1000, memory_gb=3.3e-5))
    assert choice.explanation.endswith("Use exact search, with a float query against the decoded codes.")
    assert "stored as int8, 1 byte per dim: 32 bytes instead of 128 in float32. " in choice.explanation
    coded.scores = [replace(s, value=0.2) if s.granularity == "6x32@int8" else s for s in coded.scores]
    choice = choose(coded, RETRIEVAL, Budget(1000, memory_gb=3.7e-5))
    assert "4 bytes instead of 128 in float32, and 32 bytes beside them in int8. 1,000 vectors" in choice.explanation
    assert choice.explanation.endswith("against their int8 vectors. Without that, the quality is 0.470.")


def test_a_latency_that_was_not_measured_is_not_guessed(coded):
    def fits(**limits):
        return str(choose(coded, RETRIEVAL, Budget(100_000, memory_gb=0.0033, **limits)).granularity)

    assert fits() == "6x32@int8" and fits(latency_ms=100) == "6x8"
    assert choose(coded, RETRIEVAL, Budget(100_000, memory_gb=0.0033)).latency_ms is None
    coded.latency.search_ms["32@int8"] = 0.5
    assert fits(latency_ms=100) == "6x32@int8"
    assert choose(coded, RETRIEVAL, Budget(100_000, memory_gb=0.0033)).latency_ms == 5.5
    coded.latency.search_ms["32@binary"], coded.latency.rerank_ms["32@binary"] = 0.25, {"100": 0.125}
    choice = choose(coded, RETRIEVAL, Budget(100_000, memory_gb=0.0011, latency_ms=5.4))
    assert (choice.rescoring.by, choice.latency_ms) == ("codes", 5.375)
