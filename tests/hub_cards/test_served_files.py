"""Every embedding checkpoint that this project writes has the files and fields that servers require."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from m3bert.commands.convert import convert
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.publication import Options, prepare
from m3bert.modeling import M3BertModel
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity
from tests.conftest import tiny_config
from tests.models.test_native import BIASES, POST_NORM
from tests.published import assert_served, contrastive_trainer, save_with_exits


NATIVE = {**POST_NORM, **BIASES}
CUT = Granularity(4, 16)


def trained(folder: Path, tokenizer, sentences, model=None, **changes) -> Path:
    """What a trainer saves, and the checkpoint that it leaves on the way."""
    trainer = contrastive_trainer(folder, tokenizer, sentences, model, **changes)
    trainer.train()
    trainer.save_model()
    assert_served(folder / "checkpoint-2")
    return folder


def tiny_bert() -> BertModel:
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=6, num_attention_heads=4, intermediate_size=37,
        max_position_embeddings=48,
    )  # fmt: skip
    return BertModel(config)


def published(source: Path, folder: Path, **options) -> Path:
    folder.mkdir()
    return prepare(Checkpoint(source), folder, "user/model", Options(**options)).folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tiny_tokenizer, sentences, minilm) -> dict[str, Path]:
    """One checkpoint of every kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    elastic = trained(root / "trained", tiny_tokenizer, sentences, M3BertModel(tiny_config(**NATIVE)))
    convert(minilm, str(root / "converted"))
    convert(str(trained(root / "bert", tiny_tokenizer, sentences, tiny_bert())), str(root / "converted bert"))
    save_with_exits(root / "fitted", tiny_tokenizer, sentences, **NATIVE)
    without_modules = Path(shutil.copytree(elastic, root / "encoder"))
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (without_modules / name).unlink()
    return {
        **{path.name: path for path in root.iterdir() if path != without_modules},
        "projected": trained(root / "projected", tiny_tokenizer, sentences, projection_dim=12, grid="6x12"),
        "cut": published(elastic, root / "cut", granularity=CUT),
        "cut at an exit": published(root / "fitted", root / "cut at an exit", granularity=CUT),
        **({"8 bits": published(elastic, root / "8 bits", quantize=True)} if find_spec("torchao") else {}),
        "completed": published(without_modules, root / "completed"),
        "native": export_native(Checkpoint(elastic), root / "native").folder,
        "native cut": export_native(Checkpoint(root / "fitted"), root / "native cut", CUT).folder,
        "native pushed": published(elastic, root / "native pushed", granularity=CUT, format="native"),
    }


def test_servers_find_what_they_need(checkpoints):
    """The longest text is that of the model's positions, or the smaller one that an encoder was published with."""
    assert len(checkpoints) == 12 + bool(find_spec("torchao"))
    for name, folder in checkpoints.items():
        assert_served(folder)
        assert EmbeddingSettings.read(folder).max_length == (256 if name == "converted" else 48)
