"""Every task at every granularity, from one encode: equal to one granularity at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.evaluation_data import write_rows
from tests.trainers.tiny_run import count_forwards
from trainers import Grid
from trainers.evaluation import evaluate_grid, find_task, find_tasks, load_task, score_grid


GRID = Grid.parse("2,6x8,32")
NAMES = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]
# The last bit of a sum depends on the machine, and on what a product has beside its terms.
LAST_BITS = {"rel": 1e-9, "abs": 1e-9}


def assert_same_scores(found, expected):
    """Two lists of results are of the same things, in any order, and have the same values."""
    values = [{replace(score, value=0.0): score.value for score in scores} for scores in (found, expected)]
    assert values[0] == pytest.approx(values[1], **LAST_BITS)


def test_scores_of_a_grid_are_those_of_each_granularity_alone(encoder, data):
    for name in NAMES:
        evaluator = load_task(find_task(name), data)
        scores = score_grid(encoder, evaluator)
        assert list(scores) == list(GRID)
        for g in GRID:
            alone = score_grid(replace(encoder, grid=Grid((g,))), evaluator)[g]
            if g.dim < 32:  # of what is behind a prefix, an encode of the prefix alone knows nothing
                scores[g].pop("prefix_residual_correlation", None)
            assert scores[g] == pytest.approx(alone, **LAST_BITS), (name, g)


def test_a_grid_that_is_no_product_has_the_same_scores(encoder, data):
    picked = Grid.parse("2x8,4x16,6x32")
    found = evaluate_grid(replace(encoder, grid=picked), find_tasks(["stsb", "cranfield"]), data)
    assert {score.granularity for score in found.scores} == {"2x8", "4x16", "6x32"} and not found.two_stage_searches
    whole = evaluate_grid(replace(encoder, grid=Grid.parse("2,4,6x8,16,32")), find_tasks(["stsb", "cranfield"]), data)
    assert_same_scores(found.scores, [score for score in whole.scores if score.granularity in map(str, picked)])


def test_embeddings_on_disk_give_the_same_scores_and_are_read_again(encoder, data, tmp_path):
    tasks = find_tasks(NAMES)
    expected = evaluate_grid(encoder, tasks, data)
    evaluate_grid(encoder, tasks, data, folder=tmp_path / "embeddings")
    seen = count_forwards(encoder.model)
    again = evaluate_grid(encoder, tasks, data, folder=tmp_path / "embeddings")
    assert not seen
    assert_same_scores(again.scores, expected.scores)
    assert_same_scores(again.two_stage_searches, expected.two_stage_searches)


def test_bad_data_names_the_task(encoder, data, sentences):
    write_rows(data / "banking77" / "train.jsonl.gz", [{"text": text, "label": 4} for text in sentences[:9]])
    seen = count_forwards(encoder.model)
    with pytest.raises(ValueError, match=r"'banking77': a classifier needs at least two classes; found \[4\]"):
        evaluate_grid(encoder, find_tasks(["stsb", "banking77"]), data)
    write_rows(data / "mrpc" / "test.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "label": 1}])
    with pytest.raises(ValueError, match=r"'mrpc': pair classification needs labels 0 and 1; found \[1\]"):
        evaluate_grid(encoder, find_tasks(["stsb", "mrpc"]), data)
    assert not seen, "bad data is refused before any work is done"
    with torch.no_grad():
        encoder.model.layers[3].mlp.down_proj.weight[20] = torch.nan
    with pytest.raises(ValueError, match="Task 'stsb': Embeddings at 6x8, 6x32 are not finite"):
        evaluate_grid(encoder, [find_task("stsb")], data)
    evaluate_grid(replace(encoder, grid=Grid.parse("2x8,32")), [find_task("stsb")], data)
