"""Which columns of a dataset hold the texts to train on, by the names that are usual for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal


Role = Literal["query", "document"]
ANCHORS = ("anchor", "query", "question", "sentence1")
POSITIVES = ("positive", "document", "answer", "sentence2")
NEGATIVE = re.compile(r"negative(?:_(\d+))?")
TEXT = "text"  # a single text, or the side of a pair that has no other column
LABELS = ("label", "labels", "score", "scores")  # which are no texts, and are not read
KNOWN = f"{', '.join((*ANCHORS, *POSITIVES))}, negative, negative_1, ..., {TEXT}"


def text_columns_of(found: Sequence[str]) -> list[str]:
    """
    The columns with text, in the order that objectives expect: anchor, positive, hard negatives. Labels and scores are
    left out.

    Args:
        found (`Sequence[str]`): All columns of a dataset, in any order.

    Raises:
        ValueError: if a column has another name, two columns are the same side of a pair, or there are negatives
            without a positive.
    """
    negatives = sorted((int(match[1] or 0), name) for name in found if (match := NEGATIVE.fullmatch(name)))
    anchors = [name for name in found if name in ANCHORS]
    positives = [name for name in found if name in POSITIVES]
    if TEXT in found:
        (positives if anchors and not positives else anchors).append(TEXT)
    columns = [*anchors, *positives, *(name for _, name in negatives)]
    unknown = [name for name in found if name not in (*columns, *LABELS)]
    if unknown or len(anchors) > 1 or len(positives) > 1 or (negatives and not positives):
        raise ValueError(
            f"The dataset has the column(s) {', '.join(found)}; which of them are anchor, positive and negatives is "
            f"not clear from their names: pass text_columns. Known names: {KNOWN}."
        )
    return columns


def labels_of(found: Sequence[str]) -> list[str]:
    """The columns with labels or scores."""
    return [name for name in found if name in LABELS]
