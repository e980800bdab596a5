"""Which sizes a card offers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m3bert.evaluation import MeasuredSearch
from m3bert.hub_cards.choices import ROWS, Headline, Offer, choose_rows
from m3bert.trainers import Granularity, Grid


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
