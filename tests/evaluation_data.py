"""Small data sets in the local layout, made of the tiny tokenizer's words."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest

from m3bert.evaluation import find_tasks


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(file, "wt", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def write_data(folder: Path, sentences: Sequence[str]) -> Path:
    """Write `stsb`, `banking77`, `mrpc`, `cranfield` and `tatoeba/deu-eng`, made of 48 sentences."""
    pairs = [{"sentence1": a, "sentence2": b} for a, b in zip(sentences[:24], sentences[24:48], strict=True)]
    write_rows(folder / "stsb" / "test.jsonl.gz", [{**pair, "score": row % 6} for row, pair in enumerate(pairs)])
    write_rows(folder / "mrpc" / "test.jsonl.gz", [{**pair, "label": row % 2} for row, pair in enumerate(pairs)])
    write_rows(folder / "tatoeba" / "deu-eng.jsonl.gz", pairs)
    labelled = [{"text": text, "label": row % 3} for row, text in enumerate(sentences[:48])]
    write_rows(folder / "banking77" / "train.jsonl.gz", labelled[:30])
    write_rows(folder / "banking77" / "test.jsonl.gz", labelled[30:])
    documents = [{"id": f"d{row}", "title": "", "text": text} for row, text in enumerate(sentences[:40])]
    queries = [{"id": f"q{row}", "text": text} for row, text in enumerate(sentences[40:48])]
    write_rows(folder / "cranfield" / "corpus.jsonl.gz", documents)
    write_rows(folder / "cranfield" / "queries.jsonl.gz", queries)
    # The last query has no relevant document, and one judgement says "not relevant".
    judged = [(f"q{row}", f"d{(5 * row + step) % 40}", 1 + step) for row in range(7) for step in range(3)]
    with gzip.open(folder / "cranfield" / "qrels.tsv.gz", "wt", encoding="utf-8") as lines:
        lines.write("query-id\tcorpus-id\tscore\n")
        lines.writelines(f"{query}\t{document}\t{grade}\n" for query, document, grade in [*judged, ("q7", "d1", 0)])
    return folder


def write_paper_tasks(folder: Path, sentences: Sequence[str]) -> Path:
    """Write the same data, and copies of it for every other task of the group `paper`."""
    write_data(folder, sentences)
    model = {"sts": "stsb", "geometry": "stsb", "classification": "banking77", "pair_classification": "mrpc"}
    for task in find_tasks(["paper"]):
        source, target = folder / model.get(task.task_type, "cranfield"), folder / (task.folder or task.name)
        if not target.exists():
            shutil.copytree(source, target)
        for split in (*task.splits, task.train_split) if task.task_type in model else ():
            if not (target / f"{split}.jsonl.gz").exists():
                shutil.copy(source / "test.jsonl.gz", target / f"{split}.jsonl.gz")
    return folder


def serve_datasets(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable[..., Any]) -> None:
    """Let a function stand for the Hub's data sets, whose files are all on the Hub."""
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    builder = SimpleNamespace(config=SimpleNamespace(data_files=None))
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: builder)


def nanobeir_rows(sentences: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """A set of NanoBEIR in the form that it has on the Hub: judgements have no score, documents no title."""
    return {
        "corpus": [{"_id": f"d{row}", "text": text} for row, text in enumerate(sentences[:30])],
        "queries": [{"_id": f"q{row}", "text": text} for row, text in enumerate(sentences[30:40])],
        "qrels": [
            {"query-id": f"q{row}", "corpus-id": f"d{(3 * row + step) % 30}"} for row in range(10) for step in range(2)
        ],
    }


def write_nanobeir(folder: Path, sentences: Sequence[str]) -> None:
    """Write the same rows for every set of NanoBEIR."""
    for task in find_tasks(["nanobeir"]):
        rows = nanobeir_rows(sentences)
        for part in ("corpus", "queries"):
            its = [{"id": row["_id"], "text": row["text"]} for row in rows[part]]
            write_rows(folder / task.name / f"{part}.jsonl.gz", its)
        with gzip.open(folder / task.name / "qrels.tsv.gz", "wt", encoding="utf-8") as lines:
            lines.write("query-id\tcorpus-id\n")
            lines.writelines("\t".join(row.values()) + "\n" for row in rows["qrels"])
