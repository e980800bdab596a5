"""From an empty folder to the results of a study: its data is that of the Hub, compared with what was recorded."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModel, AutoTokenizer

from benchmarks import data
from benchmarks.reproduction import report, run
from m3bert.evaluation.readers import read_rows
from m3bert.trainers import Grid
from tests.benchmarks.test_reproduction import MRL, TINY


ROOT = Path(__file__).resolve().parents[2]


def write_splits(folder: Path, splits: dict[str, list[dict]]) -> Path:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_study_runs_on_what_is_on_the_hub(hub, sentences, tiny_checkpoint, tmp_path, monkeypatch, capsys):
    pairs = list(zip(sentences[:24], sentences[24:48], strict=True))
    scored = [{"sentence1": a, "sentence2": b, "score": float(row % 6)} for row, (a, b) in enumerate(pairs)]
    nli = [
        {"premise": f"{a} {b}", "hypothesis": f"{b} {a}", "label": row % 4 - 1} for row, (a, b) in enumerate(pairs * 4)
    ]
    stsb = {"train": scored, "validation": scored[:12], "test": scored[12:]}
    hub.publish("datasets/mteb/stsbenchmark-sts", write_splits(tmp_path / "stsb", stsb))
    hub.publish("datasets/stanfordnlp/snli", write_splits(tmp_path / "snli", dict.fromkeys(stsb, nli)))
    folder = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.data", "stsb", "snli", "wic", "cisi"],
        cwd=ROOT,
        env={**os.environ, **hub.environment(tmp_path / "cache", None), "M3BERT_DATA": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "stsb/test: 12 rows DIFFER from the 1,379 that our results are measured on" in done.stdout
    for absent in ("wic/test", "cisi/corpus"):
        assert f"{absent}: no public source in this form; studies run without it" in done.stdout
    assert read_rows(folder / "stsb" / "dev.jsonl.gz") == stsb["validation"]
    labels = [(row["label"], row["label_text"]) for row in read_rows(folder / "snli" / "train.jsonl.gz")]
    assert labels[:3] == [(0, "entailment"), (1, "neutral"), (2, "contradiction")] and len(labels) == 72

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    monkeypatch.setattr(run, "backbone", lambda name, cache: (AutoModel.from_pretrained(tiny_checkpoint), tokenizer))
    families, settings = {"similarity": ("stsb", "sick")}, {"methods": {"MRL": MRL}, "learning_rates": (1e-4,)}
    study = replace(TINY, families=families, frozen={"real": "HEAD~1"}, **settings)
    planned = next(run.planned(study, development=False))
    assert run.run_all([planned], folder, tmp_path / "runs", tmp_path / "results") == []
    assert json.loads(planned.file(tmp_path / "results").read_text())["scores"].keys() == {"stsb"}
    assert f"sick is not in {folder}: the study runs without it" in capsys.readouterr().out
    scores = json.loads(planned.file(tmp_path / "results").read_text())["scores"]["stsb"]
    found = report.score(study, {"scores": {"stsb": scores}}, Grid.parse(study.grid))
    assert found == pytest.approx(100 * statistics.mean(scores.values()))


def test_rows_count_in_any_order_and_by_what_tasks_read(tmp_path):
    rows = [
        {"query-id": 1, "corpus-id": 7, "score": 2},
        {"query-id": "2", "corpus-id": "8", "score": 1.0, "more": "x"},
    ]
    file = data.file_of(tmp_path, "any/qrels")
    data.write(file, rows[::-1])
    assert data.read(file)[0] == {"query-id": "2", "corpus-id": "8", "score": "1.0"}
    found = data.summary(rows)
    assert data.summary(data.read(file)) == found
    assert data.compared(found, found) == "2 rows, as recorded"
    other = data.summary([rows[0], {**rows[1], "score": 3}])
    assert data.compared(other, found) == "2 rows DIFFER from the 2 that our results are measured on"
    lines = data.file_of(tmp_path, "wikitext-2/dev")
    data.write(lines, [{"text": "= A title ="}, {"text": "a line"}])
    assert (
        data.read(lines) == [{"text": "= A title ="}, {"text": "a line"}] and data.names_in(tmp_path)[0] == "any/qrels"
    )


class Collection:
    """Two documents of Cranfield, one of them empty, in the form of ir_datasets."""

    def docs_iter(self):
        Doc = namedtuple("Doc", "doc_id title text author bib")
        yield Doc("1", "wings in\na slipstream .", "wings in\na slipstream .\n  an experimental\nstudy .", "a", "b")
        yield Doc("2", "", "", "", "")

    def queries_iter(self):
        yield namedtuple("Query", "query_id text")("1", "What\nlaws ?")

    def qrels_iter(self):
        Judged = namedtuple("Judged", "query_id doc_id relevance iteration")
        yield from (Judged("1", "1", -1, "0"), Judged("1", "2", 3, "0"))


def test_a_collection_of_ir_datasets_has_our_form(monkeypatch):
    monkeypatch.setitem(sys.modules, "ir_datasets", SimpleNamespace(load=lambda name: Collection()))
    assert data.public_rows("cranfield/corpus") == [
        {"id": "1", "title": "wings in a slipstream .", "text": "an experimental study ."}
    ]
    assert data.public_rows("cranfield/queries") == [{"id": "1", "text": "what laws ?"}]
    assert data.public_rows("cranfield/qrels") == [{"query-id": "1", "corpus-id": "1", "score": 4}]
    monkeypatch.setitem(sys.modules, "ir_datasets", None)
    with pytest.raises(ValueError, match="pip install ir_datasets"):
        data.public_rows("npl/corpus")


def test_the_splits_of_sick_come_from_all_of_its_rows(data_folder, monkeypatch):
    """The rows of all splits, shuffled, as one split has them on the Hub."""
    splits = {part: data.read(data_folder / "sick" / f"{part}.jsonl.gz") for part in ("train", "dev", "test")}
    rows = [row for part in splits.values() for row in part]
    random.Random(0).shuffle(rows)
    monkeypatch.setattr(data, "load_hub", lambda name, split: rows)
    recorded = json.loads(data.RECORD.read_text())
    for part in splits:
        assert data.summary(data.public_rows(f"sick/{part}")) == recorded[f"sick/{part}"]
