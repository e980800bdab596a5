"""Which sizes a card offers, and what each costs."""

from dataclasses import replace

import pytest
from transformers import BertConfig, BertModel

from m3bert.evaluation import MeasuredSearch
from m3bert.hub_cards.sizes import ROWS, Headline, Offer, choose_rows, costs, tokens_counted
from m3bert.modeling import M3BertModel
from m3bert.models.auto import load_config, load_model
from m3bert.trainers import Granularity, Grid
from tests.conftest import tiny_config
from tests.elastic_repositories import SIZES, save_elastic


def offers(**values: tuple[float, float]) -> list[Offer]:
    """Size, as `s6x32` -> quality and milliseconds."""
    return [Offer(Granularity.parse(name[1:]), *value) for name, value in values.items()]


def chosen(sizes: list[Offer]) -> list[str]:
    return [str(offer.granularity) for offer in sizes]


def test_a_size_that_another_equals_is_not_offered_but_the_full_and_the_shallowest_are():
    sizes = offers(
        s0x8=(0.1, 0.1), s0x32=(0.2, 0.2),  # both keep less than half; 0x32 is the table look-up
        s2x8=(0.7, 2.0), s2x32=(0.7, 3.0),  # no better than 2x8, but slower and larger
        s4x32=(0.8, 4.0), s6x8=(0.9, 5.0), s6x32=(0.85, 6.0),  # the full size is beaten
    )  # fmt: skip
    assert chosen(choose_rows(sizes)) == ["6x8", "6x32", "4x32", "2x8", "0x32"]


def test_what_adds_least_is_left_out():
    values = [0.5, 0.52, 0.62, 0.7, 0.705, 0.712, 0.8, 0.89, 0.94, 1.0]
    sizes = [Offer(Granularity(layer, 32), value, layer) for layer, value in enumerate(values)]
    assert [offer.quality for offer in choose_rows(sizes, 8)] == [1.0, 0.94, 0.89, 0.8, 0.712, 0.62, 0.52, 0.5]
    assert {sizes[0], sizes[-1]} < {*choose_rows(sizes, 4)} and len(choose_rows(sizes, 4)) == 4


@pytest.mark.parametrize("results", ["2,6x8,32"], indirect=True)
def test_the_headline_is_retrieval_with_documents_at_the_last_layer(results):
    same = Headline.of(results)
    assert (same.metric, same.tasks, same.asymmetric) == ("nDCG@10", ["cranfield"], False)
    assert [str(offer.granularity) for offer in same.offers] == ["2x8", "2x32", "6x8", "6x32"]
    results.asymmetric_searches = [
        MeasuredSearch("cranfield", 1398, "ndcg@10", 0.6, query_layer=2, document_layer=6, dim=32)
    ]
    mixed = Headline.of(results)
    assert mixed.asymmetric and chosen(mixed.offers) == ["2x32", "6x8", "6x32"]
    assert mixed.offers[0].quality == 0.6 and mixed.full == same.full and mixed.advised == mixed.offers[0]
    results.scores = [score for score in results.scores if score.task_type != "retrieval"]
    assert Headline.of(results).tasks == ["stsb", "sick"]
    results.scores = [score for score in results.scores if score.task_type == "geometry"]
    assert Headline.of(results) is None and Headline.of(None) is None


def test_rows_are_of_one_precision_and_bm25_takes_one(coded):
    score = next(score for score in coded.scores if score.task == "cisi")
    coded.latency = replace(coded.latency, encode_ms={str(layer): 1.0 + layer for layer in range(13)})
    coded.grid = "0,1,2,3,4,5,6,7,8,9,10,11,12x16@float32,int8"
    coded.scores = [replace(score, granularity=str(g), value=0.5 + g.layer**2 / 300) for g in Grid.parse(coded.grid)]
    assert len(Headline.of(coded).rows) == ROWS
    coded.hybrid_searches = [MeasuredSearch("cisi", 9, "ndcg@10", 0.4)]
    rows = Headline.of(coded).rows
    assert len(rows) == ROWS - 1 and {row.granularity.code for row in rows} == {"float32"}
    assert Headline.of(coded).bm25 == 0.4


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
