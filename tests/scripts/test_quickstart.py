"""The whole quickstart in miniature."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m3bert.hub_cards.onnx_export import missing_packages


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(minilm, tmp_path):
    def run(*arguments):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "m3bert", "quickstart", "--output_dir", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    for arguments, searches in ((["--fast"], 3), (["--steps", "2"], 5)):
        printed = run(*arguments)
        assert "| 0x384 | 2x384 | 6x384 |" in printed
        results = json.loads((tmp_path / "results.json").read_text())
        assert len(results["granularities"]) == 16 and results["latency"]["quantile"] < 0.5
        other = "pip install 'm3bert[onnx]'" if missing_packages() else "| layer | torch | ONNX float32 | ONNX int8 |"
        assert other in printed
        assert sum(isinstance(its, dict) for its in results["granularities"]["2x64"].values()) == searches
        assert (tmp_path / "recall.png").stat().st_size > 10_000
        assert "textwrap" in run("--query", "wrap a paragraph of text to a given width")
    fitted = results["granularities"]["2x64"]["exits"]["recall@10"]
    assert fitted > 2 * results["granularities"]["2x64"]["untouched"]["recall@10"]
