"""Matryoshka distillation as an objective and a trainer; its kernel is in losses/test_divergence.py."""

import pytest
import torch
from datasets import Dataset

from m3bert import trainers
from tests.conftest import assert_close, quiet, refused
from tests.trainers.m3bert_mlm.test_divergence import naive as naive_head
from tests.trainers.tiny_run import (
    GRID,
    PLAIN_STEP,
    assert_same_weights,
    masked_dataset,
    mlm_trainer,
    named,
    quiet_model,
    run_two,
    weights,
)


def batch() -> dict[str, torch.Tensor]:
    row = masked_dataset()[7]
    return {name: torch.tensor([row[name]]) for name in ("input_ids", "labels")}


def naive(model, pairs, weight, temperature, reverse):
    """Terms and total from whole logits, a granularity at a time."""
    inputs = batch()
    masked = inputs["labels"] != -100
    outputs = model.model(inputs["input_ids"], output_hidden_states=True)
    states = {2: model.model.norm(outputs.hidden_states[2])[masked], 6: outputs.last_hidden_state[masked]}
    head, targets = model.get_output_embeddings(), inputs["labels"][masked]
    places = [tuple(((2, 6).index(layer), (8, 32).index(dim)) for layer, dim in pair) for pair in pairs]
    losses, divergences = naive_head(
        torch.stack(list(states.values())), head.weight, head.bias, targets, places, reverse, temperature, (8, 32)
    )
    return losses.mean(dim=1).sum() + weight * divergences.mean(dim=1).sum()


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("6x32>all", [((2, 8), (6, 32)), ((2, 32), (6, 32)), ((6, 8), (6, 32))]),
        ("6x32>2x32; 6x8>2x8", [((2, 32), (6, 32)), ((2, 8), (6, 8))]),
    ],
)
def test_loss_and_gradients_are_those_of_whole_logits(text, pairs, direction):
    model = quiet_model()
    objective = trainers.MatryoshkaDistillation(
        GRID, pairs=text, distillation_weight=0.7, distillation_temperature=2.0, distillation_direction=direction
    )
    loss = trainers.NestedModel(model, objective)(**batch())["loss"]
    expected = naive(model, pairs, 0.7, 2.0, direction == "reverse")
    torch.testing.assert_close(loss, expected)
    parameters = list(model.parameters())
    for actual, value in zip(
        torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True),
        torch.autograd.grad(expected, parameters, materialize_grads=True, allow_unused=True),
        strict=True,
    ):
        assert_close(actual, value)


def test_the_papers_values_are_the_defaults_and_terms_have_names():
    objective = trainers.MatryoshkaDistillation(GRID, pairs="6x32>2x8")
    assert (objective.weight, objective.temperature, objective.direction) == (1.0, 1.0, "reverse")
    terms = named(trainers.NestedModel(quiet_model(), objective)(**batch())["terms"])
    assert list(terms) == ["mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32", "mlm_kl_6x32>2x8"]
    plain = trainers.NestedModel(quiet_model(), trainers.MultigranularMLM(GRID))(**batch())
    torch.testing.assert_close(sum(terms.values()) - terms["mlm_kl_6x32>2x8"], plain["loss"])
    assert terms["mlm_kl_6x32>2x8"] > 0


def trainer(model, tokenizer, sentences, folder, **changes) -> trainers.MatryoshkaDistillationTrainer:
    values = {"pairs": "6x32>2x8", "grid": "2,6x8,32", "max_steps": 3, "warmup_steps": 0, "learning_rate": 1e-3}
    values |= {"per_device_train_batch_size": 8, "logging_steps": 1}
    args = trainers.MatryoshkaDistillationConfig(**quiet(folder, **{**values, **changes}))
    texts = Dataset.from_dict({"input_ids": tokenizer(sentences)["input_ids"], "unused": list(sentences)})
    return trainers.MatryoshkaDistillationTrainer(model, args, tokenizer, texts)


def test_random_weights_are_refused_unless_told(tiny_tokenizer, sentences, tmp_path):
    model = quiet_model()
    before = weights(model)
    with pytest.raises(ValueError, match=r"teacher 6x32 .* loss of \d.*; a uniform guess has 4.60.*allow_untrained"):
        trainer(model, tiny_tokenizer, sentences, tmp_path).train()
    assert all(before[name].equal(tensor) for name, tensor in weights(model).items())
    told = trainer(model, tiny_tokenizer, sentences, tmp_path, allow_untrained_teacher=True)
    told.train()
    assert "mlm_kl_6x32>2x8" in told.state.log_history[0]


def test_a_trained_teacher_may_teach_and_the_student_comes_to_agree(tiny_tokenizer, sentences, tmp_path):
    model = quiet_model()
    first = trainer(
        model, tiny_tokenizer, sentences, tmp_path, allow_untrained_teacher=True, max_steps=40, learning_rate=3e-3
    )
    first.train()
    agreeing = trainer(
        model, tiny_tokenizer, sentences, tmp_path, max_steps=60, learning_rate=3e-3, distillation_weight=20.0
    )
    agreeing.train()
    divergences = [entry["mlm_kl_6x32>2x8"] for entry in agreeing.state.log_history if "loss" in entry]
    assert sum(divergences[-10:]) < 0.7 * sum(divergences[:10])


def test_looking_at_the_teacher_changes_nothing(tiny_tokenizer, sentences, tmp_path):
    """Neither the random state nor the mode of the model."""
    model = quiet_model()
    ready = trainer(model, tiny_tokenizer, sentences, tmp_path, grid="2,6x8,32")
    with torch.no_grad():  # a head whose guess is always the commonest words: better than a uniform guess
        head = model.get_output_embeddings()
        head.bias.fill_(-9)
        head.bias[5:40] = 0
        head.weight.mul_(0.01)
    state = torch.random.get_rng_state()
    model.train()
    ready.require_trained_teachers()
    assert torch.random.get_rng_state().equal(state)
    assert model.training


def test_pairs_and_a_known_direction_are_needed(tiny_tokenizer, sentences, tmp_path):
    options = {"pairs": "6x32>2x8", "distillation_direction": "both"}
    message = "distillation_direction='both' is unknown; legal values: reverse, forward"
    refused(message, trainers.MatryoshkaDistillation, GRID, **options)
    refused("needs pairs='teacher>student'", trainer, quiet_model(), tiny_tokenizer, sentences, tmp_path, pairs=None)


def step(tokenizer, folder, batch_size, **changes):
    """One step of plain gradient descent on sixteen texts whose labels are made."""
    return mlm_trainer(
        tokenizer, folder, objective=trainers.MatryoshkaDistillation(GRID, pairs="6x32>all"),
        per_device_train_batch_size=batch_size, **PLAIN_STEP, **changes,
    )  # fmt: skip


STEP_OF_TWO = """
from tests.conftest import tiny_tokenizer
from tests.trainers.m3bert_mlm.test_matryoshka_distillation import step
from tests.trainers.tiny_run import assert_terms_sum_to_the_loss
changes = {"gradient_accumulation_steps": 2, "ddp_backend": "gloo"}
trainer = step(tiny_tokenizer.__wrapped__(), Path(sys.argv[1]) / "two", 4, **changes)
assert trainer.accelerator.num_processes == 2
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    assert_terms_sum_to_the_loss(trainer)
"""


def test_a_step_of_two_processes_and_accumulated_batches_are_the_big_batch(tiny_tokenizer, tmp_path):
    big = step(tiny_tokenizer, tmp_path, 16)
    big.train()
    run_two(tmp_path, STEP_OF_TWO)
    assert_same_weights(type(big.backbone).from_pretrained(tmp_path / "two"), big.backbone)
    accumulated = step(tiny_tokenizer, tmp_path, 4, gradient_accumulation_steps=4)
    accumulated.train()
    assert_same_weights(accumulated.backbone, big.backbone)
