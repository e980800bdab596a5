"""The 13 sets of NanoBEIR: what sentence-transformers reads from the Hub, and copies in a folder."""

from __future__ import annotations

import pytest
from datasets import Dataset

from m3bert.evaluation import GridEncoder, as_sentence_transformer, find_tasks, load_task, score_grid
from m3bert.trainers import Grid
from tests.evaluation_data import nanobeir_rows, serve_datasets


@pytest.fixture
def on_the_hub(monkeypatch, sentences):
    """Tiny copies of the sets, in the form that they have on the Hub."""
    rows = nanobeir_rows(sentences)

    def load_dataset(path, config, *, split, streaming=False):
        assert path == "sentence-transformers/NanoBEIR-en" and split.startswith("Nano")
        return Dataset.from_list(rows[config])

    serve_datasets(monkeypatch, load_dataset)


def test_scores_are_those_of_the_evaluator_of_sentence_transformers(on_the_hub, tiny_model, tiny_tokenizer):
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2x8,6x32"))
    theirs = evaluation.NanoBEIREvaluator(write_csv=False)
    tasks = find_tasks(["nanobeir"])
    assert [task.name for task in tasks] == [f"nanobeir-{name}" for name in theirs.dataset_names]
    ours = score_grid(encoder, load_task(tasks[6]))
    for g in encoder.grid:
        actual = theirs(as_sentence_transformer(encoder, g))
        for name in ("ndcg@10", "mrr@10", "recall@10"):
            assert ours[g][name] == pytest.approx(actual[f"NanoNFCorpus_cosine_{name}"], abs=1e-6)
