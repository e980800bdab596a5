"""The config: sizes of the paper, legal granularities, what is published."""

import json

import pytest
import torch

from m3bert.modeling import M3BertConfig, M3BertModel
from m3bert.modeling.configuration_elastic import Elasticity, Size, cut_config
from tests.conftest import refused, tiny_config


def test_defaults_are_the_papers_base_model():
    config = M3BertConfig()
    assert config.matryoshka_layers == [4, 8, 12]
    assert config.matryoshka_dims == [32, 64, 128, 768]
    with torch.device("meta"):
        model = M3BertModel(config)
    assert model.num_parameters() == 305_660_928


def test_what_serving_engines_read_is_in_the_file(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["is_matryoshka"] is True
    assert stored["matryoshka_dimensions"] == [8, 16, 32]
    assert stored["auto_map"]["AutoModelForMaskedLM"] == "modeling_m3bert.M3BertForMaskedLM"
    assert M3BertConfig.from_pretrained(tmp_path).to_dict() == tiny_config().to_dict() | {
        "transformers_version": stored["transformers_version"]
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},  # ignored
        {"rope_theta": 500.0},  # ignored
        {"output_layer": 4, "output_dim": 8, "mlp_gated": False, "num_labels": 5, "converted_from": "user/model"},
        {"matryoshka_layers": [], "matryoshka_dims": []},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope", "rope_theta": 500.0},
        {
            "position_embedding_type": "rope",
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        },
    ],
    ids=str,
)
def test_a_saved_config_is_equal_after_reloading(tmp_path, changes):
    config = tiny_config(**changes)
    config.save_pretrained(tmp_path)
    reloaded = M3BertConfig.from_pretrained(tmp_path)
    reloaded.transformers_version = config.transformers_version
    assert reloaded == config
    assert M3BertConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


def test_rope_parameters_are_saved_only_if_they_are_used(tmp_path):
    for position_embedding_type in ("absolute", "rope"):
        config = tiny_config(
            position_embedding_type=position_embedding_type,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        )
        rope = position_embedding_type == "rope"
        M3BertModel(config).save_pretrained(tmp_path)
        stored = json.loads((tmp_path / "config.json").read_text())
        assert ("rope_parameters" in stored) == ("rope_parameters" in config.to_dict()) == rope
        if rope:
            assert stored["rope_parameters"] == {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
            assert M3BertModel.from_pretrained(tmp_path).rotary_emb.rope_type == "linear"


def test_derived_values_follow_the_lists_and_not_an_old_file():
    config = M3BertConfig(**{**tiny_config().to_dict(), "matryoshka_dims": [16], "matryoshka_dimensions": [1, 2]})
    assert config.matryoshka_dimensions == [16]
    untrained = tiny_config(matryoshka_layers=[], matryoshka_dims=[])
    assert not untrained.is_matryoshka
    assert not tiny_config(matryoshka_layers=[6], matryoshka_dims=[32]).is_matryoshka


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({}, (), (6, 32)),
        ({}, (2, None), (2, 32)),
        ({}, (None, 8), (6, 8)),
        ({}, (4, 16), (4, 16)),
        ({"output_layer": 4, "output_dim": 8}, (), (4, 8)),
        ({"output_layer": 4, "output_dim": 8}, (2, 16), (2, 16)),
        ({"matryoshka_layers": [2, 4], "matryoshka_dims": [8, 16]}, (6, 32), (6, 32)),  # though not trained
        ({"matryoshka_layers": [], "matryoshka_dims": []}, (5, 13), (5, 13)),
    ],
)
def test_the_granularity_of_a_call_is_the_configs_by_default(changes, arguments, expected):
    assert tiny_config(**changes).resolve_granularity(*arguments) == expected


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        *(("output_layer", value, "2, 4, 6") for value in (0, -1, 3, 7, "4")),
        *(("output_dim", value, "8, 16, 32") for value in (0, 9, 33, "8")),
    ],
)
def test_an_illegal_granularity_names_the_legal_ones(name, value, legal):
    refused(f"{name}=.*legal values: {legal}", tiny_config().resolve_granularity, **{name: value})
    refused(f"{name}=.*legal values: {legal}", tiny_config, **{name: value})
    untrained = tiny_config(matryoshka_layers=[], matryoshka_dims=[])
    refused(r"output_layer=7 is not available here; legal values: 1\.\.6", untrained.resolve_granularity, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_type": "batchnorm"}, "norm_type='batchnorm' is unknown; legal values: rmsnorm, layernorm"),
        ({"norm_position": "sandwich"}, "legal values: pre, post"),
        ({"position_embedding_type": "alibi"}, "legal values: absolute, rope"),
        ({"classifier_pooling": "max"}, "legal values: mean, cls"),
        ({"matryoshka_layers": [4, 2]}, r"matryoshka_layers=\[4, 2\] must be ascending and within 1\.\.6"),
        ({"matryoshka_layers": [2, 8]}, r"within 1\.\.6"),
        ({"matryoshka_dims": [0, 8]}, r"within 1\.\.32"),
        ({"matryoshka_dims": [8, 8]}, "ascending"),
        ({"matryoshka_layers": [0, 6]}, r"matryoshka_layers=\[0, 6\] must be ascending and within 1\.\.6"),
        ({"num_hidden_layers": 0, "matryoshka_layers": []}, "depth 0 is the table"),
        ({"elastic": {"exits": [7]}}, r"exits=\[7\] must be within 0\.\.6"),
        ({"elastic": {"exits": [0]}}, "depth 0 is the table"),
        ({"elastic": {"exits": [2], "table": [2, 4]}}, r"table=\[2, 4\] among them"),
        ({"elastic": {"depths": {"4": [1, 2, 6]}}}, r"Depth 4 must run 4 of the layers 1\.\.6, ascending"),
        ({"elastic": {"depths": {"3": [1, 2, 5]}}}, "a path must end in the last layer, 6"),
    ],
)
def test_bad_values_are_refused(change, message):
    refused(message, tiny_config, **change)


def test_a_config_mentions_elasticity_only_if_there_is_any():
    elastic = {"depths": {"2": [1, 2]}, "exits": [2], "table": [], "ignored_ids": []}
    assert "elastic" not in tiny_config().to_dict()
    assert tiny_config(elastic=elastic).to_dict()["elastic"] == elastic
    assert tiny_config(elastic=elastic, matryoshka_layers=[4]).legal_layers == [2, 4, 6]


def test_tensors_of_other_projects_are_not_read():
    spec = Elasticity({2: [1, 2]}, [2])
    assert spec.owns("exits.2.weight")
    assert not any(map(spec.owns, ("exits.3.weight", "model.norm.weight", "exits.first.weight", "exits", "table")))


def test_a_size_names_its_layers_in_the_model_and_in_the_source():
    config = tiny_config()
    Elasticity({2: [1, 2], 4: [1, 2, 5, 6]}, [0, 2, 4], [0, 4]).declare(config)
    expected = {
        (0, 8): Size(0, 8, [], [], reads_table=True, is_whole=False, is_native=False),
        (2, 32): Size(2, 32, [1, 2], [1, 2], reads_table=False, is_whole=False, is_native=False),
        (4, 8): Size(4, 8, [1, 2, 5, 6], [1, 2, 5, 6], reads_table=True, is_whole=False, is_native=False),
        (6, 8): Size(6, 8, [*range(1, 7)], [*range(1, 7)], reads_table=False, is_whole=True, is_native=False),
        (6, 32): Size(6, 32, [*range(1, 7)], [*range(1, 7)], reads_table=False, is_whole=True, is_native=True),
    }
    assert {size: Size.of(config, *size) for size in expected} == expected
    cut_config(config, 4)
    assert Size.of(config) == Size(4, 32, [1, 2, 3, 4], [1, 2, 5, 6], reads_table=True, is_whole=True, is_native=False)


def test_a_path_without_an_exit_is_no_native_model():
    config = tiny_config()
    Elasticity({2: [1, 2], 4: [1, 2, 5, 6]}, refitted=[]).declare(config)
    assert [Size.of(config, depth).is_native for depth in (2, 4, 6)] == [True, False, True]
