"""The baselines as their formulas say: SimCSE, ESE, 2DMSE, Starbucks; teachers detached, nothing patched."""

from __future__ import annotations

import itertools
import math

import peft
import pytest
import torch
import transformers
from datasets import Dataset
from torch.nn import functional

from modeling_m3bert import M3BertModel
from tests.conftest import padded_batch, tiny_config
from trainers import (
    Contrastive,
    ContrastiveConfig,
    ContrastiveTrainer,
    Espresso,
    EspressoConfig,
    EspressoTrainer,
    Grid,
    Matryoshka2d,
    Matryoshka2dConfig,
    Matryoshka2dTrainer,
    NestedBatch,
    NestedModel,
    PooledStates,
    SimCSE,
    SimCSEConfig,
    SimCSETrainer,
    Starbucks,
    StarbucksConfig,
    StarbucksTrainer,
)
from trainers.embedding import has_dropout


TAU = 0.1
WIDTH, LAYERS = 8, (1, 2, 3)


def batch_of(leaves: dict[int, list[torch.Tensor]]) -> NestedBatch:
    names = ("anchor", "positive", "negative")
    states = [PooledStates({layer: leaves[layer][column] for layer in leaves}, "mean") for column in range(3)]
    return NestedBatch(texts=dict(zip(names, states, strict=True)))


@pytest.fixture
def leaves() -> dict[int, list[torch.Tensor]]:
    """Embeddings of three columns of texts at three layers."""
    return {
        layer: [torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3)] for layer in LAYERS
    }


def info_nce(columns: list[torch.Tensor], dim: int) -> torch.Tensor:
    anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
    return functional.cross_entropy(anchors @ torch.cat(others).T / TAU, torch.arange(len(anchors)))


def kl(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """Mean over rows of KL(softmax(teacher) || softmax(student))."""
    p, q = teacher.detach().softmax(dim=1), student.softmax(dim=1)
    return (p * (p.log() - q.log())).sum(dim=1).mean()


def assert_same(objective, leaves, expected):
    """The loss of an objective, and its gradient in every embedding."""
    loss = objective.total(objective(batch_of(leaves)))
    torch.testing.assert_close(loss, expected)
    inputs = [leaf for columns in leaves.values() for leaf in columns]
    actual, wanted = (torch.autograd.grad(x, inputs, materialize_grads=True) for x in (loss, expected))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-5)


def test_simcse_is_the_loss_of_the_full_size(leaves):
    assert_same(SimCSE(Grid.parse("3x8"), temperature=TAU), leaves, info_nce(leaves[3], 8))


@pytest.mark.parametrize("weighting", ["log", "uniform"])
def test_espresso(leaves, weighting):
    def align(columns, dim):
        everything = torch.cat(columns)
        teacher = everything.detach()
        u, s, _ = torch.linalg.svd(torch.softmax(teacher.T @ teacher / math.sqrt(WIDTH), dim=1))
        basis = u @ torch.diag(s)
        basis = basis * torch.sign(basis.gather(0, basis.abs().argmax(dim=0, keepdim=True)))
        target, student = (teacher @ basis)[:, :dim], everything[:, :dim]
        return functional.mse_loss(student, target) + kl(target, student)

    expected = info_nce(leaves[3], 8) + info_nce(leaves[3], 2) + align(leaves[3], 2)
    for layer in (1, 2):
        weight = 1 / (1 + math.log(layer)) if weighting == "log" else 1.0
        one = info_nce(leaves[layer], 2) + align(leaves[layer], 2)
        expected = expected + weight * one / 2
    grid = Grid.parse("1x2,2x2,3x2,3x8")
    assert_same(Espresso(grid, temperature=TAU, layer_weighting=weighting), leaves, expected)


def test_espresso_components_carry_no_gradient(leaves):
    """The alignment reaches the first dims only: what makes the components stands still."""
    terms = Espresso(Grid.parse("1,3x2,8"), temperature=TAU)(batch_of(leaves))
    (gradient,) = torch.autograd.grad(terms["espresso_align_1x2"], leaves[1][0])
    assert gradient[:, :2].abs().sum() > 0
    assert torch.equal(gradient[:, 2:], torch.zeros_like(gradient[:, 2:]))


def expected_2dmse(leaves, layer, dim, temperature=0.3):
    student, teacher = torch.cat(leaves[layer]), torch.cat(leaves[3])
    alignment = sum(
        temperature * kl(teacher[:, :width] / temperature, student[:, :width] / temperature) for width in (dim, 8)
    )
    parts = (
        info_nce(leaves[3], 8),
        info_nce(leaves[3], dim),
        info_nce(leaves[layer], 8),
        info_nce(leaves[layer], dim),
    )
    return sum(parts) + 2.0 * alignment


def test_2dmse_draws_a_layer_and_a_dim(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).train()
    every = {(layer, dim): expected_2dmse(leaves, layer, dim).item() for layer in (1, 2) for dim in (2, 4)}
    drawn = set()
    for _ in range(40):
        loss = objective.total(objective(batch_of(leaves))).item()
        drawn.add(min(every, key=lambda choice: abs(every[choice] - loss)))
        assert min(abs(value - loss) for value in every.values()) < 1e-9
    assert drawn == set(every)


def test_2dmse_averages_over_all_draws_in_evaluation(leaves):
    objective = Matryoshka2d(Grid.parse("1,2,3x2,4,8"), temperature=TAU, kl_weight=2.0).eval()
    expected = sum(expected_2dmse(leaves, layer, dim) for layer in (1, 2) for dim in (2, 4)) / 4
    assert_same(objective, leaves, expected)


def test_starbucks(leaves):
    expected = torch.zeros((), dtype=torch.float64)

    def scores(columns, dim):
        anchors, *others = (functional.normalize(column[:, :dim], dim=1) for column in columns)
        return anchors @ torch.cat(others).T / TAU

    for layer, dim in ((1, 2), (2, 4), (3, 8)):
        expected = expected + info_nce(leaves[layer], dim)
        if layer < 3:
            expected = expected + 0.5 * kl(scores(leaves[3], 8), scores(leaves[layer], dim))
    assert_same(Starbucks(Grid.parse("1x2,2x4,3x8"), temperature=TAU, kl_weight=0.5), leaves, expected)


@pytest.mark.parametrize(
    ("objective", "term", "teacher"),
    [
        (Espresso(Grid.parse("1,3x2,8")), "espresso_align_1x2", 3),
        (Matryoshka2d(Grid.parse("1,3x2,8")), "2dmse_align", 3),
        (Starbucks(Grid.parse("1x2,3x8")), "starbucks_kl_1x2", 3),
    ],
)
def test_teachers_get_no_gradient(leaves, objective, term, teacher):
    loss = objective(batch_of(leaves))[term]
    gradients = torch.autograd.grad(loss, [*leaves[teacher], *leaves[1]], allow_unused=True)
    assert all(gradient is None for gradient in gradients[:3])
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients[3:])


def test_the_order_of_dims_and_layers_does_not_matter(leaves):
    for make in (Contrastive, Espresso, Matryoshka2d):
        terms = []
        for text in itertools.product(("1,3", "3,1"), ("2,4,8", "8,2,4", "4,8,2")):
            torch.manual_seed(0)
            terms.append(make(Grid.parse("x".join(text)))(batch_of(leaves)))
        assert all(other == terms[0] for other in terms[1:])
    grids = ("1x2,2x4,3x8", "3x8,1x2,2x4")
    terms = [Starbucks(Grid.parse(grid))(batch_of(leaves)) for grid in grids]
    assert terms[0] == terms[1]


def test_a_mean_over_the_grid_is_the_sum_divided(leaves):
    grid, totals = Grid.parse("1,3x2,8"), {}
    for reduction in ("sum", "mean"):
        objective = Contrastive(grid, reduction=reduction)
        totals[reduction] = objective.total(objective(batch_of(leaves)))
    torch.testing.assert_close(totals["sum"], 4 * totals["mean"])


def test_both_directions(leaves):
    objective = Contrastive(Grid.parse("3x8"), temperature=TAU, symmetric=True)
    anchors, positives, _ = leaves[3]
    assert_same(objective, leaves, (info_nce(leaves[3], 8) + info_nce([positives, anchors], 8)) / 2)


def test_equal_texts_are_no_negatives(leaves):
    """Anchors 0 and 3 have the same positive, anchors 1 and 2 are the same text, a negative is 4's positive."""
    anchors, positives, negatives = leaves[3]
    ids = {"anchor": [10, 11, 11, 13, 14], "positive": [20, 21, 22, 20, 24], "negative": [30, 24, 32, 33, 34]}
    batch = NestedBatch(
        texts=batch_of(leaves).texts, text_ids={name: torch.tensor(value) for name, value in ids.items()}
    )
    rows, columns = (functional.normalize(x, dim=1) for x in (anchors, torch.cat([positives, negatives])))
    scores = rows @ columns.T / TAU
    for row, column in ((0, 3), (3, 0), (1, 2), (2, 1), (4, 6)):
        scores[row, column] = -torch.inf
    expected = functional.cross_entropy(scores, torch.arange(5))
    masked, unmasked = (
        Contrastive(Grid.parse("3x8"), temperature=TAU, mask_duplicates=mask)(batch)["contrastive_3x8"]
        for mask in (True, False)
    )
    torch.testing.assert_close(masked, expected)
    torch.testing.assert_close(unmasked, info_nce(leaves[3], 8))
    backwards = functional.normalize(positives, dim=1) @ rows.T / TAU
    for row, column in ((0, 3), (3, 0), (1, 2), (2, 1)):
        backwards[row, column] = -torch.inf
    expected = (expected + functional.cross_entropy(backwards, torch.arange(5))) / 2
    both = Contrastive(Grid.parse("3x8"), temperature=TAU, symmetric=True)(batch)["contrastive_3x8"]
    torch.testing.assert_close(both, expected)


def test_a_learned_temperature(leaves):
    objective = Contrastive(Grid.parse("3x8"), temperature=TAU, learn_temperature=True)
    loss = objective.total(objective(batch_of(leaves)))
    scale = torch.tensor(-math.log(TAU), dtype=torch.float64, requires_grad=True)
    anchors, *others = (functional.normalize(column, dim=1) for column in leaves[3])
    expected = functional.cross_entropy(anchors @ torch.cat(others).T * scale.exp(), torch.arange(5))
    torch.testing.assert_close(loss, expected)
    (actual,), (wanted,) = torch.autograd.grad(loss, objective.log_scale), torch.autograd.grad(expected, scale)
    torch.testing.assert_close(actual.double(), wanted)
    with torch.no_grad():
        objective.log_scale.fill_(9.0)
    assert objective.temperature.item() == pytest.approx(0.01)
    (back,) = torch.autograd.grad(objective.total(objective(batch_of(leaves))), objective.log_scale)
    assert back != 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimCSE(Grid.parse("2x4,8")), r"SimCSE trains one granularity, and the grid 2x4,8 has 2"),
        (lambda: Matryoshka2d(Grid.parse("2,3x8")), "2DMSE needs layers x dims, two of each or more; the grid is"),
        (lambda: Matryoshka2d(Grid.parse("1x2,2x8,3x8")), "2DMSE needs layers x dims"),
        (lambda: Matryoshka2d(Grid.parse("2,3x4,8"), kl_temperature=0), "kl_temperature=0 must be above 0"),
        (lambda: Starbucks(Grid.parse("2,3x4,8")), "sizes that grow in layer and dim together.*got 2,3x4,8"),
        (lambda: Starbucks(Grid.parse("2x8,3x4")), "sizes that grow in layer and dim together"),
        (lambda: Espresso(Grid.parse("3x8"), layer_weighting="linear"), "legal values: log, uniform"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


RUNS = {
    "simcse": (SimCSEConfig, SimCSETrainer, {"unsupervised": False}, ["simcse_6x32"]),
    "unsupervised": (SimCSEConfig, SimCSETrainer, {"text_columns": ["query"]}, ["simcse_6x32"]),
    "espresso": (EspressoConfig, EspressoTrainer, {"grid": "2,6x8,32"}, ["espresso_2x8", "espresso_align_6x8"]),
    "2dmse": (Matryoshka2dConfig, Matryoshka2dTrainer, {"grid": "2,6x8,32"}, ["2dmse_align", "2dmse_prior_full"]),
    "starbucks": (StarbucksConfig, StarbucksTrainer, {"grid": "2x8,6x32"}, ["starbucks_2x8", "starbucks_kl_2x8"]),
}


def run(name, model, tokenizer, sentences, folder, **changes):
    config_class, trainer_class, settings, _ = RUNS[name]
    dataset = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    args = config_class(
        output_dir=str(folder), max_steps=2, learning_rate=1e-3, per_device_train_batch_size=8,
        per_device_eval_batch_size=8, logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        disable_tqdm=True, **{**settings, **changes},
    )  # fmt: skip
    return trainer_class(model, args, tokenizer, dataset, eval_dataset=dataset)


@pytest.mark.parametrize("mini_batch_size", [None, 3])
@pytest.mark.parametrize("name", list(RUNS))
def test_every_objective_trains_and_leaves_the_model_its_own(
    tiny_tokenizer, sentences, tmp_path, name, mini_batch_size
):
    model = M3BertModel(tiny_config())
    before = {n: p.clone() for n, p in model.named_parameters()}
    trainer = run(name, model, tiny_tokenizer, sentences, tmp_path, mini_batch_size=mini_batch_size)
    trainer.train()
    assert all(not torch.equal(parameter, before[n]) for n, parameter in model.named_parameters())
    assert set(RUNS[name][3]) <= set(trainer.state.log_history[0])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"])
    assert model.forward.__func__ is M3BertModel.forward


def test_dropout_is_looked_for_in_the_encoder_and_its_adapter():
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, **quiet, classifier_dropout=0.1)
    assert not has_dropout(transformers.BertForSequenceClassification(config)), "the head's is no view of a text"
    lora = peft.LoraConfig(target_modules=["query"], lora_dropout=0.1)
    assert has_dropout(peft.get_peft_model(transformers.BertModel(config), lora))
    config.attention_probs_dropout_prob = 0.1
    assert has_dropout(transformers.BertModel(config))


def test_two_views_of_a_text_need_dropout(tiny_tokenizer, sentences, tmp_path):
    quiet = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0))
    with pytest.raises(ValueError, match="M3BertModel has no dropout .* two views of a text would be the same"):
        run("unsupervised", quiet, tiny_tokenizer, sentences, tmp_path)
    bert = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=6, num_attention_heads=4
        )
    )
    trainer = run("unsupervised", bert, tiny_tokenizer, sentences, tmp_path)
    views = trainer.data_collator([{"query": text} for text in sentences[:4]])
    assert list(views) == ["query", "query (view 2)"]
    model = trainer.model.train()
    states = [model.encode(view).pooled(6) for view in views.values()]
    assert not torch.allclose(*states)
    with pytest.raises(ValueError, match="takes one text column; found: query, answer"):
        run("unsupervised", bert, tiny_tokenizer, sentences, tmp_path, text_columns=None)


@pytest.mark.parametrize("name", ["espresso", "2dmse", "starbucks"])
def test_the_teacher_must_be_in_the_grid(tiny_tokenizer, sentences, tmp_path, name):
    grid = "2x8,4x32" if name == "starbucks" else "2,4x8,32"
    with pytest.raises(ValueError, match="needs the full size 6x32: it is the teacher of the others"):
        run(name, M3BertModel(tiny_config()), tiny_tokenizer, sentences, tmp_path, grid=grid)


def test_a_learned_temperature_trains_without_decay_and_is_not_published(tiny_tokenizer, sentences, tmp_path):
    dataset = Dataset.from_dict({"query": sentences[:24], "answer": sentences[24:]})
    args = ContrastiveConfig(
        output_dir=str(tmp_path), grid="6x8,32", max_steps=2, learning_rate=1e-3, per_device_train_batch_size=8,
        learn_temperature=True, report_to="none", save_steps=2, use_cpu=True, disable_tqdm=True, weight_decay=0.1,
    )  # fmt: skip
    trainer = ContrastiveTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, dataset)
    assert "objective.log_scale" not in trainer.get_decay_parameter_names(trainer.model)
    trainer.train()
    trained = trainer.model.objective.log_scale.item()
    assert trained != pytest.approx(-math.log(0.05), abs=1e-6)
    assert (tmp_path / "checkpoint-2" / "objective.safetensors").is_file()
    trainer.save_model()
    assert not (tmp_path / "objective.safetensors").is_file()
    again = ContrastiveTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, dataset)
    again._load_from_checkpoint(str(tmp_path / "checkpoint-2"))
    assert again.model.objective.log_scale.item() == trained


def test_what_stands_in_an_error_is_what_was_given(tiny_model):
    model, texts = NestedModel(tiny_model, Starbucks(Grid.parse("2x8,6x32"))), padded_batch(lengths=(3,))
    with pytest.raises(ValueError, match="a batch of one pair without hard negatives"):
        model(a=texts, b=texts)
    with pytest.raises(ValueError, match="two text columns or more; got text"):
        model(**padded_batch())
