"""Several Dense modules of sentence-transformers in a row, as EmbeddingGemma has them, are one linear map."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from m3bert.models.settings import EmbeddingSettings
from tests.conftest import assert_close, refused, write_modules


def write_two_maps(folder: Path, *, bias: bool = False) -> list[nn.Linear]:
    """Modules of an embedding model with two Dense modules in a row."""
    maps = [nn.Linear(32, 48, bias=bias), nn.Linear(48, 16, bias=bias)]
    projection, prompts = nn.Linear(32, 48, bias=bias), {"query": "ask: "}
    write_modules(folder, width=32, max_length=9, projection=projection, normalize=True, prompts=prompts)
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(3, {**modules[2], "path": "3_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, linear in zip(("2_Dense", "3_Dense"), maps, strict=True):
        (folder / path).mkdir(exist_ok=True)
        config = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": bias}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / path / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": value.detach() for name, value in linear.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")
    return maps


def test_two_maps_in_a_row_are_one(tmp_path):
    maps, vectors = write_two_maps(tmp_path), torch.randn(5, 32)
    settings = EmbeddingSettings.read(tmp_path)
    assert settings.normalize and settings.projection.out_features == 16
    assert_close(settings.projection(vectors), maps[1](maps[0](vectors)))


def test_the_modules_of_the_library_are_read_alike(tmp_path):
    modules = pytest.importorskip("sentence_transformers").sentence_transformer.modules
    write_two_maps(tmp_path)
    vectors, states = torch.randn(5, 32), []
    dense = [modules.Dense.load(str(tmp_path / path)) for path in ("2_Dense", "3_Dense")]
    for value in dense:
        states.append(value({"sentence_embedding": states[-1] if states else vectors})["sentence_embedding"])
    actual = EmbeddingSettings.read(tmp_path).projection(vectors)
    assert_close(actual, states[-1])


Change = Callable[[Any], Any]
IN_A_ROW = "are not one linear map without activation"
REFUSED: dict[str, tuple[str, Change, str]] = {
    "an activation": ("2_Dense/config.json", lambda value: value | {"activation_function": "torch.nn.Tanh"}, IN_A_ROW),
    "a residual": ("2_Dense/config.json", lambda value: value | {"use_residual": True}, IN_A_ROW),
    "another module": (
        "modules.json",
        lambda value: [*value, value[-1] | {"type": "sentence_transformers.models.LayerNorm"}],
        "has the modules Transformer, Pooling, Dense, Dense, Normalize, LayerNorm. Supported are",
    ),
    "texts without their prompt": (
        "1_Pooling/config.json",
        lambda value: value | {"include_prompt": False},
        "leaves prompts out of its pooling",
    ),
    "another pooling": (
        "1_Pooling/config.json",
        lambda value: {"pooling_mode": "max"},
        "pooling 'max'; legal values: mean, cls, lasttoken",
    ),
    "two poolings": (
        "1_Pooling/config.json",
        lambda value: value | {"pooling_mode_cls_token": True},
        r"pooling 'cls \+ mean'; legal",
    ),
    "no array": ("modules.json", lambda value: {}, "modules.json is not a JSON array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_embed_otherwise_is_refused(name, tmp_path):
    write_two_maps(tmp_path)
    file, change, message = REFUSED[name]
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).write_text(json.dumps(change(content)))
    refused(message, EmbeddingSettings.read, tmp_path)


def test_maps_with_a_bias_in_a_row_are_refused(tmp_path):
    write_two_maps(tmp_path, bias=True)
    refused(IN_A_ROW, EmbeddingSettings.read, tmp_path)
