"""The metrics of the evaluators, the spectrum of embeddings, and metrics of the library `evaluate` for a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction

from ..utils.extras import require_extra


Label = int | float | str | bool
ROWS_AT_ONCE = 1024  # rows of the matrix of distances that are in memory together


def pair_cosines(first: torch.Tensor, second: torch.Tensor) -> np.ndarray:
    """Cosine of each pair, `(pairs,)` in float64. The embeddings `(pairs, dim)` need not be normalised."""
    return nn.functional.cosine_similarity(first.double(), second.double(), dim=1).numpy()


def similarity_scores(cosines: np.ndarray, scores: Sequence[float]) -> dict[str, float]:
    """`spearman`, the rank correlation of cosines and gold scores; NaN if all cosines or all scores are equal."""
    stats = require_extra("scipy.stats", "evaluation", "Semantic textual similarity")
    return {"spearman": float(stats.spearmanr(cosines, scores).statistic)}


def pair_scores(cosines: np.ndarray, labels: Sequence[int]) -> dict[str, float]:
    """
    `accuracy` at the threshold that is best for these pairs (MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), A.4), and `average_precision`. The accuracy is NaN if all
    labels are equal.
    """
    metrics = require_extra("sklearn.metrics", "evaluation", "Pair classification")
    false_positive_rate, true_positive_rate, _ = metrics.roc_curve(labels, cosines, drop_intermediate=False)
    positives = np.mean(np.equal(labels, 1))
    accuracies = true_positive_rate * positives + (1 - false_positive_rate) * (1 - positives)
    average_precision = metrics.average_precision_score(labels, cosines)
    return {"accuracy": float(accuracies.max()), "average_precision": float(average_precision)}


def classification_scores(predicted: Sequence[Label], labels: Sequence[Label]) -> dict[str, float]:
    """`macro_f1`, the unweighted mean over classes, and `accuracy` of labels, which are numbers or names."""
    metrics = require_extra("sklearn.metrics", "evaluation", "Classification")
    macro_f1 = metrics.f1_score(labels, predicted, average="macro")
    return {"macro_f1": float(macro_f1), "accuracy": float(metrics.accuracy_score(labels, predicted))}


def ranking_scores(
    ranked: np.ndarray, relevant: Sequence[Mapping[int, float]], cutoffs: Sequence[int] = (1, 10, 100)
) -> dict[str, float]:
    """
    Metrics of ranked lists, averaged over queries.

    Args:
        ranked (`np.ndarray` of shape `(queries, k)`): Documents found, best first.
        relevant (`Sequence[Mapping[int, float]]`): Per query: relevant document -> grade, above 0.
        cutoffs (`Sequence[int]`, *optional*, defaults to `(1, 10, 100)`): Values of k for Recall@k, up to the length
            of the lists.

    Returns:
        `dict[str, float]`: `recall@k`, the share of the relevant documents among the first k; `mrr@10`, the reciprocal
        rank of the first relevant document, 0 if it is above 10; `ndcg@10`, with the grades as gains (trec_eval);
        `ndcg_exp@10`, with the gains `2^grade - 1` (QAMA).

    Raises:
        ValueError: if a query has no relevant document, which leaves its metrics undefined.
    """
    if not all(relevant):
        raise ValueError("Some queries have no relevant document; leave them out.")
    lists = zip(ranked.tolist(), relevant, strict=True)
    gains = np.array([[grades.get(row, 0.0) for row in rows] for rows, grades in lists])
    counts = np.array([len(grades) for grades in relevant])
    within = {k: (gains[:, :k] > 0).sum(axis=1) / counts for k in cutoffs if k <= gains.shape[1]}
    scores = {f"recall@{k}": float(share.mean()) for k, share in within.items()}
    gains = gains[:, :10]
    scores["mrr@10"] = float(((gains > 0).any(axis=1) / (1 + (gains > 0).argmax(axis=1))).mean())
    ideal = np.zeros((len(relevant), 10))
    for row, grades in zip(ideal, relevant, strict=True):
        best = sorted(grades.values(), reverse=True)[:10]
        row[: len(best)] = best
    discount = 1 / np.log2(np.arange(2, 12))
    for name, gain in (("ndcg@10", np.asarray), ("ndcg_exp@10", lambda grades: np.exp2(grades) - 1)):
        reached = gain(gains) @ discount[: gains.shape[1]]
        scores[name] = float((reached / (gain(ideal) @ discount)).mean())
    return scores


def alignment(first: torch.Tensor, second: torch.Tensor) -> float:
    """
    Mean squared distance of positive pairs on the unit sphere, in 0..4 (Wang and Isola,
    [2005.10242](https://huggingface.co/papers/2005.10242); IBKD, Eq. 12). The embeddings `(pairs, dim)` need not be
    normalised. Lower is better.
    """
    first, second = (nn.functional.normalize(side.double(), dim=1) for side in (first, second))
    return float((first - second).square().sum(dim=1).mean())


def uniformity(vectors: torch.Tensor, scale: float = 2.0) -> float:
    """
    `log mean exp(-scale |x - y|^2)` over pairs of different texts on the unit sphere (IBKD, Eq. 13). The embeddings
    `(texts, dim)`, at least two, need not be normalised. Lower is better.
    """
    count, total = len(vectors), 0.0
    vectors = nn.functional.normalize(vectors.float(), dim=1)
    for start in range(0, count, ROWS_AT_ONCE):
        kernel = torch.exp(2 * scale * (vectors[start : start + ROWS_AT_ONCE] @ vectors.T - 1))
        kernel.diagonal(offset=start).zero_()
        total += float(kernel.sum(dtype=torch.float64))
    return float(np.log(total / (count * (count - 1))))


def feature_covariance(vectors: torch.Tensor) -> torch.Tensor:
    """
    Covariance of the dims over texts, `(dim, dim)` in float64 (IBKD,
    [2311.05472](https://huggingface.co/papers/2311.05472), section 4.7), of embeddings `(texts, dim)`, which are not
    normalised. Its leading block is that of a prefix.
    """
    return torch.cov(vectors.double().T).reshape(vectors.shape[1], vectors.shape[1])


def feature_correlation(covariance: torch.Tensor) -> torch.Tensor:
    """Correlation matrix of a covariance matrix `(dim, dim)`. Correlations of a constant dim are 0."""
    deviations = covariance.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(deviations > 0, 1 / deviations, 0.0)
    return covariance * inverse[:, None] * inverse[None, :]


def effective_rank(covariance: torch.Tensor, dim: int) -> float:
    """Effective rank of a prefix of this length, in 1..dim, from [`feature_covariance`]: the exponential of the
    entropy of the normalised eigenvalues (Roy and Vetterli, 2007). 0 if all embeddings are equal."""
    spectrum = torch.linalg.eigvalsh(covariance[:dim, :dim]).clamp(min=0)
    if spectrum.sum() == 0:
        return 0.0
    return float(torch.special.entr(spectrum / spectrum.sum()).sum().exp())


def prefix_residual_correlation(correlation: torch.Tensor, dim: int) -> float:
    """Mean absolute correlation between the dims of a prefix of this length and the dims after it, in 0..1, from
    [`feature_correlation`]. It measures redundancy (MIC, [2605.29987](https://huggingface.co/papers/2605.29987),
    section 2; here over texts, of pooled embeddings)."""
    return float(correlation[:dim, dim:].abs().mean())


def geometry_scores(vectors: torch.Tensor, dims: Sequence[int]) -> dict[int, dict[str, float]]:
    """
    Geometry of the prefixes of embeddings `(texts, width)` of one layer, from one covariance matrix: dim ->
    `effective_rank`, `mean_covariance` (mean absolute value off the diagonal, for dims above 1), and
    `prefix_residual_correlation` (for dims below the hidden size).
    """
    covariance = feature_covariance(vectors)
    correlation = feature_correlation(covariance)
    scores: dict[int, dict[str, float]] = {}
    for dim in dims:
        scores[dim] = {"effective_rank": effective_rank(covariance, dim)}
        if dim > 1:
            block = covariance[:dim, :dim].abs()
            scores[dim]["mean_covariance"] = float((block.sum() - block.trace()) / (dim * (dim - 1)))
        if dim < vectors.shape[1]:
            scores[dim]["prefix_residual_correlation"] = prefix_residual_correlation(correlation, dim)
    return scores


def library_metrics(*names: str) -> Callable[[EvalPrediction], dict[str, float]]:
    """
    Metrics of the library `evaluate` as `compute_metrics` of a trainer that gives logits. Tokens without a label
    (-100) are left out.

    Args:
        names (`str`): Metrics of predicted labels: names on the Hub, such as `"accuracy"`, or files of metrics.

    ```python
    >>> trainer = MultigranularMLMTrainer(..., compute_metrics=library_metrics("accuracy"))  # doctest: +SKIP
    ```
    """
    import evaluate  # takes a second

    metrics = evaluate.combine(list(names))

    def compute(output: EvalPrediction) -> dict[str, float]:
        predictions, labels = np.asarray(output.predictions).argmax(axis=-1), output.label_ids
        return metrics.compute(predictions=predictions[labels != -100], references=labels[labels != -100])

    return compute
