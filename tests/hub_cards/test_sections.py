"""Rendering a card again: nothing changes, and what a person wrote stays."""

from __future__ import annotations

import pytest

from m3bert.hub_cards.sections import generated, join, merge, parse


TEMPLATE = "<!-- section: one -->\nfirst VALUE\n<!-- section: two -->\nsecond VALUE\n<!-- section: three -->\nthird\n"
FEWER = TEMPLATE.replace("second VALUE", "")


def sections(value: str = "a", template: str = TEMPLATE):
    return generated(template.replace("VALUE", value))


def names(parts):
    return [section.name for section in parts]


def test_what_was_joined_is_parsed_again_and_new_values_replace_what_nobody_touched():
    new = sections()
    assert parse(join(new)) == new and names(new) == ["one", "two", "three"] and not any(s.edited for s in new)
    assert merge(sections("b"), parse(join(new))) == sections("b")


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_edited_section_stays_and_the_others_are_new(line_end):
    edited = join(sections("a")).replace("second a", "second, by hand").replace("\n", line_end)
    text = join(merge(sections("b"), parse(edited)))
    assert "first b" in text and "second, by hand" in text and "second b" not in text
    assert merge(sections("c"), parse(text))[1] == parse(text)[1]  # and it stays for good


def test_text_between_partsstays_in_its_place():
    text = join(sections("a")).replace("<!-- section: two", "My own words.\n\n<!-- section: two") + "\nThe end."
    merged = join(merge(sections("b"), parse(text)))
    places = [merged.index(part) for part in ("first b", "My own words.", "second b", "third", "The end.")]
    assert places == sorted(places)
    assert join(merge(sections("b"), parse(merged))) == merged


def test_an_emptied_section_stays_empty():
    text = join(sections()).replace("second a\n", "")
    assert "second" not in join(merge(sections("b"), parse(text)))


def test_a_new_section_comes_after_the_one_before_it_and_one_without_text_goes():
    fewer = sections(template=FEWER)
    assert names(merge(sections(), parse(join(fewer)))) == ["one", "two", "three"]
    assert names(fewer) == names(merge(fewer, parse(join(sections())))) == ["one", "three"]


def test_a_card_of_another_hand_is_kept_whole():
    merged = merge(sections(), parse("# Somebody's model\n\nIt is good.\n"))
    assert "It is good." in join(merged) and names(merged) == ["one", "two", "three", None]
