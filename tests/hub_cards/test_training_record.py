"""What a checkpoint remembers of its run: every setting that is not a default, and nothing of the machine."""

import json
from dataclasses import fields

import pytest
import torch
from datasets import Dataset, DatasetInfo
from transformers import TrainingArguments

from m3bert import trainers
from m3bert.data.formats import file_name
from m3bert.hub_cards import training_record
from m3bert.modeling import M3BertModel
from m3bert.trainers import ContrastiveConfig, PublishingTrainer, TeacherEmbeddings
from m3bert.utils import papers
from tests.conftest import quiet, refused, tiny_config
from tests.published import contrastive_trainer
from tests.trainers.tiny_run import quiet_model


def test_every_setting_that_is_not_a_default_is_on_record(tmp_path):
    plain = training_record.changed_settings(ContrastiveConfig(**quiet(tmp_path)))
    assert set(plain) == {"learning_rate", "per_device_train_batch_size"}  # which are always asked for
    changed = {
        "temperature": 0.02, "weight_decay": 0.5, "max_grad_norm": 2.0, "warmup_steps": 7,
        "lr_scheduler_type": "cosine", "text_columns": ["a", "b"], "dataloader_drop_last": False,
    }  # fmt: skip
    assert training_record.changed_settings(ContrastiveConfig(**quiet(tmp_path, **changed))) == {**plain, **changed}


def test_paths_tokens_and_bookkeeping_are_not(tmp_path):
    changes = {"hub_token": "hf_secret", "run_name": "mine", "logging_steps": 3, "save_steps": 4}
    changes |= {"optim_args": f"file={tmp_path}", "lr_scheduler_kwargs": {"file": str(tmp_path)}}
    args = ContrastiveConfig(**quiet(tmp_path / "out", **changes))
    text = json.dumps(training_record.changed_settings(args))
    assert "hf_secret" not in text and "mine" not in text and "logging" not in text
    assert str(tmp_path) not in text and json.loads(text)["optim_args"] == f"file={tmp_path.name}"
    assert json.loads(text)["lr_scheduler_kwargs"] == {"file": tmp_path.name}


def test_what_is_saved_is_found_again(tmp_path, tiny_tokenizer, sentences):
    trainer = contrastive_trainer(tmp_path, tiny_tokenizer, sentences)
    trainer.data_files = (str(tmp_path / "a" / "pairs.jsonl"), "hf://datasets/user/x/more.csv", "b/pairs.jsonl")
    trainer.train()
    trainer.save_model()
    record = training_record.TrainingRecord.find(tmp_path)
    assert record == trainer.record() and record.rows == 24 and record.batch_size == 8
    assert record.files == ["pairs.jsonl", "more.csv"]
    assert record.objective == "MRL" and record.grid == "2,4,6x8,16,32"
    assert str(tmp_path) not in (tmp_path / training_record.RECORD_FILE).read_text()
    (tmp_path / training_record.RECORD_FILE).write_text("{}")
    refused("is not a training record", training_record.TrainingRecord.find, tmp_path)


@pytest.mark.parametrize("paper", [paper for paper in vars(papers).values() if isinstance(paper, papers.Paper)])
def test_papers_are_cited_with_the_full_names_of_their_authors(paper):
    assert all(len(name.split()) >= 2 for name in paper.authors)
    assert f"author = {{{' and '.join(paper.authors)}}}" in paper.citation


def test_a_second_objective_knows_the_first(tmp_path, tiny_tokenizer, sentences):
    first = contrastive_trainer(tmp_path / "first", tiny_tokenizer, sentences)
    first.base_model = "user/base"
    first.save_model()
    model = M3BertModel.from_pretrained(tmp_path / "first")
    second = contrastive_trainer(tmp_path / "second", tiny_tokenizer, sentences, model)
    assert second.record().base_model == "user/base" and second.record().earlier == ["MRL"]
    second.save_model()
    second.save_model()  # its own record is not an earlier one
    assert training_record.TrainingRecord.find(tmp_path / "second").earlier == ["MRL"]


def test_the_origin_is_a_name_on_the_hub_or_nothing(tmp_path):
    assert training_record.hub_id("user/model") == "user/model" and training_record.hub_id("bert-base") == "bert-base"
    assert [training_record.hub_id(name) for name in (str(tmp_path), "/no/such", "", None)] == [None] * 4
    assert training_record.origin_of(tiny_config(name_or_path="user/model")) == ("user/model", [])
    assert training_record.origin_of(tiny_config(converted_from="user/bert")) == ("user/bert", [])


def test_data_sets_of_the_hub_are_named():
    url = "hf://datasets/user/pairs@abc/data/train.parquet"
    info = DatasetInfo(download_checksums={url: {}, f"{url}2": {}, "/home/me/file.jsonl": {}})
    assert training_record.hub_datasets([Dataset.from_dict({"a": [1]}, info=info), [1, 2], None]) == ["user/pairs"]


MRL, SIA, PIC = (("MRL", [papers.MRL]), ("SIA", [papers.MIPIC]), ("PIC", [papers.MIPIC]))
SCR, SIR, HSIC = (("SCR", [papers.MIC]), ("SIR", [papers.MIC]), ("HSIC", [papers.IBKD]))
OVER_LAYERS = ("MRL", [papers.MRL, papers.M3BERT])
TAUGHT = ("InfoNCE with a teacher", [papers.IBKD])
EXITS = ("Exit distillation", [])
ONE_LAYER = {"grid": "6x8,32"}
# Name of the trainer without "Trainer", its settings, and name and papers of each part with its weight.
METHODS = [
    ("Contrastive", {"grid": "2,6x8,32"}, [(OVER_LAYERS, 1.0)]),
    ("Contrastive", ONE_LAYER, [(MRL, 1.0)]),
    ("Contrastive", {"grid": "6x32"}, [(("InfoNCE", []), 1.0)]),
    ("SimCSE", {"unsupervised": False}, [(("SimCSE", [papers.SIMCSE]), 1.0)]),
    ("ScoredPairs", {"grid": "2,6x8,32"}, [(("CoSENT", [papers.COSENT]), 1.0)]),
    ("Espresso", {"grid": "2,6x8,32"}, [(("ESE", [papers.ESE]), 1.0)]),
    ("Matryoshka2d", {"grid": "2,6x8,32"}, [(("2DMSE", [papers.ESE]), 1.0)]),
    ("Starbucks", {"grid": "2x8,6x32"}, [(("Starbucks", [papers.STARBUCKS]), 1.0)]),
    ("Mixture", {**ONE_LAYER, "weights": {"sia": 0.2, "sir": 0.3}}, [(MRL, 1.0), (SIA, 0.2), (SIR, 0.3)]),
    ("MIPIC", ONE_LAYER, [(MRL, 0.4), (SIA, 0.6), (PIC, 0.6)]),
    ("MIPIC", {**ONE_LAYER, "weights": {"mrl": 0}, "alpha": 0.25}, [(SIA, 0.75), (PIC, 0.75)]),
    ("MIPIC", {"grid": "2,6x8,32"}, [(OVER_LAYERS, 0.4), (SIA, 0.6), (PIC, 0.6)]),
    ("MIC", ONE_LAYER, [(MRL, 1.0), (SCR, 0.6), (SIR, 0.6)]),
    ("MIC", {**ONE_LAYER, "weights": "{scr: 0}", "gamma": 0.1}, [(MRL, 1.0), (SIR, 0.1)]),
    ("IBKD", {"beta": 0.3}, [(TAUGHT, 1.0), (HSIC, 0.3)]),
    ("IBKD", {"beta": 0.0}, [(TAUGHT, 1.0)]),
    ("IBKD", {"method": "mse"}, [(("MSE to a teacher", []), 1.0)]),
    ("IBKD", {"method": "crd"}, [(("CRD", [papers.CRD]), 1.0)]),
    ("IBKD", {"method": "hpd", "projection_dim": 8}, [(("HPD", [papers.HPD]), 1.0)]),
    ("ExitDistillation", {"grid": "2,6x8,20"}, [(EXITS, 1.0)]),
    ("ExitDistillation", {"grid": "2,6x8,20", "pair_weight": 0.5}, [(EXITS, 1.0), (("CrossDepth", []), 0.5)]),
    ("QAMA", {"grid": "6x8,32"}, [(("QAMA", [papers.QAMA]), 1.0)]),
    ("IBKDFinetuning", {}, [(("InfoNCE", []), 1.0), (HSIC, 0.5)]),
    ("IBKDFinetuning", {"beta": 0.0}, [(("InfoNCE", []), 1.0)]),
    ("MultigranularMLM", {}, [(("Multigranular MLM", [papers.M3BERT]), 1.0)]),
    ("MatryoshkaDistillation", {"pairs": "6x32>2x8"}, [(("Matryoshka distillation", [papers.M3BERT]), 1.0)]),
]


def trainer_of(method: str, tokenizer, sentences, folder, settings) -> PublishingTrainer:
    config_class, trainer_class = (getattr(trainers, f"{method}{kind}") for kind in ("Config", "Trainer"))
    of_texts = issubclass(config_class, trainers.TextTrainingArguments)
    of_pairs = issubclass(config_class, trainers.EmbeddingConfig)
    values = {"per_device_train_batch_size": 8} | ({"unsupervised": False} if of_pairs else {})
    args = config_class(**quiet(folder, **{**values, **settings}))
    if not of_texts:
        data = Dataset.from_dict({"input_ids": tokenizer(sentences)["input_ids"]})
        return trainer_class(quiet_model(), args, tokenizer, data)
    data = Dataset.from_dict({"query": sentences, "answer": sentences[::-1]})
    if method == "ScoredPairs":
        data = data.add_column("score", [float(row % 5) for row in range(len(sentences))])
    widths = {"IBKD": 20, "ExitDistillation": 20, "QAMA": 32}
    teacher = {}
    if method in widths:
        vectors = torch.eye(len(sentences), widths[method])
        teacher = {"teacher": TeacherEmbeddings.write(sentences, vectors, folder / "teacher.npy")}
    return trainer_class(quiet_model().model, args, tokenizer, data, **teacher)


@pytest.mark.parametrize(
    ("method", "settings", "expected"), METHODS, ids=[f"{method} {settings}" for method, settings, _ in METHODS]
)
def test_record_and_objective_name_exactly_the_parts_of_the_loss(
    tiny_tokenizer, sentences, tmp_path, method, settings, expected
):
    """Those with a weight above 0, each with its weight and its papers: no other part, and no other paper."""
    trainer = trainer_of(method, tiny_tokenizer, sentences, tmp_path, settings)
    record, identity = trainer.record(), trainer.nested.objective.identity
    names = [name for (name, _), _ in expected]
    assert record.trainer == f"{method}Trainer" and record.objective == identity.name == " + ".join(names)
    assert [part["name"] for part in record.parts] == names
    assert [part["weight"] for part in record.parts] == pytest.approx([weight for _, weight in expected])
    assert all(part["equation"] for part in record.parts)
    written = [[paper["citation"] for paper in part["papers"]] for part in record.parts]
    assert written == [[paper.citation for paper in known] for (_, known), _ in expected]
    assert set(record.tags) == {tag for part in identity.parts or (identity,) for tag in part.tags} != set()


def test_every_trainer_of_a_method_is_among_those():
    """A trainer that is no method's own has no record, or one of whatever objective it is given."""
    general = {"NestedTrainer", "PublishingTrainer", "EmbeddingTrainer", "DistillationTrainer"}
    all_trainers = {name for name in trainers.__all__ if name.endswith("Trainer")}
    assert all_trainers == {f"{method}Trainer" for method, *_ in METHODS} | general


def test_no_setting_of_an_objective_counts_as_bookkeeping():
    """Their names must not look like those that are left out."""
    common = {field.name for field in fields(TrainingArguments)}
    configs = [getattr(trainers, name) for name in trainers.__all__ if name.endswith("Config")]
    names = {field.name for config in configs for field in fields(config)} - common
    assert {name for name in names if training_record.BOOKKEEPING.fullmatch(name)} == {"grid", "teacher_cache_dir"}


def test_a_signature_in_a_url_is_not_recorded():
    assert file_name("https://host/pairs.jsonl?signature=secret") == "pairs.jsonl"
    assert file_name("data/what?.jsonl") == "what?.jsonl"
