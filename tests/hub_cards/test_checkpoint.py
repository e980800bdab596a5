"""A checkpoint on disk: what is complete, what it and its modules say, and which files are published."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertConfig, BertModel

from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.models.settings import MODULES_FILE, POOLING_FOLDER, PROJECTION_FOLDER, EmbeddingSettings
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, Granularity, Grid, Projection
from tests.conftest import quiet, refused, save, tiny_config, write_modules


@pytest.fixture
def folder(tmp_path, tiny_tokenizer) -> Path:
    """A tiny m3BERT that was never trained, with its tokenizer."""
    folder = tmp_path / "model"
    M3BertModel(tiny_config()).save_pretrained(folder, max_shard_size="60KB")
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("end", [-100, 0])
def test_weights_that_are_cut_short_are_refused(folder, end):
    file = sorted(folder.glob("model-*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:end])
    refused(f"{file.name} cannot be read; it may be incomplete", Checkpoint, folder)
    file.unlink()
    refused(f"lacks {file.name}, which its index lists", Checkpoint, folder)


def test_what_an_untrained_m3bert_says_of_itself(folder):
    checkpoint = Checkpoint(folder)
    assert (checkpoint.elastic, checkpoint.quantized, checkpoint.head) == (True, False, "AutoModel")
    assert checkpoint.record is None and checkpoint.projection is None and checkpoint.settings.pooling == "mean"
    assert checkpoint.full == Granularity(6, 32) and str(checkpoint.trained_grid) == str(checkpoint.grid)
    assert checkpoint.max_length == 48 and checkpoint.settings.used_prompts == {}
    write_modules(folder, width=32, pooling="cls", max_length=20, prompts={"query": "find: ", "document": ""})
    checkpoint = Checkpoint(folder)
    assert checkpoint.settings.pooling == "cls" and checkpoint.max_length == 20
    assert checkpoint.settings.used_prompts == {"query": "find: "}


def test_what_another_architecture_says_of_itself(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=99, **sizes)).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert not checkpoint.elastic and checkpoint.trained_grid is None and not checkpoint.trained
    assert str(checkpoint.grid) == "1,2,3x16,32" and checkpoint.full == Granularity(3, 32)


def test_a_record_is_what_it_was_trained_at(run):
    checkpoint = Checkpoint(run / "output")
    assert checkpoint.trained and str(checkpoint.trained_grid) == checkpoint.record.grid
    assert checkpoint.grid == checkpoint.trained_grid


def test_a_head_is_loaded_with_its_own_class(tmp_path):
    M3BertForMaskedLM(tiny_config()).save_pretrained(tmp_path)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.head == "AutoModelForMaskedLM" and isinstance(checkpoint.load(), M3BertForMaskedLM)


def test_only_what_belongs_to_a_model_is_published(work):
    for name in ("optimizer.pt", "data.jsonl", "notes.md", "pytorch_model.bin", ".env", "events.out.tfevents", "a.py"):
        (work / name).write_text("x")
    assert set(Checkpoint(work).files()) == {
        "1_Pooling/config.json", "config.json", "config_sentence_transformers.json", "configuration_elastic.py",
        "configuration_m3bert.py", "files_elastic.py", "loading_elastic.py", "model.safetensors",
        "modeling_elastic.py", "modeling_m3bert.py", "modules.json", "parts_elastic.py", "sentence_bert_config.json",
        "tokenizer.json", "tokenizer_config.json", "training.json",
    }  # fmt: skip


def test_a_link_out_of_the_checkpoint_is_refused(folder, tmp_path):
    (tmp_path / "secrets.json").write_text("{}")
    (folder / "added_tokens.json").symlink_to(tmp_path / "secrets.json")
    refused(r"added_tokens\.json is a link out of .*: put the file there, or remove it", Checkpoint(folder).files)


LIBRARY = "sentence_transformers"


@pytest.fixture
def m3bert_folder(tiny_model, tiny_tokenizer, tmp_path) -> Path:
    """The tiny m3BERT with its tokenizer, and nothing of sentence-transformers."""
    return save(tmp_path / "encoder", tiny_model, tiny_tokenizer)


def trainer_of(model, tokenizer, sentences, folder, **changes) -> ContrastiveTrainer:
    values = {"grid": "2,6x8,32", "per_device_train_batch_size": 8, "max_steps": 2}
    args = ContrastiveConfig(**quiet(folder, **{**values, **changes}))
    rows = {"anchor": sentences[:24], "positive": sentences[24:]}
    return ContrastiveTrainer(model, args, tokenizer, Dataset.from_dict(rows))


def files_of(folder: Path) -> dict[str, object]:
    """All that sentence-transformers wrote, but the card."""
    files = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md"):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".json":
            files[name] = json.loads(file.read_text())
        elif file.suffix == ".safetensors":
            files[name] = {key: value.tolist() for key, value in load_file(file).items()}
    return files


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("dim", [None, 6])
def test_the_files_mean_what_the_library_writes(m3bert_folder, sentences, tmp_path, pooling, dim):
    """Read and saved by sentence-transformers, they are the files that it writes of the same modules."""
    library = pytest.importorskip(LIBRARY)
    modules = library.sentence_transformer.modules
    projection = Projection(32, dim) if dim else None
    prompts = {"query": "open the ", "document": "read a "}
    written = write_modules(
        m3bert_folder, width=32, pooling=pooling, max_length=9, prompts=prompts, projection=projection
    )
    assert all((m3bert_folder / name).is_file() for name in written)
    assert written[-1] == f"{PROJECTION_FOLDER}/model.safetensors" or not dim
    options = {"device": "cpu", "local_files_only": True}
    ours = library.SentenceTransformer(str(m3bert_folder), trust_remote_code=True, **options)

    parts = [modules.Transformer(str(m3bert_folder)), modules.Pooling(32, pooling_mode=pooling)]
    if projection is not None:
        weight = projection.weight.detach().clone()
        parts.append(modules.Dense(32, dim, bias=False, activation_function=nn.Identity(), init_weight=weight))
    theirs = library.SentenceTransformer(modules=parts, prompts=prompts, similarity_fn_name="cosine", device="cpu")
    theirs.max_seq_length = 9

    np.testing.assert_array_equal(ours.encode_query(sentences[:5]), theirs.encode_query(sentences[:5]))
    assert ours.get_embedding_dimension() == theirs.get_embedding_dimension() == (dim or 32)
    for name, model in (("ours", ours), ("theirs", theirs)):
        model.save(str(tmp_path / name), create_model_card=False)
    files, expected = files_of(tmp_path / "ours"), files_of(tmp_path / "theirs")
    assert {MODULES_FILE, f"{POOLING_FOLDER}/config.json", "sentence_bert_config.json"} < expected.keys()
    assert files == expected
    assert files["tokenizer_config.json"]["model_max_length"] == 9


@pytest.mark.parametrize(("pooling", "dim"), [("mean", None), ("cls", None), ("lasttoken", 6)])
def test_a_trainer_writes_them_without_the_library(
    tiny_tokenizer, sentences, tmp_path, monkeypatch, run_bare, pooling, dim
):
    """In checkpoints and in what is published; read elsewhere, they give what was trained."""
    pytest.importorskip(LIBRARY)
    changes = {"projection_dim": dim, "grid": f"6x{dim}"} if dim else {}
    trainer = trainer_of(
        M3BertModel(tiny_config()), tiny_tokenizer, sentences, tmp_path / "run", pooling=pooling,
        save_strategy="steps", save_steps=2, **changes,
    )  # fmt: skip
    for name in [name for name in sys.modules if name.split(".")[0] == LIBRARY]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "run" / "checkpoint-2" / MODULES_FILE).is_file()
    encoder = GridEncoder(
        trainer.backbone, tiny_tokenizer, Grid.parse(f"6x{dim or 32}"), pooling=pooling, projection=trainer.projection
    )
    save_file({"vectors": encoder.encode(sentences[:5]).layers[6]}, tmp_path / "ours.safetensors")
    run_bare(
        f"""
        import torch
        from safetensors.torch import load_file
        from sentence_transformers import SentenceTransformer
        for folder in ("run", "run/checkpoint-2"):
            model = SentenceTransformer(folder, trust_remote_code=True, device="cpu")
            vectors = model.encode({sentences[:5]!r}, convert_to_tensor=True)
            torch.testing.assert_close(vectors, load_file("ours.safetensors")["vectors"], atol=1e-5, rtol=1e-5)
        """
    )


def test_adapters_are_read_with_their_pooling(m3bert_folder, tiny_tokenizer, sentences, tmp_path):
    library = pytest.importorskip(LIBRARY)
    model = get_peft_model(
        M3BertModel.from_pretrained(m3bert_folder), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    trainer = trainer_of(model, tiny_tokenizer, sentences, tmp_path / "adapter", pooling="cls", grid="6x32")
    trainer.train()
    trainer.save_model()
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    ours = GridEncoder(trainer.backbone, tiny_tokenizer, Grid.parse("6x32"), pooling="cls").encode(sentences[:4])
    theirs = library.SentenceTransformer(str(tmp_path / "adapter"), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(theirs.encode(sentences[:4]), ours.layers[6].numpy(), atol=1e-5)


def test_the_width_is_what_is_read_by_default(tiny_tokenizer, sentences, tmp_path):
    library = pytest.importorskip(LIBRARY)
    model = M3BertModel(tiny_config(output_dim=16))
    trainer_of(model, tiny_tokenizer, sentences, tmp_path, grid="2,6x16,32").save_model()
    read = library.SentenceTransformer(str(tmp_path), trust_remote_code=True, device="cpu")
    assert read.encode(sentences[:1]).shape == (1, 16) and read.get_embedding_dimension() == 16


def test_commands_pool_as_published(tiny_tokenizer, sentences, tmp_path):
    trainer_of(M3BertModel(tiny_config()), tiny_tokenizer, sentences, tmp_path / "a", pooling="cls").save_model()
    assert load_encoder(EncoderArguments(model_name_or_path=str(tmp_path / "a"))).pooling == "cls"
    assert load_encoder(EncoderArguments(model_name_or_path=str(tmp_path / "a"), pooling="mean")).pooling == "mean"
    (tmp_path / "a" / MODULES_FILE).unlink()
    assert load_encoder(EncoderArguments(model_name_or_path=str(tmp_path / "a"))).pooling == "mean"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "lasttoken"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"word_embedding_dimension": 32}, "mean"),  # as sentence-transformers reads it
    ],
)
def test_poolings_of_all_versions_are_read(tmp_path, config, expected):
    write_modules(tmp_path, width=32, max_length=32)
    (tmp_path / POOLING_FOLDER / "config.json").write_text(json.dumps(config))
    assert EmbeddingSettings.read(str(tmp_path)).pooling == expected


def test_what_is_listed_counts_not_what_lies_there(tmp_path):
    """A folder that was written twice, first with a projection."""
    write_modules(tmp_path, width=32, max_length=32, projection=Projection(32, 6))
    assert EmbeddingSettings.read(str(tmp_path)).projection is not None
    write_modules(tmp_path, width=32, max_length=32, pooling="cls")
    assert EmbeddingSettings.read(str(tmp_path)).projection is None
    assert EmbeddingSettings.read(str(tmp_path)).pooling == "cls"
