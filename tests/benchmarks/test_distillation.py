"""The distillation studies: training data without test sentences, students, tables and figures."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from matplotlib.image import imread
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction import ibkd, matryoshka_distillation
from benchmarks.reproduction.study import print_table
from hub_cards.figures import draw_alignment_and_uniformity, draw_covariances
from tests.conftest import padded_batch
from trainers import Granularity, Grid, Teacher
from trainers.evaluation.readers import read_rows


@pytest.mark.slow
def test_no_sentence_of_an_evaluation_set_is_trained_on(data_folder):
    texts = ibkd.unlabelled(data_folder)
    assert len(texts) == len(set(texts)) > 50_000
    assert texts == ibkd.unlabelled(data_folder), "the same texts in every run"
    trained = {text.lower() for text in texts}
    for name in ibkd.STS_TESTS:
        for row in read_rows(data_folder / name / "test.jsonl.gz"):
            assert not trained & {row[side].strip().lower() for side in ("sentence1", "sentence2")}


def test_the_student_is_the_first_layers_of_the_teacher(minilm, tmp_path, monkeypatch):
    monkeypatch.setattr(ibkd, "FOLDER", tmp_path)
    student, teacher = ibkd.untrained_student().eval(), AutoModel.from_pretrained(minilm)
    assert len(student.layers) == student.config.num_hidden_layers == 3
    batch = padded_batch(vocab_size=5000)
    with torch.no_grad():
        expected = teacher(**batch, output_hidden_states=True).hidden_states[3]
        found = student(**batch).last_hidden_state
    mask = batch["attention_mask"].bool()
    torch.testing.assert_close(found[mask], expected[mask], atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HPD-128, normalised", "IBKD (ours), fine-tuned, 128"])
def test_a_run_of_ibkd_trains(name, minilm, tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    monkeypatch.setattr(ibkd, "FOLDER", tmp_path)
    texts = [f"sentence number {row} about {row * 7}" for row in range(140)]
    shared = {"max_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), ibkd.untrained_student()
    before = model.layers[0].mlp.up_proj.weight.detach().clone()
    if name in ibkd.SECOND:
        rows = Dataset.from_dict({"anchor": texts[:8], "positive": texts[8:16], "negative": texts[16:24]})
        trainer = ibkd.SECOND[name].train(model, tokenizer, rows, **shared)
    else:
        teacher = Teacher(minilm).embed(texts, tmp_path / "teachers")
        trainer = ibkd.FIRST[name].train(
            model, tokenizer, Dataset.from_dict({"text": texts}), {"teacher": teacher}, **shared
        )
    assert not before.equal(model.layers[0].mlp.up_proj.weight)
    assert (trainer.projection is not None) == ("128" in name)


@pytest.mark.slow
def test_a_run_of_matryoshka_distillation_trains(minilm):
    model = matryoshka_distillation.untrained_head()
    torch.testing.assert_close(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    with torch.no_grad():  # instead of pretraining
        model.get_output_embeddings().weight.mul_(0.01)
        model.get_output_embeddings().bias.fill_(-8)
        model.get_output_embeddings().bias[1000:9000] = 0
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    pieces = matryoshka_distillation.pieces(["the open file has a list of names and text"] * 99, tokenizer)
    assert {len(ids) for ids in pieces["input_ids"]} == {matryoshka_distillation.TOKENS}
    shared = {"max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "warmup_steps": 0}
    trainer = matryoshka_distillation.RUNS["6x384>2x32"].train(model, tokenizer, pieces, **shared)
    assert trainer.state.global_step == 1


def test_tables_print_percentages_or_plain_values(capsys):
    g = Granularity(2, 16)
    results = {
        "scores": {"a": {"0": {"t": {"2x16": 0.5}}}, "b": {"0": {"t": {"2x16": 0.25}}, "1": {"t": {"2x16": 0.75}}}}
    }
    print_table(results, ["a", "b"], ["t"], Grid((g,)))
    assert "| 2x16 | **50.0** | 50.0 |" in capsys.readouterr().out
    results["scores"]["a"]["0"]["t"]["2x16"] = 6.1234
    print_table(results, ["a", "b"], ["t"], Grid((g,)), percent=False, best=min)
    assert "| 2x16 | 6.123 | **0.500** |" in capsys.readouterr().out


def test_figures_of_any_number_of_students(tmp_path):
    covariances = {f"run {n}": np.cov(np.random.default_rng(n).normal(size=(32, 100))) for n in range(3)}
    draw_covariances(covariances, tmp_path / "covariance.png")
    height, width = imread(tmp_path / "covariance.png").shape[:2]
    assert 2 < width / height < 4
    draw_alignment_and_uniformity({"a": (-2.0, 0.3), "b": (-3.0, 0.4)}, tmp_path / "map.png")
    assert imread(tmp_path / "map.png").std() > 0.01
