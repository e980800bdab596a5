"""Encoders of transformers as elastic models: every way to a size gives the same vectors."""

import copy
import json
import multiprocessing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    dynamic_module_utils,
    set_seed,
)

from m3bert.modeling.configuration_elastic import Elasticity, set_layers
from m3bert.modeling.files_elastic import fingerprint_of
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.modeling.parts_elastic import layer_list, static_vectors
from tests.conftest import refused
from tests.elastic_repositories import FAMILIES, config_of
from tests.modeling_m3bert.static_models import VOCABULARY, WIDTH, affine, halves


EXITS, PATH, IGNORED = (2, 4), [1, 2, 5, 6], [5, 6]
HEADS = (AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)
REMOTE = {"trust_remote_code": True}


@pytest.fixture(scope="module", autouse=True)
def quick_imports():
    """Whether the code of a repository imports what is not installed is known: the bare process below shows it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "check_imports", dynamic_module_utils.get_relative_imports)
        yield


def give_depths(encoder: Any) -> None:
    """An exit at 2 layers, a path of 4 with a refitted matrix and an exit that reads the table, and the table."""
    name, layers = layer_list(encoder, 6)
    linear = [value for value, module in layers[1].named_modules() if isinstance(module, torch.nn.Linear)][-1]
    like = layers[1].get_submodule(linear).weight
    encoder.set_depths(
        exits={depth: affine() for depth in EXITS}, joints={4: affine(2 * WIDTH)},
        paths={4: (PATH, {f"{name}.1.{linear}.weight": 0.1 * torch.randn_like(like)})},
        table=halves(VOCABULARY, WIDTH), ignored_ids=IGNORED,
    )  # fmt: skip


@dataclass
class Repository:
    """The native model, the elastic one in memory, and the folder where this was saved."""

    source: Any
    model: Any
    folder: Path

    @property
    def is_native(self) -> bool:
        return self.source.config.model_type != "m3bert"

    def load(self, **options: Any) -> Any:
        return AutoModel.from_pretrained(self.folder, **REMOTE, **options)


def save_repository(family: str, folder: Path) -> Repository:
    set_seed(0)
    source = AutoModel.from_config(config_of(family)).eval()
    model = make_elastic(copy.deepcopy(source))
    give_depths(model)
    model.save_pretrained(folder)
    return Repository(source, model, folder)


@pytest.fixture(scope="module", params=FAMILIES)
def repository(request, tmp_path_factory) -> Repository:
    return save_repository(request.param, tmp_path_factory.mktemp("elastic") / "repository")


def batches() -> list[dict[str, torch.Tensor]]:
    """Texts with padding on the right and on the left."""
    ids, mask = torch.randint(5, VOCABULARY, (3, 10)), torch.ones(3, 10, dtype=torch.long)
    mask[1, 7:] = mask[2, 2:] = 0
    return [{"input_ids": ids, "attention_mask": value} for value in (mask, mask.flip(1))]


@torch.no_grad()
def outputs_of(model: Any, **size: Any) -> list[torch.Tensor]:
    """Outputs with both kinds of padding, and with each kind of attention that the model has."""
    actual = []
    for attention in ("sdpa", "eager") if model._supports_sdpa else ("eager",):
        model.set_attn_implementation(attention)
        set_seed(1)
        actual += [model(**batch, **size)[0] for batch in batches()]
    return actual


def assert_equal(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], dim: int | None = None) -> None:
    assert len(actual) == len(expected) >= 2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other[..., :dim], atol=1e-5, rtol=1e-5)


def with_layers(source: Any, layers: list[int], changed: Mapping[str, torch.Tensor] = {}) -> Any:
    """A native model, with or without a head, of some layers of another."""
    config = copy.deepcopy(source.config)
    set_layers(config, layers)
    model, prefix = type(source)(config).eval(), source.base_model_prefix if source.base_model is not source else ""
    start = f"{prefix}.{layer_list(source.base_model, 6)[0]}.".removeprefix(".")
    tensors = source.state_dict()
    for place, layer in enumerate(layers):
        for name in [name for name in model.state_dict() if name.startswith(f"{start}{place}.")]:
            tensors[name] = source.state_dict()[f"{start}{layer - 1}.{name.removeprefix(f'{start}{place}.')}"]
    tensors |= {f"{prefix}.{name}".removeprefix("."): tensor for name, tensor in changed.items()}
    model.load_state_dict({name: tensors[name] for name in model.state_dict()})
    return model


def references(repository: Repository) -> dict[int, list[torch.Tensor]]:
    """What each depth gives, from native models without any of our code."""
    if not repository.is_native:
        return {depth: outputs_of(repository.model, output_layer=depth) for depth in (0, *EXITS)}
    source, parts = repository.source, repository.model.elastic
    kinds = 2 if source._supports_sdpa else 1
    set_seed(1)
    static = [static_vectors(parts.table.weight.detach(), IGNORED, **batch) for batch in batches()] * kinds
    actual = {0: [value.expand(-1, 10, -1) for value in static]}
    with torch.no_grad():
        actual[2] = [parts.exits["2"](state) for state in outputs_of(with_layers(source, [1, 2]))]
        states = outputs_of(with_layers(source, PATH, parts.refitted(4)))
        joint = parts.exits["4"].joint
        expected = [
            torch.nn.functional.linear(torch.cat([state, value.expand_as(state)], -1), joint["weight"], joint["bias"])
            for state, value in zip(states, static, strict=True)
        ]
        actual[4] = outputs_of(repository.model, output_layer=4)
    for one, other in zip(actual[4], expected, strict=True):  # a sum of two products has other last bits
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    return actual


def test_every_way_to_a_size_gives_the_same_vectors(repository, tmp_path):
    whole, expected = outputs_of(repository.source), references(repository)
    plain = AutoModel.from_pretrained(repository.folder)
    assert type(plain).__name__ == type(repository.source).__name__
    assert_equal(outputs_of(plain), whole)
    loaded = repository.load()
    assert_equal(outputs_of(loaded), whole)
    for depth in (0, *EXITS):
        assert_equal(outputs_of(repository.model, output_layer=depth), expected[depth])
        assert_equal(outputs_of(loaded, output_layer=depth), expected[depth])
        assert_equal(outputs_of(loaded, output_layer=depth, output_dim=8), expected[depth], 8)
        size = repository.load(output_layer=depth)
        for model in (size, copy.deepcopy(size)):
            assert_equal(outputs_of(model), expected[depth])
        size.save_pretrained(tmp_path / "size" / str(depth))
        again = AutoModel.from_pretrained(tmp_path / "size" / str(depth), **REMOTE)
        assert_equal(outputs_of(again), expected[depth])
        assert {*again.state_dict()} == {*size.state_dict()}
    assert_equal(outputs_of(repository.load(output_layer=4, output_dim=8)), expected[4], 8)
    if repository.is_native:
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            AutoModel.from_pretrained(tmp_path / "size" / "4")


def test_the_repository_is_that_of_the_native_model(repository, tmp_path):
    repository.source.save_pretrained(tmp_path)
    files = [folder / "model.safetensors" for folder in (tmp_path, repository.folder)]
    tensors, others = map(load_file, files)
    assert tensors.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in tensors.items())
    native, elastic = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, repository.folder))
    assert {*elastic} - {*native} <= {"auto_map", "elastic"}
    assert elastic["architectures"] == [type(repository.source).__name__]
    assert (elastic["model_type"], elastic["num_hidden_layers" if "num_hidden_layers" in elastic else "n_layers"]) == (
        repository.source.config.model_type,
        6,
    )


def test_a_size_has_the_layers_that_run_and_nothing_else(repository, bytes_read):
    size = repository.load(output_layer=4)
    assert size.config.num_hidden_layers == len(layer_list(size, 4)[1]) == 4
    extras = {name for name, _ in size.named_parameters() if name.startswith("elastic.")}
    assert extras == {"elastic.table.weight", *(f"elastic.exits.4.{value}" for value in (
        "weight", "bias", "joint.weight", "joint.bias"))}  # fmt: skip
    read = sum(bytes_read)
    bytes_read.clear()
    repository.load(output_layer=0)
    assert sum(bytes_read) < 0.5 * read


def test_gradients_reach_what_a_path_runs_and_nothing_else(repository):
    model = copy.deepcopy(repository.model)
    model(**batches()[0], output_layer=4).last_hidden_state.square().sum().backward()
    moved = {name for name, value in model.named_parameters() if value.grad is not None and value.grad.any()}
    name = layer_list(model, 6)[0]
    refitted = {value for value in moved if value.startswith("elastic.paths.4.")}
    assert len(refitted) == 1 and "elastic.table.weight" in moved and "elastic.exits.4.joint.weight" in moved
    layers = {value.removeprefix(f"{name}.").split(".")[0] for value in moved if value.startswith(name)}
    assert layers == {"0", "1", "4", "5"}


# One head of each family, and all of BERT's.
FIRST = [
    (family, heads[0])
    for family in FAMILIES
    if family != "m3bert" and (heads := [auto for auto in HEADS if CONFIG_MAPPING[family] in auto._model_mapping])
]
CASES = [*FIRST, *(("bert", auto) for auto in HEADS[1:])]


@pytest.mark.parametrize(("family", "auto"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_heads_read_the_hidden_state_of_a_depth(family, auto, tmp_path):
    source = auto.from_config(config_of(family)).eval()
    model = make_elastic(copy.deepcopy(source))
    give_depths(model.base_model)
    model.save_pretrained(tmp_path / "head")
    whole, path = outputs_of(source), with_layers(source, PATH, model.base_model.elastic.refitted(4))
    assert_equal(outputs_of(auto.from_pretrained(tmp_path / "head")), whole)
    for size, expected in (({}, whole), ({"output_layer": 4}, outputs_of(path))):
        loaded = auto.from_pretrained(tmp_path / "head", **REMOTE, **size)
        assert_equal(outputs_of(loaded), expected)
        loaded.save_pretrained(tmp_path / "again")
        assert_equal(outputs_of(auto.from_pretrained(tmp_path / "again", **REMOTE)), expected)


def run_spawned(received: Any, answers: Any) -> None:
    answers.put([value.tolist() for value in outputs_of(received.get())])


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory) -> Repository:
    return save_repository("modernbert", tmp_path_factory.mktemp("modernbert") / "repository")


def test_a_size_is_pickled_into_a_spawned_process(modernbert):
    size = modernbert.load(output_layer=4)
    context = multiprocessing.get_context("spawn")
    sent, answers = context.Queue(), context.Queue()
    process = context.Process(target=run_spawned, args=(sent, answers))
    process.start()
    sent.put(size)
    actual = [torch.tensor(value) for value in answers.get(timeout=120)]
    process.join(timeout=60)
    assert_equal(actual, outputs_of(size))


RUN = """
import torch, transformers, warnings
from safetensors.torch import load_file, save_file
batch, outputs = load_file("batch.safetensors"), {}
for depth in (0, 2, 4, 6):
    model = transformers.AutoModel.from_pretrained("repository", trust_remote_code=True, output_layer=depth)
    with torch.no_grad():
        outputs[str(depth)] = model(**batch).last_hidden_state.contiguous()
    model.save_pretrained(f"size/{depth}")
    again = transformers.AutoModel.from_pretrained(f"size/{depth}", trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(again(**batch).last_hidden_state, outputs[str(depth)])
save_file(outputs, "outputs.safetensors")
"""


@pytest.mark.parametrize("family", ["bert", "gemma3_text"])
def test_a_process_without_this_project_loads_every_size(family, tmp_path, run_bare):
    actual = save_repository(family, tmp_path / "repository")
    batch = batches()[0]
    save_file(batch, tmp_path / "batch.safetensors")
    run_bare(RUN)
    for depth, state in load_file(tmp_path / "outputs.safetensors").items():
        with torch.no_grad():
            expected = actual.model(**batch, output_layer=int(depth)).last_hidden_state
        torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)


def test_a_size_loads_in_the_type_that_is_asked_for(modernbert):
    size = modernbert.load(output_layer=4, dtype=torch.bfloat16)
    assert {value.dtype for value in size.parameters()} == {torch.bfloat16}
    assert size(**batches()[0]).last_hidden_state.dtype == torch.bfloat16


def test_a_saved_size_is_cut_no_further_than_its_exit(modernbert, tmp_path):
    modernbert.load(output_layer=4).save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path, **REMOTE)
    assert Elasticity.of(again.config).exits == [4] and not Elasticity.of(again.config).is_path(4)
    with pytest.raises(ValueError, match="output_layer=2 is not available here; legal values: 4"):
        AutoModel.from_pretrained(tmp_path, **REMOTE, output_layer=2)


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values["elastic"] |= changes
    (folder / "config.json").write_text(json.dumps(values))


def change_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, file, {"format": "pt"})


def drop_layers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    rest = {name: value for name, value in tensors.items() if ".5." not in name}
    save_file(rest, folder / "model.safetensors", {"format": "pt"})


DAMAGED = {
    "the weights have changed": (change_weights, "The weights of .* have changed since its exits and table were fit"),
    "parts cut short": (
        lambda folder: (folder / "elastic" / "weights.safetensors").write_bytes(b"\0" * 100),
        "cannot be read; it may be incomplete",
    ),
    "an exit too many": (
        lambda folder: change_config(folder, exits=[0, 1, 2, 4]),
        "'exits.1.weight' has the shape None",
    ),
    "an exit outside": (lambda folder: change_config(folder, exits=[0, 9]), r"exits=\[0, 9\] must be within 0\.\.6"),
    "a path outside": (
        lambda folder: change_config(folder, depths={"4": [1, 2, 5, 7]}),
        r"Depth 4 must run 4 of the layers 1\.\.6",
    ),
    "no matrices": (
        lambda folder: change_config(folder, refitted=[2, 4]),
        "the refitted matrices of depth 2 are missing",
    ),
    "no last layer": (drop_layers, "is incomplete or of another architecture: .* tensors of the encoder are missing"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_repository_is_refused(name, modernbert, tmp_path):
    damage, message = DAMAGED[name]
    modernbert.model.save_pretrained(tmp_path / "repository")
    damage(tmp_path / "repository")
    refused(message, AutoModel.from_pretrained, tmp_path / "repository", **REMOTE)


@pytest.mark.parametrize(
    ("auto", "size", "message"),
    [
        (AutoModel, {"output_layer": 3}, "output_layer=3 is not available here; legal values: 0, 2, 4, 6"),
        (AutoModel, {"output_dim": 33}, r"output_dim=33 is not available here; legal values: 1\.\.32"),
        (AutoModelForMaskedLM, {"output_dim": 8}, "output_dim=8: the head of ModernBertForMaskedLM reads all dims"),
        (AutoModelForMaskedLM, {"output_layer": 0}, "output_layer=0 is a static table, which no head reads"),
    ],
)
def test_a_size_that_there_is_not_is_refused(auto, size, message, modernbert):
    refused(message, auto.from_pretrained, modernbert.folder, **REMOTE, **size)


def test_the_fingerprint_sees_every_tensor(tmp_path):
    tensors = {"one": torch.randn(4, 4), "two": torch.randn(4)}
    actual = set()
    for name in ("neither", *tensors):
        changed = {key: value + (key == name) for key, value in tensors.items()}
        save_file(changed, tmp_path / "model.safetensors")
        actual.add(fingerprint_of([tmp_path / "model.safetensors"]))
    assert len(actual) == 3
