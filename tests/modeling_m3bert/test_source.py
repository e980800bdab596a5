"""A loaded model knows how it was loaded: every later look-up is of the same commit, with the same options."""

import ast
import copy
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, BertConfig, BertForTokenClassification

from m3bert.encode.encoder import GridEncoder
from m3bert.modeling import M3BertModel, modeling_elastic
from m3bert.modeling.files_elastic import Source
from m3bert.models.auto import load_model
from m3bert.models.settings import EmbeddingSettings
from tests.conftest import refused
from tests.elastic_repositories import PROMPTS, save_elastic


ROOT = Path(__file__).parents[2]
FILES = [
    file
    for top in ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts")
    for file in (ROOT / top).rglob("*.py")
]
LOOK_UPS = {
    "cached_file", "hf_hub_download", "snapshot_download", "get_class_from_dynamic_module", "get_config_dict",
    "from_pretrained", "load_config", "load_model", "load_tokenizer", "SentenceTransformer",
}  # fmt: skip
# Files with other look-ups -> why these are right.
OTHERS = {
    "hub_cards/checkpoint.py": "a folder of this machine",
    "hub_cards/mteb_meta.py": "a folder of this machine",
    "hub_cards/native_export.py": "a folder of this machine",
    "hub_cards/static_export.py": "a folder of this machine",
    "hub_cards/upload.py": "a card, at the revision and with the token of a push",
    "m3bert/encode/quantizer.py": "options of the source, with another subfolder",
    "m3bert/evaluation/while_training.py": "modules in memory",
    "m3bert/models/conversion.py": "the first look-up of a name",
    "m3bert/models/repository.py": "a snapshot at the commit of the source",
    "m3bert/models/trim.py": "a folder of this machine",
    "modeling_m3bert/loading_elastic.py": "options of a source that is made there",
    "modeling_m3bert/modeling_elastic.py": "options of a source that is made there, or nn.Embedding",
    "modeling_m3bert/parts_elastic.py": "nn.Embedding",
    "m3bert/models/settings.py": "a module in memory",
    "scripts/backbone.py": "options of a source that is made there",
    "scripts/convert.py": "at the commit of a source that is made there",
    "scripts/encoder.py": "the first look-up of a name",
    "scripts/export.py": "a whole snapshot",
    "scripts/prepare.py": "the only look-up of a tokenizer",
    "scripts/quickstart.py": "the first look-up of a name",
    "scripts/trim.py": "a folder of this machine",
    "trainers/core/checkpoints.py": "a folder of this machine",
    "trainers/core/backbone.py": "the first look-up of a name",
    "m3bert/data/teacher.py": "at the commit of the teacher",
    "m3bert/exits/join.py": "the first look-up of a name",
}  # fmt: skip


def test_every_look_up_goes_through_the_source():
    actual: dict[str, set[str]] = {}
    for file in FILES:
        for call in (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)):
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            source = ast.unparse(call.args[0]) if call.args else ""
            unpacked = [ast.unparse(each.value).rstrip("}") for each in call.keywords if each.arg is None]
            through = any(entry.endswith((".hub", ".options")) for entry in unpacked)  # of a Source
            through |= name == "load_tokenizer" and any(word in source for word in ("ource", "origin"))
            if name in LOOK_UPS and not through:
                actual.setdefault(file.relative_to(ROOT).as_posix(), set()).add(name)
    assert actual.keys() == OTHERS.keys()
    assert not any(names & {"cached_file", "get_class_from_dynamic_module"} for names in actual.values())
    assert not [file for file in FILES if '_commit_hash"' in file.read_text("utf-8")]  # private, and gone


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
    refused("runs its own code, own.Config: read it, then pass trust_remote_code=True", load_model, tmp_path)
    assert Source.at(tmp_path, {"revision": "v1"}).revision is None


def test_a_config_of_own_code_has_no_native_head():
    own = type("OwnConfig", (BertConfig,), {"model_type": "bert"})
    kind = vars(modeling_elastic)["ElasticForTokenClassification"]
    assert kind.native_class(BertConfig()) is BertForTokenClassification
    refused("OwnConfig has no class for AutoModelForTokenClassification", kind.native_class, own())
