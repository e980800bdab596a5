"""The script for `hf jobs uv run`: its inline metadata, and that it runs."""

import json
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


def run(*arguments: str) -> None:
    before = sys.argv
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = before


def test_the_inline_metadata_fits_the_project():
    metadata, project = inline_metadata(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert metadata["requires-python"] == project["requires-python"]
    (needed,) = map(Requirement, metadata["dependencies"])
    assert needed.name == project["name"] and needed.extras <= set(project["optional-dependencies"])
    assert metadata["tool"]["hf-jobs"]["secrets"] == ["HF_TOKEN"]


def test_train_evaluate_and_embed_run_one_after_the_other(tmp_path, monkeypatch, encoder_folder, sentences):
    monkeypatch.chdir(tmp_path)
    pairs = [{"anchor": a, "positive": b} for a, b in zip(sentences[:16], sentences[16:32], strict=True)]
    Path("pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences[:10]))
    short = ["--max_steps", "1", "--per_device_train_batch_size", "4", "--save_strategy", "no", "--use_cpu", "true"]
    grid = ["--grid", "1,2x8,20"]
    files = ["--model_name_or_path", str(encoder_folder), "--train_files", "pairs.jsonl", "--output_dir", "model"]
    run("train", "contrastive", *files, *grid, *short, "--bf16", "false", "--report_to", "none")
    run("embed", "--model_name_or_path", "model", "--files", "corpus.jsonl", *grid, "--output_dir", "vectors")
    assert (tmp_path / "vectors" / "layer_2.npy").is_file()
    monkeypatch.setattr("m3bert.data.stdlib_docs.module_pairs", lambda: iter(()))
    monkeypatch.setattr("m3bert.data.stdlib_docs.split_by_module.__defaults__", (40,))
    options = ["--tasks", "stdlib", *grid, "--no_latency", "--output_dir", "scores"]
    run("evaluate", "--model_name_or_path", "model", *options)
    assert json.loads((tmp_path / "scores" / "results.json").read_text())["scores"]
