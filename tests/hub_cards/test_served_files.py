"""Every embedding checkpoint that this project writes has the files and fields that servers require."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import BertConfig, BertModel

from hub_cards.checkpoint import Checkpoint
from hub_cards.native_export import export_native
from hub_cards.publication import Options, prepare
from modeling_m3bert import EmbeddingSettings, M3BertModel
from scripts.convert import convert
from tests.conftest import tiny_config
from tests.modeling_m3bert.test_native_m3bert import BIASES, POST_NORM
from tests.published import contrastive_trainer, save_with_exits
from trainers import Granularity
from trainers.hub.serving import problems_for_servers


NATIVE = {**POST_NORM, **BIASES}
CUT = Granularity(4, 16)


def trained(folder: Path, tokenizer, sentences, model=None, **changes) -> Path:
    """What a trainer saves, and the checkpoint that it leaves on the way."""
    trainer = contrastive_trainer(folder, tokenizer, sentences, model, **changes)
    trainer.train()
    trainer.save_model()
    assert problems_for_servers(folder / "checkpoint-2") == []
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
        **{path.name: path for path in root.iterdir()},
        "projected": trained(root / "projected", tiny_tokenizer, sentences, projection_dim=12, grid="6x12"),
        "cut": published(elastic, root / "cut", granularity=CUT),
        "cut at an exit": published(root / "fitted", root / "cut at an exit", granularity=CUT),
        "8 bits": published(elastic, root / "8 bits", quantize=True),
        "completed": published(without_modules, root / "completed"),
        "native": export_native(Checkpoint(elastic), root / "native").folder,
        "native cut": export_native(Checkpoint(root / "fitted"), root / "native cut", CUT).folder,
        "native pushed": published(elastic, root / "native pushed", granularity=CUT, format="native"),
    }


def test_servers_find_what_they_need(checkpoints):
    found = {name: problems_for_servers(folder) for name, folder in checkpoints.items()}
    assert len(found) == 14
    assert found.pop("encoder")[0] == "sentence_bert_config.json is missing."
    assert not any(found.values()), found


def test_the_longest_text_is_that_of_the_model(checkpoints):
    """The model's positions, or the smaller limit that an encoder was published with."""
    lengths = {name: EmbeddingSettings.read(folder).max_length for name, folder in checkpoints.items()}
    assert lengths.pop("converted") == 256 and lengths.pop("encoder") is None
    assert set(lengths.values()) == {48}


@pytest.mark.parametrize(
    ("file", "change", "problem"),
    [
        ("sentence_bert_config.json", {"max_seq_length": None}, "lacks max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": 49}, "max_seq_length=49 must be within 1..48"),
        ("sentence_bert_config.json", {"max_seq_length": "48"}, "max_seq_length='48' must be int"),
        ("sentence_bert_config.json", {"do_lower_case": None}, "lacks do_lower_case"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "must set exactly one pooling_mode"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": None}, "lacks pooling_mode_mean_tokens"),
        ("config_sentence_transformers.json", {"prompts": {"query": 1}}, "has a prompt that is no text"),
        ("config.json", {"architectures": None}, "config.json lacks architectures"),
        ("config.json", {"num_hidden_layers": True}, "num_hidden_layers=True must be int"),
        ("config.json", {"hidden_act": "gelu_10"}, "hidden_act='gelu_10' is not one of gelu"),
        ("config.json", {"auto_map": {"AutoTokenizer": [None, "a.B"]}}, "auto_map must map to str"),
        ("config.json", {"matryoshka_dimensions": [16, 8]}, "matryoshka_dimensions must be ascending"),
        ("2_Dense/config.json", {"activation_function": "x.GELU"}, "activation_function must be one of"),
        ("2_Dense/config.json", {"bias": None}, "2_Dense/config.json lacks bias"),
    ],
)
def test_each_defect_is_named(checkpoints, tmp_path, file, change, problem):
    folder = shutil.copytree(checkpoints["native pushed"], tmp_path / "broken")
    content = json.loads((folder / file).read_text()) | change
    (folder / file).write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    found = problems_for_servers(folder)
    assert any(problem in sentence for sentence in found), found
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in found)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"]
)
def test_each_missing_file_is_named(checkpoints, tmp_path, file):
    folder = Path(shutil.copytree(checkpoints["native pushed"], tmp_path / "broken"))
    (folder / file).unlink()
    assert any(sentence.startswith(f"{file} is missing") for sentence in problems_for_servers(folder))


def test_unknown_modules_are_named(checkpoints, tmp_path):
    folder = Path(shutil.copytree(checkpoints["native pushed"], tmp_path / "broken"))
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.models.Router"
    (folder / "modules.json").write_text(json.dumps(modules))
    (problem,) = problems_for_servers(folder)
    assert problem.startswith("modules.json: 'sentence_transformers.models.Router' is not one of")
