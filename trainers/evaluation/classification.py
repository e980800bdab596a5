"""Classification of frozen embeddings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score


def require_classes(labels: Sequence[int]) -> None:
    """
    Check the labels that a classifier learns from.

    Raises:
        ValueError: if there are fewer than two classes.
    """
    if len(set(labels)) < 2:
        raise ValueError(f"a classifier needs two classes at least; found {sorted(set(labels))}.")


def fit_classifier(
    train: torch.Tensor, labels: Sequence[int], *, strength: float = 1.0, max_iter: int = 1000
) -> LogisticRegression:
    """
    Logistic regression on frozen embeddings, as they are: pooled and cut, not normalised (the protocol of MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), A.4, and of MIC, B.4).

    Args:
        train (`torch.Tensor` of shape `(texts, dim)`): Embeddings.
        labels (`Sequence[int]`): One a text.
        strength (`float`, *optional*, defaults to 1.0): Inverse of the weight of the L2 penalty (`C` in scikit-learn).
        max_iter (`int`, *optional*, defaults to 1000): Steps of L-BFGS at most.

    Returns:
        `sklearn.linear_model.LogisticRegression`: fitted.

    Raises:
        ValueError: if all labels are equal.
    """
    require_classes(labels)
    return LogisticRegression(C=strength, max_iter=max_iter).fit(train.numpy(), list(labels))


def classification_scores(predictions: Sequence[int], labels: Sequence[int]) -> dict[str, float]:
    """`macro_f1` (mean over classes, each as heavy as the others) and `accuracy` of predicted labels."""
    return {
        "macro_f1": float(f1_score(labels, predictions, average="macro")),
        "accuracy": float(accuracy_score(labels, predictions)),
    }
