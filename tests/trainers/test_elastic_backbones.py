"""Training a native encoder with exits, a path and a static table: what is saved, and what a resumed run reads."""

import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from m3bert.hub_cards.training_record import TrainingRecord
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.models.auto import load_config, load_model
from m3bert.trainers import Grid
from m3bert.trainers.core.checkpoints import load_weights
from m3bert.trainers.core.grid import declare_grid
from tests.conftest import refused
from tests.elastic_repositories import PATH, VOCABULARY, save_elastic
from tests.published import contrastive_trainer


GRID = "0,2,4,6x8,32"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer, sentences) -> tuple[Path, dict[str, torch.Tensor]]:
    """Folder of a run with one checkpoint, and the weights at its end."""
    folder = tmp_path_factory.mktemp("trained")
    save_elastic(folder / "source", tiny_tokenizer)
    trainer = contrastive_trainer(
        folder / "run", tiny_tokenizer, sentences, str(folder / "source"), grid=GRID, learning_rate=3e-3
    )
    trainer.train()
    trainer.save_model()
    return folder, {name: its.clone() for name, its in trainer.backbone.state_dict().items()}


def test_layers_exits_paths_and_table_are_trained(trained):
    folder, weights = trained
    before = load_model(folder / "source").state_dict()
    moved = {name for name, its in weights.items() if not torch.equal(its, before[name])}
    assert {"elastic.table.weight", "elastic.exits.2.weight", "elastic.exits.4.joint.weight"} <= moved
    assert {"encoder.layer.0.output.dense.weight", "encoder.layer.5.output.dense.weight"} <= moved
    assert any(name.startswith("elastic.paths.4.") for name in moved)


def test_a_checkpoint_holds_every_weight_exactly(trained):
    folder, weights = trained
    model = load_model(folder / "source")
    load_weights(model, str(folder / "run" / "checkpoint-2"))
    assert all(torch.equal(its, weights[name]) for name, its in model.state_dict().items())


def test_what_is_saved_is_an_elastic_repository(trained):
    """Without remote code it is the trained encoder; with it, every depth and the table are there, in float16."""
    folder, weights = trained
    run, ids = folder / "run", torch.randint(5, VOCABULARY, (2, 9))
    spec = Elasticity.of(load_config(run))
    assert (spec.exits, spec.table, spec.layers_of(4)) == ([0, 2, 4], [0, 4], PATH)
    assert spec.fit == Elasticity.of(load_config(folder / "source")).fit and TrainingRecord.find(run).grid == GRID
    plain = AutoModel.from_pretrained(run)
    assert all(torch.equal(its, weights[name]) for name, its in plain.state_dict().items())
    full = load_model(run).eval()
    torch.testing.assert_close(full.elastic.table.weight, weights["elastic.table.weight"], atol=1e-2, rtol=1e-3)
    with torch.no_grad():
        for depth in (0, 2, 4):
            size = load_model(run, output_layer=depth, output_dim=8).eval()
            expected = full(input_ids=ids, output_layer=depth, output_dim=8).last_hidden_state
            assert torch.equal(size(input_ids=ids).last_hidden_state, expected)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(tmp_path, tiny_tokenizer, sentences):
    save_elastic(tmp_path / "source", tiny_tokenizer)
    ends = []
    for run, resume in (("whole", None), ("resumed", str(tmp_path / "whole" / "checkpoint-1"))):
        trainer = contrastive_trainer(
            tmp_path / run, tiny_tokenizer, sentences, str(tmp_path / "source"), grid=GRID, save_steps=1
        )
        trainer.train(resume_from_checkpoint=resume)
        ends.append(trainer.backbone.state_dict())
    assert all(torch.equal(its, ends[1][name]) for name, its in ends[0].items())


@pytest.mark.parametrize("case", ["a size", "other names in the file"])
def test_weights_with_other_names_in_the_file_are_loaded(case, tmp_path, tiny_tokenizer):
    """A path keeps the numbers of the source's layers in its file, and some architectures are stored otherwise."""
    kind, sizes = ("bert", {"output_layer": 4}) if case == "a size" else ("nomic_bert", {})
    save_elastic(tmp_path / "source", tiny_tokenizer, kind)
    saved, other = (load_model(tmp_path / "source", **sizes) for _ in range(2))
    with torch.no_grad():
        for parameter in saved.parameters():
            parameter.add_(0.125)
    saved.save_pretrained(tmp_path / "checkpoint", exact=True)
    load_weights(other, str(tmp_path / "checkpoint"))
    assert all(torch.equal(its, other.state_dict()[name]) for name, its in saved.state_dict().items())


def test_a_checkpoint_without_its_exits_is_refused(trained, tmp_path, tiny_tokenizer):
    model = save_elastic(tmp_path / "model", tiny_tokenizer)
    (tmp_path / "model" / "elastic" / "weights.safetensors").unlink()
    refused("elastic.exits", load_weights, model, str(tmp_path / "model"))


def test_depths_that_are_not_trained_lose_their_exits_and_paths(tmp_path, tiny_tokenizer, sentences, caplog):
    save_elastic(tmp_path / "source", tiny_tokenizer)
    model = load_model(tmp_path / "source")
    with caplog.at_level(logging.WARNING):
        contrastive_trainer(tmp_path / "run", tiny_tokenizer, sentences, model, grid="2,6x8,32")
    assert "The exits of depths 0, 4 are dropped: the grid 2,6x8,32 does not train them" in caplog.text
    spec = Elasticity.of(model.config)
    assert (spec.exits, spec.table) == ([2], []) and 4 not in spec.depths
    assert not len(model.elastic.paths) and model.elastic.table is None


def test_the_default_size_of_an_elastic_model_must_be_trained(tmp_path, tiny_tokenizer):
    save_elastic(tmp_path / "source", tiny_tokenizer)
    config = load_config(tmp_path / "source")
    declare_grid(config, Grid.parse("2,6x8,32"))
    assert (config.matryoshka_layers, config.matryoshka_dimensions, config.is_matryoshka) == ([2, 6], [8, 32], True)
    config.output_dim = 16
    refused("output_dim=16 is not available here; legal values: 8, 32", declare_grid, config, Grid.parse("2,6x8,32"))
