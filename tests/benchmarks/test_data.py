"""From an empty folder to the results of a study: its data is that of the Hub, compared with what was recorded."""

import gzip
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import threading
from collections import namedtuple
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoModel, AutoTokenizer

from benchmarks import data
from benchmarks.reproduction import report, run
from m3bert.evaluation.readers import read_rows
from m3bert.trainers import Grid
from tests.benchmarks.test_reproduction import MRL, TINY
from tests.conftest import refused


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def serve():
    """Serve files as GitHub does: folder, path -> content -> the address."""
    servers = []

    def start(folder: Path, files: dict[str, str | bytes]) -> str:
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder)))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()


def archive(files: dict[str, str]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return content.getvalue()


def test_rows_of_files_on_github(serve, tmp_path, monkeypatch):
    captions = {
        f"{data.MULTI30K}/val.{number}.en.gz": gzip.compress(f"a {number} \nb {number}\n".encode())
        for number in range(1, 6)
    }
    cisi = {
        "CISI.ALL": ".I 1\r\n.T\r\nA title\r\n.A\r\nAn author\r\n.W\r\n  Two\r\nlines\r\n.X\r\n1\t5\t1\r\n",
        "CISI.QRY": ".I 1\r\n.W\r\nWhat?\r\n.I 2\r\n.T\r\nA title\r\n.W\r\nAnd a text\r\n",
        "CISI.REL": "     1     28\t0\t0.000000\r\n",
    }
    files = {
        data.CISI: archive(cisi),
        f"{data.MSMARCO}/corpus.jsonl": '{"_id": "7", "title": "", "text": "a\x85b", "metadata": {}}\n',
        f"{data.MSMARCO}/qrels/test.tsv": "1\t7\t2\n",
        f"{data.WIC}/dev/dev.data.txt": "board\tN\t2-2\tRoom and board .\tHe nailed boards . \n",
        f"{data.WIC}/dev/dev.gold.txt": "F\n",
        **captions,
    }
    for path in (f"{name}-ud-{split}.conllu" for name in data.WEB for split in ("train", "dev", "test")):
        files[f"{data.UNIVERSAL}/{path}"] = f"# sent_id = 1\n# text = One line.\n# text = {path[3:14]}\n1\tOne\n"
    monkeypatch.setattr(data, "GITHUB", serve(tmp_path, files))
    monkeypatch.setattr(data, "LEFT_OUT", tmp_path / "rows.json")
    data.LEFT_OUT.write_text('{"multi30k-captions/dev": [0]}')
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", str(tmp_path / "downloads"))
    expected = {
        "cisi/corpus": [{"id": "1", "title": "A title", "text": "Two lines"}],
        "cisi/queries": [{"id": "1", "text": "What?"}, {"id": "2", "text": "A title And a text"}],
        "cisi/qrels": [{"query-id": "1", "corpus-id": "28", "score": 1}],
        "msmarco-mini/corpus": [{"id": "7", "title": "", "text": "a\x85b"}],
        "msmarco-mini/qrels": [{"query-id": "1", "corpus-id": "7", "score": "2"}],
        "multi30k-captions/dev": [{"captions": [f"b {number}" for number in range(1, 6)]}],
        "text-english/web": [{"text": "One line."}, {"text": "English-EWT"}, {"text": "English-GUM"}],
    }
    for name, rows in expected.items():
        assert data.public_rows(name) == rows, name
    (row,) = data.public_rows("wic/dev")
    assert (row["sentence1"], row["sentence2"], row["label"]) == ("Room and board .", "He nailed boards .", 0)


def test_every_set_has_a_source():
    folders = {name.partition("/")[0] for name in json.loads(data.RECORD.read_text())}
    assert len(folders) == 26
    assert {folder for folder in folders if not data.source_of(folder).name} == set()


def write_splits(folder: Path, splits: dict[str, list[dict]]) -> Path:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_a_study_runs_on_what_is_on_the_hub(hub, serve, sentences, tiny_checkpoint, tmp_path, monkeypatch, capsys):
    pairs = list(zip(sentences[:24], sentences[24:48], strict=True))
    scored = [{"sentence1": a, "sentence2": b, "score": float(row % 6)} for row, (a, b) in enumerate(pairs)]
    nli = [
        {"premise": f"{a} {b}", "hypothesis": f"{b} {a}", "label": row % 4 - 1} for row, (a, b) in enumerate(pairs * 4)
    ]
    stsb = {"train": scored, "validation": scored[:12], "test": scored[12:]}
    hub.publish("datasets/mteb/stsbenchmark-sts", write_splits(tmp_path / "stsb", stsb))
    hub.publish("datasets/stanfordnlp/snli", write_splits(tmp_path / "snli", dict.fromkeys(stsb, nli)))
    pairs_on_github = {
        f"{data.SNLI_SAMPLE}/train.csv": "".join(
            f"{row % 3 + 1}\t_\t{a} {b}\t{b} {a}\n" for row, (a, b) in enumerate(pairs)
        ),
        f"{data.SNLI_SAMPLE}/test.csv": "",
        **{
            f"{data.SNLI_PAIRS}/{kind}/{split}.tsv": "sentence1\tsentence2\tgold_label\n"
            for kind in ("original", "revised_combined")
            for split in ("train", "dev", "test")
        },
    }
    served = serve(tmp_path / "github", pairs_on_github)
    folder = tmp_path / "data"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.data", "stsb", "snli", "wic", "cisi"],
        cwd=ROOT,
        env={
            **os.environ, **hub.environment(tmp_path / "cache", None), "M3BERT_DATA": str(folder),
            "M3BERT_GITHUB": served,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stsb/test: 12 rows DIFFER from the 1,379 that our results are measured on" in done.stdout
    for absent in ("wic/test", "cisi/corpus"):
        assert f"{absent}: MISSING, studies run without it: " in done.stdout
    assert read_rows(folder / "stsb" / "dev.jsonl.gz") == stsb["validation"]
    labels = [(row["label"], row["label_text"]) for row in read_rows(folder / "snli" / "train.jsonl.gz")]
    assert labels[:3] == [(1, "neutral"), (2, "contradiction"), (0, "entailment")] and len(labels) == 24
    assert {row["label"] for row in read_rows(folder / "snli" / "dev.jsonl.gz")} == {0, 1, 2}

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    monkeypatch.setattr(run, "backbone", lambda name, cache: (AutoModel.from_pretrained(tiny_checkpoint), tokenizer))
    families, settings = {"similarity": ("stsb", "sick")}, {"methods": {"MRL": MRL}, "learning_rates": (1e-4,)}
    study = replace(TINY, families=families, frozen={"real": "HEAD~1"}, **settings)
    planned = next(run.planned(study, development=False))
    assert run.run_all([planned], folder, tmp_path / "runs", tmp_path / "results") == []
    assert json.loads(planned.file(tmp_path / "results").read_text())["scores"].keys() == {"stsb"}
    assert "The study runs without sick: Task 'sick': there is no 'test'" in capsys.readouterr().out
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
    refused("pip install ir_datasets", data.public_rows, "npl/corpus")


def test_the_splits_of_sick_come_from_all_of_its_rows(data_folder, monkeypatch):
    """The rows of all splits, shuffled, as one split has them on the Hub."""
    splits = {part: data.read(data_folder / "sick" / f"{part}.jsonl.gz") for part in ("train", "dev", "test")}
    rows = [row for part in splits.values() for row in part]
    random.Random(0).shuffle(rows)
    monkeypatch.setattr(data, "load_hub", lambda name, split: rows)
    recorded = json.loads(data.RECORD.read_text())
    for part in splits:
        assert data.summary(data.public_rows(f"sick/{part}")) == recorded[f"sick/{part}"]
