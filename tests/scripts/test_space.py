"""A Space: a folder with the page, its card, its requirements, and all the code that it needs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from huggingface_hub import SpaceCard

from modeling_m3bert import M3BertModel
from scripts import demo
from scripts.demo import main
from tests.conftest import tiny_config
from tests.scripts.test_demo import free_port, hits, text_of


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")
pytest.importorskip("gradio", reason="the page needs gradio")
STARTED_SECONDS = 300


def published(cache: Path, tokenizer: object) -> str:
    """A model as it lies in the cache of the Hub's client after a download."""
    repository = cache / "models--user--tiny"
    snapshot = repository / "snapshots" / ("0" * 40)
    M3BertModel(tiny_config()).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    return "user/tiny"


def as_in_an_index(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.fixture
def space(tmp_path) -> Path:
    folder = tmp_path / "space"
    main(["--model_name_or_path", "user/tiny", "--query_prompt", "find ", "--space", str(folder)])
    return folder


def test_a_space_has_a_card_that_the_hub_reads(space):
    data = SpaceCard.load(space / "README.md").data
    assert (data.sdk, data.app_file, data.models, data.license) == ("gradio", "app.py", ["user/tiny"], "apache-2.0")
    assert f"gradio=={data.sdk_version}" in (space / "requirements.txt").read_text().splitlines()
    assert (space / data.app_file).is_file() and not list(space.rglob("__pycache__"))
    assert "--query_prompt=find " in (space / "app.py").read_text()


def test_a_space_requires_what_its_code_imports(space):
    pins = [line.split("==") for line in (space / "requirements.txt").read_text().splitlines()]
    required = {name for name, _ in pins}
    own = {"m3bert", "modeling_m3bert", "trainers", "hub_cards", *sys.stdlib_module_names}
    optional = {"mteb", "pyarrow"}  # of modules that are imported by their names alone
    imported = set()
    for file in space.rglob("*.py"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.split(".")[0])
    distributions = packages_distributions()
    known_as = {name: {as_in_an_index(found) for found in distributions[name]} for name in imported - own - optional}
    assert not {name for name, found in known_as.items() if not required & found}
    assert all(re.fullmatch(r"[\d.]+", pin) for _, pin in pins), "a local build is in no index"


# The project's packages that the folder has no copy of stay hidden, also where they are installed.
START = """
import importlib.abc, runpy, sys
from pathlib import Path
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        own = top in ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts", "tests", "benchmarks")
        if own and not Path(top).exists():
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
sys.path.insert(0, str(Path.cwd()))
runpy.run_path("app.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_space_starts_where_there_is_nothing_but_its_folder(space, tmp_path, tiny_tokenizer):
    client = pytest.importorskip("gradio_client", reason="comes with gradio")
    published(tmp_path / "hub", tiny_tokenizer)
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment.update(HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, f"--port={port}", "--host=127.0.0.1"],
            cwd=space,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + STARTED_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.2)
        page = client.Client(f"http://127.0.0.1:{port}/", verbose=False, analytics_enabled=False)
        html = page.predict(demo.OWN, "open a file\nread a list", "read a list", 1, 2, "int8", api_name="/compare")
        assert "2 layers, 16 dims, int8 (8 bits)" in html
        assert {"line 1", "line 2"} == {name for _, name in hits(html)[:2]}
        html = page.predict(demo.LIBRARY, "", "read a list", 3, 3, "binary", api_name="/compare")
        assert "6 layers, 32 dims, binary (1 bit)<" in html and "all 800" in text_of(html)
    finally:
        process.terminate()
        process.wait(timeout=30)
