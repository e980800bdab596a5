"""A loaded model knows how it was loaded: every later look-up is of the same commit, with the same options."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from m3bert.encode.encoder import GridEncoder
from m3bert.modeling import M3BertModel
from m3bert.modeling.files_elastic import Source
from m3bert.models.auto import load_model
from m3bert.models.settings import EmbeddingSettings
from tests.elastic_repositories import PROMPTS, save_elastic


@pytest.fixture
def pinned(only_hub: Any, tiny_tokenizer: Any, tmp_path: Path) -> str:
    """A commit of the repository `user/elastic`, whose `main` has other prompts and broken weights."""
    folder = tmp_path / "published"
    save_elastic(folder, tiny_tokenizer)
    repo = only_hub.publish("user/elastic", folder)
    commit = repo.history[-1].oid
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prompts": {"query": "NEW"}}))
    files = only_hub.publish("user/other", folder).history[-1].files
    repo.commit("main moves", {**files, "model.safetensors": files["modules.json"]})
    return commit


@pytest.mark.parametrize("loader", ["AutoModel", "load_model", "GridEncoder"])
def test_what_is_pinned_is_read_at_its_commit_and_never_again(loader, pinned, only_hub, tmp_path, monkeypatch):
    options: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "token": "hf_user", "output_layer": 2}
    if loader == "GridEncoder":
        encoder = GridEncoder.from_pretrained("user/elastic", grid="2x32", revision=pinned, model_kwargs=options)
        assert dict(encoder.prompts) == PROMPTS
        model = encoder.model
    elif loader == "load_model":
        model = load_model("user/elastic", revision=pinned, **options)
    else:
        model = AutoModel.from_pretrained("user/elastic", revision=pinned, trust_remote_code=True, **options)
    assert model.loaded_from.revision == pinned and model.loaded_from.hub["cache_dir"] == options["cache_dir"]
    only_hub.repos.clear()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("saved")
    assert EmbeddingSettings.read("saved").prompts == PROMPTS
    assert "hf_user" not in repr(model.loaded_from) and b"hf_user" not in pickle.dumps(
        model.loaded_from.__getstate__()
    )
    assert copy.deepcopy(model).loaded_from.token == "hf_user"


def test_a_config_takes_a_size(tiny_tokenizer, tmp_path):
    save_elastic(tmp_path / "elastic", tiny_tokenizer)
    config = AutoConfig.from_pretrained(tmp_path / "elastic", trust_remote_code=True, output_layer=2)
    model = AutoModel.from_pretrained(tmp_path / "elastic", trust_remote_code=True, config=config)
    assert model.config.num_hidden_layers == len(model.encoder.layer) == 2


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_type_of_the_weights_is_found(name, tiny_model, tmp_path):
    tiny_model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert M3BertModel.from_pretrained(tmp_path, **{name: "auto"}).dtype == torch.bfloat16


def test_own_code_needs_trust(tmp_path):
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    elastic = {"model_type": "own", "source_auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "elastic": elastic}))
    with pytest.raises(ValueError, match="runs its own code, own.Config: read it, then pass trust_remote_code=True"):
        load_model(tmp_path)
    assert Source.at(tmp_path, {"revision": "v1"}).revision is None
