"""Fixtures of the tests of the commands: options of a quick run, tiny models on disk, and small files of real data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from m3bert.modeling import M3BertModel
from tests.conftest import tiny_config


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def quick_options(quiet_arguments) -> Callable[..., list[str]]:
    """Options of a quiet run of a few steps that keeps its last checkpoint: `quick_options(max_steps=2)`."""

    def options(**changes: Any) -> list[str]:
        values = {"max_steps": 3, "logging_steps": 1, **changes}
        quiet = quiet_arguments("", **values)
        kept = {name: value for name, value in quiet.items() if name not in ("output_dir", "save_strategy")}
        return [word for name, value in kept.items() for word in (f"--{name}", str(value))]

    return options


@pytest.fixture
def text_files(tmp_path, tiny_tokenizer, sentences) -> Path:
    """A folder with a tokenizer, texts in two languages, and pairs."""
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "en.txt").write_text("\n".join(sentences[:32]))
    (tmp_path / "de.txt").write_text("\n".join(sentences[32:40]))
    pairs = [{"query": a, "answer": b} for a, b in zip(sentences[:24], sentences[24:], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def rows_of(file: Path, limit: int | None = None) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, limit)]


def triplets(data: Path) -> list[dict[str, str]]:
    """Queries of MS MARCO with a passage of the best grade, its first sentence as a title, and one of no grade."""
    folder = data / "msmarco-mini"
    passages = {row["id"]: row["text"] for row in rows_of(folder / "corpus.jsonl.gz")}
    queries = {row["id"]: row["text"] for row in rows_of(folder / "queries.jsonl.gz")}
    with gzip.open(folder / "qrels.tsv.gz", "rt", encoding="utf-8") as lines:
        judged = [line.rstrip("\n").split("\t") for line in islice(lines, 1, None)]
    judged = [(query, passage) for query, passage, grade in judged if int(grade) == 3 and passage in passages]
    others = list(passages.values())
    return [
        {
            "query": queries[query],
            "positive": passages[passage],
            "negative": others[index],
            "document": passages[passage],
            "title": passages[passage].split(".")[0],
            "description": passages[passage],
        }
        for index, (query, passage) in enumerate(judged)
    ]


@pytest.fixture
def real_files(tmp_path, data_folder, minilm) -> Path:
    """A folder with a small model that has the real encoder's tokenizer, and files of the kinds that recipes take."""
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / "model")
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id)
    M3BertModel(config).save_pretrained(tmp_path / "model")
    rows = triplets(data_folder)
    assert len(rows) > 100
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:5])))
    sentences = [row["sentence1"] for row in rows_of(data_folder / "snli" / "dev.jsonl.gz", limit=400)]
    (tmp_path / "sentences.txt").write_text("\n".join(sentences))
    return tmp_path
