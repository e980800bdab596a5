"""The command that computes what a training step needs."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from benchmarks._measure import RESULTS
from hub_cards.tables import markdown
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts import scaling
from tests.conftest import tiny_config
from tests.snippets import read, snippets
from tests.test_docs import tiny_bert


def rows(printed: str) -> list[list[str]]:
    """The cells of the table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.splitlines() if line[:1] == "|"]


def test_stage_3_of_the_paper_by_default(capsys):
    scaling.main([])
    printed = capsys.readouterr().out
    assert printed.startswith("305,660,928 parameters, 1,048,576 pairs per step, up to 512 tokens per text (mean 100)")
    header, _, *found = rows(printed)
    assert header == scaling.HEADER
    assert [row[:3] for row in found] == [
        ["1", "-", "-"],
        *[[gpus, "ddp", candidates] for gpus in ("8", "64", "512") for candidates in ("gather", "ring")],
    ]
    assert {row[5] for row in found} == {"yes"}


def test_json_has_the_parts(capsys):
    scaling.main(["--gpus", "512", "--strategy", "fsdp", "--candidates", "ring", "--json"])
    (step,) = json.loads(capsys.readouterr().out)
    assert (step["gpus"], step["strategy"], step["candidates"]) == (512, "fsdp", "ring")
    assert step["encoding_bytes"]["parameters"] == 305_660_928 * 4 / 512
    assert {"candidates", "similarities"} <= step["loss_bytes"].keys()
    assert step["sent_bytes"].keys() == {"data parallelism", "candidates"}
    assert step["seconds"].keys() == {"encoder", "similarities", "communication"}
    assert step["stage"]["batch"] == 2**20 and step["hardware"]["utilisation"] == 0.4


def test_options_change_the_step(capsys):
    options = ["--gpus", "4", "--candidates", "gather", "--memory_gb", "1", "--checkpointing", "--batch", "4096"]
    scaling.main([*options, "--length", "64", "--layers", "6", "--dims", "16", "768", "--mini_batch", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith(
        "305,660,928 parameters, 4,096 pairs per step, up to 64 tokens per text (mean 64), grid 6x16,768, "
        "8 texts at a time, with gradient checkpointing."
    )
    ((*_,), _, row) = rows(printed)
    assert row[:3] == ["4", "ddp", "gather"] and row[5] == "no"


def test_masked_lm_stages_have_no_candidates(capsys):
    scaling.main(["--stage", "1", "--gpus", "64"])
    printed = capsys.readouterr().out
    assert printed.startswith("497,912,466 parameters, 131,072 texts per step")
    assert [row[2] for row in rows(printed)[2:]] == ["-"]
    with pytest.raises(ValueError, match="--candidates ring is for contrastive training; stage 2 predicts tokens"):
        scaling.main(["--stage", "2", "--candidates", "ring"])


def test_sizes_of_a_checkpoint(tmp_path, capsys):
    """Of an m3BERT, and of an encoder that is like one."""
    small = ["--layers", "2", "--dims", "16", "--length", "16", "--gpus", "1"]
    tiny_config().save_pretrained(tmp_path / "own")
    scaling.main(["--model_name_or_path", str(tmp_path / "own"), *small])
    assert capsys.readouterr().out.startswith(f"{M3BertModel(tiny_config()).num_parameters():,} parameters")
    tiny_bert(2).config.save_pretrained(tmp_path / "bert")
    config = scaling.config_of(str(tmp_path / "bert"), None)
    assert isinstance(config, M3BertConfig) and (config.num_hidden_layers, config.hidden_size) == (2, 384)
    with pytest.raises(ValueError, match="The grid reads 12 layers and 128 dims, but the model has 6 x 32"):
        scaling.main(["--model_name_or_path", str(tmp_path / "own")])


PAGE = "docs/scaling.md"


def commands() -> list[str]:
    code = "".join(snippet.code for snippet in snippets(read(PAGE)) if snippet.language == "bash")
    return [line for line in code.splitlines() if line.startswith("m3bert scaling")]


@pytest.mark.parametrize("command", commands())
def test_the_page_shows_what_the_command_prints(command, capsys):
    scaling.main(shlex.split(command)[2:])
    assert capsys.readouterr().out.strip() in read(PAGE)


def measured_table(result: dict[str, Any]) -> str:
    """What the benchmark measured beside what was predicted, as on the page."""
    found = []
    for unit, name in (("megabytes", "MB"), ("bytes sent", "MB sent")):
        for case, values in result[unit].items():
            scale = 1 if unit == "megabytes" else 10**6
            measured, predicted = values["measured"] / scale, values["predicted"] / scale
            error = 100 * (predicted / measured - 1)
            found.append([case, name, f"{measured:.1f}", f"{predicted:.1f}", f"{error:+.1f}%"])
    return markdown(["case", "what", "measured", "predicted", "error"], found, words=2)


def test_the_page_shows_what_was_measured():
    result = json.loads((RESULTS / "scaling.json").read_text(encoding="utf-8"))
    assert measured_table(result) in read(PAGE) and result["date"] in read(PAGE)
