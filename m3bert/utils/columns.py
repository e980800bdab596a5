"""Which columns of a dataset hold the texts to train on, by the names that are usual for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal


Role = Literal["query", "document"]  # of a text: it selects the prompt and the maximum length
ANCHORS = ("anchor", "query", "question", "sentence1")
POSITIVES = ("positive", "document", "answer", "sentence2")
NEGATIVE = re.compile(r"negative(?:_(\d+))?")
TEXT = "text"  # a single text, or the side of a pair that has no other column
LABELS = ("label", "labels", "score", "scores")  # which are no texts, and are not read
KNOWN = (
    f"{', '.join((*ANCHORS, *POSITIVES))}, negative, negative_1, ..., {TEXT}. A list of texts (pos, neg) is no "
    "column: write one row per positive, and a column per negative"
)


def fields_of(column: str) -> list[str]:
    """The dataset columns of a text column: `"title+text"` joins the fields `title` and `text`."""
    return column.split("+")


def check_columns(present: Sequence[str], columns: Iterable[str], name: str = "The dataset") -> None:
    """Raise a ValueError if some columns are not present in what the message calls `name`."""
    if missing := [column for column in columns if column not in present]:
        hint = " (text_column names another)" if missing == [TEXT] else ""
        raise ValueError(f"{name} lacks the column(s) {', '.join(missing)}{hint}; it has {', '.join(present)}.")


def text_columns_of(
    present: Sequence[str], source: str = "The dataset", option: str = "pass text_columns"
) -> list[str]:
    """
    The columns with text, in the order that objectives expect: anchor, positive, hard negatives. Labels and scores are
    left out. ValueError, which names the `source` and the `option` to use, if a column has another name, two columns
    are the same side of a pair, or there are negatives without a positive.
    """
    negatives = sorted((int(match[1] or 0), name) for name in present if (match := NEGATIVE.fullmatch(name)))
    anchors = [name for name in present if name in ANCHORS]
    positives = [name for name in present if name in POSITIVES]
    if TEXT in present:
        (positives if anchors and not positives else anchors).append(TEXT)
    columns = [*anchors, *positives, *(name for _, name in negatives)]
    unknown = [name for name in present if name not in (*columns, *LABELS)]
    if unknown or len(anchors) > 1 or len(positives) > 1 or (negatives and not positives):
        raise ValueError(
            f"{source} has the column(s) {', '.join(present)}; which of them are anchor, positive and negatives is "
            f"not clear from their names: {option}. Known names: {KNOWN}."
        )
    return columns


def labels_of(present: Sequence[str]) -> list[str]:
    """The columns with labels or scores."""
    return [name for name in present if name in LABELS]
