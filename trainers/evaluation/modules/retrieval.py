"""Recall@k, MRR@10 and nDCG@10 of ranked lists."""

from __future__ import annotations

from collections.abc import Sequence

import evaluate
import numpy as np
from datasets import Features, List, Value

from trainers.evaluation.search import ranking_scores


INPUTS = """
Args:
    predictions: ranked documents of each query, best first; all lists have the same length.
    references: relevant documents of each query.
    grades: relevance grades of these documents, above 0.
    cutoffs: values of k for Recall@k, up to the length of the lists. Default: 1, 10 and 100.
"""


class RankingScores(evaluate.Metric):
    """[`trainers.evaluation.search.ranking_scores`] as a metric of the library `evaluate`."""

    def _info(self) -> evaluate.MetricInfo:
        features = Features(
            {"predictions": List(Value("int64")), "references": List(Value("int64")), "grades": List(Value("float64"))}
        )
        return evaluate.MetricInfo(
            description=__doc__ or "", citation="", inputs_description=INPUTS, features=features
        )

    def _compute(
        self,
        predictions: list[list[int]],
        references: list[list[int]],
        grades: list[list[float]],
        cutoffs: Sequence[int] = (1, 10, 100),
    ) -> dict[str, float]:
        relevant = [dict(zip(rows, its, strict=True)) for rows, its in zip(references, grades, strict=True)]
        return ranking_scores(np.array(predictions), relevant, cutoffs)
