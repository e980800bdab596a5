"""What a trainer takes, models and teachers by name or in memory, and what it records and publishes."""

import copy

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from peft import LoraConfig, PeftModel
from transformers import AutoModel, AutoTokenizer, BertModel, Trainer, TrainerCallback

from m3bert.hub_cards.training_record import TrainingRecord
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, IBKDConfig, IBKDTrainer, PublishingTrainer, Teacher
from tests.conftest import quiet, refused, save
from tests.trainers.tiny_run import bert_config, masked_dataset, mlm_trainer, quiet_model, weights


@pytest.fixture
def pairs(sentences):
    return Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """An encoder with its tokenizer, pooled by [CLS] and published for texts of 24 tokens."""
    return save(tmp_path / "encoder", quiet_model().model, tiny_tokenizer, pooling="cls", max_length=24)


def options(tmp_path, **changes):
    return quiet(tmp_path / "out", grid="6x8,32", max_steps=1, per_device_train_batch_size=8, **changes)


def test_a_model_by_name_and_in_memory_trains_the_same(folder, pairs, tmp_path, tiny_tokenizer):
    library = pytest.importorskip("sentence_transformers")
    model = type(quiet_model().model).from_pretrained(folder)
    given = {
        "folder": str(folder), "path": folder, "model": model,
        "SentenceTransformer": library.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu"),
    }  # fmt: skip
    losses = {}
    for name, each in given.items():
        trainer = ContrastiveTrainer(each, ContrastiveConfig(**options(tmp_path)), train_dataset=pairs)
        assert trainer.args.pooling == "cls" and trainer.args.max_length == 24, name
        assert trainer.processing_class.get_vocab() == tiny_tokenizer.get_vocab()
        losses[name] = trainer.train().training_loss
    assert all(loss == pytest.approx(losses["model"], rel=1e-5) for loss in losses.values()), losses


def lora():
    return LoraConfig(r=2, target_modules="all-linear")


def test_peft_config_trains_a_new_adapter(folder, pairs, tmp_path):
    args = ContrastiveConfig(**options(tmp_path))
    trainer = ContrastiveTrainer(folder, args, train_dataset=pairs, peft_config=lora())
    assert isinstance(trainer.backbone, PeftModel)
    trainable = {name for name, one in trainer.backbone.named_parameters() if one.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    with pytest.raises(ValueError, match="the model has one: pass one of them"):
        ContrastiveTrainer(trainer.backbone, args, train_dataset=pairs, peft_config=lora())


def test_a_teacher_by_name_and_in_memory_teaches_the_same(encoder_folder, folder, sentences, tmp_path):
    library = pytest.importorskip("sentence_transformers")
    texts = Dataset.from_dict({"text": sentences[:8]})
    loaded = library.SentenceTransformer(str(encoder_folder), device="cpu")
    embeddings = []
    for teacher in (str(encoder_folder), encoder_folder, loaded, Teacher(str(encoder_folder))):
        args = IBKDConfig(**options(tmp_path, method="mse", teacher_cache_dir=str(tmp_path / "teachers")))
        trainer = IBKDTrainer(folder, args, train_dataset=texts, teacher=teacher)
        embeddings.append(trainer.teacher.of(sentences[:8]))
    for each in embeddings[1:]:
        torch.testing.assert_close(each, embeddings[0])
    with torch.no_grad():
        next(loaded.parameters()).mul_(2)
    changed = IBKDTrainer(folder, args, train_dataset=texts, teacher=loaded).teacher.of(sentences[:8])
    assert not torch.allclose(changed, embeddings[0]), "the weights in memory teach, not those on disk"


def test_what_would_train_on_the_wrong_rows_or_on_none_is_refused(folder, pairs, tmp_path):
    args = ContrastiveConfig(**options(tmp_path))
    splits = DatasetDict({"train": pairs, "test": pairs})
    with pytest.raises(ValueError, match="splits of one data set, train, test: pass one of them"):
        ContrastiveTrainer(folder, args, train_dataset=splits)
    with pytest.raises(ValueError, match=r"\(7 rows\) is smaller than one batch \(8 rows\)"):
        ContrastiveTrainer(folder, args, train_dataset=pairs.select(range(7)))
    args = ContrastiveConfig(**options(tmp_path, dataloader_drop_last=False))
    assert ContrastiveTrainer(folder, args, train_dataset=pairs.select(range(7))).train().global_step == 1


CHANGED = {"pooling": "mean", "query_prompt": "open ", "projection_dim": 8, "grid": "6x8", "learning_rate": 0.1}


def in_memory(kind, folder):
    """A model as a user has it in memory, and its encoder."""
    if kind == "SentenceTransformer":
        model = pytest.importorskip("sentence_transformers").SentenceTransformer(
            str(folder), trust_remote_code=True, device="cpu"
        )
        return model, model.transformers_model
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    return model, model


@pytest.mark.parametrize("kind", ["SentenceTransformer", "with a new adapter", "model"])
def test_what_was_passed_is_the_trained_model_as_a_whole_or_untouched(folder, pairs, tmp_path, kind):
    model, encoder = in_memory(kind, folder)
    before, settings = weights(model), copy.deepcopy(EmbeddingSettings.of(encoder))
    args = ContrastiveConfig(**(options(tmp_path) | CHANGED))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    trainer = ContrastiveTrainer(model, args, tokenizer, pairs, peft_config=lora() if "adapter" in kind else None)
    trainer.train()
    if kind == "model":
        found = EmbeddingSettings.of(model)
        assert (found.pooling, found.prompts) == ("mean", {"query": "open "})
        torch.testing.assert_close(found.projection.weight, trainer.projection.weight, rtol=0, atol=0)
        assert model is trainer.backbone
        assert not torch.equal(model.embed_tokens.weight, before["embed_tokens.weight"])
        return
    after = weights(model)
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert EmbeddingSettings.of(encoder) == settings
    assert getattr(encoder.config, "matryoshka_dims", []) != [8]


class Saving(TrainerCallback):
    """Does what reporters do: keeps the model it is given, and saves it with a Trainer of its own at the end."""

    def __init__(self, folder):
        self.folder, self.models = folder, set()

    def on_event(self, args, state, control, model=None, **kwargs):
        self.models.add(id(model))

    on_train_begin = on_step_end = on_log = on_evaluate = on_save = on_prediction_step = on_event

    def on_train_end(self, args, state, control, model=None, processing_class=None, **kwargs):
        self.on_event(args, state, control, model=model)
        other = copy.deepcopy(args)
        assert other.hub_token == "hf_secret"
        Trainer(args=other, model=model, processing_class=processing_class, eval_dataset=["x"]).save_model(self.folder)


@pytest.mark.parametrize("kind", ["m3bert", "bert", "adapter"])
def test_callbacks_get_a_model_that_saves_what_loads_and_no_token(folder, pairs, tmp_path, kind):
    if kind == "bert":
        BertModel(bert_config()).save_pretrained(folder)
    callback = Saving(str(tmp_path / "reported"))
    changes = {"hub_token": "hf_secret", "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    changes |= CHANGED if kind == "m3bert" else {}
    trainer = ContrastiveTrainer(
        folder, ContrastiveConfig(**(options(tmp_path, save_steps=1) | {"save_strategy": "steps"} | changes)),
        train_dataset=pairs, eval_dataset=pairs, peft_config=lora() if kind == "adapter" else None,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.models == {id(trainer.backbone)}
    assert not any(b"hf_secret" in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    loaded = AutoModel.from_pretrained(folder if kind == "adapter" else callback.folder, trust_remote_code=True)
    loaded = weights(PeftModel.from_pretrained(loaded, callback.folder) if kind == "adapter" else loaded)
    for name, tensor in weights(trainer.backbone).items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, msg=name)
    if kind == "m3bert":
        found = EmbeddingSettings.read(callback.folder)
        assert (found.pooling, found.prompts) == ("mean", {"query": "open "})
        torch.testing.assert_close(found.projection.weight, trainer.projection.weight, rtol=0, atol=0)


def test_what_is_not_one_model_that_reads_all_tokens_is_refused(folder, pairs, tmp_path):
    args = ContrastiveConfig(**options(tmp_path))
    for none in ({"model": None, "model_init": lambda: folder}, {"model": lambda trial: folder}):
        refused("make one for each trial and compare", ContrastiveTrainer, args=args, train_dataset=pairs, **none)
    with pytest.raises(ValueError, match="make one for each trial and compare"):
        ContrastiveTrainer(folder, args, train_dataset=pairs).hyperparameter_search()
    model, tokenizer = AutoModel.from_pretrained(folder, trust_remote_code=True), AutoTokenizer.from_pretrained(folder)
    rows = model.get_input_embeddings().num_embeddings
    new = [f"new{index}" for index in range(rows + 2 - len(tokenizer))]
    tokenizer.add_tokens(new)
    with pytest.raises(ValueError, match=rf"{rows} embeddings, none for the token\(s\) {new[-2]}, {new[-1]}: call"):
        ContrastiveTrainer(model, args, tokenizer, pairs)
    model.resize_token_embeddings(len(tokenizer))
    with pytest.raises(ValueError, match=f"has {rows} token embeddings, and this model {rows + 2}. Save the resized"):
        ContrastiveTrainer(model, args, tokenizer, pairs, peft_config=lora())
    save(tmp_path / "resized", model, tokenizer)
    trainer = ContrastiveTrainer(tmp_path / "resized", args, train_dataset=pairs, peft_config=lora())
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    model = AutoModel.from_pretrained(tmp_path / "resized", trust_remote_code=True)
    loaded = PeftModel.from_pretrained(model, tmp_path / "adapter")
    assert loaded.get_input_embeddings().num_embeddings == rows + 2


def test_a_sampling_strategy_works_or_is_refused(folder, pairs, tmp_path):
    for strategy in ("group_by_length", "batch_rebalance", "sequential"):
        args = ContrastiveConfig(**options(tmp_path, train_sampling_strategy=strategy))
        assert ContrastiveTrainer(folder, args, train_dataset=pairs).train().global_step == 1
        for data in ({"a": pairs, "b": pairs}, IterableDataset.from_generator(lambda: iter(pairs))):
            with pytest.raises(ValueError, match=f"{strategy}' orders the rows of one data set, not a stream"):
                ContrastiveTrainer(folder, args, train_dataset=data)


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
