"""Several Dense modules of sentence-transformers in a row, as EmbeddingGemma has them, are one linear map."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from modeling_m3bert import EmbeddingSettings
from tests.conftest import write_modules


def write_two_maps(folder: Path, *, bias: bool = False, activation: str = "Identity") -> list[nn.Linear]:
    """Modules of an embedding model with two Dense modules in a row."""
    maps = [nn.Linear(32, 48, bias=bias), nn.Linear(48, 16, bias=bias)]
    write_modules(folder, width=32, max_length=9, projection=nn.Linear(32, 48, bias=bias), normalize=True)
    modules = json.loads((folder / "modules.json").read_text())
    modules.insert(3, {**modules[2], "path": "3_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, linear in zip(("2_Dense", "3_Dense"), maps, strict=True):
        (folder / path).mkdir(exist_ok=True)
        config = {"in_features": linear.in_features, "out_features": linear.out_features, "bias": bias}
        config["activation_function"] = f"torch.nn.modules.{'linear' if activation == 'Identity' else 'activation'}"
        config["activation_function"] += f".{activation}"
        (folder / path / "config.json").write_text(json.dumps(config))
        tensors = {f"linear.{name}": its.detach() for name, its in linear.named_parameters()}
        save_file(tensors, folder / path / "model.safetensors")
    return maps


def test_two_maps_in_a_row_are_one(tmp_path):
    maps, vectors = write_two_maps(tmp_path), torch.randn(5, 32)
    settings = EmbeddingSettings.read(tmp_path)
    assert settings.normalize and settings.projection.out_features == 16
    torch.testing.assert_close(settings.projection(vectors), maps[1](maps[0](vectors)), atol=1e-6, rtol=1e-5)


def test_the_modules_of_the_library_are_read_alike(tmp_path):
    modules = pytest.importorskip("sentence_transformers").sentence_transformer.modules
    write_two_maps(tmp_path)
    vectors, states = torch.randn(5, 32), []
    dense = [modules.Dense.load(str(tmp_path / path)) for path in ("2_Dense", "3_Dense")]
    for its in dense:
        states.append(its({"sentence_embedding": states[-1] if states else vectors})["sentence_embedding"])
    found = EmbeddingSettings.read(tmp_path).projection(vectors)
    torch.testing.assert_close(found, states[-1], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("changes", [{"bias": True}, {"activation": "Tanh"}], ids=str)
def test_maps_that_are_not_one_are_refused(tmp_path, changes):
    write_two_maps(tmp_path, **changes)
    with pytest.raises(ValueError, match="is not one linear map without activation"):
        EmbeddingSettings.read(tmp_path)
