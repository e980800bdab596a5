"""Granularities and grids."""

from __future__ import annotations

import pytest

from tests.conftest import tiny_config
from trainers import Granularity, Grid


def test_a_product_and_a_list_are_told_apart():
    product = Grid.parse("2,4x8,16")
    assert [str(member) for member in product] == ["2x8", "2x16", "4x8", "4x16"]
    pairs = Grid.parse("12x768, 2x16,4X32")
    assert [str(member) for member in pairs] == ["2x16", "4x32", "12x768"]
    assert Grid.parse("4x64") == Grid((Granularity(4, 64),))
    assert Grid.parse("4 x 32, 64") == Grid.product([4], [32, 64])


@pytest.mark.parametrize("text", ["2,4x8,16", "2x16,4x32,12x768", "4x64", "1,2,3x7", "2x8,2x16,4x8"])
def test_text_survives_a_round_trip(text):
    assert Grid.parse(str(Grid.parse(text))) == Grid.parse(text)
    assert str(Grid.parse(text)) == text


def test_order_does_not_matter():
    assert Grid.parse("4,2x16,8") == Grid.parse("2x8,2x16,4x8,4x16")


def test_what_a_grid_tells():
    grid = Grid.parse("2x16,4x8,4x32")
    assert (grid.layers, grid.dims, grid.dims_of(4), len(grid)) == ([2, 4], [8, 16, 32], [8, 32], 3)
    assert Granularity(4, 8) in grid


@pytest.mark.parametrize("text", ["", "4", "x", "4x", "4-64", "4x64x2,3", "4x8;2x8", "a x b", "4.0x8", "-1x8"])
def test_nonsense_is_refused(text):
    with pytest.raises(ValueError, match="is not a grid. Write layers x dims"):
        Grid.parse(text)


def test_doubles_and_zeros_are_refused():
    with pytest.raises(ValueError, match="4x8,4x8 names a granularity twice"):
        Grid.parse("4x8,4x8")
    with pytest.raises(ValueError, match="layer or dim below 1"):
        Grid.parse("0,2x8")
    with pytest.raises(ValueError, match="at least one granularity"):
        Grid(())


def test_a_grid_outside_the_model_names_what_is_outside():
    grid = Grid.parse("2,8x16,64")
    with pytest.raises(ValueError, match=r"layers 1\.\.6 and dims 1\.\.32; outside of it: 2x64, 8x16, 8x64"):
        grid.validate(tiny_config())
    assert Grid.parse("2,6x1,32").validate(tiny_config()).layers == [2, 6]
