"""Builds in processes of their own that are killed at any moment; test_index.py stops them at each one."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.trainers.index.test_engines import MODULES
from trainers.index import ENGINES


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
INSTALLED = [name for name in ENGINES if find_spec(MODULES[name]) is not None]
DOCUMENTS = 3000
SETUP = """
    from pathlib import Path
    from transformers import AutoModel, AutoTokenizer
    from trainers import Granularity
    from trainers.evaluation import GridEncoder
    from trainers.index import Corpus, Index, Plan, Target, index

    index.CHUNK = 256
    folder, engine, kind = Path({folder!r}), {engine!r}, {kind!r}
    plan = Plan(Granularity(6, 32), first_dim=8, shortlist=100)
    model = AutoModel.from_pretrained({model!r}, trust_remote_code=True)
    encoder = GridEncoder(model, AutoTokenizer.from_pretrained({model!r}), plan.grid())

    def build():
        return Index.build(Target(folder, engine, kind), plan, encoder, Corpus([{corpus!r}]))
"""
SEARCH = """
    import json
    queries = {queries!r}
    with build() as built:
        print("FOUND", json.dumps([len(built), [[hit.id for hit in hits] for hits in built.search(queries)]]))
"""


@pytest.fixture
def corpus(tmp_path, sentences) -> str:
    """Many documents, no two of which are equal."""
    count = len(sentences)
    rows = (
        {
            "id": f"d{row}",
            "text": " ".join(sentences[number % count] for number in (row, row // count, row // count**2)),
        }
        for row in range(DOCUMENTS)
    )
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "corpus.jsonl")


@pytest.fixture
def model(tiny_model, tiny_tokenizer, tmp_path) -> str:
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


class Runner:
    """Starts builds of one index."""

    def __init__(self, folder: Path, engine: str, kind: str, model: str, corpus: str, queries: list[str]):
        self.folder = folder
        values = {"folder": str(folder), "engine": engine, "kind": kind, "model": model, "corpus": corpus}
        self.setup = textwrap.dedent(SETUP.format(**values))
        self.search = textwrap.dedent(SEARCH.format(queries=queries))

    def start(self, code: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", self.setup + textwrap.dedent(code)],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str) -> tuple[int, str]:
        process = self.start(code)
        out, err = process.communicate(timeout=300)
        return process.returncode, out + err

    def found(self) -> tuple[int, list[list[str]]]:
        """What the finished index finds, after building what is missing."""
        status, said = self.run(self.search)
        assert status == 0, said
        return json.loads(said.partition("FOUND")[2].splitlines()[0])

    def rows(self) -> int:
        """Documents that the store has."""
        try:
            with sqlite3.connect(f"file:{self.folder / 'documents.sqlite'}?mode=ro", uri=True) as connection:
                return connection.execute("SELECT count(*) FROM documents").fetchone()[0]
        except sqlite3.OperationalError:  # not there yet
            return 0


@pytest.mark.parametrize("engine", INSTALLED)
def test_a_build_that_is_killed_goes_on_and_finds_the_same(tmp_path, engine, model, corpus, sentences):
    queries = sentences[:5]
    expected = Runner(tmp_path / "whole", engine, "flat", model, corpus, queries).found()
    assert expected[0] == DOCUMENTS
    broken = Runner(tmp_path / "broken", engine, "flat", model, corpus, queries)

    process = broken.start("build().close()")
    while broken.rows() < 700 and process.poll() is None:
        time.sleep(0.005)
    assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGKILL)  # at any moment
    process.communicate()
    assert 700 <= broken.rows() < DOCUMENTS

    assert broken.found() == expected
