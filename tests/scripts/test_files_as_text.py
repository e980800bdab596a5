"""What every command reads of a file is what the file says, in every format: text stays text."""

import csv
import gzip
import json
from argparse import Namespace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from m3bert.commands import trim
from m3bert.commands.training_data import DataArguments, read_data
from m3bert.data.files import load_files
from m3bert.data.formats import number_of, text_of
from m3bert.data.hub_data import load_hub
from m3bert.data.preparing import texts_by_language
from m3bert.data.target_vectors import read_target_vectors
from m3bert.data.text_files import TextFiles
from m3bert.evaluation.own_data import _read_table, labels_task, pairs_task
from m3bert.evaluation.readers import load_task
from m3bert.index.corpus import Corpus
from tests.conftest import refused


ROOT = Path(__file__).parents[2]
AWKWARD = [
    "007", "01234", "2024-01-05", "true", "1e5", "NA", "null", "None", "1_000", "٣", "12:30", "nan", "-0", "1.0",
]  # fmt: skip
FORMATS = ("csv", "tsv", "csv.gz", "jsonl", "json", "jsonl.gz", "parquet")


def write(file: Path, rows: list[dict]) -> str:
    """Rows in the format that the name of a file says; `.json` is an array."""
    if file.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
        return str(file)
    with (gzip.open if file.suffix == ".gz" else open)(file, "wt", encoding="utf-8", newline="") as opened:
        if ".json" in file.name:
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            opened.write(lines if ".jsonl" in file.name else json.dumps(rows))
        else:
            table = csv.DictWriter(opened, rows[0], delimiter="\t" if ".tsv" in file.name else ",")
            table.writeheader()
            table.writerows(rows)
    return str(file)


def test_every_command_reads_texts_as_they_are(tmp_path, tiny_checkpoint):
    """Readers of the commands, on awkward texts, ids, labels and metadata behind 1,500 rows of digits."""
    digits = [f"{row:05d}" for row in range(1500)]
    texts = [*digits, *AWKWARD]
    options = Namespace(text_column="text", revision=None)
    for suffix in FORMATS:
        folder = tmp_path / suffix / "en"
        folder.mkdir(parents=True)
        rows = [dict.fromkeys(("id", "text", "label", "more", "sentence1", "sentence2"), text) for text in texts]
        file = write(folder / f"train.{suffix}", [{**row, "score": number % 2} for number, row in enumerate(rows)])
        write(folder / f"test.{suffix}", rows)
        documents = list(Corpus([file]).documents())
        labels = load_task(labels_task(str(folder)))
        pairs = load_task(pairs_task(file))
        read = {
            "index": [document.id for document in documents],
            "index, texts": [document.text for document in documents],
            "search --where": [document.metadata["more"] for document in documents],
            "evaluate --classification": labels.train_labels,
            "evaluate --classification, test": labels.test_labels,
            "evaluate --pairs": pairs.texts["sentence1"],
            "fit, train --streaming": [row["text"] for row in TextFiles([file]).streams[file]],
            "trim": list(trim.texts_of([file], options, tiny_checkpoint)()),
            "prepare": texts_by_language([file], "text", None)["en"]["text"][:],
            "mine, train": read_data(DataArguments(train_files=[file]))["text"][:],
            "train --dataset_name": load_hub(str(folder), split="test")["text"][:],
            "embed": load_files([file], text=["text"])["text"][:],
        }
        wrong = [(name, [*filter(lambda pair: pair[0] != pair[1], zip(its, texts, strict=True))][:5])
                 for name, its in read.items() if its != texts]  # fmt: skip
        assert not wrong, (suffix, wrong)
        assert pairs.labels == [number % 2 for number in range(len(texts))]


def test_numbers_are_numbers_where_they_are_asked_for(tmp_path):
    assert [text_of(its) for its in (7, 7.0, 0.5, True, float("nan"), None, [1, "a"], b"x")] == [
        "7", "7", "0.5", "true", None, None, '[1, "a"]', "x",
    ]  # fmt: skip
    given = ["1.5", "007", " -2e3 ", ".5", True, "False", "NaN", float("nan"), "", None]
    assert [number_of(its) for its in given] == [1.5, 7, -2000, 0.5, 1, 0, None, None, None, None]
    for wrong in ("1_000", "٣", "NA", "None", "12:30", "inf", "1e999"):
        refused("is not a number", number_of, wrong)
    rows = [{"sentence1": "a", "sentence2": "b", "label": its} for its in (1.0, 0.0, float("nan"))]
    task = pairs_task(write(tmp_path / "nan.parquet", rows))
    assert task.task_type == "pair_classification" and load_task(task).labels == [1, 0]
    assert _read_table(write(tmp_path / "a.jsonl", [{"id": 7}, {"id": "07"}]), None, "test")["id"][:] == ["7", "07"]
    file = write(tmp_path / "v.csv", [{"text": "007", "vector": "[1, 2]"}, {"text": "NA", "vector": "[2, 1]"}])
    assert read_target_vectors([file])[0] == {"v.csv": ["007", "NA"]}
    file = write(tmp_path / "new.csv", [{"id": "007", "text": "a", "year": "1990"}])
    assert [its.metadata for its in Corpus([file]).documents({"year": "integer"})] == [{"year": 1990}]
    refused("row 1: the column 'year' of the index is boolean", list, Corpus([file]).documents({"year": "boolean"}))
