"""The script for `hf jobs uv run`: its inline metadata, and that it runs."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "scripts" / "jobs" / "m3bert_job.py"
# The regular expression of the specification of inline script metadata (PEP 723).
BLOCK = re.compile(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$")


def inline_metadata() -> dict:
    """The block `script` of the file, read as the specification says."""
    (block,) = (match for match in BLOCK.finditer(SCRIPT.read_text()) if match["type"] == "script")
    lines = block["content"].splitlines(keepends=True)
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def test_the_inline_metadata_fits_the_project():
    metadata, project = inline_metadata(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["requires-python"] == project["requires-python"]
    (needed,) = map(Requirement, metadata["dependencies"])
    assert needed.name == project["name"] and needed.extras <= set(project["optional-dependencies"])
    assert metadata["tool"]["hf-jobs"]["secrets"] == ["HF_TOKEN"]


def test_the_script_runs_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "recipes", "mic_bert"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    assert capsys.readouterr().out.startswith("# MIC")
