"""Classification of frozen embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..core.extras import require_extra


if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression


def require_classes(labels: Sequence[int]) -> None:
    """
    Check the training labels of a classifier.

    Raises:
        ValueError: if there are fewer than two classes.
    """
    if len(set(labels)) < 2:
        raise ValueError(f"a classifier needs at least two classes; found {sorted(set(labels))}.")


def fit_classifier(
    train: torch.Tensor, labels: Sequence[int], *, strength: float = 1.0, max_iter: int = 1000
) -> LogisticRegression:
    """
    Fit a logistic regression on frozen embeddings, which are pooled and truncated but not normalised (the evaluator of
    MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), A.4, and of MIC, B.4).

    Args:
        train (`torch.Tensor` of shape `(texts, dim)`): Embeddings.
        labels (`Sequence[int]`): One label per text.
        strength (`float`, *optional*, defaults to 1.0): Inverse of the L2 regularisation strength (`C` in
            scikit-learn).
        max_iter (`int`, *optional*, defaults to 1000): Maximum number of L-BFGS iterations.

    Returns:
        `sklearn.linear_model.LogisticRegression`: fitted.

    Raises:
        ValueError: if all labels are equal.
    """
    require_classes(labels)
    linear_model = require_extra("sklearn.linear_model", "evaluation", "Classification")
    return linear_model.LogisticRegression(C=strength, max_iter=max_iter).fit(train.numpy(), list(labels))
