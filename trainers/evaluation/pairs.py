"""Metrics on the cosines of text pairs: similarity, pair classification and bitext mining."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from ..core.extras import require_extra
from .search import exact_search


def pair_cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Cosine of each pair, `(pairs,)` in float64. The embeddings `(pairs, dim)` need not be normalised."""
    return nn.functional.cosine_similarity(first.double(), second.double(), dim=1)


def similarity_spearman(cosines: Sequence[float] | torch.Tensor, scores: Sequence[float]) -> float:
    """
    Spearman correlation between the cosines of pairs and their gold scores.

    Args:
        cosines (`Sequence[float]`): One cosine per pair.
        scores (`Sequence[float]`): One gold score per pair, on any scale.

    Returns:
        `float`: in -1..1; NaN (undefined) if all cosines or all scores are equal.
    """
    stats = require_extra("scipy.stats", "evaluation", "Semantic textual similarity")
    return float(stats.spearmanr(np.asarray(cosines), np.asarray(scores)).statistic)


def require_both_labels(labels: Sequence[int]) -> None:
    """
    Check the labels of pairs.

    Raises:
        ValueError: if there are labels other than 0 and 1, or only one of the two.
    """
    if set(labels) != {0, 1}:
        raise ValueError(f"pair classification needs labels 0 and 1; found {sorted(set(labels))}.")


def pair_classification_scores(cosines: Sequence[float] | torch.Tensor, labels: Sequence[int]) -> dict[str, float]:
    """
    How well the cosines of pairs separate positive from negative pairs.

    Args:
        cosines (`Sequence[float]`): One cosine per pair.
        labels (`Sequence[int]`): 1 for positive pairs, 0 for negative pairs.

    Returns:
        `dict[str, float]`: `accuracy` at the threshold that is best for these pairs (MIPIC,
        [2604.24374](https://huggingface.co/papers/2604.24374), A.4), and `average_precision`.

    Raises:
        ValueError: if all labels are equal.
    """
    require_both_labels(labels)
    metrics = require_extra("sklearn.metrics", "evaluation", "Pair classification")
    scores = np.asarray(cosines)
    false_positive_rate, true_positive_rate, _ = metrics.roc_curve(labels, scores, drop_intermediate=False)
    positives = sum(labels) / len(labels)
    accuracies = true_positive_rate * positives + (1 - false_positive_rate) * (1 - positives)
    return {
        "accuracy": float(accuracies.max()),
        "average_precision": float(metrics.average_precision_score(labels, scores)),
    }


def bitext_accuracy(first: torch.Tensor, second: torch.Tensor) -> dict[str, float]:
    """
    Share of sentences whose nearest sentence in the other language, by cosine, is their translation (the Tatoeba test
    of LASER, [1812.10464](https://huggingface.co/papers/1812.10464)).

    Args:
        first (`torch.Tensor` of shape `(sentences, dim)`): Embeddings of one language; need not be normalised.
        second (`torch.Tensor` of shape `(sentences, dim)`): Embeddings of the translations, in the same order.

    Returns:
        `dict[str, float]`: `accuracy` from first to second, and `accuracy_reverse` from second to first.
    """
    own = np.arange(len(first))
    return {
        "accuracy": float((exact_search(first, second, 1)[:, 0] == own).mean()),
        "accuracy_reverse": float((exact_search(second, first, 1)[:, 0] == own).mean()),
    }
