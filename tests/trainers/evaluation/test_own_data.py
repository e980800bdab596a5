"""Your own data as tasks: the same scores as a registered task of the same data, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from tests.evaluation_data import serve_datasets
from tests.scripts.conftest import rows_of
from trainers.evaluation import (
    collection_task,
    evaluate_grid,
    exact_search,
    find_task,
    labels_task,
    load_task,
    pairs_task,
    ranking_scores,
    score_grid,
)


def export_beir(source: Path, folder: Path, suffix: str = "", split: str = "test") -> Path:
    """Write a local collection in the layout of BEIR, plain or with the suffix .gz."""
    opened = gzip.open if suffix else open
    (folder / "qrels").mkdir(parents=True)
    for part in ("corpus", "queries"):
        with opened(folder / f"{part}.jsonl{suffix}", "wt", encoding="utf-8") as lines:
            for row in rows_of(source / f"{part}.jsonl.gz"):
                lines.write(json.dumps({"_id": row.pop("id"), **row, "metadata": {}}) + "\n")
    with opened(folder / "qrels" / f"{split}.tsv{suffix}", "wt", encoding="utf-8") as lines:
        lines.write(gzip.decompress((source / "qrels.tsv.gz").read_bytes()).decode())
    return folder


@pytest.fixture
def mine(data, tmp_path) -> Path:
    """The small collection in the layout of BEIR."""
    return export_beir(data / "cranfield", tmp_path / "mine")


def scores_of(encoder, task, data=None):
    """Granularity and metric -> value."""
    results = evaluate_grid(encoder, [task], data, two_stages=False)
    return {(score.granularity, score.metric): score.value for score in results.scores}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_collection_in_the_layout_of_beir_is_the_task_it_was_exported_from(encoder, data, tmp_path, suffix):
    task = collection_task(str(export_beir(data / "cranfield", tmp_path / "mine", suffix)))
    assert (task.name, task.task_type, task.splits) == ("mine", "retrieval", ("test",))
    assert load_task(task) == load_task(find_task("cranfield"), data)
    assert scores_of(encoder, task) == scores_of(encoder, find_task("cranfield"), data)
    results = evaluate_grid(encoder, [task, find_task("stsb")], data)
    assert results.tasks() == ["mine", "stsb"] and results.settings["own_data"] == {"mine": "mine"}


def test_the_local_layout_and_other_splits_are_collections_too(data, mine, tmp_path):
    shutil.copytree(data / "cranfield", tmp_path / "local")
    assert load_task(collection_task(str(tmp_path / "local"))) == load_task(find_task("cranfield"), data)
    (mine / "qrels" / "test.tsv").rename(mine / "qrels" / "dev.tsv")
    task = collection_task(str(mine), split="dev")
    assert task.splits == ("dev",) and load_task(task) == load_task(find_task("cranfield"), data)
    with pytest.raises(
        ValueError, match=r"qrels/test.tsv does not exist, plain or with .gz; qrels has the splits dev"
    ):
        collection_task(str(mine))


def rewrite(file: Path, change) -> None:
    """Change the rows of a JSON Lines file."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "corpus.jsonl").write_text(""), r"mine/corpus\.jsonl is empty: it has no rows"),
        (lambda folder: (folder / "queries.jsonl").write_text("\n"), r"mine/queries\.jsonl is empty"),
        (
            lambda folder: (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n"),
            r"mine/qrels/test\.tsv is empty",
        ),
        (lambda folder: (folder / "corpus.jsonl").unlink(), r"mine/corpus\.jsonl does not exist, plain or with \.gz"),
        (
            lambda folder: rewrite(folder / "corpus.jsonl", lambda rows: [{**row, "text": ""} for row in rows]),
            r"mine/corpus\.jsonl: no row has a text",
        ),
        (
            lambda folder: rewrite(folder / "queries.jsonl", lambda rows: [*rows, {"_id": "a", "query": "b"}]),
            r"mine/queries\.jsonl: row 9 lacks text; it has id, _id, query",
        ),
        (
            lambda folder: rewrite(folder / "queries.jsonl", lambda rows: [{"text": "b"}]),
            r"mine/queries\.jsonl: row 1 lacks id; it has text",
        ),
        (
            lambda folder: (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\tnan\n"),
            r"mine/qrels/test\.tsv: 'nan' in row 1 of column 'score' is not a finite number",
        ),
        (
            lambda folder: (folder / "qrels/test.tsv").write_text("q1\t0\td1\t1\nq2\t0\td2\t1\n"),
            r"mine/qrels/test\.tsv: row 1 lacks query-id, corpus-id, score; it has q1, 0, d1, 1",
        ),
        (
            lambda folder: (folder / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\tx\t1\nq2\ty\t1\n"),
            r"no query has a relevant document: 2 of 2 qrels name unknown documents \(x, y\)",
        ),
    ],
)
def test_a_damaged_collection_is_named_with_its_file(mine, damage, message):
    damage(mine)
    with pytest.raises(ValueError, match=message) as caught:
        load_task(collection_task(str(mine)))
    assert "\n" not in str(caught.value)


PAIRS = [("open the file", "read it", 1.5), ("a name", "the list", 3.0), ("do it", "can do", 4.5), ("to", "no", 0.0)]


def write_pairs(file: Path, rows=PAIRS, columns=("sentence1", "sentence2", "score")) -> str:
    """Write three columns in the format that the name of the file says."""
    table = [dict(zip(columns, row, strict=True)) for row in rows]
    opened = gzip.open if file.suffix == ".gz" else open
    if ".parquet" in file.name:
        Dataset.from_list(table).to_parquet(str(file))
    elif ".jsonl" in file.name:
        with opened(file, "wt") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in table)
    else:
        with opened(file, "wt", newline="") as lines:
            writer = csv.DictWriter(lines, columns, delimiter="\t" if ".tsv" in file.name else ",")
            writer.writeheader()
            writer.writerows(table)
    return str(file)


@pytest.mark.parametrize(
    "name", ["my.pairs.csv", "my.pairs.csv.gz", "my.pairs.tsv", "my.pairs.jsonl.gz", "my.pairs.parquet"]
)
def test_scored_pairs_of_every_format_are_a_similarity_task(tmp_path, name):
    task = pairs_task(write_pairs(tmp_path / name))
    assert (task.name, task.task_type) == ("my.pairs", "sts")
    evaluator = load_task(task)
    assert evaluator.texts == {"sentence1": [row[0] for row in PAIRS], "sentence2": [row[1] for row in PAIRS]}
    assert evaluator.scores == [row[2] for row in PAIRS]


def test_own_pairs_and_labels_have_the_scores_of_the_tasks_with_the_same_texts(encoder, data, tmp_path):
    def table(name, split, columns):
        return [tuple(row[column] for column in columns) for row in rows_of(data / name / f"{split}.jsonl.gz")]

    for name, third in (("stsb", "score"), ("mrpc", "label")):
        rows = table(name, "test", ("sentence1", "sentence2", third))
        task = pairs_task(write_pairs(tmp_path / f"my-{name}.csv", rows, ("a", "b", "c")), columns=("a", "b", "c"))
        assert scores_of(encoder, task) == scores_of(encoder, find_task(name), data)
    (tmp_path / "reviews").mkdir()
    for split in ("train", "test"):
        file = tmp_path / "reviews" / f"{split}.csv"
        Dataset.from_list(rows_of(data / "banking77" / f"{split}.jsonl.gz")).to_csv(str(file))
    task = labels_task(str(tmp_path / "reviews"))
    assert task.name == "reviews"
    assert scores_of(encoder, task) == scores_of(encoder, find_task("banking77"), data)


def test_labels_may_be_texts_and_one_file_is_split_by_its_texts(encoder, sentences, tmp_path):
    rows = [{"text": text, "label": "ab"[row % 2]} for row, text in enumerate(sentences[:40])]
    Dataset.from_list(rows + rows[:10]).to_csv(str(tmp_path / "reviews.csv"))
    evaluator = load_task(labels_task(str(tmp_path / "reviews.csv")))
    train, test = evaluator.texts["train"], evaluator.texts["test"]
    assert len(set(test)) == 8 and not set(train) & set(test) and len(train) + len(test) == 50
    assert load_task(labels_task(str(tmp_path / "reviews.csv"))) == evaluator
    labels = {row["text"]: row["label"] for row in rows}
    assert evaluator.train_labels == [labels[text] for text in train]
    found = scores_of(encoder, labels_task(str(tmp_path / "reviews.csv")))
    numbered = replace(
        evaluator,
        **{
            part: ["ab".index(label) for label in getattr(evaluator, part)] for part in ("train_labels", "test_labels")
        },
    )
    expected = score_grid(encoder, numbered)
    assert found == {(str(g), metric): value for g, scores in expected.items() for metric, value in scores.items()}


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ([*PAIRS, ("a", "b", "nan")], (), "pairs.csv: 'nan' in row 5 of column 'score' is not a finite number"),
        ([*PAIRS, ("a", "b", None)], (), "pairs.csv: None in row 5 of column 'score' is not a finite number"),
        (
            [(*row[:2], "good") for row in PAIRS],
            (),
            "pairs.csv: 'good' in row 1 of column 'score' is not a finite num",
        ),
        ([("", row[1], row[2]) for row in PAIRS], (), "pairs.csv: no row has a text in column 'sentence1' and 'sent"),
        ([(7, *row[1:]) for row in PAIRS], (), "pairs.csv: column 'sentence1' is not text: 7 in row 1"),
        (
            [(*row[:2], 1) for row in PAIRS],
            (),
            r"pairs.csv: column 'score' has only the value\(s\) 1: similarity needs",
        ),
        ([(*PAIRS[0][:2], 2), (*PAIRS[1][:2], 3)], (), r"has only the value\(s\) 2, 3: similarity needs three differ"),
        (
            PAIRS,
            ("a", "sentence2", "score"),
            r"lacks the column\(s\) a; it has sentence1, sentence2, score",
        ),
        (PAIRS, ("a", "b"), "Pairs have three columns, two texts and a number; got a, b"),
    ],
)
def test_pairs_that_cannot_be_scored_are_refused(tmp_path, rows, columns, message):
    with pytest.raises(ValueError, match=message) as caught:
        pairs_task(write_pairs(tmp_path / "pairs.csv", rows), columns=columns)
    assert "\n" not in str(caught.value)


def test_rows_without_text_are_counted_and_left_out(tmp_path, caplog):
    rows = [("", "b", 1), *PAIRS, (" ", "b", 2), ("a", None, 3), ("a", "", 4)]
    with caplog.at_level(logging.WARNING):
        evaluator = load_task(pairs_task(write_pairs(tmp_path / "pairs.csv", rows)))
    assert evaluator.scores == [row[2] for row in PAIRS]
    assert (
        "4 of 8 rows have no text in column 'sentence1' or 'sentence2' (rows 1, 6, 7, ...): they are left out."
        in caplog.messages
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\na,x\nb,x\n", "labels.csv: a classifier needs two classes or more; column 'label' has only 'x'"),
        ("text,label\na,x\nb,\n", "labels.csv: row 2 has no label in column 'label'"),
        ("text,label\n,x\n,y\n", "labels.csv: no row has a text in column 'text'"),
        ("text,stars\na,1\nb,2\n", r"lacks the column\(s\) label; it has text, stars"),
        ("", "labels.csv cannot be read"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(tmp_path, content, message):
    (tmp_path / "labels.csv").write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        labels_task(str(tmp_path / "labels.csv"))
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_named(tmp_path, data):
    for make in (pairs_task, labels_task):
        with pytest.raises(ValueError, match=r"no/pairs\.csv does not exist\."):
            make("no/pairs.csv")
    with pytest.raises(ValueError, match=r"\.\./no/folder does not exist\."):
        collection_task("../no/folder")
    with pytest.raises(OSError, match="nobody/nothing"):
        pairs_task("nobody/nothing")
    with pytest.raises(OSError, match="nobody/nothing"):
        load_task(collection_task("nobody/nothing"))
    file = write_pairs(tmp_path / "pairs.csv")
    with pytest.raises(ValueError, match=r"pairs\.csv is not a folder: a collection has corpus\.jsonl"):
        collection_task(file)
    with pytest.raises(ValueError, match=r"needs one file called train, such as train\.csv; it has pairs\.csv"):
        labels_task(str(tmp_path))
    with pytest.raises(
        ValueError, match=r"has the name of the task or group 'cranfield' \(see --list_tasks\): rename"
    ):
        collection_task(str(data / "cranfield"))


def test_two_tasks_of_one_name_are_refused(encoder, tmp_path):
    files = [write_pairs(tmp_path / name) for name in ("pairs.csv", "pairs.tsv")]
    with pytest.raises(ValueError, match="Two tasks are called 'pairs': rename one"):
        evaluate_grid(encoder, [pairs_task(file) for file in files])


ON_THE_HUB = {
    ("user/mine", "corpus"): {"test": {"_id": [4, 5], "title": ["T", None], "text": ["x", "y"]}},
    ("user/mine", "queries"): {"test": {"_id": [1, 2], "text": ["q", "r"]}},
    ("user/mine", "qrels"): {
        "test": {"query-id": [1], "corpus-id": [5], "score": [1]},
        "dev": {"query-id": [2], "corpus-id": [4], "score": [2]},
    },
    ("mteb/scifact", "corpus"): {"corpus": {"_id": ["4"], "title": ["T"], "text": ["x"]}},
    ("mteb/scifact", "queries"): {"queries": {"_id": ["1"], "text": ["q"]}},
    ("mteb/scifact", "default"): {"test": {"query-id": ["1"], "corpus-id": ["4"], "score": [1]}},
    ("user/bare", "corpus"): {"corpus": {"_id": ["4"], "title": ["T"], "text": ["x"]}},
    ("user/sts", None): {"test": {"a": ["x", "y", "z"], "b": ["u", "v", "w"], "score": [0.5, 1.0, 2.0]}},
    ("user/topics", "small"): {
        "train": {"text": ["x", "y"], "label": [0, 1]},
        "validation": {"text": ["z", "w"], "label": [1, 0]},
    },
}


@pytest.fixture
def on_the_hub(monkeypatch):
    """What the library datasets reads from the Hub."""

    def load_dataset(name, config, *, split, streaming):
        splits = ON_THE_HUB[name, config]
        if split not in splits:
            raise ValueError(f'Unknown split "{split}". Should be one of {list(splits)}.')
        return Dataset.from_dict(splits[split])

    serve_datasets(monkeypatch, load_dataset)
    monkeypatch.setattr(
        datasets, "get_dataset_config_names", lambda name: [key[1] for key in ON_THE_HUB if key[0] == name]
    )
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: list(ON_THE_HUB[name, config]))


def test_collections_on_the_hub(on_the_hub):
    evaluator = load_task(collection_task("user/mine"))
    assert evaluator.texts == {"queries": ["q"], "documents": ["T x", "y"]} and evaluator.relevant == [{1: 1.0}]
    assert load_task(collection_task("user/mine", split="dev")).relevant == [{0: 2.0}]
    task = collection_task("mteb/scifact")
    assert collection_task("mteb/scifact", split="train").name == "mteb-scifact", "other scores than those of the task"
    assert task.name == "scifact" and load_task(task) == load_task(find_task("scifact"))
    with pytest.raises(ValueError, match="user/bare has no configuration 'queries'; it has corpus"):
        load_task(collection_task("user/bare"))
    with pytest.raises(ValueError, match="user/mine, qrels has no split 'train'; it has test, dev"):
        load_task(collection_task("user/mine", split="train"))


def test_pairs_and_labels_on_the_hub(on_the_hub):
    task = pairs_task("user/sts", columns=("a", "b", "score"))
    assert (task.name, task.task_type) == ("user-sts", "sts"), "`sts` is a group of other tasks"
    evaluator = load_task(labels_task("user/topics:small", split="validation"))
    assert evaluator.texts == {"train": ["x", "y"], "test": ["z", "w"]} and evaluator.test_labels == [1, 0]
    with pytest.raises(
        ValueError, match=r"^user/sts: The dataset lacks the column\(s\) sentence1, sentence2; it has a, b, score\.$"
    ):
        pairs_task("user/sts")
    with pytest.raises(
        ValueError,
        match=re.escape('user/topics cannot be read: Unknown split "test". Should be one of'),
    ):
        labels_task("user/topics:small")


def test_a_folder_wins_over_the_hub(on_the_hub, data, tmp_path, monkeypatch):
    export_beir(data / "cranfield", tmp_path / "user" / "mine")
    monkeypatch.chdir(tmp_path)
    assert load_task(collection_task("user/mine")) == load_task(find_task("cranfield"), data)


def test_classes_are_no_scores(tmp_path, monkeypatch):
    features = Features(
        {
            "sentence1": Value("string"),
            "sentence2": Value("string"),
            "label": ClassLabel(names=["yes", "maybe", "no"]),
        }
    )
    rows = {"sentence1": ["a"] * 3, "sentence2": ["b"] * 3, "label": [0, 1, 2]}
    serve_datasets(monkeypatch, lambda *names, **options: Dataset.from_dict(rows, features))
    with pytest.raises(
        ValueError, match="user/nli: column 'label' has 3 classes, which are no scores: yes, maybe, no"
    ):
        pairs_task("user/nli")


def test_recall_at_any_k_is_the_share_of_the_relevant_documents_found(encoder, data, caplog):
    task = replace(find_task("cranfield"), recall=(3, 25, 1000))
    evaluator = load_task(task, data)
    assert "Task 'cranfield': recall@1000 is left out: the collection has 40 documents." in caplog.messages
    vectors = {name: encoder.encode(texts).at(encoder.grid.full) for name, texts in evaluator.texts.items()}
    found = evaluator.score(vectors)
    assert list(found) == ["recall@3", "recall@25", "mrr@10", "ndcg@10", "ndcg_exp@10"]
    ranked = exact_search(vectors["queries"], vectors["documents"], 40)
    assert found == pytest.approx(ranking_scores(ranked, evaluator.relevant, (3, 25)))
    usual = load_task(find_task("cranfield"), data).score(vectors)
    assert usual["ndcg@10"] == found["ndcg@10"] and "recall@10" in usual
    only = replace(evaluator, cutoffs=(2,)).score(vectors)
    assert list(only) == ["recall@2", "mrr@10", "ndcg@10", "ndcg_exp@10"] and only["ndcg@10"] == found["ndcg@10"]
    with pytest.raises(ValueError, match="Recall@0 is not defined: k must be 1 or more"):
        replace(evaluator, cutoffs=(0,))
