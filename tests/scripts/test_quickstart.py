"""The whole quickstart in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(minilm, tmp_path):
    def run(*arguments):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "scripts.quickstart", "--output_dir", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    printed = run("--steps", "2")
    assert "2 layers x 64 dims" in printed
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["granularities"]) == 12
    assert (tmp_path / "recall.png").stat().st_size > 10_000
    assert "textwrap" in run("--query", "wrap a paragraph of text to a given width")
