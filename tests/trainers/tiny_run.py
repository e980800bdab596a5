"""What tests of the trainer share: a tiny run whose data, labels and start are always the same."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from torch import nn
from transformers import DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM
from tests.conftest import tiny_config
from trainers import (
    Grid,
    MultigranularMLM,
    NestedBatch,
    NestedTrainer,
    NestedTrainingArguments,
    Objective,
    prefix,
)


GRID = Grid.parse("2,6x8,32")


def masked_dataset(rows: int = 16) -> Dataset:
    """Texts of different lengths with labels already made, so that every run sees the same ones."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for row in range(rows):
        length = 4 + row % 7
        ids = torch.randint(5, 99, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) < 0.1 + 0.05 * (row % 9)
        data.append({"input_ids": ids.tolist(), "labels": torch.where(labelled, ids, -100).tolist()})
    return Dataset.from_list(data)


def quiet_model(**changes: object) -> M3BertForMaskedLM:
    """A model without dropout: its runs can be compared."""
    torch.manual_seed(5)
    return M3BertForMaskedLM(tiny_config(embedding_dropout=0.0, attention_dropout=0.0, **changes))


def arguments(folder: Path, **changes: object) -> NestedTrainingArguments:
    values = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    return NestedTrainingArguments(output_dir=str(folder), **{**values, **changes})


def mlm_trainer(tiny_tokenizer, folder, model=None, objective=None, **changes) -> NestedTrainer:
    return NestedTrainer(
        model=model if model is not None else quiet_model(),
        objective=objective if objective is not None else MultigranularMLM(GRID),
        args=arguments(folder, **changes),
        data_collator=DataCollatorForTokenClassification(tiny_tokenizer),
        train_dataset=masked_dataset(),
        eval_dataset=masked_dataset(6),
        processing_class=tiny_tokenizer,
        columns=("input_ids", "labels"),
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(first: nn.Module, second: nn.Module, atol: float = 1e-6) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=1e-5, msg=f"{name} differs")


class WithProjector(Objective):
    """An objective with a parameter of its own."""

    name = "projected"

    def __init__(self, grid: Grid):
        super().__init__(grid)
        self.projector = nn.Linear(32, 32)

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        (text,) = batch.texts.values()
        return {self.term(g): prefix(self.projector(text.pooled(g.layer)), g.dim).square().mean() for g in self.grid}
