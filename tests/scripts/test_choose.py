"""The command that chooses a granularity, from a results file."""

import pytest

from m3bert.commands import choose
from m3bert.evaluation import GridResults, Latency, MeasuredSearch, Score


@pytest.fixture
def results(tmp_path) -> GridResults:
    """Two retrieval tasks and one of similarity, at four granularities; the deeper and the wider, the better."""
    scores = [
        Score(task, task_type, "test", metric, True, f"{layer}x{dim}", base + layer / 100 + dim / 1000)
        for task, task_type, metric, base in (
            ("cranfield", "retrieval", "ndcg@10", 0.4),
            ("msmarco", "retrieval", "ndcg@10", 0.3),
            ("stsb", "sts", "spearman", 0.7),
        )
        for layer in (2, 6)
        for dim in (8, 32)
    ]
    return GridResults(
        model="user/model", revision=None, grid="2,6x8,32", seed=0, date="2026-01-01", machine="test", versions={},
        settings={}, scores=scores,
    )  # fmt: skip


@pytest.fixture
def file(results, tmp_path) -> str:
    results.save(tmp_path / "results.json")
    return str(tmp_path / "results.json")


@pytest.mark.parametrize(
    ("options", "beginning"),
    [
        ([], "Judged by cranfield, msmarco. Deploy 6x32: "),
        (["--tasks", "sts"], "Judged by stsb. Deploy 6x32: "),
        (["--tasks", "stsb", "cranfield", "sts"], "Judged by stsb, cranfield. Deploy 6x32: "),
        (["--memory_gb", "0.00004"], "Judged by cranfield, msmarco. Deploy 6x8: "),
        (["--min_quality", "0.38"], "Judged by cranfield, msmarco. Deploy 6x8: "),
        (["--min_quality", "0.37"], "Judged by cranfield, msmarco. Deploy 2x8: "),
    ],
)
def test_the_choice_is_printed_with_its_reason(file, options, beginning, capsys):
    choose.main([file, "--documents", "1000", *options])
    assert capsys.readouterr().out.startswith(beginning)


def test_all_tasks_but_geometry_count_where_there_is_no_retrieval(results, tmp_path, capsys):
    results.scores = [score for score in results.scores if score.task == "stsb"]
    results.scores.append(Score("stsb-geometry", "geometry", "test", "effective_rank", True, "2x8", 3.0))
    results.save(tmp_path / "other.json")
    choose.main([str(tmp_path / "other.json"), "--documents", "1000"])
    assert capsys.readouterr().out.startswith("Judged by stsb. Deploy 6x32")


def test_queries_at_few_layers_count_where_they_were_measured(results, tmp_path, capsys):
    results.latency = Latency({"2": 1.0, "6": 3.0}, {"8": 0.1, "32": 0.4}, {"8": {}, "32": {}}, 1000, "m3bert", 1)
    results.asymmetric_searches = [
        MeasuredSearch(task, 500, "ndcg@10", 0.43, query_layer=2, document_layer=6, dim=32)
        for task in ("cranfield", "msmarco")
    ]
    results.save(tmp_path / "pairs.json")
    asked = [str(tmp_path / "pairs.json"), "--documents", "1000", "--latency_ms", "2"]
    choose.main([*asked, "--plans"])
    printed = capsys.readouterr().out
    assert printed.startswith("Judged by cranfield, msmarco. Deploy 6x32, queries at layer 2: ")
    assert "| query layer | cranfield, documents at 6 | cranfield, same layer |" in printed
