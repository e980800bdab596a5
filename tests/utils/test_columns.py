"""Which columns are trained on: by their names, in any order; all others are refused before training."""

import pytest
from datasets import Dataset

from m3bert.trainers import ContrastiveConfig
from m3bert.utils.columns import text_columns_of


@pytest.mark.parametrize(
    ("actual", "expected"),
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
def test_columns_are_known_by_their_names_in_any_order(actual, expected):
    assert text_columns_of(actual) == expected


@pytest.mark.parametrize(
    "actual",
    [
        ["source", "anchor", "positive"], ["anchor", "query", "positive"], ["query", "document", "text"],
        ["query", "negative"], ["query", "pos", "neg"],
    ],
)  # fmt: skip
def test_columns_that_may_mean_something_else_are_refused(actual):
    with pytest.raises(ValueError, match=f"has the column.s. {', '.join(actual)}; .* pass text_columns"):
        text_columns_of(actual)


def test_labels_are_left_out_and_the_log_says_so(tmp_path, caplog):
    args = ContrastiveConfig(output_dir=str(tmp_path), use_cpu=True)
    rows = Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "score": [0.5]})
    assert args.columns_of(rows) == ["sentence1", "sentence2"]
    assert "score are not read: every row is a positive pair" in caplog.text
