"""An objective as a loss of sentence-transformers' own trainer."""

import pytest
import torch
from datasets import Dataset

from m3bert.modeling import M3BertModel
from m3bert.trainers import Contrastive, Grid, NestedLoss, NestedModel
from tests.conftest import refused, save
from tests.trainers.tiny_run import quiet_model


sentence_transformers = pytest.importorskip("sentence_transformers")
GRID = Grid.parse("2,6x8,32")


@pytest.fixture
def model(tmp_path, tiny_tokenizer):
    plain = quiet_model(matryoshka_layers=[], matryoshka_dims=[]).model
    folder = str(save(tmp_path / "encoder", plain, tiny_tokenizer, max_length=24))
    return sentence_transformers.SentenceTransformer(folder, trust_remote_code=True, device="cpu")


def test_the_loss_is_that_of_the_objective(model, sentences):
    features = [model.preprocess(sentences[:6]), model.preprocess(sentences[6:12])]
    objective = Contrastive(GRID)
    columns = {name: dict(inputs) for name, inputs in zip(("anchor", "positive"), features, strict=True)}
    columns = {name: {key: its[key] for key in ("input_ids", "attention_mask")} for name, its in columns.items()}
    expected = NestedModel(model.transformers_model, objective)(**columns)["loss"]
    loss = NestedLoss(model, objective)(features, None)
    torch.testing.assert_close(loss, expected)


def test_their_trainer_trains_the_grid_and_saves_it(model, sentences, tmp_path):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    args = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=2, per_device_train_batch_size=8, learning_rate=1e-3, save_strategy="no",
        report_to="none", use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    pairs = Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})
    objective = Contrastive(GRID, learn_temperature=True)
    temperature = float(objective.temperature)
    loss = NestedLoss(model, objective)
    sentence_transformers.SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss).train()
    assert float(objective.temperature) != temperature
    assert not [name for name, weight in model.named_parameters() if torch.equal(weight, before[name])]
    model.save_pretrained(str(tmp_path / "trained"))
    saved = M3BertModel.from_pretrained(tmp_path / "trained")
    assert (saved.config.matryoshka_layers, saved.config.matryoshka_dims) == ([2, 6], [8, 32])


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (Contrastive(GRID, pooling="cls"), "The model pools by 'mean', the objective by 'cls'"),
        (Contrastive(Grid.parse("7x8")), "The model has layers 1..6"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(model, objective, message):
    refused(message, NestedLoss, model, objective)
