"""The data of a task: where it is looked for, and what is refused."""

from __future__ import annotations

import re

import datasets
import pytest
from datasets import Dataset

from trainers.evaluation import Task, evaluate_grid, find_task, load_task


def test_a_task_without_data_says_where_it_was_looked_for(encoder, data, tmp_path):
    missing = re.escape(str(data / "emotion" / "train.jsonl.gz"))
    message = f"Task 'emotion': there is no 'train': {missing} does not exist, and mteb/emotion could not be read"
    with pytest.raises(ValueError, match=message):
        evaluate_grid(encoder, [find_task("stsb"), find_task("emotion")], data)
    with pytest.raises(ValueError, match="'wic'.* does not exist, and it is not on the Hub in this"):
        load_task(find_task("wic"), data)
    with pytest.raises(ValueError, match="no folder of local data was given"):
        load_task(find_task("wic"), None)


HUB = {
    "allenai/scitail": {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": ["entails", "neutral"]},
    "stanfordnlp/snli": {
        "premise": ["a", "b", "c", "d"],
        "hypothesis": ["e", "f", "g", "h"],
        "label": [0, 1, 2, -1],
    },
    "mteb/scifact": {
        "corpus": {"_id": ["4", "5"], "title": ["T", ""], "text": ["x", "y"]},
        "queries": {"_id": ["1", "2"], "text": ["q", "r"]},
        "test": {"query-id": ["1"], "corpus-id": ["5"], "score": [1]},
    },
}


def test_the_hub_has_the_same_tasks_under_other_columns_and_labels(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return Dataset.from_dict(HUB[path] if path != "mteb/scifact" else HUB[path][split])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    scitail = load_task(find_task("scitail"))
    assert scitail.texts == {"sentence1": ["a", "b"], "sentence2": ["c", "d"]} and scitail.labels == [1, 0]
    snli = load_task(find_task("snli"))
    assert snli.texts["sentence1"] == ["a", "c"] and snli.labels == [1, 0]
    scifact = load_task(find_task("scifact"))
    assert scifact.texts == {"queries": ["q"], "documents": ["T x", "y"]} and scifact.relevant == [{1: 1.0}]
    assert asked[0] == ("allenai/scitail", "tsv_format", "test")
    assert asked[-1] == ("mteb/scifact", "default", "test")


def test_texts_that_come_with_python_need_no_folder():
    """Every machine can score the task `stdlib`: a summary is to find its own text."""
    evaluator = load_task(find_task("stdlib"))
    queries, documents = evaluator.texts["queries"], evaluator.texts["documents"]
    assert 800 <= len(queries) == len(documents) < 1000
    assert evaluator.relevant == [{row: 1.0} for row in range(len(queries))]


def test_a_development_split_is_a_task_too(data_folder):
    evaluator = load_task(Task("stsb-dev", "sts", folder="stsb", splits=("dev",)), data_folder)
    assert len(evaluator.scores) == 1500
