"""Rendering a card again: nothing changes, and what a person wrote stays."""

from __future__ import annotations

import pytest

from hub_cards.sections import generated, join, merge, parse


TEMPLATE = "<!-- section: one -->\nfirst VALUE\n<!-- section: two -->\nsecond VALUE\n<!-- section: three -->\nthird\n"


def sections(value: str = "a", template: str = TEMPLATE):
    return generated(template, lambda text: text.replace("VALUE", value))


def test_what_was_joined_is_parsed_again():
    new = sections()
    assert parse(join(new)) == new
    assert [section.name for section in new] == ["one", "two", "three"] and not any(s.edited for s in new)


def test_a_section_without_text_is_left_out_and_goes_from_an_old_card():
    kept = generated(TEMPLATE, lambda text: "\n" if "second" in text else text)
    assert [section.name for section in kept] == ["one", "three"]
    assert [section.name for section in merge(kept, parse(join(sections())))] == ["one", "three"]


def test_rendering_again_changes_nothing():
    text = join(sections())
    for _ in range(3):
        assert (text := join(merge(sections(), parse(text)))) == join(sections())


def test_new_values_replace_what_nobody_touched():
    assert join(merge(sections("b"), parse(join(sections("a"))))) == join(sections("b"))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_an_edited_section_stays_and_the_others_are_new(line_end):
    edited = join(sections("a")).replace("second a", "second, by hand").replace("\n", line_end)
    text = join(merge(sections("b"), parse(edited)))
    assert "first b" in text and "second, by hand" in text and "second b" not in text
    assert merge(sections("c"), parse(text))[1] == parse(text)[1]  # and it stays for good


def test_text_between_sections_stays_in_its_place():
    text = join(sections("a")).replace("<!-- section: two", "My own words.\n\n<!-- section: two") + "\nThe end."
    merged = join(merge(sections("b"), parse(text)))
    places = [merged.index(part) for part in ("first b", "My own words.", "second b", "third", "The end.")]
    assert places == sorted(places)
    assert join(merge(sections("b"), parse(merged))) == merged


def test_an_emptied_section_stays_empty():
    text = join(sections()).replace("second a\n", "")
    assert "second" not in join(merge(sections("b"), parse(text)))


def test_a_new_section_comes_after_the_one_before_it_and_an_old_one_goes():
    old = join(sections(template=TEMPLATE.replace("<!-- section: two -->\nsecond VALUE\n", "")))
    assert [section.name for section in merge(sections(), parse(old))] == ["one", "two", "three"]
    fewer = sections(template=TEMPLATE.replace("<!-- section: two -->\nsecond VALUE\n", ""))
    assert [section.name for section in merge(fewer, parse(join(sections())))] == ["one", "three"]


def test_a_card_of_another_hand_is_kept_whole():
    merged = merge(sections(), parse("# Somebody's model\n\nIt is good.\n"))
    assert "It is good." in join(merged) and [s.name for s in merged] == ["one", "two", "three", None]
