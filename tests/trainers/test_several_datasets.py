"""Several training sets in one run: different columns, pure batches, resumed and in two processes the same ones."""

import json

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import TrainerCallback

from m3bert.modeling import M3BertModel
from m3bert.trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    IBKDConfig,
    IBKDTrainer,
    ScoredPairsConfig,
    ScoredPairsTrainer,
    SimCSEConfig,
    SimCSETrainer,
    TeacherEmbeddings,
)
from tests.conftest import quiet, tiny_config
from tests.trainers.tiny_run import assert_same_weights, quiet_model, run_two


PAIRS, TRIPLETS = ("query", "answer"), ("anchor", "positive", "negative")
WORDS = "open read file list name text from not".split()


def table(columns, rows: int, first: int) -> Dataset:
    """Rows of texts of three words, all of which differ."""
    texts = (" ".join(WORDS[number // 8**place % 8] for place in range(3)) for number in range(first, 512))
    return Dataset.from_list([{column: next(texts) for column in columns} for _ in range(rows)])


def two_sets() -> DatasetDict:
    return DatasetDict({"pairs": table(PAIRS, 26, 0), "triplets": table(TRIPLETS, 17, 100)})


class Seen:
    """A collator that keeps the rows that it gets."""

    def __init__(self, trainer):
        self.collator, self.batches = trainer.data_collator, []
        trainer.data_collator = self

    def __call__(self, rows):
        self.batches.append(rows)
        return self.collator(rows)

    def of(self, found):
        return self.collator.of(found)


def contrastive_trainer(tokenizer, folder, train=None, evaluation=None, batch_size=8, **changes) -> ContrastiveTrainer:
    values = {"grid": "2,6x8,32", "max_steps": 5, "learning_rate": 1e-2, "per_device_train_batch_size": batch_size}
    values |= {"logging_steps": 1, "lr_scheduler_type": "constant"}
    args = ContrastiveConfig(**quiet(folder, **{**values, **changes}))
    return ContrastiveTrainer(quiet_model().model, args, tokenizer, train or two_sets(), evaluation)


def names_of(batches) -> list[str]:
    """The data set of each batch: all its rows have the columns of that set."""
    for rows in batches:
        assert len({tuple(row) for row in rows}) == 1
    return ["pairs" if tuple(rows[0]) == PAIRS else "triplets" for rows in batches]


def test_two_data_sets_of_different_columns_are_trained_in_pure_batches(tiny_tokenizer, tmp_path):
    trainer = contrastive_trainer(tiny_tokenizer, tmp_path, evaluation=two_sets())
    seen = Seen(trainer)
    trainer.train()
    assert sorted(names_of(seen.batches)) == ["pairs"] * 3 + ["triplets"] * 2
    texts = [tuple(row.values()) for rows in seen.batches for row in rows]
    assert len(texts) == len(set(texts)) == 40
    assert {"eval_pairs_contrastive_6x32", "eval_triplets_loss"} <= trainer.evaluate().keys()
    record = trainer.record()
    assert record.rows == 43 and record.sets == {"pairs": 26, "triplets": 17} and record.columns == [*PAIRS, *TRIPLETS]


def test_a_batch_has_the_loss_that_it_has_alone(tiny_tokenizer, tmp_path):
    """Prompts and lengths are those of its own columns."""
    changes = {"query_prompt": "list ", "document_prompt": "text ", "query_max_length": 6}
    several = contrastive_trainer(tiny_tokenizer, tmp_path, **changes)
    for name, dataset in two_sets().items():
        alone = contrastive_trainer(tiny_tokenizer, tmp_path, dataset, **changes)
        rows = [dataset[row] for row in range(8)]
        ours, theirs = several.data_collator(rows), alone.data_collator(rows)
        assert list(ours) == list(theirs) == dataset.column_names, name
        for column in dataset.column_names:
            assert ours[column]["input_ids"].equal(theirs[column]["input_ids"])


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 5:
            raise KeyboardInterrupt


def test_a_killed_run_goes_on_with_the_same_batches(tiny_tokenizer, tmp_path):
    """The five batches of an epoch are three steps of two batches or one; the run is killed in its second epoch."""
    changes = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    changes |= {"batch_sampler": "no_duplicates"}
    straight = contrastive_trainer(tiny_tokenizer, tmp_path / "straight", **changes)
    expected = Seen(straight)
    straight.train()
    killed = contrastive_trainer(tiny_tokenizer, tmp_path / "killed", **changes)
    killed.add_callback(Kill)
    before = Seen(killed)
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    resumed = contrastive_trainer(tiny_tokenizer, tmp_path / "killed", **changes)
    after = Seen(resumed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "killed" / "checkpoint-4"))
    at = len(expected.batches) - len(after.batches)
    assert before.batches == expected.batches[: len(before.batches)] and 0 < at < len(before.batches)
    assert after.batches == expected.batches[at:]
    assert set(names_of(after.batches)) == {"pairs", "triplets"}
    assert_same_weights(resumed.backbone, straight.backbone)


TWO = """
from tests.conftest import tiny_tokenizer
from tests.trainers.test_several_datasets import SGD, Seen, contrastive_trainer, names_of
import json
folder = Path(sys.argv[1])
trainer = contrastive_trainer(tiny_tokenizer.__wrapped__(), folder, batch_size=4, ddp_backend="gloo", **SGD)
assert trainer.accelerator.num_processes == 2
seen = Seen(trainer)
trainer.train()
(folder / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(seen.batches))
if torch.distributed.get_rank() == 0:
    trainer.backbone.save_pretrained(folder)
"""
SGD = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 4, "batch_sampler": "no_duplicates"}


def test_two_processes_have_rows_of_the_same_data_set_and_train_as_one(tiny_tokenizer, tmp_path):
    run_two(tmp_path, TWO)
    trainer = contrastive_trainer(tiny_tokenizer, tmp_path / "one", **SGD)
    seen = Seen(trainer)
    trainer.train()
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert names_of(first) == names_of(second) == names_of(seen.batches)
    assert [one + other for one, other in zip(first, second, strict=True)] == seen.batches
    assert_same_weights(M3BertModel.from_pretrained(tmp_path), trainer.backbone, atol=1e-5)


def test_one_data_set_without_duplicates_in_a_batch(tiny_tokenizer, tmp_path):
    answers = table(["answer"], 24, 0)
    pairs = answers.add_column("query", [WORDS[row % 6] for row in range(24)])
    trainer = contrastive_trainer(tiny_tokenizer, tmp_path, pairs, pairs, batch_size=6, batch_sampler="no_duplicates")
    seen = Seen(trainer)
    trainer.train()
    assert len(seen.batches) == 5
    trained = [rows for rows in seen.batches if len(rows) == 6]
    assert all(len({row["query"] for row in rows}) == 6 for rows in trained)


def run(config_class, trainer_class, tokenizer, folder, train, *, teacher=None, **changes):
    values = {"max_steps": 4, "learning_rate": 1e-3, "per_device_train_batch_size": 8, "logging_steps": 1}
    args = config_class(**quiet(folder, **{**values, **changes}))
    trainer = trainer_class(M3BertModel(tiny_config()), args, tokenizer, train, teacher=teacher)
    before = {name: parameter.clone() for name, parameter in trainer.backbone.named_parameters()}
    seen = Seen(trainer)
    trainer.train()
    assert all(not torch.equal(each, before[name]) for name, each in trainer.backbone.named_parameters())
    return seen.batches


def test_every_kind_of_data_is_trained_from_several_sets(tiny_tokenizer, tmp_path):
    """Single texts under two names, scores under two names, and a teacher of texts in one column and in two."""
    singles = {"a": table(["text"], 16, 0), "b": table(["query"], 16, 20)}
    batches = run(SimCSEConfig, SimCSETrainer, tiny_tokenizer, tmp_path, singles)
    assert {tuple(rows[0]) for rows in batches} == {("text",), ("query",)}
    scores = [row % 5 / 5 for row in range(16)]
    scored = {
        "a": table(["sentence1", "sentence2"], 16, 0).add_column("score", scores),
        "b": table(["query", "text"], 16, 40).add_column("label", scores),
    }
    batches = run(ScoredPairsConfig, ScoredPairsTrainer, tiny_tokenizer, tmp_path, scored, grid="2,6x8,32")
    assert {tuple(rows[0]) for rows in batches} == {("sentence1", "sentence2", "score"), ("query", "text", "label")}
    taught = {"a": singles["a"], "b": table(PAIRS, 16, 60)}
    texts = sorted({text for dataset in taught.values() for row in dataset for text in row.values()})
    teacher = TeacherEmbeddings.write(texts, torch.randn(len(texts), 20), tmp_path / "teacher.npy")
    batches = run(IBKDConfig, IBKDTrainer, tiny_tokenizer, tmp_path, taught, teacher=teacher, method="mse")
    assert {tuple(rows[0]) for rows in batches} == {("text",), PAIRS}


def test_the_teacher_embeds_the_texts_of_all_sets(tiny_tokenizer, encoder_folder, tmp_path):
    pytest.importorskip("sentence_transformers")
    args = IBKDConfig(
        **quiet(tmp_path, grid="6x32", method="mse", teacher_cache_dir=str(tmp_path), per_device_train_batch_size=8)
    )
    trainer = IBKDTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, two_sets(), teacher=str(encoder_folder))
    assert len(trainer.teacher) == 26 * 2 + 17 * 3


def test_a_set_without_a_batch_of_its_own_is_refused(tiny_tokenizer, tmp_path):
    """Its rows would never be read."""
    train = {"a": table(PAIRS, 16, 0), "b": table(PAIRS, 7, 20)}
    with pytest.raises(ValueError, match=r"The data set 'b' \(7 rows\) is smaller than one batch \(8 rows\)"):
        contrastive_trainer(tiny_tokenizer, tmp_path, train)
