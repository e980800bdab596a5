"""Batches encoded in mini-batches with cached gradients: the same step, for the activations of one mini-batch."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from m3bert.encode.padded_batches import PassCost
from m3bert.encode.states import nested_states
from m3bert.modeling import M3BertModel
from m3bert.trainers import Contrastive, ContrastiveConfig, ContrastiveTrainer, Grid, MultigranularMLM, NestedModel
from m3bert.trainers.core.column_states import column_states
from tests.conftest import padded_batch, quiet, refused, tiny_config
from tests.trainers.tiny_run import GRID, PLAIN_STEP, assert_same_weights, quiet_model


LENGTHS = (7, 3, 1, 5, 9, 2, 0)


def pooled(model: torch.nn.Module, inputs: dict[str, torch.Tensor], layers: list[int], mini_batch_size: int):
    """The states of one column, encoded in mini-batches."""
    return column_states(model, {"text": inputs}, layers, "mean", mini_batch_size)["text"]


def columns(lengths: tuple[int, ...] = LENGTHS) -> dict[str, dict[str, torch.Tensor]]:
    return {name: padded_batch(lengths=lengths) for name in ("anchor", "positive", "negative")}


def gradients(model: torch.nn.Module, loss: torch.Tensor) -> list[torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("pooling", "mini_batch_size"), [("mean", 1), ("mean", 3), ("mean", 100), ("cls", 3), ("lasttoken", 3)]
)
def test_values_and_gradients_are_those_of_the_whole_batch(tiny_model, mini_batch_size, pooling):
    # A text without a token has no last one.
    texts, model = columns(LENGTHS if pooling != "lasttoken" else LENGTHS[:-1]), tiny_model.double()
    objective = Contrastive(Grid.parse("2,4x8,32"), temperature=0.1, pooling=pooling)
    whole, cached = NestedModel(model, objective), NestedModel(model, objective, mini_batch_size)
    expected, actual = whole(**texts), cached(**texts)
    for term, value in expected["terms"].items():
        torch.testing.assert_close(actual["terms"][term], value)
    asked, ours = (gradients(model, outputs["loss"]) for outputs in (expected, actual))
    # Layers 5 and 6 take no part, and must not get a gradient of zeros: an optimizer would decay them.
    assert [gradient is None for gradient in ours] == [gradient is None for gradient in asked]
    assert any(gradient is None for gradient in ours)
    for one, other in zip(ours, asked, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-9)


def test_dropout_is_replayed():
    """The gradients are those of the very masks that made the values, and the random stream goes on after them."""
    model = M3BertModel(tiny_config(attention_dropout=0.3, embedding_dropout=0.3)).double().train()
    inputs, sizes = padded_batch(lengths=(5, 5, 5, 5, 5)), (2, 2, 1)
    torch.manual_seed(3)
    cached = pooled(model, inputs, [2, 6], mini_batch_size=2)
    after = torch.rand(1)
    torch.manual_seed(3)
    parts = [
        nested_states(model, {name: value.split(sizes)[index] for name, value in inputs.items()}, [2, 6])
        for index in range(3)
    ]
    assert torch.equal(after, torch.rand(1))
    upstream = torch.randn(5, 32, dtype=torch.float64)
    losses = []
    for states in (cached, None):
        vectors = [
            states.pooled(layer) if states is not None else torch.cat([part.pooled(layer) for part in parts])
            for layer in (2, 6)
        ]
        losses.append((vectors[0] * upstream).sum() + (vectors[1].square() * upstream).sum())
    torch.testing.assert_close(losses[0], losses[1])
    torch.manual_seed(99)
    before = torch.get_rng_state()
    ours = gradients(model, losses[0])
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in zip(ours, gradients(model, losses[1]), strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_is_replayed(tiny_model):
    inputs = padded_batch(lengths=(5, 5, 5))
    upstream = torch.randn(3, 32)
    outcome = []
    for size in (1, 3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = pooled(tiny_model, inputs, [6], size)
        outcome.append(gradients(tiny_model, (states.pooled(6) * upstream).sum()))
    whole = torch.cat([gradient.flatten() for gradient in outcome[1]])
    apart = torch.cat([gradient.flatten() for gradient in outcome[0]])
    assert (apart - whole).norm() < 0.02 * whole.norm()
    exact = gradients(tiny_model, (nested_states(tiny_model, inputs, [6]).pooled(6) * upstream).sum())
    exact = torch.cat([gradient.flatten() for gradient in exact])
    assert (whole - exact).norm() > 1e-4 * exact.norm()  # the backward pass ran in bf16, too


def test_the_encoder_sees_mini_batches_only_and_twice(tiny_model, monkeypatch):
    monkeypatch.setattr(PassCost, "on", classmethod(lambda cls, device: cls(2)))
    seen = []
    tiny_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    model = NestedModel(tiny_model, Contrastive(Grid.parse("6x8")), mini_batch_size=2)
    texts = {name: padded_batch(lengths=LENGTHS) for name in ("a", "b")}
    outputs = model(**texts)
    # Both columns together, longest first, cut to the longest of each; an empty text keeps one token. No mini-batch
    # has more tokens than two of the longest texts, so short texts share one.
    once = [(2, 9), (2, 7), (2, 5), (4, 3), (4, 1)]
    assert seen == once
    outputs["loss"].backward()
    assert sorted(seen) == sorted(once * 2)
    seen.clear()
    with torch.no_grad():
        model(**texts)
    assert seen == once


def test_no_graph_is_kept_for_a_mini_batch(tiny_model):
    """However many mini-batches: one node, and no tensors beside the embeddings."""
    nodes = []
    for rows in (4, 12):
        states = pooled(tiny_model, padded_batch(lengths=(5,) * rows), [6], 2)
        waiting, seen = [states.pooled(6).grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is not None and node not in seen:
                seen.add(node)
                waiting += [following for following, _ in node.next_functions]
        nodes.append(len(seen))
    assert nodes[0] == nodes[1]


def test_only_what_trains_gets_a_gradient(tiny_model):
    adapted = get_peft_model(tiny_model, LoraConfig(r=2, target_modules="all-linear"))
    texts = {name: padded_batch(lengths=(3, 4, 5)) for name in ("a", "b")}
    NestedModel(adapted, Contrastive(Grid.parse("6x8")), mini_batch_size=2)(**texts)["loss"].backward()
    assert {parameter.grad is not None for parameter in adapted.parameters() if parameter.requires_grad} == {True}
    assert {parameter.grad for parameter in adapted.parameters() if not parameter.requires_grad} == {None}
    frozen = tiny_model.requires_grad_(False)
    outputs = NestedModel(frozen, Contrastive(Grid.parse("6x8"), learn_temperature=True), mini_batch_size=2)(**texts)
    outputs["loss"].backward()


def test_activation_checkpointing_comes_on_top(tiny_model):
    texts, objective = columns(), Contrastive(Grid.parse("2,6x8,32"))
    expected = gradients(tiny_model, NestedModel(tiny_model, objective)(**texts)["loss"])
    tiny_model.train()
    for module in tiny_model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    tiny_model.config.attention_dropout = 0.0
    for layer in tiny_model.layers:
        layer.self_attn.attention_dropout = 0.0
    cached = NestedModel(tiny_model, objective, mini_batch_size=2)
    tiny_model.activation_checkpointing_enable({"use_reentrant": False})
    for one, other in zip(gradients(tiny_model, cached(**texts)["loss"]), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    tiny_model.activation_checkpointing_enable({"use_reentrant": True})
    tiny_model.enable_input_require_grads()
    refused("activation checkpointing that is not re-entrant", cached, **texts)


def test_an_objective_that_reads_tokens_is_refused(tiny_model):
    with pytest.raises(ValueError, match="MultigranularMLM reads token hidden states: its gradients cannot be cached"):
        NestedModel(quiet_model(), MultigranularMLM(GRID), mini_batch_size=2)
    states = pooled(tiny_model, padded_batch(), [6], 2)
    refused("pooled with 'mean'; 'cls' reads token hidden states", states.pooled, 6, "cls")


@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_a_trained_step_is_the_same(tiny_tokenizer, sentences, tmp_path, mini_batch_size):
    """The same under Trainer, with two accumulated batches and an evaluation, for several layers of a grid."""
    dataset = Dataset.from_dict({"query": sentences[:16], "answer": sentences[16:32]})
    model = quiet_model().model
    changes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "gradient_accumulation_steps": 2}
    changes |= {"mini_batch_size": mini_batch_size, **PLAIN_STEP}
    args = ContrastiveConfig(**quiet(tmp_path, grid="2,6x8,32", **changes))
    trainer = ContrastiveTrainer(model, args, tiny_tokenizer, dataset, eval_dataset=dataset)
    trainer.train()
    reference = NestedModel(quiet_model().model, Contrastive(Grid.parse("2,6x8,32")))
    batches = [trainer.data_collator([dataset[i] for i in rows]) for rows in (range(8), range(8, 16))]
    loss = sum(reference(**batch)["loss"] for batch in batches) / 2
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
        evaluated = sum(reference(**batch)["loss"] for batch in batches) / 2
    assert_same_weights(model, reference.backbone)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(evaluated.item(), rel=1e-4)
