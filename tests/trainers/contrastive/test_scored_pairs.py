"""Training on scores: the objective over a grid, two processes, and what is refused."""

import pytest
import torch
from datasets import Dataset

from m3bert.encode.states import nested_states
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Grid, ScoredPairs, ScoredPairsConfig, ScoredPairsTrainer, TextColumnsCollator
from m3bert.trainers.embedding import scored_losses
from tests.conftest import quiet, refused
from tests.trainers.tiny_run import quiet_model


GRID = "2,6x8,32"


def step(folder, batch_size, tokenizer, sentences, **changes):
    """A trainer of one step of plain gradient descent on 16 pairs."""
    values = {"grid": GRID, "max_steps": 1, "per_device_train_batch_size": batch_size, "optim": "sgd"}
    values |= {"learning_rate": 0.01, "max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}
    args = ScoredPairsConfig(**quiet(folder / "out", **{**values, **changes}))
    columns = {"sentence1": sentences[:16], "sentence2": sentences[16:32], "score": [row % 6 for row in range(16)]}
    if args.loss in ("margin_mse", "kl"):
        columns = {"query": sentences[:16], "positive": sentences[16:32], "negative": sentences[32:48]}
        columns["scores"] = [[row % 4, row % 3 - 1.5] for row in range(16)]
    return ScoredPairsTrainer(quiet_model().model, args, tokenizer, Dataset.from_dict(columns))


@pytest.mark.parametrize("loss", ["cosent", "angle", "margin_mse", "kl"])
@pytest.mark.parametrize("mini_batch_size", [None, 3])
def test_every_loss_trains_every_granularity(tiny_tokenizer, sentences, tmp_path, loss, mini_batch_size):
    """It is saved with the similarity that was trained."""
    changes = {"mini_batch_size": mini_batch_size, "similarity": "dot" if loss == "margin_mse" else "cosine"}
    trainer = step(tmp_path, 8, tiny_tokenizer, sentences, loss=loss, logging_steps=1, **changes)
    trainer.train()
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert {f"scored_{loss}_{g}" for g in Grid.parse(GRID)} <= logged
    trainer.save_model()
    assert EmbeddingSettings.read(trainer.args.output_dir).similarity == ("dot" if loss == "margin_mse" else "cosine")
    assert not quiet_model().model.embed_tokens.weight.equal(trainer.backbone.embed_tokens.weight)


@pytest.mark.parametrize(
    ("loss", "similarity", "measure"),
    [
        ("cosent", "cosine", scored_losses.nested_pair_cosines),
        ("angle", "cosine", scored_losses.nested_pair_angles),
        ("margin_mse", "dot", scored_losses.nested_pair_products),
    ],
)
def test_a_batch_has_the_loss_of_its_embeddings(tiny_tokenizer, sentences, tmp_path, loss, similarity, measure):
    trainer = step(tmp_path, 16, tiny_tokenizer, sentences, loss=loss, similarity=similarity, reduction="mean")
    inputs = trainer.data_collator([trainer.train_dataset[row] for row in range(16)])
    outputs = trainer.nested(**inputs)
    losses = []
    columns = [
        {name: inputs[column][name] for name in ("input_ids", "attention_mask")} for column in list(inputs)[:-1]
    ]
    states = [nested_states(trainer.backbone, column, (2, 6)) for column in columns]
    for layer in (2, 6):
        first, *others = (state.pooled(layer) for state in states)
        similarities = torch.stack([measure(first, other, (8, 32)) for other in others], dim=-1)
        if loss == "margin_mse":
            losses.append(scored_losses.margin_mse(similarities, inputs["labels"]))
        else:
            losses.append(scored_losses.cosent(similarities[..., 0], inputs["labels"], temperature=0.05))
    torch.testing.assert_close(outputs["loss"], torch.cat(losses).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "mse"}, "loss='mse' is unknown; legal values: cosent, angle, margin_mse, kl"),
        ({"similarity": "angle"}, "similarity='angle' is unknown; legal values: cosine, dot"),
        ({"score_temperature": 0.0}, r"score_temperature=0\.0 must be above 0"),
    ],
)
def test_arguments_out_of_range_are_named(values, message):
    refused(message, ScoredPairs, Grid.parse("6x32"), **values)


@pytest.mark.parametrize(
    ("columns", "changes", "message"),
    [
        (["sentence1", "sentence2"], {}, "Found no column with scores: name one in score_column"),
        (["sentence1", "sentence2", "score", "label"], {}, "Found score, label with scores: name one"),
        (["query", "positive", "negative", "score"], {}, "loss='cosent' needs two text columns; found: query, pos"),
        (["query", "positive", "score"], {"loss": "kl"}, "loss='kl' needs three text columns or more; found: query"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_training(tiny_tokenizer, tmp_path, columns, changes, message):
    data = Dataset.from_dict({name: ["a"] * 2 if name not in ("score", "label") else [0.5] * 2 for name in columns})
    with pytest.raises(ValueError, match=message):
        args = ScoredPairsConfig(**quiet(tmp_path, grid="6x32", per_device_train_batch_size=2, **changes))
        ScoredPairsTrainer(quiet_model().model, args, tiny_tokenizer, data)


def test_scores_that_are_no_numbers_are_refused(tiny_tokenizer):
    collator = TextColumnsCollator(tiny_tokenizer, ["a"], 8, label="score")
    with pytest.raises(ValueError, match="Column 'score' of a row is not a finite number"):
        collator([{"a": "open", "score": score} for score in (float("nan"), 1.0)])
