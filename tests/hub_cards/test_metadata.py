"""The metadata of a card: every score in the Hub's form, and what a person wrote stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from m3bert.hub_cards.metadata import with_edits
from m3bert.hub_cards.scores import evaluations


def test_every_main_score_of_a_known_task_type_is_a_result(results):
    entries = evaluations(results)
    expected = [score for score in results.scores if score.task_type != "geometry"]
    assert [(e.dataset_name, e.metric_type, e.metric_value) for e in entries] == [
        (score.task, score.metric, pytest.approx(score.value, abs=1e-6)) for score in expected
    ]
    first = entries[0]
    assert (first.task_type, first.dataset_type) == ("sentence-similarity", "mteb/stsbenchmark-sts")
    assert (first.metric_name, first.metric_args) == ("spearman at 2x8", {"layer": 2, "dim": 8})


def test_codes_are_not_results_of_the_model(coded):
    entries = evaluations(coded)
    floats = [score for score in coded.scores if "@" not in score.granularity]
    assert 0 < len(floats) < len(coded.scores)
    assert [(e.dataset_name, e.metric_value) for e in entries] == [(s.task, pytest.approx(s.value)) for s in floats]
    assert all(e.metric_args.keys() == {"layer", "dim"} for e in entries)


def test_data_of_ones_own_on_the_hub_is_named_by_its_id(results):
    results.scores = [replace(score, task="mine") for score in results.scores[:1]]
    assert evaluations(results)[0].dataset_type == "mine"
    results.settings["own_data"] = {"mine": "user/mine"}
    assert evaluations(results)[0].dataset_type == "user/mine"


def test_keys_of_a_person_stay_and_generated_ones_are_replaced():
    old = {"thumbnail": "me.png", "license": "mit", "pipeline_tag": "fill-mask", "model-index": [], "language": "de"}
    new = {"license": "apache-2.0", "library_name": "transformers"}
    expected = {"thumbnail": "me.png", "license": "apache-2.0", "language": "de", "library_name": "transformers"}
    assert with_edits(new, old) == {**expected, "tags": []}


def test_stale_generated_tags_go_and_tags_of_a_person_stay():
    assert with_edits({"tags": ["m3bert"]}, {"tags": ["onnx", "mine", "m3bert"]})["tags"] == ["m3bert", "mine"]
