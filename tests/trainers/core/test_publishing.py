"""PublishingTrainer: a record of the run in whatever it saves, and no push of what cannot be published."""

import pytest

from m3bert.hub_cards.training_record import TrainingRecord
from m3bert.trainers import PublishingTrainer
from tests.trainers.tiny_run import masked_dataset, mlm_trainer


def test_checkpoints_and_what_is_saved_have_a_record(tiny_tokenizer, tmp_path):
    """Of as many steps as the weights have seen."""
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, trainer_class=PublishingTrainer, **changes)
    trainer.train()
    trainer.save_model()
    steps = [TrainingRecord.find(tmp_path / folder).steps for folder in ("checkpoint-1", "checkpoint-2", ".")]
    assert steps == [1, 2, 2]
    record = TrainingRecord.find(tmp_path)
    assert record == trainer.record()
    assert (record.trainer, record.objective, record.grid) == ("PublishingTrainer", "Multigranular MLM", "2,6x8,32")
    assert (record.rows, record.batch_size, record.columns) == (16, 4, ["input_ids", "labels"])


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_the_optimizers_state_is_not_pushed(tiny_tokenizer, tmp_path, strategy):
    changes = {"push_to_hub": True, "hub_model_id": "user/model", "hub_strategy": strategy}
    with pytest.raises(
        ValueError,
        match=f"hub_strategy='{strategy}' would publish the optimizer's state; legal values: end, every_save",
    ):
        mlm_trainer(tiny_tokenizer, tmp_path, trainer_class=PublishingTrainer, **changes)


def test_a_run_is_not_resumed_on_other_data(tiny_tokenizer, tmp_path):
    """Unless it says that it skips none."""

    def trainer(rows, **changes):
        made = mlm_trainer(
            tiny_tokenizer, tmp_path, trainer_class=PublishingTrainer, save_strategy="steps", save_steps=1, **changes
        )
        made.train_dataset = masked_dataset(rows)
        return made

    trainer(16, max_steps=1).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    assert trainer(16, max_steps=2).train(resume_from_checkpoint=checkpoint).global_step == 2
    with pytest.raises(ValueError, match="checkpoint-1 was trained on other data: rows 16, now 8. Resume"):
        trainer(8, max_steps=2).train(resume_from_checkpoint=checkpoint)
    resumed = trainer(8, max_steps=2, ignore_data_skip=True)
    assert resumed.train(resume_from_checkpoint=checkpoint).global_step == 2
