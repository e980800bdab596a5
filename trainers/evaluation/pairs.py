"""Scores of pairs of texts by the cosines of their embeddings: similarity, pair classification, bitext mining."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, roc_curve
from torch import nn

from .search import exact_search


def pair_cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Cosine of each pair, `(pairs,)` in float64, of embeddings `(pairs, dim)` that need not be normalised."""
    return nn.functional.cosine_similarity(first.double(), second.double(), dim=1)


def similarity_spearman(cosines: Sequence[float] | torch.Tensor, scores: Sequence[float]) -> float:
    """
    Spearman correlation of the cosines of pairs with what people say of them.

    Args:
        cosines (`Sequence[float]`): One a pair.
        scores (`Sequence[float]`): Of each pair, on any scale.

    Returns:
        `float`: in -1..1; NaN where all cosines, or all scores, are equal, which leaves it undefined.
    """
    return float(spearmanr(np.asarray(cosines), np.asarray(scores)).statistic)


def require_both_labels(labels: Sequence[int]) -> None:
    """
    Check the labels of pairs.

    Raises:
        ValueError: if they are not 0 and 1, with both present.
    """
    if set(labels) != {0, 1}:
        raise ValueError(f"pair classification needs labels 0 and 1; found {sorted(set(labels))}.")


def pair_classification_scores(cosines: Sequence[float] | torch.Tensor, labels: Sequence[int]) -> dict[str, float]:
    """
    How well the cosines of pairs tell those that belong together from those that do not.

    Args:
        cosines (`Sequence[float]`): One a pair.
        labels (`Sequence[int]`): 1 for pairs that belong together, 0 for others.

    Returns:
        `dict[str, float]`: `accuracy`, of calling a pair positive from a threshold on, at the threshold that is best
        for these very pairs (MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), A.4), and
        `average_precision`.

    Raises:
        ValueError: if all labels are equal.
    """
    require_both_labels(labels)
    cosines = np.asarray(cosines)
    false_positive_rate, true_positive_rate, _ = roc_curve(labels, cosines, drop_intermediate=False)
    positives = sum(labels) / len(labels)
    accuracies = true_positive_rate * positives + (1 - false_positive_rate) * (1 - positives)
    return {
        "accuracy": float(accuracies.max()),
        "average_precision": float(average_precision_score(labels, cosines)),
    }


def bitext_accuracy(first: torch.Tensor, second: torch.Tensor) -> dict[str, float]:
    """
    How often the nearest of all sentences of the other language, by cosine, is the own translation (the Tatoeba test
    of LASER, [1812.10464](https://huggingface.co/papers/1812.10464)).

    Args:
        first (`torch.Tensor` of shape `(sentences, dim)`): Of one language; need not be normalised.
        second (`torch.Tensor` of shape `(sentences, dim)`): Their translations, in the same order.

    Returns:
        `dict[str, float]`: `accuracy` from first to second, and `accuracy_reverse`.
    """
    own = np.arange(len(first))
    return {
        "accuracy": float((exact_search(first, second, 1)[:, 0] == own).mean()),
        "accuracy_reverse": float((exact_search(second, first, 1)[:, 0] == own).mean()),
    }
