"""The data of a task: where it is looked for, and what is refused."""

from __future__ import annotations

import gzip
import re

import pytest
from datasets import Dataset

from tests.evaluation_data import serve_datasets
from trainers.evaluation import Task, evaluate_grid, find_task, load_task
from trainers.evaluation.readers import read_rows


def test_a_task_without_data_says_where_it_was_looked_for(encoder, data, tmp_path):
    missing = re.escape(str(data / "emotion" / "train.jsonl.gz"))
    message = f"Task 'emotion': there is no 'train': {missing} does not exist, and .*mteb/emotion"
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

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split))
        return Dataset.from_dict(HUB[path] if path != "mteb/scifact" else HUB[path][split])

    serve_datasets(monkeypatch, load_dataset)
    scitail = load_task(find_task("scitail"))
    assert scitail.texts == {"sentence1": ["a", "b"], "sentence2": ["c", "d"]} and scitail.labels == [1, 0]
    snli = load_task(find_task("snli"))
    assert snli.texts["sentence1"] == ["a", "c"] and snli.labels == [1, 0]
    scifact = load_task(find_task("scifact"))
    assert scifact.texts == {"queries": ["q"], "documents": ["T x", "y"]} and scifact.relevant == [{1: 1.0}]
    assert asked[0] == ("allenai/scitail", "tsv_format", "test")
    assert asked[-1] == ("mteb/scifact", "default", "test")


def test_judgements_of_unknown_documents_and_queries_are_counted_and_named(data, caplog):
    """For every collection: here the task `cranfield`, with and without the judgements that say nothing."""
    expected = load_task(find_task("cranfield"), data)
    assert not [record for record in caplog.records if "unknown" in record.message]
    file = data / "cranfield" / "qrels.tsv.gz"
    with gzip.open(file, "rt") as opened:
        known = opened.read()
    more = "".join(f"q{row}\tx{row % 5}\t2\n" for row in range(7)) + "p1\td1\t1\np1\tx9\t1\n"
    with gzip.open(file, "wt") as opened:
        opened.write(known + more)
    found = load_task(find_task("cranfield"), data)
    assert found == expected
    assert (
        "Task 'cranfield': 8 of 31 qrels name unknown documents (x0, x1, x2, ...) and 2 of 31 qrels name unknown "
        "queries (p1); they are left out."
    ) in caplog.messages
    with gzip.open(file, "wt") as opened:
        opened.write(known.splitlines()[0] + "\n" + more)
    with pytest.raises(ValueError, match="'cranfield': no query has a relevant document: 8 of 9 qrels name unk"):
        load_task(find_task("cranfield"), data)


def test_a_line_that_cannot_be_read_is_named(tmp_path):
    for name, content, message in (
        ("a.jsonl", '{"id": 1}\n\n{"id": ', "a.jsonl, line 3 is not JSON"),
        ("b.jsonl", "[1, 2]", r"b.jsonl, line 1 is not a JSON object: \[1, 2\]"),
        ("c.tsv", "query-id\tscore\n1\t2\t3\n", "c.tsv, line 2 has 3 fields; the header has query-id, score"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=message):
            read_rows(tmp_path / name)


def test_texts_that_come_with_python_need_no_folder():
    """Every machine can score the task `stdlib`: a summary is to find its own text."""
    evaluator = load_task(find_task("stdlib"))
    queries, documents = evaluator.texts["queries"], evaluator.texts["documents"]
    assert 800 <= len(queries) == len(documents) < 1000
    assert evaluator.relevant == [{row: 1.0} for row in range(len(queries))]


def test_a_development_split_is_a_task_too(data_folder):
    evaluator = load_task(Task("stsb-dev", "sts", folder="stsb", splits=("dev",)), data_folder)
    assert len(evaluator.scores) == 1500
