"""The whole quickstart in miniature."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from m3bert.commands import quickstart
from m3bert.data.stdlib_docs import split_by_module, stdlib_pairs
from tests.conftest import refused


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_quickstart_runs_from_end_to_end(minilm, tmp_path):
    def run(*arguments):
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "m3bert", "quickstart", "--output_dir", str(tmp_path), *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)

    done = run("--steps", "2")
    steps = re.findall(r"^\[(\d)/6\] .+ \(about .+\)$", done.stdout, re.MULTILINE)
    assert steps == [*"123456"]
    rows = re.findall(r"^\| .*", done.stdout, re.MULTILINE)[:8]
    assert rows[0] == "| query | first layers alone | fitted | fine-tuned | ms per query |"
    names = ["table look-up", "2 layers", "4 layers", "all 6 layers, 64 dims", "all 6 layers", "BM25"]
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == names
    assert "| table look-up | 2 layers | all 6 layers |" in done.stdout
    assert "Token indices" not in done.stderr and "train_runtime" not in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    sizes = results["granularities"]
    assert len(sizes) == 16 and results["latency"]["quantile"] < 0.5
    assert {*sizes["2x64"]} == {"truncated", "fitted", "trained", "ms_per_query", "bytes_per_vector"}
    assert sizes["2x64"]["fitted"]["recall@10"] > 2 * sizes["2x64"]["truncated"]["recall@10"]
    assert (tmp_path / "recall.png").stat().st_size > 10_000
    assert "textwrap" in run("--query", "wrap a paragraph of text to a given width").stdout


@pytest.mark.slow
def test_a_fast_run_ends_with_the_fit(tiny_tokenizer, tmp_path, monkeypatch):
    training, held_out = split_by_module(stdlib_pairs())
    monkeypatch.setattr(quickstart, "split_by_module", lambda pairs: (training[::20], held_out))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=len(tiny_tokenizer), pad_token_id=tiny_tokenizer.pad_token_id, **sizes))
    model.save_pretrained(tmp_path / "source")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.model_max_length = 512
    tokenizer.save_pretrained(tmp_path / "source")
    run = tmp_path / "run"
    quickstart.main(["--fast", "--model", str(tmp_path / "source"), "--output_dir", str(run)])
    results = json.loads((run / "results.json").read_text())
    assert results["steps"] == 0 and "trained" not in results["granularities"]["3x32"]
    same = "model.safetensors"
    assert (run / "model" / same).read_bytes() == (tmp_path / "source" / same).read_bytes()


def test_the_model_of_another_command_stays(tmp_path):
    (tmp_path / "model").mkdir()
    refused("model is not of a quickstart", quickstart.main, ["--model", "none", "--output_dir", str(tmp_path)])
    assert [*tmp_path.iterdir()] == [tmp_path / "model"]
