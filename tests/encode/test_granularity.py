"""Granularities, grids, and codes of stored embeddings: their bits and bytes."""

import pytest

from m3bert.encode.granularity import evenly_spaced
from m3bert.encode.precisions import PRECISIONS, bytes_per_vector, stored_bits
from m3bert.modeling import quantization_m3bert
from m3bert.trainers import Contrastive, Granularity, Grid
from tests.conftest import refused, tiny_config
from tests.trainers.tiny_run import GRID


def test_a_product_and_a_list_are_told_apart():
    product = Grid.parse("2,4x8,16")
    assert [str(member) for member in product] == ["2x8", "2x16", "4x8", "4x16"]
    pairs = Grid.parse("12x768, 2x16,4X32")
    assert [str(member) for member in pairs] == ["2x16", "4x32", "12x768"]
    assert Grid.parse("4x64") == Grid((Granularity(4, 64),))
    assert Grid.parse("4 x 32, 64") == Grid.product([4], [32, 64])
    assert Grid.parse("4,2x16,8") == Grid.parse("2x8,2x16,4x8,4x16"), "order does not matter"


@pytest.mark.parametrize(
    "text",
    [
        *("2,4x8,16", "2x16,4x32,12x768", "4x64", "1,2,3x7", "2x8,2x16,4x8", "4x64@int8", "2x8@int8,2x8,2x16"),
        *("2,4x8,16@binary,int8,float32", "2,4x8@qama-1.5,qama-2", "2x16@binary,4x64@qama-2"),
    ],
)
def test_text_survives_a_round_trip(text):
    assert Grid.parse(str(Grid.parse(text))) == Grid.parse(text)
    assert str(Grid.parse(text)) == text


def test_a_grid_has_codes_and_its_sizes_do_not():
    grid = Grid.parse("2x16, 4x8@BINARY, 4x8@int8, 4x32@int8")
    assert (grid.layers, grid.dims, len(grid)) == ([2, 4], [8, 16, 32], 4) and Granularity(2, 16) in grid
    assert [str(member) for member in grid] == ["2x16", "4x8@binary", "4x8@int8", "4x32@int8"]
    assert (grid.dims_of(4), grid.codes, grid.full) == ([8, 32], ["binary", "int8", "float32"], Granularity(4, 32))
    assert grid.sizes == Grid.parse("2x16,4x8,4x32")
    product = Grid.product([2], [8, 16], ["float32", "qama-2"])
    assert product == Grid.parse("2x8,16@float32,qama-2") == Grid.parse("2x8@qama-2,2x8,2x16@qama-2,2x16")
    assert product.sizes == Grid.product([2], [8, 16]) == Grid.product([2], [8, 16]).sizes
    assert Granularity.parse("4x64@int8") == Granularity(4, 64, "int8") != Granularity(4, 64)
    assert Granularity.parse("4x64@int8").size == Granularity.parse("4x64@float32") == Granularity(4, 64)


def test_codes_are_sorted_by_bits_within_a_size():
    members = list(Grid.product([1], [8, 64], PRECISIONS))
    assert [member.dim for member in members] == [8] * len(PRECISIONS) + [64] * len(PRECISIONS)
    at_64 = [stored_bits(member.code, member.dim) for member in members if member.dim == 64]
    assert at_64 == sorted(at_64) and at_64[-1] == 32 * 64
    assert Granularity(1, 8) < Granularity(1, 64, "binary") < Granularity(1, 64, "int8") < Granularity(1, 64)
    assert max(members) == Granularity(1, 64) >= members[-1]


def test_codes_are_no_matter_of_the_model():
    grid = Grid.parse("2,6x8@float32,int8")
    refused("2x8@int8, 6x8@int8: a model is trained and run in float32", grid.validate, tiny_config())
    assert grid.sizes.validate(tiny_config())
    refused("trained and run in float32", Contrastive, grid)


NO_GRIDS = ("", "4", "x", "4x", "4-64", "4x64x2,3", "4x8;2x8", "a x b", "4.0x8", "-1x8", "4x64@", "4@int8x64")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a grid. Write layers x dims") for text in NO_GRIDS),
        ("2x16@int8,4x64@int8,binary", "is not a grid"),
        ("4x64@int7", "'int7' is not a precision; legal values: float32, float16, int8, int4, qama-2"),
        ("4x64@int8,int8", "4x64@int8,4x64@int8 names a granularity twice"),
        ("4x8,4x8", "4x8,4x8 names a granularity twice"),
        ("2x0", "a layer below 0 or a dim below 1"),
    ],
)
def test_what_is_no_grid_is_refused(text, message):
    refused(message, Grid.parse, text)
    refused("a layer below 0 or a dim below 1", Grid.product, [-1], [8])
    refused("at least one granularity", Grid, ())


def test_a_grid_outside_the_model_names_what_is_outside():
    grid = Grid.parse("2,8x16,64")
    refused(r"layers 1\.\.6 and dims 1\.\.32; outside of it: 2x64, 8x16, 8x64", grid.validate, tiny_config())
    assert Grid.parse("2,6x1,32").validate(tiny_config()).layers == [2, 6]
    refused(r"layers 1\.\.6 and dims 1\.\.32; outside of it: 0x8", Grid.parse("0,2x8").validate, tiny_config())
    Grid.parse("0,2x8").validate(tiny_config(elastic={"depths": {"0": []}, "exits": [0], "table": [0]}))


def test_a_grid_that_is_not_named_is_the_trained_one_or_everything(tiny_model):
    assert str(Grid.of(tiny_model.config)) == "2,4,6x8,16,32"
    tiny_model.config.matryoshka_layers = tiny_model.config.matryoshka_dims = []
    assert str(Grid.of(tiny_model.config)) == "1,2,3,4,5,6x16,32"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("6x32>2x8", ["2x8<6x32"]), (" 6x32 > 2x8,32 ", ["2x8<6x32", "2x32<6x32"]),
        ("6x32>ALL", ["2x8<6x32", "2x32<6x32", "6x8<6x32"]), ("6x32>2x32;6x8>2x8", ["2x32<6x32", "2x8<6x8"]),
    ],
)  # fmt: skip
def test_pairs_are_read(text, expected):
    assert [f"{student}<{teacher}" for student, teacher in GRID.pairs(text)] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6x32", "'6x32' is not a pair. Write teacher>student: '12x768>4x64'"), ("6x32>2x8>2x32", "is not a grid"),
        ("2,6x32>2x8", "'2,6x32' must be one granularity"),
        ("6x32>4x8", "'6x32>4x8' names granularities that the grid 2,6x8,32 lacks: 4x8"), ("6x16>2x8", "lacks: 6x16"),
        ("6x32>6x32", "'6x32>6x32' makes 6x32 teach itself"), ("6x32>2x8;6x32>all", "names a pair twice"),
    ],
)  # fmt: skip
def test_pairs_that_cannot_be(text, message):
    refused(message.replace("(", r"\("), GRID.pairs, text)
    refused("teach itself", Grid((Granularity(6, 32),)).pairs, "6x32>all")


def test_layers_are_evenly_spaced_and_end_with_the_last():
    assert evenly_spaced(range(1, 13), 6) == [2, 4, 6, 8, 10, 12]
    assert evenly_spaced(range(1, 4), 7) == [1, 2, 3]
    for depth in (1, 2, 3, 5, 28):
        for count in (1, 2, 7):
            layers = evenly_spaced(range(1, depth + 1), count)
            assert layers == sorted(set(layers)) and layers[-1] == depth and len(layers) == min(depth, count)


def test_bits_per_dim_are_exact_at_whole_widths():
    for name, precision in PRECISIONS.items():
        for dim in (64, 384, 768):
            assert stored_bits(name, dim) == precision.bits * dim == 8 * bytes_per_vector(name, dim)
    assert {name for name, precision in PRECISIONS.items() if precision.learned} == {*quantization_m3bert.CODES}
