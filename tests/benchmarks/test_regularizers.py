"""The study of regularisers: training data without test sentences, one encoder for all seeds, stored results."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from benchmarks.reproduction.regularizers import DIMS, ENCODERS, RUNS, TESTS, corpus, settings_of
from benchmarks.reproduction.study import add_results
from trainers import Granularity
from trainers.evaluation.readers import read_rows


@pytest.mark.slow
def test_no_sentence_of_an_evaluation_set_is_trained_on(data_folder):
    texts = corpus(data_folder)
    assert len(texts) == len(set(texts)) > 15_000
    assert texts == corpus(data_folder), "the same texts in every run"
    trained = {text.lower() for text in texts}
    for name in TESTS:
        for row in read_rows(data_folder / name / "test.jsonl.gz"):
            assert not trained & {
                row[side].strip().lower() for side in ("text", "sentence1", "sentence2") if side in row
            }


def test_the_reinitialised_encoder_is_the_same_for_every_seed(minilm):
    torch.manual_seed(1)
    first = ENCODERS["reinitialised"]().state_dict()
    torch.manual_seed(2)
    second, whole = ENCODERS["reinitialised"]().state_dict(), ENCODERS["contrastive"]().state_dict()
    assert first.keys() == second.keys() < whole.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    kept = {name for name in first if torch.equal(first[name], whole[name])}
    drawn = {name for name in first if name.startswith("encoder.layer.3.")}
    assert drawn and not kept & {name for name in drawn if name.endswith("weight")}
    assert set(first) - drawn == kept - drawn


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_every_run_trains(name, minilm):
    model, texts = ENCODERS["reinitialised"](), [f"sentence number {row} about {row * 7}" for row in range(8)]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tokenizer, grid = AutoTokenizer.from_pretrained(minilm), None if name == "SimCSE" else "4x16,384"
    shared = {"max_steps": 1, "per_device_train_batch_size": 4, "unsupervised": True, "use_cpu": True, "grid": grid}
    RUNS[name].train(model, tokenizer, Dataset.from_dict({"text": texts}), **shared)
    assert any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.slow
def test_settings_of_a_study_do_not_replace_the_arguments_of_a_run(minilm):
    name, options = "MIC with PIC (ours)", Namespace(encoder="reinitialised", pooling="cls", steps=1, batch_size=4)
    texts = Dataset.from_dict({"text": [f"sentence number {row}" for row in range(8)]})
    tokenizer, settings = AutoTokenizer.from_pretrained(minilm), settings_of(name, options, 4, seed=0)
    trainer = RUNS[name].train(ENCODERS["reinitialised"](), tokenizer, texts, **settings)
    parts = trainer.accelerator.unwrap_model(trainer.model).objective.parts
    assert parts["scr"].layers == parts["sir"].layers == [4]
    assert (parts["scr"].variance_weight, parts["sir"].weights["variation"], parts["sir"].pooling) == (0.0, 0.0, "cls")
    assert (parts["pic"].pooling, parts["pic"].detach_target) == ("mean", True)


def test_results_of_one_study_are_kept_and_those_of_others_dropped(tmp_path):
    file, about = tmp_path / "results" / "study.json", {"command": "c", "settings": {"steps": 1}}
    scores = {"stsb": {Granularity(4, dim): dim / 1000 for dim in DIMS}}
    add_results(file, {"MRL": {"0": scores}}, about)
    add_results(file, {"MRL": {"1": scores}}, about)
    results = add_results(file, {"MIC": {"0": scores}}, about)
    assert {name: list(seeds) for name, seeds in results["scores"].items()} == {"MRL": ["0", "1"], "MIC": ["0"]}
    assert results["scores"]["MRL"]["1"]["stsb"]["4x16"] == 0.016
    results = add_results(file, {"MIC": {"0": scores}}, about | {"settings": {"steps": 2}})
    assert list(results["scores"]) == ["MIC"]
