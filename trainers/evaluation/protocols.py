"""
The papers' protocols: what is embedded, and how the embeddings at one granularity become scores.

A protocol holds the texts and the gold of one task. Its `score` sees the embeddings at one granularity; `score_layer`
those of one layer, for what is cheaper for all prefixes together.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from threadpoolctl import threadpool_limits

from ..nested import prefix
from .classification import classification_scores, fit_classifier, require_classes
from .encoding import Role
from .geometry import alignment, geometry_scores, uniformity
from .pairs import (
    bitext_accuracy,
    pair_classification_scores,
    pair_cosines,
    require_both_labels,
    similarity_spearman,
)
from .search import SHORTLISTS, exact_search, products_share, ranking_scores, rerank


Vectors = Mapping[str, torch.Tensor]
Scores = dict[str, float]


@dataclass(frozen=True)
class Protocol(ABC):
    """
    One task's texts and gold.

    Args:
        texts (`dict[str, Sequence[str]]`): Name -> texts. Those named `documents` have the role of documents,
            all others of queries.
    """

    family: ClassVar[str]
    main_metric: ClassVar[str]

    texts: Mapping[str, Sequence[str]]

    @staticmethod
    def role(name: str) -> Role:
        """What texts of this name are, for encoders that want to be told."""
        return "document" if name == "documents" else "query"

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
        """Dim -> metrics, of embeddings of one layer at the widest of the dims."""
        return {dim: self.score({name: prefix(side, dim) for name, side in vectors.items()}) for dim in dims}

    def score_two_stages(self, vectors: Vectors, dims: Sequence[int]) -> list[dict[str, Any]]:
        """
        Where something is searched: with one prefix, then re-ranked with a longer one of the same vectors, for every
        pair of dims and every length of [`SHORTLISTS`] within the collection.

        Args:
            vectors (`dict[str, torch.Tensor]`): Embeddings of one layer at the widest of the dims.
            dims (`Sequence[int]`): Prefixes, ascending.

        Returns:
            `list[dict[str, Any]]`: the fields of a [`Plan`] but for its task and layer; none where nothing is
                searched.
        """
        return []

    def variances(self, vectors: Vectors) -> list[float]:
        """Where geometry is looked at: the variance of each dim over the texts; none elsewhere."""
        return []


@dataclass(frozen=True)
class STS(Protocol):
    """Semantic textual similarity of `sentence1` and `sentence2`: Spearman correlation of cosines with `scores`."""

    family: ClassVar[str] = "sts"
    main_metric: ClassVar[str] = "spearman"

    scores: Sequence[float]

    def __post_init__(self) -> None:
        if len(set(self.scores)) < 2:
            raise ValueError(f"a correlation needs scores that differ; found {sorted(set(self.scores))}.")

    def score(self, vectors: Vectors) -> Scores:
        cosines = pair_cosines(vectors["sentence1"], vectors["sentence2"])
        return {"spearman": similarity_spearman(cosines, self.scores)}


@dataclass(frozen=True)
class PairClassification(Protocol):
    """Whether `sentence1` and `sentence2` belong together, by a threshold on their cosine; `labels` are 1 and 0."""

    family: ClassVar[str] = "pair_classification"
    main_metric: ClassVar[str] = "accuracy"

    labels: Sequence[int]

    def __post_init__(self) -> None:
        require_both_labels(self.labels)

    def score(self, vectors: Vectors) -> Scores:
        return pair_classification_scores(pair_cosines(vectors["sentence1"], vectors["sentence2"]), self.labels)


@dataclass(frozen=True)
class Classification(Protocol):
    """Logistic regression on frozen embeddings of the texts `train`, tested on those of `test`."""

    family: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "macro_f1"

    train_labels: Sequence[int]
    test_labels: Sequence[int]

    def __post_init__(self) -> None:
        require_classes(self.train_labels)

    def score(self, vectors: Vectors) -> Scores:
        classifier = fit_classifier(vectors["train"], self.train_labels)
        return classification_scores(classifier.predict(vectors["test"].numpy()), self.test_labels)

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        # A fit is many small products, which threads only slow down: two to six times on two cores. One fit a core.
        with threadpool_limits(1), ThreadPoolExecutor(os.cpu_count()) as pool:
            fits = {
                dim: pool.submit(self.score, {name: prefix(side, dim) for name, side in vectors.items()})
                for dim in sorted(dims, reverse=True)
            }
            return {dim: fits[dim].result() for dim in dims}


@dataclass(frozen=True)
class BitextMining(Protocol):
    """Which of the sentences `sentence2` is the translation of each of `sentence1`, and back."""

    family: ClassVar[str] = "bitext"
    main_metric: ClassVar[str] = "accuracy"

    def score(self, vectors: Vectors) -> Scores:
        return bitext_accuracy(vectors["sentence1"], vectors["sentence2"])


@dataclass(frozen=True)
class Retrieval(Protocol):
    """Exact search of `documents` by `queries`; `relevant` has a query's relevant documents, row -> grade."""

    family: ClassVar[str] = "retrieval"
    main_metric: ClassVar[str] = "ndcg@10"

    relevant: Sequence[Mapping[int, float]]

    def __post_init__(self) -> None:
        if not self.relevant or not all(self.relevant):
            raise ValueError("retrieval needs queries, each with a relevant document.")

    def score(self, vectors: Vectors) -> Scores:
        return ranking_scores(exact_search(vectors["queries"], vectors["documents"], 100), self.relevant)

    def score_two_stages(self, vectors: Vectors, dims: Sequence[int]) -> list[dict[str, Any]]:
        queries, documents = vectors["queries"], vectors["documents"]
        sizes = [size for size in SHORTLISTS if size <= len(documents)]
        if not sizes:
            return []
        plans = []
        for position, first in enumerate(dims[:-1]):
            shortlist = exact_search(prefix(queries, first), prefix(documents, first), sizes[-1])
            for second in dims[position + 1 :]:
                for size, ranked in rerank(
                    prefix(queries, second), prefix(documents, second), shortlist, sizes
                ).items():
                    plans.append(
                        {
                            "documents": len(documents),
                            "first_dim": first,
                            "second_dim": second,
                            "shortlist": size,
                            "products_share": products_share(len(documents), (first, second), size),
                            "metric": self.main_metric,
                            "value": ranking_scores(ranked, self.relevant)[self.main_metric],
                        }
                    )
        return plans


@dataclass(frozen=True)
class Geometry(Protocol):
    """How embeddings of `sentence1` and `sentence2` lie in space; `positives` are the rows of pairs that are alike."""

    family: ClassVar[str] = "geometry"
    main_metric: ClassVar[str] = "uniformity"

    positives: Sequence[int]

    def __post_init__(self) -> None:
        if not self.positives:
            raise ValueError("alignment needs pairs that are alike; there is none.")

    def score(self, vectors: Vectors) -> Scores:
        rows = list(self.positives)
        return {
            "alignment": alignment(vectors["sentence1"][rows], vectors["sentence2"][rows]),
            "uniformity": uniformity(self._all(vectors)),
        }

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        geometry = geometry_scores(self._all(vectors), dims)
        return {dim: scores | geometry[dim] for dim, scores in super().score_layer(vectors, dims).items()}

    def variances(self, vectors: Vectors) -> list[float]:
        return self._all(vectors).double().var(dim=0).tolist()

    @staticmethod
    def _all(vectors: Vectors) -> torch.Tensor:
        """All texts' embeddings, `(2 pairs, dim)`."""
        return torch.cat([vectors["sentence1"], vectors["sentence2"]])
