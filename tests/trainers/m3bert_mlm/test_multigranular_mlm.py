"""Multigranular masked-LM training."""

import copy
import gzip

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoTokenizer, EvalPrediction

from m3bert.data.files import tokenize_texts
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import Grid, MultigranularMLM, MultigranularMLMConfig, MultigranularMLMTrainer, NestedModel
from tests.conftest import padded_batch, quiet, tiny_config
from tests.trainers.tiny_run import named


def labelled_batch() -> dict[str, torch.Tensor]:
    batch = padded_batch(lengths=(7, 6, 3))
    labels = torch.full((3, 7), -100)
    labels[0, 1], labels[0, 4], labels[2, 2] = 17, 98, 5
    return {**batch, "labels": labels}


def naive_terms(model: M3BertForMaskedLM, grid: Grid, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A forward and a cross-entropy for every granularity."""
    terms = {}
    for g in grid:
        logits = model(**{**batch, "labels": None}, output_layer=g.layer, output_dim=g.dim).logits
        terms[f"mlm_{g}"] = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    return terms


@pytest.mark.parametrize("grid", ["2,4,6x8,16,32", "2x8,4x32", "6x32"])
def test_terms_and_gradients_equal_a_loop_over_the_grid(tiny_masked_lm, grid):
    model, grid, batch = tiny_masked_lm, Grid.parse(grid), labelled_batch()
    outputs = NestedModel(model, MultigranularMLM(grid))(**batch)
    expected = naive_terms(model, grid, batch)
    terms = named(outputs["terms"])
    assert terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term)
    total = sum(expected.values())
    torch.testing.assert_close(outputs["loss"], total)
    parameters = list(model.parameters())
    for actual, wanted in zip(
        torch.autograd.grad(outputs["loss"], parameters, materialize_grads=True),
        torch.autograd.grad(total, parameters, materialize_grads=True),
        strict=True,
    ):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)


def test_a_batch_without_masked_tokens_has_loss_zero_and_no_nan(tiny_masked_lm):
    batch = labelled_batch()
    batch["labels"][:] = -100
    model = NestedModel(tiny_masked_lm, MultigranularMLM(Grid.parse("2,6x8,32")))
    assert model(**batch, num_items_in_batch=torch.tensor(0))["loss"] == 0
    outputs = model(**batch)
    assert outputs["loss"] == 0
    outputs["loss"].backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in tiny_masked_lm.parameters())


def test_loss_is_divided_by_the_items_of_the_whole_step(tiny_masked_lm):
    model = NestedModel(tiny_masked_lm, MultigranularMLM(Grid.parse("6x32")))
    batch = labelled_batch()
    torch.testing.assert_close(model(**batch, num_items_in_batch=12)["loss"], model(**batch)["loss"] * 3 / 12)


def test_what_is_missing_is_named(tiny_masked_lm):
    objective = MultigranularMLM(Grid.parse("6x32"))
    batch = labelled_batch()
    with pytest.raises(ValueError, match="needs a backbone with a vocabulary projection"):
        NestedModel(M3BertModel(tiny_config()), objective)(**batch)
    batch.pop("labels")
    with pytest.raises(ValueError, match="needs a backbone with a vocabulary projection, and labels"):
        NestedModel(tiny_masked_lm, objective)(**batch)


def test_a_tokenizer_without_a_mask_is_refused(tiny_tokenizer, tiny_masked_lm, tmp_path):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token"):
        MultigranularMLMTrainer(tiny_masked_lm, MultigranularMLMConfig(**quiet(tmp_path)), tokenizer)


def test_metrics_get_the_logits_of_the_full_size(tiny_tokenizer, tiny_masked_lm, sentences, tmp_path):
    """Their cross-entropy is the loss of the full size, over batches of different lengths."""
    seen = {}

    def accuracy(found: EvalPrediction) -> dict[str, float]:
        seen["logits"], seen["labels"] = map(torch.from_numpy, found)
        kept = seen["labels"] != -100
        return {"accuracy": (seen["logits"].argmax(-1) == seen["labels"])[kept].float().mean().item()}

    dataset = tokenize_texts(Dataset.from_dict({"text": sentences[:10]}), tiny_tokenizer, max_length=48)
    args = MultigranularMLMConfig(**quiet(tmp_path, per_device_eval_batch_size=10, mlm_probability=0.5))
    trainer = MultigranularMLMTrainer(
        tiny_masked_lm, args, tiny_tokenizer, eval_dataset=dataset, compute_metrics=accuracy
    )
    metrics = trainer.evaluate()
    logits, labels = seen["logits"].float(), seen["labels"]
    assert logits.shape == (*labels.shape, tiny_masked_lm.config.vocab_size) and (labels != -100).sum() > 9
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert metrics["eval_mlm_6x32"] == pytest.approx(loss.item(), rel=1e-4)
    assert 0 <= metrics["eval_accuracy"] <= 1
    packed = dataset.add_column("document_lengths", [[len(row)] for row in dataset["input_ids"]])
    with pytest.raises(ValueError, match="compute_metrics needs rows of one text each; rows of eval_dataset are pack"):
        MultigranularMLMTrainer(tiny_masked_lm, args, tiny_tokenizer, eval_dataset=packed, compute_metrics=accuracy)


@pytest.mark.parametrize("texts", ["embedded", pytest.param("wikitext", marks=pytest.mark.slow)])
def test_it_learns_at_every_granularity(tiny_tokenizer, sentences, tmp_path, request, texts):
    if texts == "embedded":
        tokenizer, lines = tiny_tokenizer, sentences
    else:
        # Real text with a real tokenizer.
        tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue("minilm"))
        folder = request.getfixturevalue("data_folder")
        with gzip.open(folder / "wikitext-2" / "test.txt.gz", "rt", encoding="utf-8") as file:
            lines = [line for line in file.read().splitlines() if len(line) > 200][:256]
    dataset = tokenize_texts(Dataset.from_dict({"text": lines}), tokenizer, max_length=48)
    model = M3BertForMaskedLM(
        tiny_config(vocab_size=len(tokenizer), initializer_range=0.02, pad_token_id=tokenizer.pad_token_id)
    )
    changes = {"learning_rate": 1e-2, "warmup_steps": 2, "max_steps": 16, "logging_steps": 4}
    changes |= {"mlm_probability": 0.3, "per_device_train_batch_size": 16}
    args = MultigranularMLMConfig(**quiet(tmp_path, **changes))
    trainer = MultigranularMLMTrainer(model, args, tokenizer, dataset)
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    special = torch.isin(batch["input_ids"], torch.tensor([tokenizer.cls_token_id, tokenizer.pad_token_id]))
    assert (batch["labels"][special] == -100).all()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "mlm_2x8" in entry]
    names = [name for name in logs[0] if name.startswith("mlm_")]
    assert len(names) == 9
    for name in names:
        assert logs[-1][name] < logs[0][name] - 0.2, name
