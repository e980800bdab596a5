"""Contrastive training over a grid."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from torch import nn

from modeling_m3bert import M3BertModel
from tests.conftest import padded_batch, tiny_config
from tests.trainers.tiny_run import named
from trainers import Contrastive, ContrastiveConfig, ContrastiveTrainer, Grid, NestedModel, TextColumnsCollator
from trainers.evaluation import GridEncoder, Retrieval, score_grid


def columns() -> dict[str, dict[str, torch.Tensor]]:
    """Anchors, positives and hard negatives of different lengths."""
    return {
        "anchor": padded_batch(lengths=(3, 5, 1)),
        "positive": padded_batch(lengths=(7, 4, 6)),
        "negative": padded_batch(lengths=(2, 9, 3)),
    }


def naive_term(model, texts, layer, dim, temperature):
    """The formula, a granularity and a pair at a time: pool, slice, normalise, compare."""
    embeddings = []
    for text in texts.values():
        states = model(**text, output_layer=layer).last_hidden_state
        rows = [state[mask.bool()].mean(0)[:dim] for state, mask in zip(states, text["attention_mask"], strict=True)]
        embeddings.append([row / row.norm() for row in rows])
    anchors, candidates = embeddings[0], [row for column in embeddings[1:] for row in column]
    losses = []
    for i, anchor in enumerate(anchors):
        scores = torch.stack([anchor @ candidate for candidate in candidates]) / temperature
        losses.append(torch.logsumexp(scores, 0) - scores[i])
    return sum(losses) / len(losses)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("grid", ["2,6x8,32", "4x16,6x8"])
def test_terms_and_gradients_equal_a_loop_over_the_grid(tiny_model, grid, reduction):
    grid, texts, tiny_model = Grid.parse(grid), columns(), tiny_model.double()
    objective = Contrastive(grid, temperature=0.1, reduction=reduction)
    outputs = NestedModel(tiny_model, objective)(**texts)
    expected = {f"contrastive_{g}": naive_term(tiny_model, texts, g.layer, g.dim, 0.1) for g in grid}
    terms = named(outputs["terms"])
    assert terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, atol=1e-9, rtol=1e-9)
    total = sum(expected.values()) / (len(expected) if reduction == "mean" else 1)
    torch.testing.assert_close(outputs["loss"], total)
    parameters = list(tiny_model.parameters())
    actual, wanted = (torch.autograd.grad(x, parameters, materialize_grads=True) for x in (outputs["loss"], total))
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_bad_arguments_and_batches_are_refused(tiny_model, tmp_path, quiet_arguments):
    grid = Grid.parse("2x8")
    with pytest.raises(ValueError, match="pooling='max' is unknown; legal values: mean, cls, lasttoken"):
        Contrastive(grid, pooling="max")
    with pytest.raises(ValueError, match="reduction='max' is unknown; legal values: sum, mean"):
        Contrastive(grid, reduction="max")
    with pytest.raises(ValueError, match="temperature=0 must be above 0"):
        Contrastive(grid, temperature=0)
    model, one = NestedModel(tiny_model, Contrastive(grid)), padded_batch(lengths=(3,))
    with pytest.raises(ValueError, match="a batch of one pair without hard negatives"):
        model(a=one, b=one)
    model(a=one, b=one, c=one)
    with pytest.raises(ValueError, match="two text columns or more; got text"):
        model(**padded_batch())
    with pytest.raises(ValueError, match="per_device_train_batch_size=1 leaves a contrastive loss without negatives"):
        ContrastiveConfig(**quiet_arguments(tmp_path, per_device_train_batch_size=1))


def test_training_lifts_every_granularity(tiny_tokenizer, sentences, tmp_path, quiet_arguments):
    """Pairs of the same words in another order: after training each finds its partner, at every layer and dim."""
    torch.manual_seed(0)
    shuffled = [" ".join(sorted(sentence.split())) for sentence in sentences]
    dataset = Dataset.from_dict({"query": sentences, "answer": shuffled})
    model = M3BertModel(tiny_config())
    grid = Grid.parse("2,6x8,32")

    pairs = Retrieval({"queries": sentences, "documents": shuffled}, [{row: 1.0} for row in range(len(sentences))])

    def recall():
        scores = score_grid(GridEncoder(model, tiny_tokenizer, grid), pairs)
        return {g: its["recall@1"] for g, its in scores.items()}

    changes = {"learning_rate": 5e-3, "max_steps": 30, "per_device_train_batch_size": 16, "logging_steps": 10}
    args = ContrastiveConfig(**quiet_arguments(tmp_path, grid=str(grid), **changes))
    trainer = ContrastiveTrainer(model, args, tiny_tokenizer, dataset, eval_dataset=dataset)
    before = recall()
    metrics_before = trainer.evaluate()
    trainer.train()
    after, metrics = recall(), trainer.evaluate()
    for g in grid:
        assert after[g] > before[g] + 0.1, (str(g), before[g], after[g])
        assert metrics[f"eval_contrastive_{g}"] < metrics_before[f"eval_contrastive_{g}"]


def test_accumulation_averages_smaller_batches(tiny_tokenizer, sentences, tmp_path, quiet_arguments):
    """In-batch negatives are not shared between accumulated batches, and the documentation says so."""
    dataset = Dataset.from_dict({"query": sentences[:8], "answer": sentences[8:16]})
    model = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0))
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    changes = {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    changes |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1}
    changes |= {"train_sampling_strategy": "sequential", "logging_steps": 1}
    args = ContrastiveConfig(**quiet_arguments(tmp_path, grid="6x8,32", **changes))
    trainer = ContrastiveTrainer(model, args, tiny_tokenizer, dataset)
    trainer.train()
    reference = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0))
    reference.load_state_dict(start)
    wrapped = NestedModel(reference, Contrastive(Grid.parse("6x8,32")))
    collator = TextColumnsCollator(tiny_tokenizer, ["query", "answer"], 48)
    losses = [wrapped(**collator([dataset[i] for i in rows]))["loss"] for rows in (range(4), range(4, 8))]
    (sum(losses) / 2).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    for (name, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5, msg=name)
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log["loss"] == pytest.approx((sum(losses) / 2).item(), rel=1e-4)
    assert log["contrastive_6x8"] + log["contrastive_6x32"] == pytest.approx(log["loss"], rel=1e-4)


def test_a_causal_backbone_trains_on_its_last_token(tiny_tokenizer, sentences, tmp_path, quiet_arguments):
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.Qwen3Model(config)
    changes = {"max_steps": 2, "learning_rate": 1e-3, "per_device_train_batch_size": 8}
    args = ContrastiveConfig(**quiet_arguments(tmp_path, grid="2,4x8,32", pooling="lasttoken", **changes))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dataset = Dataset.from_dict({"query": sentences, "answer": sentences[::-1]})
    ContrastiveTrainer(model, args, tiny_tokenizer, dataset).train()
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert len(moved) == len(before)
    first_token = ContrastiveConfig(**quiet_arguments(tmp_path, grid="2,4x8,32", pooling="cls", **changes))
    with pytest.raises(ValueError, match="pooling='cls' reads the first token, which attends to no other"):
        ContrastiveTrainer(model, first_token, tiny_tokenizer, dataset).train()


def test_normalisation_comes_after_slicing(tiny_model):
    """A term at dim d does not depend on what stands beyond d."""
    texts = {name: padded_batch(lengths=(3, 4)) for name in ("a", "b")}
    model = NestedModel(tiny_model, Contrastive(Grid.parse("6x8")))
    expected = model(**texts)["loss"]
    with torch.no_grad():
        nn.init.constant_(tiny_model.norm.weight[8:], 100.0)
    torch.testing.assert_close(model(**texts)["loss"], expected)
