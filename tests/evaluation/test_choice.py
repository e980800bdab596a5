"""Which granularity a budget buys."""

from dataclasses import replace

import pytest

from m3bert.evaluation import GridResults, Latency, MeasuredSearch, Score
from m3bert.evaluation.choice import Budget, choose, deployments
from tests.conftest import refused


def two_stages(task: str, value: float, shortlist: int, share: float) -> MeasuredSearch:
    stages = {"layer": 6, "first_dim": 8, "second_dim": 32}
    return MeasuredSearch(task, 1000, "ndcg@10", value, **stages, shortlist=shortlist, products_share=share)


QUALITY = {"2x8": 0.30, "2x32": 0.40, "6x8": 0.45, "6x32": 0.50}
RETRIEVAL = ["cranfield", "cisi"]
SHIFTS = {"cranfield": 0.0, "cisi": 0.1}  # of the second task, every value is higher
RERANKING = {"8": {}, "32": {"5": 0.1, "10": 0.1, "20": 0.2, "50": 0.4}}


def scores_of(values):
    return [
        Score(task, "retrieval", "test", "ndcg@10", True, granularity, value + shift)
        for task, shift in SHIFTS.items()
        for granularity, value in values.items()
    ]


@pytest.fixture
def results() -> GridResults:
    plans = [
        two_stages(task, value + shift, size, share)
        for size, share, value in ((10, 0.26, 0.47), (20, 0.27, 0.497), (50, 0.30, 0.50))
        for task, shift in SHIFTS.items()
    ]
    plans.append(two_stages("cranfield", 0.50, 5, 0.255))  # not on the other task
    stsb = [Score("stsb", "sts", "test", "spearman", True, granularity, 0.9) for granularity in QUALITY]
    return GridResults(
        model="m", revision=None, grid="2,6x8,32", seed=0, date="", machine="", versions={}, settings={},
        scores=[*scores_of(QUALITY), *stsb], two_stage_searches=plans,
        latency=Latency({"2": 2.0, "6": 5.0}, {"8": 1.0, "32": 3.0}, RERANKING, 100_000, "m3bert", 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limits", "best"),
    [
        ({}, "6x32"),
        ({"memory_gb": 0.1}, "6x8"),  # 1e6 x 32 x 4 bytes are 0.128 GB
        # Ten times as many documents as measured: 5 + 30 ms exactly, 5 + 10 + 0.2 in two stages, 5 + 10 with 8 dims.
        ({"latency_ms": 16}, "6x32"),
        ({"latency_ms": 15.1}, "6x8"),
        ({"latency_ms": 13}, "2x8"),
        ({"memory_gb": 0.1, "latency_ms": 13}, "2x8"),
        ({"min_quality": 0.44}, "6x8"),  # 0.50 on the mean of both, in fewer bytes than 2x32
    ],
)
def test_the_best_or_the_cheapest_within_the_budget(results, limits, best):
    assert str(choose(results, RETRIEVAL, Budget(1_000_000, **limits)).granularity) == best
    assert str(choose(results, ["stsb"], Budget(1000)).granularity) == "2x8", "of equal quality, the cheapest"


def test_the_plan_is_the_fastest_that_keeps_the_quality(results):
    million = Budget(1_000_000)
    choice = choose(results, RETRIEVAL, million)
    assert (choice.plan.first_dim, choice.plan.shortlist, choice.plan.products_share) == (8, 20, 0.27)
    assert choice.plan.exact_quality == pytest.approx(0.55) and choice.plan.quality == pytest.approx(0.547)
    assert choice.latency_ms == pytest.approx(15.2)
    assert choice.explanation == (
        "Deploy 6x32: quality 0.550, 0.128 GB (128 bytes per vector), 15.2 ms per query. Search: shortlist 20 "
        "documents by 8 dims and rerank them by all 32, with 27.0% of the multiplications and 99.5% of the quality of "
        "an exact search."
    )
    assert choose(results, RETRIEVAL, million, tolerance=0.001).plan.shortlist == 50
    assert choose(results, ["cranfield"], million).plan.shortlist == 5
    assert choose(results, ["stsb"], million).plan is None
    assert choose(results, RETRIEVAL, Budget(1000)).plan is None, "of few documents the exact search is faster"
    results.latency = None
    assert choose(results, RETRIEVAL, million).plan.shortlist == 20, "by multiplications, where no time was measured"


def measured_between_layers(tasks, values):
    """Asymmetric searches of these tasks with queries at 2 layers, documents at 6: dim -> value."""
    return [
        MeasuredSearch(task, 1000, "ndcg@10", value, query_layer=2, document_layer=6, dim=dim)
        for task in tasks
        for dim, value in values.items()
    ]


def test_queries_at_few_layers_are_chosen_where_they_are_better(results):
    results.asymmetric_searches = measured_between_layers(RETRIEVAL, {8: 0.44, 32: 0.52})
    symmetric = choose(results, RETRIEVAL, Budget(100_000))
    assert (str(symmetric.granularity), symmetric.query_layer) == ("6x32", 6) and not symmetric.asymmetric
    fast = choose(results, RETRIEVAL, Budget(100_000, latency_ms=5))  # 2 + 3 ms; symmetric, 2x32 has 0.45
    assert (str(fast.granularity), fast.query_layer, fast.quality) == ("6x32", 2, pytest.approx(0.52))
    assert fast.asymmetric and fast.plan is None and fast.latency_ms == 5.0
    assert fast.explanation.startswith("Deploy 6x32, queries at layer 2: quality 0.520")
    # Searched exactly, ten times as many documents take ten times as long.
    assert choose(results, RETRIEVAL, Budget(1_000_000, latency_ms=12.5)).latency_ms == 12.0
    results.asymmetric_searches = measured_between_layers(["cranfield"], {32: 0.50})
    for latency in (results.latency, None):
        results.latency = latency
        assert choose(results, ["cranfield"], Budget(1000)).query_layer == 2, "of equal quality, the cheaper queries"
    for tasks in (RETRIEVAL, ["cranfield", "stsb"], ["stsb"]):
        assert not choose(results, tasks, Budget(1000)).asymmetric, "not measured on every task"


def test_nothing_that_fits_names_the_best_of_each_quantity(results):
    message = "smallest memory is 0.0032 GB, the best quality 0.550, and the lowest latency 3 ms"
    for limits in ({"memory_gb": 0.001}, {"min_quality": 0.54, "latency_ms": 6}):
        refused(message, choose, results, RETRIEVAL, Budget(100_000, **limits))
    results.latency = None
    assert choose(results, RETRIEVAL, Budget(1000)).latency_ms is None
    refused(r"the lowest latency inf ms \(inf: not measured\)", choose, results, RETRIEVAL, Budget(1000, latency_ms=6))


@pytest.fixture
def coded(results) -> GridResults:
    """Codes of 6x32 beside float32; `binary` loses much, and re-scoring makes up for it."""
    results.scores += scores_of({"6x32@int8": 0.498, "6x32@qama-2": 0.49, "6x32@binary": 0.42})
    results.grid = "2x8,2x32,6x8,6x32@binary,6x32@qama-2,6x32@int8,6x32"
    results.rescored_searches = [
        MeasuredSearch(
            task, 1000, "ndcg@10", value + shift, layer=6, dim=32, code="binary", rescore=by, shortlist=size
        )
        for task, shift in SHIFTS.items()
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
    assert best(0.1) == best(0.032) == ("6x32@int8", None, 32)  # 6x8 in float32 takes as many bytes and has 0.45
    assert best(0.03) == ("6x32@qama-2", None, 12)
    assert best(0.011) == ("6x32@binary", "codes", 4)
    coded.scores = [replace(s, value=0.2) if s.granularity == "6x32@int8" else s for s in coded.scores]
    assert best(0.036) == ("6x32@binary", "int8", 4 + 32), "re-scored by int8, the signs are better than levels"
    coded.rescored_searches = [search for search in coded.rescored_searches if search.task == "cranfield"]
    assert all(c.rescoring is None for c in deployments(coded, RETRIEVAL, 1000, 0.01)), "not measured on both"


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
    assert choice.explanation.endswith(
        "Search: shortlist 100 documents by their codes and rescore them by the decoded codes."
    )
