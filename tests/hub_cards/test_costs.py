"""What a granularity costs, against the model that is built and the usual count of its operations."""

from __future__ import annotations

from transformers import BertConfig, BertModel

from m3bert.hub_cards.costs import costs, tokens_counted
from m3bert.modeling import M3BertModel
from m3bert.models.auto import load_config, load_model
from m3bert.trainers import Granularity, Grid
from tests.conftest import tiny_config
from tests.elastic_repositories import SIZES, save_elastic


def test_costs_are_those_of_the_model_that_is_built():
    """Two operations per weight and token, and attention."""
    config = tiny_config()
    for g, cost in costs(config, Grid.parse("2x8,6x32")).items():
        model = M3BertModel(tiny_config(output_layer=g.layer))
        assert cost.parameters == sum(p.numel() for p in model.parameters())
        assert cost.layer_parameters == cost.parameters - sum(
            p.numel() for name, p in model.named_parameters() if "embed" in name and "norm" not in name
        )
        width, inner, tokens = config.hidden_size, config.intermediate_size, 48  # all of its positions
        weights = g.layer * (4 * width**2 + 3 * width * inner)
        assert cost.flops_per_token == 2 * weights + g.layer * 4 * tokens * width


def test_a_depth_counts_what_it_reads_and_only_the_rows_that_are_computed(tiny_tokenizer, tmp_path):
    """Its layers, its exit and the table; two operations per number of the rows, beside the layers."""
    save_elastic(tmp_path / "model", tiny_tokenizer)
    config, native, width = load_config(tmp_path / "model"), BertConfig(**SIZES), 32
    grid = Grid.parse("0,2,3,4x8,32")
    counted, plain = costs(config, grid), costs(native, Grid.parse("2,3,4x8,32"))
    for g in grid:
        if g.layer == 3:
            assert counted[g] == plain[g], "a prefix without an exit"
            continue
        model = load_model(tmp_path / "model", output_layer=g.layer)
        assert counted[g].parameters == sum(p.numel() for p in model.parameters())
        operations = counted[g].flops_per_token - (plain[g].flops_per_token if g.layer else 0)
        if g.layer == 0:
            assert (counted[g].layer_parameters, operations) == (0, 2 * g.dim)
        if g.layer == 2:
            assert counted[g].layer_parameters - plain[g].layer_parameters == width**2 + width
            assert operations == 2 * width * g.dim
        if g.layer == 4:  # the static vector is made and mapped once per text of 64 tokens
            assert operations == 2 * width * g.dim + 2 * width + 2 * width * g.dim // 64


def test_another_architecture_is_counted_too():
    config = BertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=3, num_attention_heads=4
    )
    counted = costs(config, Grid.parse("1,3x32"))
    assert counted[Granularity(3, 32)].parameters == sum(p.numel() for p in BertModel(config).parameters())
    assert counted[Granularity(1, 32)].parameters < counted[Granularity(3, 32)].parameters
    assert tokens_counted(config) == 128
