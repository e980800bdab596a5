"""Recall@k, MRR@10 and nDCG@10 of ranked lists, the last with two kinds of gains."""

from __future__ import annotations

from collections.abc import Sequence

import evaluate
import numpy as np
from datasets import Features, List, Value

from trainers.core.extras import require_extra


INPUTS = """
Args:
    predictions: ranked documents of each query, best first; all lists have the same length.
    references: relevant documents of each query, at least one.
    grades: relevance grades of these documents, above 0.
    cutoffs: values of k for Recall@k; those above the length of the lists are left out. Default: 1, 10 and 100.
"""


class RankingScores(evaluate.Metric):
    """
    Means over queries of `recall@k`, the share of the relevant documents among the first k; `mrr@10`, the reciprocal
    rank of the first relevant document, 0 if it is not among the first 10; `ndcg@10`, with the grades as gains, as in
    trec_eval; `ndcg_exp@10`, with the gains `2^grade - 1`, as in QAMA's text. Both are the same if all grades are 1. A
    ValueError says that a query has no relevant document.
    """

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
        if not all(relevant):
            raise ValueError("Some queries have no relevant document; leave them out.")
        lists = list(zip(predictions, relevant, strict=True))
        found = np.array([[its.get(row, 0.0) for row in rows] for rows, its in lists])
        counts = np.array([len(its) for its in relevant])
        scores = {
            f"recall@{k}": float(((found[:, :k] > 0).sum(axis=1) / counts).mean())
            for k in cutoffs
            if k <= found.shape[1]
        }
        hits = found[:, :10] > 0
        scores["mrr@10"] = float((hits.any(axis=1) / (1 + hits.argmax(axis=1))).mean())
        # The ideal ranking also has the relevant documents that were not found: append them to the list.
        found = np.pad(found, ((0, 0), (0, max(0, 10 - found.shape[1]))))
        missed = np.zeros((len(relevant), counts.max()))
        for row, (rows, its) in enumerate(lists):
            rest = [its[document] for document in its.keys() - set(rows)]
            missed[row, : len(rest)] = rest
        gains = np.concatenate([found, missed], axis=1)
        order = np.broadcast_to(-np.arange(gains.shape[1]), gains.shape)
        metrics = require_extra("sklearn.metrics", "evaluation", "Retrieval")
        for name, values in (("ndcg@10", gains), ("ndcg_exp@10", np.exp2(gains) - 1)):
            scores[name] = float(metrics.ndcg_score(values, order, k=10, ignore_ties=True))
        return scores
