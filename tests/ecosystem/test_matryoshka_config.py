"""`is_matryoshka` and `matryoshka_dimensions` of config.json: what serving engines read before they cut a vector."""

import json
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoModel, BertConfig, BertModel

from m3bert.modeling import M3BertModel
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer
from tests.conftest import quiet, tiny_config


def written(folder: Path) -> tuple[bool, list[int]]:
    config = json.loads((folder / "config.json").read_text())
    return config["is_matryoshka"], config["matryoshka_dimensions"]


def backbone_of(kind: str) -> M3BertModel | BertModel:
    if kind == "m3bert":
        return M3BertModel(tiny_config())
    return BertModel(
        BertConfig(
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=6,
            num_attention_heads=2,
            intermediate_size=24,
            max_position_embeddings=48,
        )  # fmt: skip
    )


@pytest.mark.parametrize("kind", ["m3bert", "bert"])
def test_trained_dims_are_declared_wherever_the_checkpoint_goes(kind, tiny_tokenizer, sentences, tmp_path):
    """Trained, read and saved by transformers, by sentence-transformers, and cut."""
    changes = {"grid": "2,4,6x8,24,32", "max_steps": 1, "per_device_train_batch_size": 8}
    args = ContrastiveConfig(**quiet(tmp_path / "trained", **changes))
    rows = Dataset.from_dict({"anchor": sentences[:24], "positive": sentences[24:]})
    trainer = ContrastiveTrainer(backbone_of(kind), args, tiny_tokenizer, rows)
    trainer.train()
    trainer.save_model()
    declared = (True, [8, 24, 32])
    assert written(tmp_path / "trained") == declared
    model = AutoModel.from_pretrained(tmp_path / "trained")
    assert (model.config.is_matryoshka, model.config.matryoshka_dimensions) == declared
    model.save_pretrained(tmp_path / "again")
    assert written(tmp_path / "again") == declared
    if kind == "m3bert":
        AutoModel.from_pretrained(tmp_path / "trained", output_layer=2).save_pretrained(tmp_path / "cut")
        assert written(tmp_path / "cut") == declared

    library = pytest.importorskip("sentence_transformers")
    read = library.SentenceTransformer(str(tmp_path / "trained"), trust_remote_code=True, device="cpu")
    read.save_pretrained(str(tmp_path / "theirs"))
    assert written(tmp_path / "theirs") == declared
