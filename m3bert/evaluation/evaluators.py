"""
Evaluators of the papers: the texts of a task, and how embeddings at one granularity become scores.

An evaluator has the texts and gold labels of one task. `score` takes embeddings at one granularity. `score_layer`
takes embeddings of one layer and scores all its prefixes, which some evaluators can do faster together.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ..encode.states import truncate
from ..utils.columns import Role
from ..utils.extras import require_extra
from ..utils.hashing import fingerprint_of
from .hybrid import CANDIDATES, FUSIONS, Ranking, bm25_search
from .metrics import (
    Label,
    alignment,
    classification_scores,
    geometry_scores,
    pair_cosines,
    pair_scores,
    ranking_scores,
    similarity_scores,
    uniformity,
)
from .search import exact_search, nearest


if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

    from ..encode.encoder import GridEncoder

Vectors = Mapping[str, torch.Tensor]
Scores = dict[str, float]


@dataclass(frozen=True)
class Evaluator(ABC):
    """
    Texts and gold labels of one task.

    Args:
        texts (`dict[str, Sequence[str]]`): Name -> texts. Texts named `documents` have the role `"document"`, all
            others the role `"query"`.
    """

    task_type: ClassVar[str]
    main_metric: ClassVar[str]

    texts: Mapping[str, Sequence[str]]

    @staticmethod
    def role(name: str) -> Role:
        """Role of the texts of this name, for encoders with prompts."""
        return "document" if name == "documents" else "query"

    def read_as(self, role: Role, encoder: GridEncoder) -> Role | None:
        """The role to encode with: `None` outside of retrieval if the encoder has a default prompt."""
        return role if isinstance(self, Retrieval) or encoder.default_prompt_name is None else None

    def fingerprint(self) -> str:
        """A digest of all texts and gold labels."""
        gold = (list(getattr(self, each.name)) for each in fields(self) if each.name != "texts")
        texts = (text for name, part in self.texts.items() for text in (name, str(len(part)), *part))
        return fingerprint_of([*map(str, gold), *texts])

    @property
    def stored(self) -> list[str]:
        """Names of the texts whose embeddings are stored, to which a precision is fitted: documents, or all texts."""
        return [name for name in self.texts if self.role(name) == "document"] or list(self.texts)

    @abstractmethod
    def score(self, vectors: Vectors) -> Scores:
        """
        Metrics at one granularity.

        Args:
            vectors (`dict[str, torch.Tensor]`): Name -> embeddings `(texts, dim)`, not normalised.

        Returns:
            `dict[str, float]`: metric -> value.
        """

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        """Dim -> metrics, from embeddings of one layer at the widest of the dims."""
        return {dim: self.score({name: truncate(side, dim) for name, side in vectors.items()}) for dim in dims}


@dataclass(frozen=True)
class STS(Evaluator):
    """Semantic textual similarity of `sentence1` and `sentence2`: Spearman correlation of cosines and `scores`."""

    task_type: ClassVar[str] = "sts"
    main_metric: ClassVar[str] = "spearman"

    scores: Sequence[float]

    def score(self, vectors: Vectors) -> Scores:
        return similarity_scores(pair_cosines(vectors["sentence1"], vectors["sentence2"]), self.scores)


@dataclass(frozen=True)
class PairClassification(Evaluator):
    """Classification of pairs `sentence1`, `sentence2` by a threshold on their cosine. `labels` are 1 for positive and
    0 for negative pairs."""

    task_type: ClassVar[str] = "pair_classification"
    main_metric: ClassVar[str] = "accuracy"

    labels: Sequence[int]

    def score(self, vectors: Vectors) -> Scores:
        return pair_scores(pair_cosines(vectors["sentence1"], vectors["sentence2"]), self.labels)


def fit_classifier(train: torch.Tensor, labels: Sequence[Label]) -> LogisticRegression:
    """Fit a logistic regression on frozen embeddings `(texts, dim)`, which are not normalised (the evaluator of MIPIC,
    [2604.24374](https://huggingface.co/papers/2604.24374), A.4, and of MIC, B.4)."""
    linear_model = require_extra("sklearn.linear_model", "evaluation", "Classification")
    return linear_model.LogisticRegression(C=1.0, max_iter=1000).fit(train.numpy(), list(labels))


@dataclass(frozen=True)
class Classification(Evaluator):
    """Logistic regression on frozen embeddings, fitted on the texts `train` and tested on the texts `test`. Labels are
    numbers or names."""

    task_type: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "macro_f1"

    train_labels: Sequence[Label]
    test_labels: Sequence[Label]

    def score(self, vectors: Vectors) -> Scores:
        classifier = fit_classifier(vectors["train"], self.train_labels)
        return classification_scores(classifier.predict(vectors["test"].numpy()), self.test_labels)

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        # A fit is many small products, which are two to six times slower with two threads: run one fit per core.
        threadpoolctl = require_extra("threadpoolctl", "evaluation", "Classification")
        with threadpoolctl.threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
            fits = {
                dim: pool.submit(self.score, {name: truncate(side, dim) for name, side in vectors.items()})
                for dim in sorted(dims, reverse=True)
            }
            return {dim: fits[dim].result() for dim in dims}


@dataclass(frozen=True)
class BitextMining(Evaluator):
    """Find the translation of each sentence of `sentence1` among `sentence2`, and the reverse (the Tatoeba test of
    LASER, [1812.10464](https://huggingface.co/papers/1812.10464))."""

    task_type: ClassVar[str] = "bitext"
    main_metric: ClassVar[str] = "accuracy"

    def score(self, vectors: Vectors) -> Scores:
        sides = vectors["sentence1"], vectors["sentence2"]
        rows = np.arange(len(sides[0]))
        return {
            name: float((exact_search(first, second, 1)[:, 0] == rows).mean())
            for name, (first, second) in (("accuracy", sides), ("accuracy_reverse", sides[::-1]))
        }


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Exact search of `documents` by `queries`. `relevant` maps, per query, the row of each relevant document to its
    grade. `cutoffs` are the values of k for Recall@k; those above the number of documents are left out. `self_rows`
    is, per query, the row of the document that is the query itself, which is left out of its ranking; -1: none."""

    task_type: ClassVar[str] = "retrieval"
    main_metric: ClassVar[str] = "ndcg@10"

    relevant: Sequence[Mapping[int, float]]
    cutoffs: Sequence[int] = (1, 10, 100)
    self_rows: Sequence[int] = ()

    def score(self, vectors: Vectors) -> Scores:
        return self.score_ranked(self.nearest(vectors, max([*self.cutoffs, 10])).rows)

    def score_ranked(self, rows: np.ndarray) -> Scores:
        """Metrics of ranked documents `(queries, k)`, best first."""
        return ranking_scores(rows, self.relevant, self.cutoffs)

    def score_bm25(self, vectors: Vectors | None = None, fusion: str = "scores") -> Scores:
        """Metrics of [`~Retrieval.bm25_ranked`]."""
        return self.score_ranked(self.bm25_ranked(vectors, fusion))

    def bm25_ranked(self, vectors: Vectors | None = None, fusion: str = "scores") -> np.ndarray:
        """Documents `(queries, k)` by BM25, beside exact search by embeddings if there are some. `fusion` is
        `"scores"` or `"ranks"`; see [`fuse_scores`] and [`fuse_ranks`]."""
        depth = max([*self.cutoffs, 10])  # nDCG and MRR read the first 10
        if vectors is None:
            return self._bm25.rows[:, :depth]
        return FUSIONS[fusion](self.nearest(vectors, CANDIDATES), self._bm25, depth)

    def nearest(self, vectors: Vectors, k: int) -> Ranking:
        """The nearest documents of the queries. `vectors` may hold the queries several times, list after list."""
        return self._without_self(
            lambda length: Ranking(*nearest(vectors["queries"], vectors["documents"], length)), k
        )

    @property
    def reachable(self) -> int:
        """Number of documents that every query can find."""
        return len(self.texts["documents"]) - bool(self.self_rows)

    @cached_property
    def _bm25(self) -> Ranking:
        return self._without_self(partial(bm25_search, self.texts["queries"], self.texts["documents"]), CANDIDATES)

    def _without_self(self, search: Callable[[int], Ranking], k: int) -> Ranking:
        """The `k` best documents of a search that are not the query itself."""
        if not self.self_rows:
            return search(k)
        ranking = search(k + 1)
        return ranking.without(np.resize(self.self_rows, len(ranking.rows)), k)


@dataclass(frozen=True)
class Geometry(Evaluator):
    """Geometry of the embeddings of `sentence1` and `sentence2`. `positives` are the rows of positive pairs."""

    task_type: ClassVar[str] = "geometry"
    main_metric: ClassVar[str] = "uniformity"

    positives: Sequence[int]

    def score(self, vectors: Vectors) -> Scores:
        positives = list(self.positives)
        return {
            "alignment": alignment(vectors["sentence1"][positives], vectors["sentence2"][positives]),
            "uniformity": uniformity(self.both(vectors)),
        }

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        geometry = geometry_scores(self.both(vectors), dims)
        return {dim: scores | geometry[dim] for dim, scores in super().score_layer(vectors, dims).items()}

    @staticmethod
    def both(vectors: Vectors) -> torch.Tensor:
        """Embeddings of all texts, `(2 * pairs, dim)`."""
        return torch.cat([vectors["sentence1"], vectors["sentence2"]])
