"""Every way to save an elastic encoder, and every way to load what was saved: equal vectors, or one line."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification

from m3bert import GridEncoder
from m3bert.modeling.files_elastic import AUTO_CLASSES, CODE_FILES, write_parts
from m3bert.modeling.modeling_elastic import ElasticModel, make_elastic
from m3bert.models.auto import load_config, load_model
from tests.conftest import assert_close, refused, save
from tests.elastic_repositories import KINDS, PATH, save_elastic, save_source


REMOTE = {"trust_remote_code": True}
TEXTS = ["open the file", "a list of names"]
SIZES: dict[str, dict[str, int]] = {
    "all": {},
    "2": {"output_layer": 2},
    "a path at 8": {"output_layer": 4, "output_dim": 8},
}


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory) -> Path:
    """An elastic repository with an exit, a path and a table."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saving") / "elastic"
    save_elastic(folder, tiny_tokenizer)
    return folder


def load(folder: Path, auto: Any = AutoModel, **options: Any) -> Any:
    return auto.from_pretrained(folder, **REMOTE, **options).eval()


def adapted(folder: Path, **size: int) -> Any:
    """A size with an adapter."""
    model = load(folder, **size)
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False))
    return model.eval()


@torch.no_grad()
def pooled(model: Any, tokenizer: Any) -> torch.Tensor:
    """The means over the tokens of the texts."""
    inputs = tokenizer(TEXTS, return_tensors="pt", padding=True)
    mask = inputs["attention_mask"].unsqueeze(-1)
    return (model.base_model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def with_grid(folder: Path, options: dict[str, Any]) -> torch.Tensor:
    encoder = GridEncoder.from_pretrained(folder, model_kwargs=options, grid="")
    return encoder.encode(TEXTS, role=None).at(encoder.grid.full)


# Each takes the folder, the tokenizer and the options with which the folder is loaded.
WAYS_TO_LOAD: dict[str, Callable[[Path, Any, dict[str, Any]], Any]] = {
    "AutoModel": lambda folder, tokenizer, options: pooled(load(folder, **options), tokenizer),
    "load_model": lambda folder, tokenizer, options: pooled(load_model(folder, **options).eval(), tokenizer),
    "GridEncoder": lambda folder, tokenizer, options: with_grid(folder, options),
    "SentenceTransformer": lambda folder, tokenizer, options: SentenceTransformer(
        str(folder), **REMOTE, model_kwargs=options
    ).encode(TEXTS),
}
# The model to save, from the elastic folder; how it is saved; and how it is loaded.
Way = tuple[Callable[[Path], Any], dict[str, Any], dict[str, Any]]
WAYS_TO_SAVE: dict[str, Way] = {
    **{f"size: {name}": (lambda folder, size=size: load(folder, **size), {}, {}) for name, size in SIZES.items()},
    **{f"adapter: {name}": (lambda value, size=size: adapted(value, **size), {}, {}) for name, size in SIZES.items()},
    "variant": (lambda folder: load(folder, output_layer=4), {"variant": "fp16"}, {"variant": "fp16"}),
    "sharded": (lambda folder: load(folder, output_layer=4), {"max_shard_size": "30KB"}, {}),
    "offloaded": (
        lambda folder: load(
            folder, output_layer=4, device_map={"embeddings": "cpu", "encoder": "disk", "pooler": "cpu"},
            offload_folder=folder.parent / "off",
        ),
        {}, {},
    ),
    "plain source": (lambda folder: AutoModel.from_pretrained(folder).eval(), {}, {}),
    "head": (lambda folder: load(folder, AutoModelForSequenceClassification), {}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*so it is the plain encoder")
@pytest.mark.parametrize("name", WAYS_TO_SAVE)
@pytest.mark.parametrize("given", [False, True], ids=["", "state_dict"])
def test_every_way_to_save_loads_in_every_way(name, given, folder, tiny_tokenizer, tmp_path):
    made, saving, loading = WAYS_TO_SAVE[name]
    model, saved = made(folder), tmp_path / "saved"
    expected = pooled(model, tiny_tokenizer)
    if given and name != "offloaded":
        saving = {**saving, "state_dict": model.state_dict()}
    model.save_pretrained(saved, **saving)
    tiny_tokenizer.save_pretrained(saved)
    assert (
        not name.startswith("adapter")
        or {*saved.glob("*.py"), *saved.glob("el*"), *saved.glob("config.json")} == set()
    )
    for way, vectors in WAYS_TO_LOAD.items():
        actual = torch.as_tensor(vectors(saved, tiny_tokenizer, loading))
        assert_close(actual, expected, msg=f"{name}: {way}")


def test_two_variants_and_other_weights_are_told_apart(folder, tmp_path):
    for variant, size in ((None, {}), ("small", {"dtype": torch.float16})):
        load(folder, **size).save_pretrained(tmp_path, variant=variant)
    load(tmp_path, output_layer=4), load(tmp_path, output_layer=4, variant="small")
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "model.small.safetensors")
    refused("The weights of .* have changed", load, tmp_path, output_layer=4, variant="small")


def test_a_save_over_one_of_another_form_is_what_is_loaded(folder, tiny_tokenizer, tmp_path):
    model = load(folder, output_layer=4)
    for options in ({}, {"max_shard_size": "30KB"}, {}, {"max_shard_size": "30KB"}):
        with torch.no_grad():
            model.embeddings.word_embeddings.weight += 1
        model.save_pretrained(tmp_path, **options)
        assert_close(pooled(load(tmp_path), tiny_tokenizer), pooled(model, tiny_tokenizer))
        files = {file.name for file in tmp_path.glob("model[.-]*")}
        assert (files == {"model.safetensors"}) != bool(options) and ("model.safetensors" in files) != bool(options)
    load(folder, output_layer=0).save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.glob("model[.-]*")} == {"model.safetensors"}


def test_a_save_leaves_an_offloaded_model_as_it_is(folder, tiny_tokenizer, tmp_path):
    model = WAYS_TO_SAVE["offloaded"][0](folder)
    expected, parameters = pooled(model, tiny_tokenizer), dict(model.named_parameters())
    model.save_pretrained(tmp_path)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert torch.equal(pooled(model, tiny_tokenizer), expected)


HEAD = AutoModelForSequenceClassification


@pytest.mark.parametrize(
    ("auto", "depth"), [*((AutoModel, depth) for depth in (0, 2, 4, None)), *((HEAD, depth) for depth in (2, 4, None))]
)
def test_a_tensor_that_no_model_has_is_reported_at_every_size(auto, depth, folder, tmp_path):
    """A layer that does not run is not."""
    model, file = load(folder), tmp_path / "model.safetensors"
    model.save_pretrained(tmp_path)
    save_file({**load_file(file), "other.weight": torch.ones(2)}, file, {"format": "pt"})
    write_parts(tmp_path, model.elastic.state_dict(), exact=True)
    loaded, info = auto.from_pretrained(tmp_path, **REMOTE, output_layer=depth, output_loading_info=True)
    assert {key.removeprefix("bert.") for key in info["unexpected_keys"]} == {"other.weight"}
    patterns = [model._keys_to_ignore_on_load_unexpected or () for model in (loaded, loaded.base_model)]
    assert not any("layer" in pattern or "pooler" in pattern for pattern in [*patterns[0], *patterns[1]])


def test_a_folder_without_its_exits_is_the_plain_source_and_a_size_is_refused(folder, tmp_path):
    for name, size in SIZES.items():
        load(folder, **size).save_pretrained(tmp_path / name)
        shutil.rmtree(tmp_path / name / "elastic")
    with pytest.warns(UserWarning, match="so it is the plain encoder"):
        plain = load(tmp_path / "all")
    assert type(plain) is transformers.BertModel and plain.config.elastic is None
    with pytest.warns(UserWarning, match="so it is the plain encoder"):
        assert type(load(tmp_path / "all", config=load_config(folder))) is transformers.BertModel
    with pytest.warns(UserWarning, match="so it is the plain encoder"):
        assert load_config(tmp_path / "all").elastic is None
        refused(r"output_layer=2 is not available here", load, tmp_path / "all", output_layer=2)
        refused(r"has one size, 6 layers and 32 dims", load, tmp_path / "all", output_dim=8)
    refused(r"'exits.2.weight' has the shape None", load, tmp_path / "2")


def test_a_path_without_matrices_needs_no_file(tiny_tokenizer, tmp_path):
    save_source(tmp_path / "source", tiny_tokenizer)
    model = make_elastic(AutoModel.from_pretrained(tmp_path / "source").eval())
    model.set_depths(paths={4: (PATH, {})})
    save(tmp_path / "paths", model, tiny_tokenizer)
    assert not (tmp_path / "paths" / "elastic").exists()
    model.config.output_layer = 4
    assert_close(pooled(load(tmp_path / "paths", output_layer=4), tiny_tokenizer), pooled(model, tiny_tokenizer))
    file = tmp_path / "paths" / "config.json"
    values = json.loads(file.read_text())
    assert values["elastic"].pop("refitted") == []
    file.write_text(json.dumps(values))
    with pytest.warns(UserWarning, match="so it is the plain encoder"):  # an old repository, which does not say
        assert load(tmp_path / "paths").config.elastic is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_layer": 4}, r"trained for output_layer=2, and the model has 4"),
        ({"output_layer": 2, "output_dim": 8}, r"trained for output_dim=32, and the model has 8"),
    ],
)
def test_an_adapter_of_another_size_or_source_is_refused(change, message, folder, tiny_tokenizer, tmp_path):
    adapted(folder, output_layer=2).save_pretrained(tmp_path / "adapter")
    refused(message, load, tmp_path / "adapter", **change)
    refused(message, load(folder, **change).load_adapter, tmp_path / "adapter")
    save_elastic(tmp_path / "other", tiny_tokenizer)
    other = load(tmp_path / "other", output_layer=2)
    refused("trained for source='[0-9a-f]+'", other.load_adapter, tmp_path / "adapter")


def test_an_adapter_beside_its_model_is_loaded_at_its_size(folder, tiny_tokenizer, tmp_path):
    model = adapted(folder, output_layer=4)
    shutil.copytree(folder, tmp_path / "both")
    model.save_pretrained(tmp_path / "both")
    assert_close(pooled(load(tmp_path / "both"), tiny_tokenizer), pooled(model, tiny_tokenizer))
    refused("trained for output_layer=4, and the model has 2", load, tmp_path / "both", output_layer=2)


def test_a_push_writes_the_folder_and_the_same_files_on_the_hub(folder, tiny_tokenizer, tmp_path, only_hub):
    model = load(folder, output_layer=4)
    model.save_pretrained(
        tmp_path / "pushed", push_to_hub=True, repo_id="user/pushed", variant="fp16", token="hf_user"
    )
    files = {file.relative_to(tmp_path / "pushed").as_posix() for file in (tmp_path / "pushed").rglob("*.*")}
    assert {"config.json", "model.fp16.safetensors", "elastic/weights.fp16.safetensors", *CODE_FILES} <= files
    for name in (tmp_path / "pushed", "user/pushed"):
        assert_close(pooled(load(name, variant="fp16"), tiny_tokenizer), pooled(model, tiny_tokenizer))


HEADS = [
    value
    for value in dir(transformers)
    if value.startswith("AutoModel") and hasattr(getattr(transformers, value), "_model_mapping")
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_of_the_library_is_named(kind):
    """One that is not would be loaded as the whole source, with layers that a saved size does not have."""
    config = CONFIG_MAPPING[kind]
    assert {name for name in HEADS if config in getattr(transformers, name)._model_mapping} <= {*AUTO_CLASSES}


@pytest.mark.parametrize("auto", [name for name in AUTO_CLASSES if name != "AutoConfig"])
def test_every_head_of_a_size_has_its_layers(auto, folder, tmp_path):
    load(folder, output_layer=4).save_pretrained(tmp_path)
    target = load(tmp_path).state_dict()
    model = load(tmp_path, getattr(transformers, auto))
    for name, tensor in model.base_model.state_dict().items():
        assert name.startswith(("pooler", "elastic")) or torch.equal(tensor, target[name]), name
    assert model.base_model.config.num_hidden_layers == 4


@pytest.mark.parametrize("depth", [0, 2, 4, None])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_an_offloaded_size_gives_the_same_vectors(depth, place, folder, tiny_tokenizer, tmp_path):
    layers = {f"encoder.layer.{number}": place if number % 2 else "cpu" for number in range(6)}
    places = {"embeddings": place, **layers, "pooler": "cpu"}
    model = load(folder, output_layer=depth, device_map=places, offload_folder=tmp_path)
    assert_close(pooled(model, tiny_tokenizer), pooled(load(folder, output_layer=depth), tiny_tokenizer))


def test_a_table_alone_has_the_type_that_its_config_names(folder):
    for dtype in ("bfloat16", torch.bfloat16):
        config = load_config(folder)
        config.dtype = dtype
        model = load_model(folder, config=config, output_layer=0)
        assert model.elastic.table.weight.dtype == torch.bfloat16


class OwnBert(transformers.BertModel):
    """A class that a user has registered."""


def test_what_a_user_has_registered_stays_and_this_code_does_not(folder, monkeypatch):
    mapping = AutoModel._model_mapping
    for registered, expected in ((OwnBert, OwnBert), (ElasticModel, transformers.BertModel)):
        monkeypatch.setitem(mapping._extra_content, transformers.BertConfig, registered)
        model = load_model(folder, output_layer=2)
        assert isinstance(model, transformers.BertModel) and not isinstance(model, OwnBert)
        assert mapping[transformers.BertConfig] is expected


HASH = """
import sys
from datasets import Dataset
from datasets.fingerprint import Hasher
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True, output_layer=4)
print(Hasher.hash(model))
rows = Dataset.from_dict({"ids": [[5, 6], [7, 8]]}).with_format("torch")
for processes in (None, 2):
    mapped = rows.map(lambda row: {"v": model(row["ids"][None]).last_hidden_state[0, 0].detach()}, num_proc=processes)
    assert (mapped["v"][1] - model(rows["ids"][1][None]).last_hidden_state[0, 0]).abs().max() < 1e-4
model.elastic.table.weight.data[7] += 1
print(Hasher.hash(model))
"""


def test_the_hash_of_a_model_is_that_of_its_weights_in_each_process(folder):
    """`datasets` keeps the results of `map` by it."""
    actual = []
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", HASH, folder], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "random hash" not in done.stderr, done.stderr
        actual.append(done.stdout.split())
    assert actual[0] == actual[1] and actual[0][0] != actual[0][1]
