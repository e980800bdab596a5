"""MIPIC and MIC as trainers: the papers' weights, other mixtures, projectors with a schedule of their own."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from safetensors import safe_open
from transformers import BertConfig, Qwen3Config, Qwen3Model

from tests.trainers.tiny_run import assert_same_weights, quiet_model, weights
from trainers import (
    PIC,
    SCR,
    SIA,
    SIR,
    Contrastive,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
    NestedTrainer,
)
from trainers.optimization import warm_up_apart
from trainers.regularized import chain, evenly_spaced
from trainers.trainer import OBJECTIVE_FILE


BERT_CONFIG = BertConfig()
TINYBERT_CONFIG = BertConfig(num_hidden_layers=6)


def config(cls, folder, **changes):
    values = {
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "unsupervised": False,
    }
    return cls(output_dir=str(folder), **{**values, **changes})


def trainer_of(trainer_class, args, tokenizer, sentences, model=None) -> NestedTrainer:
    dataset = Dataset.from_dict({"query": sentences, "answer": sentences[::-1]})
    return trainer_class(model if model is not None else quiet_model().model, args, tokenizer, dataset)


def test_mipic_is_what_its_paper_says(tmp_path):
    args = MIPICConfig(output_dir=str(tmp_path))
    grid = args.grid_for(TINYBERT_CONFIG)
    parts = args.parts(grid)
    assert str(grid) == "6x16,32,64,128,256,512,768"
    assert {name: weight for name, (weight, _) in parts.items()} == pytest.approx({"mrl": 0.4, "sia": 0.6, "pic": 0.6})
    mrl, sia, pic = (objective for _, objective in parts.values())
    assert (mrl.reduction, mrl.temperature, mrl.pooling) == ("sum", 0.05, "anchor")
    assert sia.layers == [1, 2, 3, 4, 5, 6] and sia.temperature == 0.05 and sia.smallest_token_count == 8
    assert sia.token_shares == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert str(pic.grid) == "1x16,2x32,3x64,4x256,5x512,6x768" and not pic.detach_target
    assert (pic.temperature, pic.pooling) == (0.05, "anchor")
    assert (args.learning_rate, args.max_length, args.num_train_epochs, args.per_device_train_batch_size) == (
        2e-5, 256, 5, 16,
    )  # fmt: skip
    assert args.lr_scheduler_type == "cosine" and args.unsupervised


def test_mic_is_what_its_paper_says(tmp_path):
    args = MICConfig(output_dir=str(tmp_path))
    grid = args.grid_for(BERT_CONFIG)
    parts = args.parts(grid)
    assert {name: weight for name, (weight, _) in parts.items()} == {"mrl": 1.0, "scr": 0.6, "sir": 0.6}
    mrl, scr, sir = (objective for _, objective in parts.values())
    assert mrl.reduction == "mean" and mrl.grid == grid
    assert scr.layers == sir.layers == [8, 10]
    assert (scr.threshold, scr.variance_weight, sir.scale, sir.pooling) == (0.1, 0.1, 2.0, "mean")
    assert sir.grid.dims == scr.grid.dims == [16, 32, 64, 128, 256, 512, 768]
    assert (args.learning_rate, args.max_length, args.num_train_epochs, args.per_device_train_batch_size) == (
        2e-5, 256, 5, 32,
    )  # fmt: skip
    assert args.lr_scheduler_type == "cosine" and args.unsupervised


@pytest.mark.parametrize(
    ("cls", "weights", "kinds"),
    [
        (MIPICConfig, {"sir": 0.3}, {Contrastive, SIA, PIC, SIR}),
        (MIPICConfig, '{"sia": 0}', {Contrastive, PIC}),
        (MIPICConfig, "{pic: 0}", {Contrastive, SIA}),
        (MICConfig, {"sir": 0}, {Contrastive, SCR}),
        (MICConfig, {"scr": 0}, {Contrastive, SIR}),
        (MICConfig, {"sia": 0.01, "mrl": 2.0}, {Contrastive, SCR, SIR, SIA}),
    ],
)
def test_every_mixture_is_a_config(tmp_path, cls, weights, kinds):
    args = cls(output_dir=str(tmp_path), weights=weights)
    parts = args.parts(args.grid_for(TINYBERT_CONFIG))
    assert {type(objective) for _, objective in parts.values()} == kinds
    if isinstance(weights, dict) and "sir" in weights and weights["sir"]:
        assert parts["sir"][0] == 0.3


def test_layers_and_chains_that_are_not_given(tmp_path):
    assert evenly_spaced(range(1, 13), 6) == [2, 4, 6, 8, 10, 12]
    assert evenly_spaced(range(1, 4), 7) == [1, 2, 3]
    assert str(chain(6, [16, 32, 64, 128, 256, 384])) == "1x16,2x32,3x64,4x128,5x256,6x384"
    assert str(chain(2, [8, 16, 32])) == "1x8,2x32"
    for depth in (1, 2, 3, 5, 28):
        for count in (1, 2, 7):
            dims = [2**power for power in range(3, 3 + count)]
            layers = evenly_spaced(range(1, depth + 1), count)
            assert layers == sorted(set(layers)) and layers[-1] == depth
            steps = list(chain(depth, dims))
            assert len(steps) == min(depth, count) and steps[-1].layer == depth


@pytest.mark.parametrize(("cls", "trainer_class"), [(MIPICConfig, MIPICTrainer), (MICConfig, MICTrainer)])
@pytest.mark.parametrize("unsupervised", [True, False])
def test_a_run_trains_every_part(tiny_tokenizer, tmp_path, sentences, cls, trainer_class, unsupervised):
    args = config(cls, tmp_path, grid="6x8,16,32", unsupervised=unsupervised, learning_rate=1e-3)
    model = quiet_model().model
    if unsupervised:
        model.config.attention_dropout = 0.1
        dataset = Dataset.from_dict({"text": sentences})
        trainer = trainer_class(model, args, tiny_tokenizer, dataset)
    else:
        trainer = trainer_of(trainer_class, args, tiny_tokenizer, sentences, model)
    before = weights(trainer.model)
    trainer.train()
    moved = {name for name, tensor in weights(trainer.model).items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if name.startswith("objective.")} <= moved
    assert any(name.startswith("backbone.layers.0.") for name in moved)
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    parts = {name.split("_")[0] for name in first if "_" in name and "x" in name.split("_")[-1]}
    assert parts == set(trainer.model.objective.parts) - {"mrl"} | {"contrastive"}


def test_projectors_are_checkpointed_and_not_published(tiny_tokenizer, tmp_path, sentences):
    changes = {"grid": "6x8,16,32", "save_strategy": "steps", "save_steps": 2, "projector_learning_rate": 1e-2}
    changes |= {"projector_warmup_steps": 2, "lr_scheduler_type": "linear"}
    args = config(MIPICConfig, tmp_path, **changes)
    trainer = trainer_of(MIPICTrainer, args, tiny_tokenizer, sentences)
    trainer.train()
    checkpoint = tmp_path / "checkpoint-2"
    assert (checkpoint / OBJECTIVE_FILE).is_file()
    resumed = trainer_of(MIPICTrainer, args, tiny_tokenizer, sentences)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same_weights(resumed.model, trainer.model)
    published = tmp_path / "published"
    trainer.save_model(str(published))
    assert not (published / OBJECTIVE_FILE).exists()
    with safe_open(published / "model.safetensors", "pt") as tensors:
        assert not [name for name in tensors.keys() if "project" in name or "objective" in name]


def test_projectors_have_a_learning_rate_and_a_warm_up_of_their_own(tiny_tokenizer, tmp_path, sentences):
    changes = {"learning_rate": 1e-4, "projector_learning_rate": 1e-2, "lr_scheduler_type": "linear"}
    changes |= {"warmup_steps": 0, "projector_warmup_steps": 0.5, "max_steps": 8, "weight_decay": 0.1}
    args = config(MIPICConfig, tmp_path, grid="6x8,16,32", **changes)
    trainer = trainer_of(MIPICTrainer, args, tiny_tokenizer, sentences)
    trainer.create_optimizer_and_scheduler(8)
    own = {id(parameter) for parameter in trainer.model.objective.parameters()}
    groups = trainer.optimizer.param_groups
    seen = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(id(parameter) for parameter in trainer.model.parameters()), "each of them once"
    rates: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(8):
        for group in groups:
            ours = {id(parameter) in own for parameter in group["params"]}
            assert len(ours) == 1
            if group["weight_decay"]:
                rates[ours.pop()].append(group["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    assert rates[False] == pytest.approx([1e-4 * (8 - step) / 8 for step in range(8)])
    warm = [1e-2 * step / 4 for step in range(4)] + [1e-2 * (8 - step) / 4 for step in range(4, 8)]
    assert rates[True] == pytest.approx(warm)
    decays = [{group["weight_decay"] for group in groups if id(group["params"][0]) in own}]
    assert decays == [{0.0, 0.1}], "biases of projectors do not decay"


def test_a_schedule_that_looks_at_losses_cannot_be_set_apart(tmp_path):
    optimizer = torch.optim.SGD([torch.zeros(1)])
    args = config(MIPICConfig, tmp_path, lr_scheduler_type="linear")
    with pytest.raises(ValueError, match="needs a schedule of the step"):
        warm_up_apart(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), args, 2, 8)


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (MIPICConfig, {"sia_layers": [2, 8]}, r"sia: .*layers 1..6 .* outside of it: 8x8, 8x32"),
        (MIPICConfig, {"pic_checkpoints": "2x8,9x32"}, r"pic: .*layers 1..6 .* outside of it: 9x32"),
        (MIPICConfig, {"pic_checkpoints": "2x32,6x8"}, "deeper and not shorter"),
        (MIPICConfig, {"sia_token_shares": [0.2, 0.3]}, "2 values for 1 dims"),
        (MIPICConfig, {"grid": "6x8,16"}, "full width of the model, 32|model's full width, 32"),
        (MICConfig, {"isotropy_layers": [7]}, r"scr: .*layers 1..6 .* outside of it: 7x8, 7x32"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_training(
    tiny_tokenizer, tmp_path, sentences, cls, changes, message
):
    args = config(cls, tmp_path, **{"grid": "6x8,32", **changes})
    trainer_class = MIPICTrainer if cls is MIPICConfig else MICTrainer
    with pytest.raises(ValueError, match=message):
        trainer_of(trainer_class, args, tiny_tokenizer, sentences)


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (MIPICConfig, {"alpha": 1.5}, "alpha=1.5 must be in 0..1"),
        (MICConfig, {"gamma": -0.1}, "gamma=-0.1 must not be negative"),
        (MICConfig, {"weights": {"sri": 0.1}}, "unknown parts: sri; legal values: mrl, sia, pic, scr, sir"),
        (MICConfig, {"weights": [1]}, "must map parts to numbers"),
        (MICConfig, {"projector_learning_rate": -1.0}, "projector_learning_rate=-1.0 must not be negative"),
        (MIPICConfig, {"per_device_train_batch_size": 1}, "leaves a contrastive loss without negatives"),
    ],
)
def test_configs_that_cannot_be(tmp_path, cls, changes, message):
    with pytest.raises(ValueError, match=message):
        config(cls, tmp_path, **changes)


def test_a_causal_backbone_trains_with_both(tiny_tokenizer, tmp_path, sentences):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 4, "num_attention_heads": 4}
    tiny = Qwen3Config(vocab_size=99, num_key_value_heads=2, head_dim=8, **sizes)
    for cls, trainer_class in ((MIPICConfig, MIPICTrainer), (MICConfig, MICTrainer)):
        args = config(cls, tmp_path, grid="4x8,32", max_steps=1, pooling="anchor")
        trainer = trainer_of(trainer_class, args, tiny_tokenizer, sentences, Qwen3Model(tiny))
        trainer.train()
        assert trainer.state.global_step == 1
