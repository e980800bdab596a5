"""Fixtures of the tests of the commands: options of a quick run, small files, and rows of real data."""

import gzip
import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import quiet


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def quick_options() -> Callable[..., list[str]]:
    """Options of a quiet run of a few steps that keeps its last checkpoint: `quick_options(max_steps=2)`."""

    def options(**changes: Any) -> list[str]:
        values = quiet("", **{"max_steps": 3, "logging_steps": 1, **changes})
        return [
            word
            for name, value in values.items()
            if name not in ("output_dir", "save_strategy")
            for word in (f"--{name}", str(value))
        ]

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
