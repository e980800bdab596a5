"""Mixtures of a contrastive loss and regularisers as trainers, and the losses of every method."""

import json
from copy import deepcopy
from itertools import combinations

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, Qwen3Config, Qwen3Model

from benchmarks.method_values import TAUGHT, values_of
from m3bert.evaluation import GridEncoder
from m3bert.trainers import (
    METHODS,
    PIC,
    SCR,
    SIA,
    SIR,
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    Grid,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
)
from tests.conftest import WORDS, quiet, refused
from tests.snippets import ROOT
from tests.trainers.tiny_run import pair_config, pair_trainer, quiet_model, weights


TINYBERT_CONFIG = BertConfig(num_hidden_layers=6)
BERT_CONFIG = BertConfig()


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
    args = cls(**quiet(tmp_path, weights=weights))
    objective = args.build_objective(args.grid_for(TINYBERT_CONFIG))
    assert {type(part) for part in objective.parts.values()} == kinds
    if isinstance(weights, dict) and weights.get("sir"):
        assert objective.weights["sir"] == 0.3


@pytest.mark.parametrize(
    ("changes", "of_pic"),
    [
        ({}, {}),
        ({"pooling": "mean", "temperature": 0.1, "mask_duplicates": False}, {}),
        ({"pooling": "mean", "temperature": 0.1}, {"pooling": "cls", "temperature": 0.2, "mask_duplicates": False}),
    ],
)
def test_parts_share_arguments_unless_they_name_others(tmp_path, changes, of_pic):
    args = MIPICConfig(**quiet(tmp_path, weights={"sir": 0.3}, pic=of_pic, **changes))
    parts = args.build_objective(args.grid_for(TINYBERT_CONFIG)).parts
    shared = {"pooling": "cls", "temperature": 0.05, "mask_duplicates": True} | changes
    assert {name: getattr(parts["mrl"], name) for name in shared} == shared
    assert {name: getattr(parts["pic"], name) for name in shared} == shared | of_pic
    assert (parts["sir"].pooling, parts["sia"].temperature) == (shared["pooling"], shared["temperature"])


@pytest.mark.parametrize(("cls", "trainer_class"), [(MIPICConfig, MIPICTrainer), (MICConfig, MICTrainer)])
@pytest.mark.parametrize("unsupervised", [True, False])
def test_a_run_trains_every_part(tiny_tokenizer, tmp_path, sentences, cls, trainer_class, unsupervised):
    args = pair_config(cls, tmp_path, grid="6x8,16,32", unsupervised=unsupervised, learning_rate=1e-3)
    model = quiet_model().model
    if unsupervised:
        model.config.attention_dropout = 0.1
        dataset = Dataset.from_dict({"text": sentences})
        trainer = trainer_class(model, args, tiny_tokenizer, dataset)
    else:
        trainer = pair_trainer(trainer_class, args, tiny_tokenizer, sentences, model)
    before = weights(trainer.model)
    trainer.train()
    moved = {name for name, tensor in weights(trainer.model).items() if not torch.equal(tensor, before[name])}
    assert {name for name in before if name.startswith("objective.")} <= moved
    assert any(name.startswith("backbone.layers.0.") for name in moved)
    first = next(entry for entry in trainer.state.log_history if "loss" in entry)
    parts = {name.split("_")[0] for name in first if "_" in name and "x" in name.split("_")[-1]}
    assert parts == set(trainer.model.objective.parts), "each logs under its own name"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sia": {"layers": [2, 8]}}, r"sia: .*layers 1..6 .* outside of it: 8x8, 8x32"),
        ({"grid": "6x8,16"}, "must be the model's hidden size, 32"),
    ],
)
def test_what_the_model_does_not_have_is_refused_before_training(
    tiny_tokenizer, tmp_path, sentences, changes, message
):
    args = pair_config(MIPICConfig, tmp_path, **{"grid": "6x8,32", **changes})
    with pytest.raises(ValueError, match=message):
        pair_trainer(MIPICTrainer, args, tiny_tokenizer, sentences)


def test_unknown_parts_and_arguments_are_refused(tmp_path):
    legal = "weights has unknown keys: sri; legal values: mrl, sia, pic, scr, sir"
    refused(legal, pair_config, MICConfig, tmp_path, weights={"sri": 0.1})
    legal = "sia has unknown keys: tau; legal values: layers, temperature, "
    refused(legal, pair_config, MIPICConfig, tmp_path, sia={"tau": 1.0})


def test_a_causal_backbone_trains_with_both(tiny_tokenizer, tmp_path, sentences):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 4, "num_attention_heads": 4}
    tiny = Qwen3Config(vocab_size=99, num_key_value_heads=2, head_dim=8, **sizes)
    for cls, trainer_class in ((MIPICConfig, MIPICTrainer), (MICConfig, MICTrainer)):
        chained = {"pic": {"pooling": "lasttoken"}} if cls is MIPICConfig else {}
        args = pair_config(cls, tmp_path, grid="4x8,32", max_steps=1, pooling="lasttoken", **chained)
        trainer = pair_trainer(trainer_class, args, tiny_tokenizer, sentences, Qwen3Model(tiny))
        trainer.train()
        assert trainer.state.global_step == 1


def test_arguments_of_a_part_reach_it(tmp_path):
    grid = Grid.parse("6x8,32")
    sia = pair_config(MIPICConfig, tmp_path, sia="{layers: [2, 6], temperature: 1.0}")
    sia = sia.build_objective(grid).parts["sia"]
    assert (sia.layers, sia.temperature) == ([2, 6], 1.0)
    pic = pair_config(MIPICConfig, tmp_path, pic={"chain": "2x8,6x32", "detach_target": True})
    pic = pic.build_objective(grid).parts["pic"]
    assert (str(pic.grid), pic.detach_target, pic.pooling) == ("2x8,6x32", True, "cls")
    mic = pair_config(MICConfig, tmp_path, scr={"layers": [1], "threshold": 0.3}, sir={"layers": [3], "scale": 1.0})
    mic = mic.build_objective(grid).parts
    assert (mic["scr"].layers, mic["scr"].threshold) == ([1], 0.3)
    assert (mic["sir"].layers, mic["sir"].scale) == ([3], 1.0)


def test_the_sizes_of_mic_are_those_of_its_paper(tmp_path):
    args = MICConfig(**quiet(tmp_path)).with_settings(None, BERT_CONFIG.max_position_embeddings)
    grid = args.grid_for(BERT_CONFIG)
    objective = args.build_objective(grid)
    mrl, scr, sir = objective.parts.values()
    assert mrl.reduction == "mean" and mrl.grid == grid
    assert scr.layers == sir.layers == [8, 10]
    assert sir.grid.dims == scr.grid.dims == [16, 32, 64, 128, 256, 512, 768]


def test_the_sizes_of_mipic_are_those_of_its_paper(tmp_path):
    args = MIPICConfig(**quiet(tmp_path)).with_settings(None, TINYBERT_CONFIG.max_position_embeddings)
    grid = args.grid_for(TINYBERT_CONFIG)
    objective = args.build_objective(grid)
    assert str(grid) == "6x16,32,64,128,256,512,768"
    _, sia, pic = objective.parts.values()
    assert sia.layers == [1, 2, 3, 4, 5, 6]
    assert sia.token_shares == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert str(pic.grid) == "1x16,2x32,3x64,4x256,5x512,6x768" and not pic.detach_target


def test_projectors_have_a_learning_rate_of_their_own(tiny_tokenizer, tmp_path, sentences):
    changes = {"learning_rate": 1e-4, "projector_learning_rate": 1e-2, "weight_decay": 0.1}
    args = pair_config(MIPICConfig, tmp_path, grid="6x8,16,32", **changes)
    trainer = pair_trainer(MIPICTrainer, args, tiny_tokenizer, sentences)
    groups = trainer.create_optimizer().param_groups
    own = {id(parameter) for parameter in trainer.model.objective.parameters()}
    seen = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(id(parameter) for parameter in trainer.model.parameters()), "each of them once"
    for group in groups:
        (ours,) = {id(parameter) in own for parameter in group["params"]}
        assert group["lr"] == (1e-2 if ours else 1e-4)
    decays = {group["weight_decay"] for group in groups if id(group["params"][0]) in own}
    assert decays == {0.0, 0.1}, "biases of projectors do not decay"


GOLDEN = json.loads((ROOT / "tests" / "frozen" / "method_values.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("method", METHODS)
def test_a_method_has_the_losses_and_weights_that_it_had(method, tmp_path):
    *losses, total, norm = values_of(method, tmp_path)
    *expected, expected_total, expected_norm = GOLDEN[method]
    tolerance = 1e-3 if method in TAUGHT else 1e-5  # in float32, or in float64 with losses logged in float32
    assert losses == pytest.approx(expected, rel=tolerance)
    assert norm == pytest.approx(expected_norm, rel=tolerance)
    assert total == pytest.approx(expected_total, abs=tolerance * expected_norm)


HALF = len(WORDS) // 2
# A text and its translation, word by word, into words that the text does not have.
PAIRS = [
    (" ".join(WORDS[i] for i in four), " ".join(WORDS[HALF + i] for i in four))
    for four in combinations(range(HALF), 4)
]
TRAINED, HELD_OUT = [pair for row, pair in enumerate(PAIRS) if row % 8], PAIRS[::8]
LEARNERS = {
    "mrl": (ContrastiveConfig, ContrastiveTrainer, "1,2x8,32", 40),
    "mipic": (MIPICConfig, MIPICTrainer, "2x8,32", 80),
    "mic": (MICConfig, MICTrainer, "2x8,32", 40),
}


def found(model, tokenizer, size: str) -> float:
    """The share of held-out texts whose nearest translation is their own."""
    encoder = GridEncoder(model, tokenizer, Grid.parse(size))
    texts, translations = (
        encoder.encode(list(side)).at(encoder.grid.full, normalize=True) for side in zip(*HELD_OUT, strict=True)
    )
    nearest = (texts @ translations.T).argmax(dim=1)
    return float((nearest == nearest.new_tensor(range(len(nearest)))).float().mean())


@pytest.mark.parametrize("name", LEARNERS)
def test_small_sizes_improve_on_held_out_pairs(name, tiny_tokenizer, tmp_path):
    config_class, trainer_class, grid, steps = LEARNERS[name]
    model = quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]).model
    sizes = [str(g) for g in Grid.parse(grid)][:-1]
    before = {size: found(deepcopy(model), tiny_tokenizer, size) for size in sizes}
    args = config_class(
        **quiet(tmp_path, grid=grid, max_steps=steps, learning_rate=5e-3, per_device_train_batch_size=16),
        unsupervised=False,
    )
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*TRAINED, strict=True)), strict=True)))
    trainer_class(model, args, tiny_tokenizer, rows).train()
    after = {size: found(model, tiny_tokenizer, size) for size in sizes}
    chance = 1 / len(HELD_OUT)
    assert all(value < 3 * chance for value in before.values()), before
    assert all(value > 6 * chance for value in after.values()), after
