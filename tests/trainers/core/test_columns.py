"""Which columns are trained on: by their names, in any order; all others are refused before training."""

from __future__ import annotations

import pytest
from datasets import Dataset

from trainers import ContrastiveConfig, IBKDConfig, MICConfig, MIPICConfig
from trainers.core.columns import text_columns_of


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (["positive", "anchor"], ["anchor", "positive"]),
        (["negative_10", "negative_2", "document", "query"], ["query", "document", "negative_2", "negative_10"]),
        (["score", "sentence1", "sentence2"], ["sentence1", "sentence2"]),
        (["text", "label"], ["text"]),
        (["text", "query"], ["query", "text"]),
        (["positive", "text"], ["text", "positive"]),
        (["question", "answer", "negative"], ["question", "answer", "negative"]),
    ],
)
def test_columns_are_known_by_their_names_in_any_order(found, expected):
    assert text_columns_of(found) == expected


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (["source", "anchor", "positive"], r"column\(s\) source, anchor, positive; .* 'source': pass text_columns"),
        (["anchor", "positive", "idx"], "'idx': pass text_columns. Known names: anchor, query, "),
        (["text", "kind"], "text, kind; .* 'kind': pass text_columns"),
        (["anchor", "query", "positive"], "anchor and query are the same side of a pair: pass text_columns"),
        (["query", "document", "text"], "query and text are the same side of a pair"),
        (["query", "negative"], "query, negative: negatives, but no positive"),
    ],
)
def test_what_may_not_be_meant_is_refused_with_the_list(found, message):
    with pytest.raises(ValueError, match=message):
        text_columns_of(found)


@pytest.mark.parametrize(
    ("config_class", "changes", "found", "message"),
    [
        (MIPICConfig, {}, ["anchor", "positive"], "found: anchor, positive. .* unsupervised=False to train on pairs"),
        (MICConfig, {}, ["anchor", "positive"], "unsupervised=False to train on pairs"),
        (IBKDConfig, {}, ["text", "source"], "'source': pass text_columns"),
        (ContrastiveConfig, {}, ["text", "label"], "two text columns or more; found: text"),
    ],
)
def test_a_method_says_what_its_columns_need(tmp_path, config_class, changes, found, message):
    args = config_class(output_dir=str(tmp_path), use_cpu=True, **changes)
    with pytest.raises(ValueError, match=message):
        args.columns_of(Dataset.from_dict({name: ["a"] for name in found}))


def test_labels_are_left_out_and_the_log_says_so(tmp_path, caplog):
    args = ContrastiveConfig(output_dir=str(tmp_path), use_cpu=True)
    rows = Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "score": [0.5]})
    assert args.columns_of(rows) == ["sentence1", "sentence2"]
    assert "score are not read: every row is a positive pair" in caplog.text
