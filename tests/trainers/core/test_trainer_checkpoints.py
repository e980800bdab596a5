"""What a training run writes, and what reads it again: resuming, the best model, adapters, a bare process."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import BertForMaskedLM, BertModel, EarlyStoppingCallback, PreTrainedModel

from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers.core.checkpoints import complete_checkpoints, last_checkpoint, load_weights
from tests.conftest import refused
from tests.trainers.tiny_run import (
    GRID,
    WithProjector,
    assert_same_weights,
    bert_config,
    mlm_trainer,
    quiet_model,
    run_two,
    weights,
)


def test_a_resumed_run_ends_where_the_straight_one_does(tiny_tokenizer, tmp_path):
    straight, resumed = (
        mlm_trainer(
            tiny_tokenizer, tmp_path, objective=WithProjector(GRID), max_steps=4, save_strategy="steps", save_steps=2
        )
        for _ in range(2)
    )
    start = straight.model.objective.projector.weight.detach().clone()
    straight.train()
    assert not torch.equal(straight.model.objective.projector.weight, start)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_weights(resumed.model, straight.model)
    for one, other in zip(straight.state.log_history, resumed.state.log_history, strict=False):
        names = [name for name in one if name.startswith(("loss", "projected", "step"))]
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=1e-4)


def test_a_checkpoint_that_is_written_again_is_not_complete_until_the_end(tiny_tokenizer, tmp_path, monkeypatch):
    """Or it would be half the old and half the new one, after a kill."""
    saved = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    mlm_trainer(tiny_tokenizer, tmp_path, **saved).train()
    assert [Path(folder).name for folder in complete_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]
    before = load_file(tmp_path / "checkpoint-2" / "model.safetensors")

    def full(*arguments: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    again = mlm_trainer(tiny_tokenizer, tmp_path, seed=1, **saved)
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="checkpoint-2 cannot be written; the disk may be full") as error:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "\n" not in str(error.value)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    assert before.keys() == load_file(tmp_path / "checkpoint-2" / "model.safetensors").keys()


def test_weights_that_cannot_be_written_leave_the_model_as_it_was(tiny_tokenizer, tmp_path, monkeypatch):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path)
    trainer.save_model()
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        next(trainer.backbone.parameters()).zero_()

    def full(*arguments: object, **options: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: File too large (os error 27)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(OSError, match=f"{tmp_path} cannot be written; .* File too large"):
        trainer.save_model()
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


LATE_RANK = """
import time
from m3bert.trainers.core.trainer import NestedTrainer, Trainer
from tests.conftest import word_tokenizer
from tests.trainers.tiny_run import mlm_trainer
torch.distributed.init_process_group("gloo")
rank, save, found = torch.distributed.get_rank(), Trainer._save_rng_state, []

def late(self, output_dir):
    time.sleep(rank)
    save(self, output_dir)
    found.append(Path(output_dir, "trainer_state.json").exists())

Trainer._save_rng_state = late
mlm_trainer(word_tokenizer(), sys.argv[1], max_steps=1, save_strategy="steps", save_steps=1).train()
assert found == [False]
"""


def test_a_checkpoint_is_complete_when_every_rank_has_written(tmp_path):
    run_two(tmp_path, LATE_RANK)
    names = {file.name for file in (tmp_path / "checkpoint-1").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "trainer_state.json"} <= names


def test_the_objectives_parameters_stay_in_checkpoints_and_out_of_what_is_saved(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, objective=WithProjector(GRID), max_steps=1, save_strategy="steps", save_steps=1
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    checkpoint, final = (
        {file.name for file in folder.iterdir()} for folder in (tmp_path / "checkpoint-1", tmp_path / "final")
    )
    assert {"model.safetensors", "config.json", "modeling_m3bert.py", "objective.safetensors"} <= checkpoint
    assert "objective.safetensors" not in final
    assert {"model.safetensors", "modeling_m3bert.py", "configuration_m3bert.py", "tokenizer.json"} <= final
    # The optimizer's files of the Trainer are torch's; what we write is JSON and safetensors.
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in final)
    loaded = M3BertForMaskedLM.from_pretrained(tmp_path / "final")
    assert_same_weights(loaded, trainer.backbone)


@pytest.mark.parametrize("metric", ["projected_6x32", "eval_projected_6x32", "loss"])
def test_the_best_checkpoint_comes_back(tiny_tokenizer, tmp_path, metric):
    """The lowest of a loss or of its term, for early stopping, too."""
    trainer = mlm_trainer(
        tiny_tokenizer,
        tmp_path,
        objective=WithProjector(GRID),
        max_steps=3,
        learning_rate=0.5,  # so high that it gets worse
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model=metric,
    )
    stopping = EarlyStoppingCallback(early_stopping_patience=9)
    trainer.add_callback(stopping)
    trainer.train()
    metric = f"eval_{metric.removeprefix('eval_')}"
    losses = [entry[metric] for entry in trainer.state.log_history if metric in entry]
    assert min(losses) < losses[-1], "the run must get worse for this test to say anything"
    assert stopping.early_stopping_patience_counter == 2 - losses.index(min(losses))
    assert trainer.evaluate()[metric] == pytest.approx(min(losses), rel=1e-4)


def test_an_adapter_trains_alone_and_is_saved_as_one(tiny_tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quiet_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=model, **changes)
    before = weights(trainer.backbone)
    trainer.train()
    moved = {name for name, tensor in weights(trainer.backbone).items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(quiet_model(), str(tmp_path / "adapter"))
    for name, tensor in weights(trainer.backbone).items():
        if "lora_" in name:
            assert torch.equal(weights(again)[name], tensor)
    fresh = peft.get_peft_model(quiet_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    resumed = mlm_trainer(tiny_tokenizer, tmp_path, model=fresh, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_weights(resumed.backbone, trainer.backbone)


MODELS = {
    "m3bert": lambda: quiet_model(),
    "tied m3bert": lambda: quiet_model(tie_word_embeddings=True),
    "tied bert": lambda: BertForMaskedLM(bert_config(num_hidden_layers=2)),
    "bert without a head": lambda: BertModel(bert_config(num_hidden_layers=2)),
}


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other weights, as training leaves them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def addresses(model: PreTrainedModel) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_weights_are_restored_exactly_in_place(tmp_path, kind, shard):
    """From one file or several, and weights that the head shares with the embeddings stay shared."""
    saved = moved(MODELS[kind]())
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("model*.safetensors"))) == 1 or shard == "20KB"
    model = MODELS[kind]()
    before = addresses(model)
    load_weights(model, str(tmp_path))
    assert addresses(model) == before
    expected = weights(saved)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(model).items())
    assert ("tied" in kind) == (len(set(before.values())) < len(before)), "the test is of tied weights"


@pytest.mark.parametrize("damage", ["lacks a tensor", "has another shape", "is cut"])
def test_a_checkpoint_that_does_not_fill_the_model_is_refused(tmp_path, damage):
    quiet_model().save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.3.mlp.down_proj.weight"
    tensors = load_file(file)
    tensor = tensors.pop(name)
    if damage == "has another shape":
        tensors[name] = tensor[:, :-1].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    if damage == "is cut":
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{tmp_path} .*{name if damage == 'lacks a tensor' else 'cannot be read'}"):
        load_weights(quiet_model(), str(tmp_path))


def test_a_checkpoint_without_the_parameters_of_the_objective_is_refused(tiny_tokenizer, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    mlm_trainer(tiny_tokenizer, tmp_path, **changes).train()
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, objective=WithProjector(GRID), **changes)
    with pytest.raises(ValueError, match="parameters of WithProjector in .*objective.safetensors cannot be read"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_the_last_complete_checkpoint_is_found(tmp_path):
    refused("no complete checkpoint to resume from", last_checkpoint, tmp_path)
    for step, content in ((9, "{}"), (10, "{}"), (11, '{"global_st'), (12, None)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(content)
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
