"""
The papers' protocols: what is embedded, and how the embeddings at one granularity become scores.

A protocol holds the texts and the gold of one task. Its `score` sees the embeddings at one granularity; `score_layer`
those of one layer, for what is cheaper for all prefixes together.
"""

from __future__ import annotations

import itertools
import os
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
from .search import SHORTLISTS, exact_search, products_share, ranking_scores, two_stage_search


Vectors = Mapping[str, torch.Tensor]
Scores = dict[str, float]


@dataclass(frozen=True)
class Protocol:
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

    def score(self, vectors: Vectors) -> Scores:
        """
        Metrics at one granularity.

        Args:
            vectors (`dict[str, torch.Tensor]`): Name -> embeddings `(texts, dim)`, not normalised.

        Returns:
            `dict[str, float]`: metric -> value.
        """
        raise NotImplementedError

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        """Dim -> metrics, of embeddings of one layer at the widest of the dims."""
        return {dim: self.score({name: prefix(side, dim) for name, side in vectors.items()}) for dim in dims}


@dataclass(frozen=True)
class STS(Protocol):
    """Semantic textual similarity of `sentence1` and `sentence2`: Spearman correlation of cosines with `scores`."""

    family: ClassVar[str] = "sts"
    main_metric: ClassVar[str] = "spearman"

    scores: Sequence[float]

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

    def score_two_stages(
        self, vectors: Vectors, dims: Sequence[int], sizes: Sequence[int] = SHORTLISTS
    ) -> list[dict[str, Any]]:
        """
        Search with one prefix and re-rank with a longer one of the same vectors, for every pair of dims.

        Args:
            vectors (`dict[str, torch.Tensor]`): Embeddings of one layer at the widest of the dims.
            dims (`Sequence[int]`): Prefixes.
            sizes (`Sequence[int]`): Lengths of the shortlist; those beyond the collection are left out.

        Returns:
            `list[dict[str, Any]]`: one a plan: `first_dim`, `second_dim`, `shortlist`, `products_share` (of an exact
            search with the second dim), `metric` and its `value`.
        """
        queries, documents = vectors["queries"], vectors["documents"]
        sizes = [size for size in sizes if size <= len(documents)]
        plans = []
        for first, second in itertools.combinations(dims, 2) if sizes else ():
            for size, ranked in two_stage_search(queries, documents, (first, second), sizes).items():
                plans.append(
                    {
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

    def score(self, vectors: Vectors) -> Scores:
        first, second = vectors["sentence1"], vectors["sentence2"]
        rows = list(self.positives)
        return {
            "alignment": alignment(first[rows], second[rows]),
            "uniformity": uniformity(self.sides(vectors)),
        }

    @staticmethod
    def sides(vectors: Vectors) -> torch.Tensor:
        """All texts' embeddings, `(2 pairs, dim)`."""
        return torch.cat([vectors["sentence1"], vectors["sentence2"]])

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        geometry = geometry_scores(self.sides(vectors), dims)
        return {dim: scores | geometry[dim] for dim, scores in super().score_layer(vectors, dims).items()}
