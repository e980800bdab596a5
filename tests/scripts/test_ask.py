"""Questions to a finished run, in a process that does not have this project."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts import ask
from trainers import fit_exits


SCRIPT = Path(ask.__file__)


@pytest.fixture
def finished_run(tiny_model, tiny_tokenizer, sentences, tmp_path) -> Path:
    """What the quickstart leaves behind, of the tiny model with exits: one index, of the last layer."""
    fit_exits(tiny_model, tiny_tokenizer, [f"{first} {second}" for first in sentences for second in sentences[:9]])
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    inputs = tiny_tokenizer(sentences[:9], padding=True, return_tensors="pt")
    mask = inputs["attention_mask"].unsqueeze(-1)
    with torch.no_grad():
        states = tiny_model(**inputs).last_hidden_state
    save_file({"layer_6": (states * mask).sum(1) / mask.sum(1)}, tmp_path / "index.safetensors")
    rows = [{"name": f"name.{row}", "summary": text} for row, text in enumerate(sentences[:9])]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(
    "name", ["m3bert", "m3bert.commands", "modeling_m3bert", "trainers.core", "hub_cards", "scripts"]
)
def test_the_project_is_hidden(name):
    with pytest.raises(ModuleNotFoundError, match="hidden on purpose"):
        ask.HiddenProject().find_spec(name)
    assert ask.HiddenProject().find_spec("transformers_modules.model.modeling_m3bert") is None


@pytest.mark.slow
def test_a_question_is_answered_without_the_project(finished_run, sentences, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(finished_run / "modules"))
    smaller = SCRIPT.read_text().replace("((0, 384), (2, 384), (6, 384))", "((0, 32), (2, 32), (6, 32))")
    script = finished_run / "ask.py"
    script.write_text(smaller)
    line = [sys.executable, "-I", str(script), str(finished_run), sentences[3]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert f"\n{sentences[3]}\n" in printed and "0 layers x 32 dims" in printed
    first = next(text for text in printed.splitlines() if text.startswith("1 "))
    assert first.split() == ["1", "name.3", "name.3", "name.3"], "a document is the nearest to itself, from any depth"


def test_what_is_missing_is_said_in_one_line(tmp_path):
    for arguments, message in (
        ([str(tmp_path), "a question"], "holds no finished run: run `m3bert quickstart` first"),
        ([str(tmp_path)], "the following arguments are required: questions"),
    ):
        done = subprocess.run([sys.executable, "-I", str(SCRIPT), *arguments], capture_output=True, text=True)
        assert done.returncode != 0 and message in done.stderr and "Traceback" not in done.stderr
