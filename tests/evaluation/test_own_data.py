"""Your own data as tasks: the same scores as a registered task of the same data."""

import gzip
import json
import logging
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, Value

from m3bert.evaluation import collection_task, evaluate_grid, find_task, labels_task, load_task, pairs_task, score_grid
from tests.conftest import refused
from tests.evaluation_data import serve_datasets
from tests.scripts.conftest import rows_of
from tests.scripts.test_files_as_text import write


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


def scores_of(encoder, task, data=None):
    """Granularity and metric -> value."""
    results = evaluate_grid(encoder, [task], data, two_stages=False)
    return {(score.granularity, score.metric): score.value for score in results.scores}


@pytest.mark.parametrize(("suffix", "split"), [("", "test"), (".gz", "dev")])
def test_a_collection_in_the_layout_of_beir_is_the_task_it_was_exported_from(encoder, data, tmp_path, suffix, split):
    task = collection_task(str(export_beir(data / "cranfield", tmp_path / "mine", suffix, split)), split=split)
    assert (task.name, task.task_type, task.splits) == ("mine", "retrieval", (split,))
    assert load_task(task) == load_task(find_task("cranfield"), data)
    assert scores_of(encoder, task) == scores_of(encoder, find_task("cranfield"), data)
    results = evaluate_grid(encoder, [task, find_task("stsb")], data)
    assert results.tasks() == ["mine", "stsb"] and results.settings["own_data"] == {"mine": "mine"}
    with pytest.raises(ValueError, match=r"mine/qrels/nothing.tsv does not exist, plain or with .gz"):
        load_task(collection_task(str(tmp_path / "mine"), split="nothing"))
    # The layout of registered tasks; the folder has the name of one.
    local = collection_task(str(data / "cranfield"))
    assert local.name == "own-cranfield" and load_task(local) == load_task(find_task("cranfield"), data)


def repeat(file: Path, times: int, **changes: object) -> None:
    """Append the first line of a file, with some fields changed, as often."""
    lines = file.read_text("utf-8").splitlines()
    if file.suffix == ".tsv":
        first = "\t".join(
            str(value) for value in (dict(zip(*(line.split() for line in lines[:2]), strict=True)) | changes).values()
        )
    else:
        first = json.dumps(json.loads(lines[0]) | changes)
    file.write_text("\n".join([*lines, *[first] * times]) + "\n", "utf-8")


def test_what_is_listed_twice_counts_once_and_must_not_contradict_itself(data, tmp_path):
    """Documents, queries and judgements. The column `_id` is the id, whatever a column `id` says."""
    expected = load_task(find_task("cranfield"), data)
    for part, changes, message in (
        ("corpus.jsonl", {"text": "another"}, "corpus: the texts of id .* differ: .*another.* Keep one of them"),
        ("queries.jsonl", {"text": "another"}, "queries: the texts of id .* differ"),
        ("qrels/test.tsv", {"score": 3}, "qrels: the scores of query and document .* differ: .* and 3.0"),
    ):
        folder = export_beir(data / "cranfield", tmp_path / Path(part).stem)
        repeat(folder / part, 20)
        if part == "corpus.jsonl":
            rows = [json.loads(line) for line in (folder / part).read_text("utf-8").splitlines()]
            (folder / part).write_text("".join(json.dumps({"id": i, **row}) + "\n" for i, row in enumerate(rows)))
        assert load_task(collection_task(str(folder))) == expected
        repeat(folder / part, 1, **changes)
        refused(f"Task .*{message}", load_task, collection_task(str(folder)))


PAIRS = [("open the file", "read it", 1.5), ("a name", "the list", 3.0), ("do it", "can do", 4.5), ("to", "no", 0.0)]


def write_pairs(file: Path, rows=PAIRS, columns=("sentence1", "sentence2", "score")) -> str:
    return write(file, [dict(zip(columns, row, strict=True)) for row in rows])


def test_scored_pairs_are_a_similarity_task(tmp_path):
    task = pairs_task(write_pairs(tmp_path / "my.pairs.csv.gz"))
    assert (task.name, task.task_type) == ("my.pairs", "sts")
    evaluator = load_task(task)
    assert evaluator.texts == {"sentence1": [row[0] for row in PAIRS], "sentence2": [row[1] for row in PAIRS]}
    assert evaluator.scores == [row[2] for row in PAIRS]


def test_own_pairs_and_labels_have_the_scores_of_the_tasks_with_the_same_texts(encoder, data, tmp_path):
    for name, third in (("stsb", "score"), ("mrpc", "label")):
        rows = [(row["sentence1"], row["sentence2"], row[third]) for row in rows_of(data / name / "test.jsonl.gz")]
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
    numbered = {
        part: ["ab".index(label) for label in getattr(evaluator, part)] for part in ("train_labels", "test_labels")
    }
    expected = score_grid(encoder, replace(evaluator, **numbered))
    actual = scores_of(encoder, labels_task(str(tmp_path / "reviews.csv")))
    assert actual == {(str(g), metric): value for g, scores in expected.items() for metric, value in scores.items()}


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (PAIRS, ("a", "sentence2", "score"), "a cannot be the columns of .*; it has sentence1, sentence2, score"),
        (PAIRS, ("sentence1", "sentence2", "grade"), "grade cannot be the columns of "),
        (PAIRS, ("sentence1", "sentence2"), "sentence1, sentence2 cannot be the columns of "),
        ([(*row[:2], "good") for row in PAIRS], (), "row 1, column 'score': 'good' is not a number"),
        ([("", row[1], row[2]) for row in PAIRS[:1]] + [(row[0], "", 1) for row in PAIRS], (), "no row has values in"),
    ],
)
def test_pairs_that_would_be_scored_as_something_else_are_refused(tmp_path, rows, columns, message):
    refused(f"pairs.jsonl.*{message}", pairs_task, write_pairs(tmp_path / "pairs.jsonl", rows), columns=columns)


def test_rows_that_lack_a_value_are_counted_and_left_out(tmp_path, caplog):
    rows = [("", "b", 1), *PAIRS, (" ", "b", 2), ("a", None, 3), ("a", "b", None)]
    with caplog.at_level(logging.WARNING):
        evaluator = load_task(pairs_task(write_pairs(tmp_path / "pairs.csv", rows)))
    assert evaluator.scores == [row[2] for row in PAIRS]
    assert "4 of 8 rows (rows 1, 6, 7, ...) have no value in one of the columns" in caplog.text


def test_two_tasks_of_one_name_are_refused(encoder, tmp_path):
    files = [write_pairs(tmp_path / name) for name in ("pairs.csv", "pairs.tsv")]
    refused("Two tasks are called 'pairs': rename one", evaluate_grid, encoder, [pairs_task(file) for file in files])


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
    ("user/sts", None): {"test": {"a": ["x", "y", "z"], "b": ["u", "v", "w"], "score": [0.5, 1.0, 2.0]}},
    ("user/topics", "small"): {
        "train": {"text": ["x", "y"], "label": [0, 1]},
        "validation": {"text": ["z", "w"], "label": [1, 0]},
    },
}


@pytest.fixture
def on_the_hub(monkeypatch):
    """Data sets that the library datasets reads from the Hub."""
    serve_datasets(
        monkeypatch, lambda name, config, *, split, streaming: Dataset.from_dict(ON_THE_HUB[name, config][split])
    )
    monkeypatch.setattr(
        datasets, "get_dataset_config_names", lambda name: [key[1] for key in ON_THE_HUB if key[0] == name]
    )
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, config: list(ON_THE_HUB[name, config]))


def test_collections_on_the_hub(on_the_hub, data, tmp_path, monkeypatch):
    evaluator = load_task(collection_task("user/mine"))
    assert evaluator.texts == {"queries": ["q"], "documents": ["T x", "y"]} and evaluator.relevant == [{1: 1.0}]
    assert load_task(collection_task("user/mine", split="dev")).relevant == [{0: 2.0}]
    task = collection_task("mteb/scifact")
    assert collection_task("mteb/scifact", split="train").name == "mteb-scifact", "other scores than those of the task"
    assert task.name == "scifact" and load_task(task) == load_task(find_task("scifact"))
    export_beir(data / "cranfield", tmp_path / "user" / "mine")
    monkeypatch.chdir(tmp_path)
    local = load_task(collection_task("user/mine"))
    assert local == load_task(find_task("cranfield"), data), "a folder wins over the Hub"


def test_pairs_and_labels_on_the_hub(on_the_hub):
    task = pairs_task("user/sts", columns=("a", "b", "score"))
    assert (task.name, task.task_type) == ("user-sts", "sts"), "`sts` is a group of other tasks"
    evaluator = load_task(labels_task("user/topics:small", split="validation"))
    assert evaluator.texts == {"train": ["x", "y"], "test": ["z", "w"]} and evaluator.test_labels == ["1", "0"]


def test_classes_are_no_scores(monkeypatch):
    text, labels = Value("string"), ClassLabel(names=["yes", "maybe", "no"])
    features = Features({"sentence1": text, "sentence2": text, "label": labels})
    rows = {"sentence1": ["a"] * 3, "sentence2": ["b"] * 3, "label": [0, 1, 2]}
    serve_datasets(monkeypatch, lambda *names, **options: Dataset.from_dict(rows, features))
    refused("user/nli: column 'label' has classes, which are no scores: yes, maybe, no", pairs_task, "user/nli")
