"""NestedTrainer: what it logs, evaluates and refuses, and that the Trainer's features work unchanged."""

from __future__ import annotations

import json
import math

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForMaskedLM, DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config
from tests.trainers.tiny_run import (
    GRID,
    WithProjector,
    arguments,
    assert_same_weights,
    masked_dataset,
    mlm_trainer,
    quiet_model,
    weights,
)
from trainers import (
    Contrastive,
    Grid,
    MultigranularMLM,
    NestedBatch,
    NestedTrainer,
    Objective,
)


def test_every_term_is_logged_and_makes_up_the_loss(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=4, logging_steps=2)
    before = weights(trainer.backbone)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        terms = {name: value for name, value in entry.items() if name.startswith("mlm_")}
        assert set(terms) == {"mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32"}
        assert sum(terms.values()) == pytest.approx(entry["loss"], rel=1e-4)
    after = weights(trainer.backbone)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []


def test_a_default_outside_the_trained_grid_is_refused(tiny_tokenizer, tmp_path):
    """Else the saved checkpoint would not open."""
    with pytest.raises(ValueError, match="output_dim=16 is not available here; legal values: 8, 32"):
        mlm_trainer(tiny_tokenizer, tmp_path, model=quiet_model(output_dim=16))


def test_the_trained_grid_is_written_into_the_config(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=quiet_model(matryoshka_layers=[], matryoshka_dims=[]))
    assert (trainer.backbone.config.matryoshka_layers, trainer.backbone.config.matryoshka_dims) == ([2, 6], [8, 32])
    assert trainer.backbone.config.is_matryoshka


def test_evaluation_reports_every_granularity(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert {"eval_mlm_2x8", "eval_mlm_2x32", "eval_mlm_6x8", "eval_mlm_6x32"} <= set(evaluations[0])
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == evaluations[1]["eval_loss"]
    data = masked_dataset(6)
    batches = [data.select(range(4)), data.select(range(4, 6))]
    collator = DataCollatorForTokenClassification(tiny_tokenizer)
    means = []
    with torch.no_grad():
        for batch in batches:
            inputs = collator([batch[row] for row in range(len(batch))])
            labels = inputs.pop("labels")
            logits = trainer.backbone.eval()(**inputs, output_layer=2, output_dim=8).logits
            means.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert metrics["eval_mlm_2x8"] == pytest.approx(sum(means) / 2, rel=1e-4)
    train_logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(
        sum(value for name, value in entry.items() if name.startswith("mlm_"))
        == pytest.approx(entry["loss"], rel=1e-4)
        for entry in train_logs
    )


def test_several_evaluation_sets_are_kept_apart(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path)
    metrics = trainer.evaluate({"one": masked_dataset(4), "two": masked_dataset(8)})
    assert {"eval_one_mlm_2x8", "eval_two_mlm_2x8"} <= set(metrics)
    assert metrics["eval_one_mlm_2x8"] != metrics["eval_two_mlm_2x8"]


def test_bfloat16_trains_close_to_float32(tiny_tokenizer, tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, bf16=bf16, max_steps=4)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert trainer.backbone.dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("option", ["activation_checkpointing", "torch_compile"])
def test_checkpointing_and_compiling_change_no_number(tiny_tokenizer, tmp_path, option):
    runs = []
    for changes in ({}, {option: True}):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, **changes)
        trainer.train()
        runs.append(trainer)
    assert_same_weights(runs[0].backbone, runs[1].backbone, atol=2e-4)
    runs[1].save_model(str(tmp_path / "saved"))
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path / "saved"), runs[1].backbone)
    if option == "activation_checkpointing":
        assert runs[1].backbone.is_activation_checkpointing


def test_a_loss_that_is_not_finite_stops_the_run(tiny_tokenizer, tmp_path):
    class Poisoned(MultigranularMLM):
        def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
            terms = super().forward(batch)
            self.calls = getattr(self, "calls", 0) + 1
            return {**terms, "mlm_6x8": terms["mlm_6x8"] * math.nan} if self.calls == 3 else terms

    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, objective=Poisoned(GRID), max_steps=4, save_strategy="steps", save_steps=1
    )
    with pytest.raises(ValueError, match=r"not finite at step 3 \(terms: mlm_6x8\)"):
        trainer.train()
    good = M3BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in good.state_dict().values())
    assert_same_weights(good, trainer.backbone)
    assert not (tmp_path / "checkpoint-3").exists()


def test_bad_data_is_refused_before_any_work(tiny_tokenizer, tmp_path):
    def build(dataset):
        return NestedTrainer(
            quiet_model(),
            MultigranularMLM(GRID),
            arguments(tmp_path),
            lambda rows: rows,
            dataset,
            columns=("input_ids",),
        )

    with pytest.raises(ValueError, match="The dataset is empty"):
        build(masked_dataset().select([]))
    with pytest.raises(ValueError, match=r"lacks the column\(s\) input_ids; it has text, id"):
        build(Dataset.from_dict({"text": ["a"], "id": [1]}))


def test_a_grid_outside_the_model_is_refused(tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"layers 1\.\.6 and dims 1\.\.32; outside of it: 9x8"):
        mlm_trainer(tiny_tokenizer, tmp_path, objective=MultigranularMLM(Grid.parse("2,9x8")))


def test_the_grid_defaults_to_the_models_own(tmp_path):
    args = arguments(tmp_path)
    assert str(args.grid_for(tiny_config())) == "2,4,6x8,16,32"
    assert str(arguments(tmp_path, grid="1x4").grid_for(tiny_config())) == "1x4"
    with pytest.raises(ValueError, match="names no matryoshka_layers"):
        args.grid_for(tiny_config(matryoshka_layers=[]))
    with pytest.raises(ValueError, match="is not a grid"):
        arguments(tmp_path, grid="4,8")


def test_objectives_train_other_backbones_too(tiny_tokenizer, tmp_path):
    import transformers

    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=6, num_attention_heads=4
    )
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=AutoModelForMaskedLM.from_config(config), max_steps=2)
    trainer.train()
    trainer.save_model()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "bert"
    assert (stored["is_matryoshka"], stored["matryoshka_dimensions"], stored["matryoshka_layers"]) == (
        True,
        [8, 32],
        [2, 6],
    )


def test_objectives_can_be_made_of_others():
    """What MIPIC will be: one forward, two objectives, one weighted total."""

    class Both(Objective):
        def __init__(self, grid: Grid):
            super().__init__(grid)
            self.first, self.second = Contrastive(grid), WithProjector(grid)

        def forward(self, batch):
            return {**self.first(batch), **self.second(NestedBatch({"text": batch.texts["a"]}))}

        def total(self, terms):
            return sum(0.5 * value for value in terms.values())

    from trainers import NestedModel

    ids = torch.randint(5, 99, (3, 6))
    model = NestedModel(M3BertModel(tiny_config()), Both(GRID))
    outputs = model(a={"input_ids": ids}, b={"input_ids": ids})
    assert len(outputs["terms"]) == 8
    torch.testing.assert_close(outputs["loss"], sum(outputs["terms"].values()) / 2)
