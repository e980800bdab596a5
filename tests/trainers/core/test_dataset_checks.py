"""What is checked of a dataset before any work is done."""

from __future__ import annotations

import pytest
from datasets import Dataset

from tests.published import contrastive_trainer
from tests.trainers.tiny_run import (
    GRID,
    arguments,
    masked_dataset,
    quiet_model,
)
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    MultigranularMLM,
    NestedTrainer,
)


def test_a_training_set_smaller_than_a_batch_is_refused(tmp_path, tiny_tokenizer, sentences):
    with pytest.raises(ValueError, match=r"\(24 rows\) is smaller than one batch \(25 rows\)"):
        contrastive_trainer(tmp_path, tiny_tokenizer, sentences, per_device_train_batch_size=25)
    options = {"per_device_train_batch_size": 25, "dataloader_drop_last": False, "max_steps": 1}
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences, **options)
    assert trainer.train().global_step == 1


def test_columns_must_be_there(tiny_tokenizer, tiny_model, tmp_path, quiet_arguments):
    def build(dataset, **changes):
        args = ContrastiveConfig(**quiet_arguments(tmp_path, **changes))
        return ContrastiveTrainer(tiny_model, args, tiny_tokenizer, dataset)

    one = Dataset.from_dict({"query": ["a"]})
    with pytest.raises(ValueError, match="needs two text columns or more; found: query"):
        build(one)
    with pytest.raises(ValueError, match=r"lacks the column\(s\) answer; it has query"):
        build(one, text_columns=["query", "answer"])
    with pytest.raises(ValueError, match="The dataset is empty"):
        build(Dataset.from_dict({"query": [], "answer": []}))


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
