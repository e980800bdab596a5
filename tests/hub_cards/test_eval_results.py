"""Results for the leaderboards on the Hub: the full size, on benchmarks whose metric is ours."""

import shutil

import pytest
import yaml
from huggingface_hub import parse_eval_result_entries

from m3bert.evaluation import TASKS, GridResults
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.files import EVAL_RESULTS
from m3bert.hub_cards.publication import Options, prepare
from m3bert.hub_cards.scores import leaderboard_entries, write_eval_results
from m3bert.trainers import Granularity


FULL = Granularity(6, 32)
METRICS = {"cosine_spearman": "spearman", "ndcg_at_10": "ndcg@10"}


def test_the_hubs_own_parser_reads_the_file(results, tmp_path):
    entries = leaderboard_entries(results, FULL, "user/model")
    write_eval_results(tmp_path, entries)
    content = yaml.safe_load((tmp_path / EVAL_RESULTS).read_text())
    assert parse_eval_result_entries(content) == entries
    assert content == [
        {
            "dataset": {"id": "mteb/stsbenchmark-sts", "task_id": "STSBenchmark"},
            "value": pytest.approx(100 * (6 + 0.32) / 10),
            "date": "2026-11-21",
            "source": {"url": "https://huggingface.co/user/model/blob/main/results.json", "name": "All scores"},
            "notes": "full size 6x32, pooling mean, max_length 64, scored by m3bert evaluate",
        }
    ]


def test_a_small_size_is_never_reported_as_the_model(results):
    assert leaderboard_entries(results, Granularity(6, 64), "user/model") == []


def test_a_code_is_never_reported_as_the_model(coded):
    (entry,) = leaderboard_entries(coded, Granularity(6, 16), "user/model")
    (score,) = (score for score in coded.scores if (score.task, score.granularity) == ("stsb", "6x16"))
    assert entry.value == pytest.approx(100 * score.value) and entry.notes.startswith("full size 6x16,")
    assert leaderboard_entries(coded, Granularity(6, 16, "binary"), "user/model") == [entry], (
        "a model is read in float32"
    )
    coded.scores = [score for score in coded.scores if "@" in score.granularity]
    assert leaderboard_entries(coded, Granularity(6, 16), "user/model") == []


def test_prompts_are_in_the_notes(results):
    results.settings["prompts"] = {"query": "query: "}
    (entry,) = leaderboard_entries(results, FULL, "user/model")
    assert "with prompts" in entry.notes


def test_the_file_of_an_earlier_evaluation_is_removed(results, tmp_path):
    write_eval_results(tmp_path, leaderboard_entries(results, FULL, "user/model"))
    write_eval_results(tmp_path, [])
    assert not (tmp_path / EVAL_RESULTS).exists()


@pytest.mark.parametrize("size", [None, Granularity(4, 16)])
def test_a_publication_has_the_file_of_its_own_full_size(run, tmp_path, size):
    """And not that of the checkpoint's folder, which is skipped as all hidden folders are."""
    work = shutil.copytree(run / "output", tmp_path / "work")
    (work / EVAL_RESULTS).parent.mkdir()
    (work / EVAL_RESULTS).write_text("stale")
    (tmp_path / "staged").mkdir()
    results = GridResults.load(run / "results.json")
    publication = prepare(Checkpoint(work), tmp_path / "staged", "user/model", Options(granularity=size), results)
    assert EVAL_RESULTS in publication.sizes()
    (entry,) = parse_eval_result_entries(yaml.safe_load((tmp_path / "staged" / EVAL_RESULTS).read_text()))
    published = str(size or FULL)
    (score,) = (s for s in results.scores if (s.task, s.granularity, s.main) == ("stsb", published, True))
    assert entry.value == pytest.approx(100 * score.value, abs=1e-4) and f"full size {published}," in entry.notes


def test_mteb_scores_these_benchmarks_as_we_do():
    """The same data set, split and metric, and nothing is removed from the results of a search."""
    mteb = pytest.importorskip("mteb")
    compared = 0
    for task in TASKS.values():
        if task.hub is not None and task.hub.benchmark is not None:
            theirs = mteb.get_task(task.hub.benchmark)
            assert theirs.metadata.dataset["path"] == task.hub.path
            assert METRICS[theirs.metadata.main_score] == {"sts": "spearman", "retrieval": "ndcg@10"}[task.task_type]
            assert tuple(theirs.metadata.eval_splits) == task.splits and theirs.metadata.hf_subsets == ["default"]
            assert not getattr(theirs, "ignore_identical_ids", False)
            compared += 1
    assert compared == 8
