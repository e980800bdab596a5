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
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from ..core.columns import Role
from ..core.extras import require_extra
from ..core.states import truncate
from .embeddings import ROWS_AT_ONCE
from .geometry import geometry_scores
from .hybrid import CANDIDATES, FUSIONS, Ranking, bm25_search
from .modules import compute_metric
from .pairs import pair_cosines, require_both_labels
from .search import SHORTLISTS, exact_search, products_share, ranking_scores, rerank, search_blocks


if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

Vectors = Mapping[str, torch.Tensor]
Scores = dict[str, float]
LONGEST_RESCORED = 100  # documents found in a code that are scored again


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

    def score_two_stages(self, vectors: Vectors, dims: Sequence[int]) -> list[dict[str, Any]]:
        """
        Measure two-stage searches of a retrieval task: search with a short prefix, then rerank with a longer one, for
        every pair of dims and every length in [`SHORTLISTS`] up to the size of the collection.

        Args:
            vectors (`dict[str, torch.Tensor]`): Embeddings of one layer at the widest of the dims.
            dims (`Sequence[int]`): Dims of the prefixes, ascending.

        Returns:
            `list[dict[str, Any]]`: per search, the fields of a [`TwoStageSearch`] except task and layer. Empty for
            other task types.
        """
        return []

    def score_rescored(self, coded: Vectors, rescorers: Mapping[str, Callable[[], Vectors]]) -> list[dict[str, Any]]:
        """
        Measure searches of a retrieval task that find a shortlist in a precision and rescore it, for every length in
        [`SHORTLISTS`] up to 100 and to the size of the collection.

        Args:
            coded (`dict[str, torch.Tensor]`): Embeddings in the precision, from [`~coding.code_vectors`].
            rescorers (`dict[str, Callable]`): Name -> function that gives the vectors that rescore.

        Returns:
            `list[dict[str, Any]]`: per search, the fields of a [`RescoredSearch`] except task and granularity. Empty
            for other task types.
        """
        return []

    def score_asymmetric(
        self, embeddings: Callable[[str, int], torch.Tensor], dims: Mapping[int, Sequence[int]]
    ) -> list[dict[str, Any]]:
        """
        Measure exact searches of a retrieval task with queries and documents at different layers, for every pair of
        layers and every dim that both have.

        Args:
            embeddings (`Callable[[str, int], torch.Tensor]`): Name of a list of texts and layer -> its embeddings
                `(texts, widest dim of the layer)`, not normalised.
            dims (`dict[int, Sequence[int]]`): Layer -> its dims, ascending.

        Returns:
            `list[dict[str, Any]]`: per search, the fields of an [`AsymmetricSearch`] except task. Empty for other task
            types.
        """
        return []

    def score_hybrid(
        self, embeddings: Callable[[str, int], torch.Tensor], dims: Mapping[int, Sequence[int]]
    ) -> list[dict[str, Any]]:
        """
        Measure BM25 alone and beside exact search in a retrieval task, with queries at every layer and documents at
        the last one, for every dim that both have.

        Args:
            embeddings (`Callable[[str, int], torch.Tensor]`): As in [`~Evaluator.score_asymmetric`].
            dims (`dict[int, Sequence[int]]`): Layer -> its dims, ascending.

        Returns:
            `list[dict[str, Any]]`: per search, the fields of a [`HybridSearch`] except task. Empty for other task
            types.

        Raises:
            ValueError: if SQLite has no full-text search.
        """
        return []

    def variances(self, vectors: Vectors) -> list[float]:
        """Variance of each dim over the texts, for geometry; empty for other task types."""
        return []


@dataclass(frozen=True)
class STS(Evaluator):
    """Semantic textual similarity of `sentence1` and `sentence2`: Spearman correlation of cosines and `scores`."""

    task_type: ClassVar[str] = "sts"
    main_metric: ClassVar[str] = "spearman"

    scores: Sequence[float]

    def __post_init__(self) -> None:
        if len(set(self.scores)) < 2:
            raise ValueError(f"a correlation needs different scores; found only {sorted(set(self.scores))}.")

    def score(self, vectors: Vectors) -> Scores:
        cosines = pair_cosines(vectors["sentence1"], vectors["sentence2"])
        return compute_metric("similarity_spearman", predictions=cosines.numpy(), references=self.scores)


@dataclass(frozen=True)
class PairClassification(Evaluator):
    """Classification of pairs `sentence1`, `sentence2` by a threshold on their cosine. `labels` are 1 for positive and
    0 for negative pairs."""

    task_type: ClassVar[str] = "pair_classification"
    main_metric: ClassVar[str] = "accuracy"

    labels: Sequence[int]

    def __post_init__(self) -> None:
        require_both_labels(self.labels)

    def score(self, vectors: Vectors) -> Scores:
        cosines = pair_cosines(vectors["sentence1"], vectors["sentence2"])
        return compute_metric("pair_classification", predictions=cosines.numpy(), references=self.labels)


def require_classes(labels: Sequence[int]) -> None:
    """
    Check the training labels of a classifier.

    Raises:
        ValueError: if there are fewer than two classes.
    """
    if len(set(labels)) < 2:
        raise ValueError(f"a classifier needs at least two classes; found {sorted(set(labels))}.")


def fit_classifier(train: torch.Tensor, labels: Sequence[int]) -> LogisticRegression:
    """
    Fit a logistic regression on frozen embeddings, which are pooled and truncated but not normalised (the evaluator of
    MIPIC, [2604.24374](https://huggingface.co/papers/2604.24374), A.4, and of MIC, B.4).

    Args:
        train (`torch.Tensor` of shape `(texts, dim)`): Embeddings.
        labels (`Sequence[int]`): One label per text.

    Returns:
        `sklearn.linear_model.LogisticRegression`: fitted.

    Raises:
        ValueError: if all labels are equal.
    """
    require_classes(labels)
    linear_model = require_extra("sklearn.linear_model", "evaluation", "Classification")
    return linear_model.LogisticRegression(C=1.0, max_iter=1000).fit(train.numpy(), list(labels))


@dataclass(frozen=True)
class Classification(Evaluator):
    """Logistic regression on frozen embeddings, fitted on the texts `train` and tested on the texts `test`."""

    task_type: ClassVar[str] = "classification"
    main_metric: ClassVar[str] = "macro_f1"

    train_labels: Sequence[int]
    test_labels: Sequence[int]

    def __post_init__(self) -> None:
        require_classes(self.train_labels)

    def score(self, vectors: Vectors) -> Scores:
        classifier = fit_classifier(vectors["train"], self.train_labels)
        predicted = classifier.predict(vectors["test"].numpy())
        return compute_metric("classification", predictions=predicted, references=self.test_labels)

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
    """Find the translation of each sentence of `sentence1` among `sentence2`, and the reverse."""

    task_type: ClassVar[str] = "bitext"
    main_metric: ClassVar[str] = "accuracy"

    def score(self, vectors: Vectors) -> Scores:
        sides = vectors["sentence1"], vectors["sentence2"]
        scores, own = {}, range(len(sides[0]))
        for name, (first, second) in (("accuracy", sides), ("accuracy_reverse", sides[::-1])):
            nearest = exact_search(first, second, 1)[:, 0]
            scores[name] = compute_metric("bitext_accuracy", predictions=nearest, references=own)["accuracy"]
        return scores


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Exact search of `documents` by `queries`. `relevant` maps, per query, the row of each relevant document to its
    grade. `cutoffs` are the values of k for Recall@k; those above the number of documents are left out."""

    task_type: ClassVar[str] = "retrieval"
    main_metric: ClassVar[str] = "ndcg@10"

    relevant: Sequence[Mapping[int, float]]
    cutoffs: Sequence[int] = (1, 10, 100)

    def __post_init__(self) -> None:
        if not self.relevant or not all(self.relevant):
            raise ValueError("retrieval needs queries, each with at least one relevant document.")
        if wrong := [k for k in self.cutoffs if k < 1]:
            raise ValueError(f"Recall@{wrong[0]} is not defined: k must be 1 or more.")

    def score(self, vectors: Vectors) -> Scores:
        depth = max([*self.cutoffs, 10])  # nDCG and MRR read the first 10
        ranked = exact_search(vectors["queries"], vectors["documents"], depth)
        return ranking_scores(ranked, self.relevant, self.cutoffs)

    def score_two_stages(self, vectors: Vectors, dims: Sequence[int]) -> list[dict[str, Any]]:
        queries, documents = vectors["queries"], vectors["documents"]
        sizes = [size for size in SHORTLISTS if size <= len(documents)]
        if not sizes:
            return []
        plans = []
        for position, first in enumerate(dims[:-1]):
            shortlist = exact_search(truncate(queries, first), truncate(documents, first), sizes[-1])
            for second in dims[position + 1 :]:
                for size, ranked in rerank(
                    truncate(queries, second), truncate(documents, second), shortlist, sizes
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

    def score_rescored(self, coded: Vectors, rescorers: Mapping[str, Callable[[], Vectors]]) -> list[dict[str, Any]]:
        documents = len(coded["documents"])
        sizes = [size for size in SHORTLISTS if size <= min(documents, LONGEST_RESCORED)]
        if not sizes or not rescorers:
            return []
        shortlist = exact_search(coded["queries"], coded["documents"], sizes[-1])
        searches = []
        for name, vectors_of in rescorers.items():
            vectors = vectors_of()
            for size, ranked in rerank(vectors["queries"], vectors["documents"], shortlist, sizes).items():
                searches.append(
                    {
                        "documents": documents,
                        "rescore": name,
                        "shortlist": size,
                        "metric": self.main_metric,
                        "value": ranking_scores(ranked, self.relevant)[self.main_metric],
                    }
                )
        return searches

    def score_asymmetric(
        self, embeddings: Callable[[str, int], torch.Tensor], dims: Mapping[int, Sequence[int]]
    ) -> list[dict[str, Any]]:
        queries = {layer: embeddings("queries", layer) for layer in dims}
        searches = []
        for document_layer in dims:
            documents = embeddings("documents", document_layer)
            for dim in dims[document_layer]:
                others = [layer for layer in dims if layer != document_layer and dim in dims[layer]]
                if not others:
                    continue
                sides = [truncate(queries[layer], dim) for layer in others]
                # One search serves the queries of all layers, and finds as many as ndcg@10 reads.
                found = np.split(exact_search(torch.cat(sides), truncate(documents, dim), 10), len(sides))
                for query_layer, ranked in zip(others, found, strict=True):
                    searches.append(
                        {
                            "documents": len(documents),
                            "query_layer": query_layer,
                            "document_layer": document_layer,
                            "dim": dim,
                            "metric": self.main_metric,
                            "value": ranking_scores(ranked, self.relevant)[self.main_metric],
                        }
                    )
        return searches

    def score_hybrid(
        self, embeddings: Callable[[str, int], torch.Tensor], dims: Mapping[int, Sequence[int]]
    ) -> list[dict[str, Any]]:
        last = max(dims)
        documents = embeddings("documents", last)

        def search(query_layer: int | None, dim: int | None, fusion: str | None, scores: Scores) -> dict[str, Any]:
            return {
                "documents": len(documents),
                "query_layer": query_layer,
                "document_layer": None if query_layer is None else last,
                "dim": dim,
                "fusion": fusion,
                "metric": self.main_metric,
                "value": scores[self.main_metric],
            }

        searches = [search(None, None, None, self.score_bm25())]
        for layer, its in dims.items():
            for dim in (dim for dim in its if dim in dims[last]):
                stored, queries = truncate(documents, dim), truncate(embeddings("queries", layer), dim)
                vectors = {"queries": queries, "documents": stored}
                searches += [search(layer, dim, name, self.score_bm25(vectors, name)) for name in FUSIONS]
        return searches

    def score_bm25(self, vectors: Vectors | None = None, fusion: str = "scores") -> Scores:
        """
        Metrics of BM25, beside exact search by embeddings if there are some.

        Args:
            vectors (`dict[str, torch.Tensor]`, *optional*): Embeddings of `queries` and `documents`, not normalised.
            fusion (`str`, *optional*, defaults to `"scores"`): `"scores"` or `"ranks"`; see [`fuse_scores`] and
                [`fuse_ranks`].

        Returns:
            `dict[str, float]`: metric -> value.

        Raises:
            ValueError: if SQLite has no full-text search.
        """
        depth = max([*self.cutoffs, 10])
        ranked = self._words.rows[:, :depth]
        if vectors is not None:
            blocks = partial(vectors["documents"].split, ROWS_AT_ONCE)
            found = Ranking(*search_blocks(vectors["queries"], blocks, CANDIDATES))
            ranked = FUSIONS[fusion](found, self._words, depth)
        return ranking_scores(ranked, self.relevant, self.cutoffs)

    @cached_property
    def _words(self) -> Ranking:
        """BM25's best documents."""
        return bm25_search(self.texts["queries"], self.texts["documents"])


@dataclass(frozen=True)
class Geometry(Evaluator):
    """Geometry of the embeddings of `sentence1` and `sentence2`. `positives` are the rows of positive pairs."""

    task_type: ClassVar[str] = "geometry"
    main_metric: ClassVar[str] = "uniformity"

    positives: Sequence[int]

    def __post_init__(self) -> None:
        if not self.positives:
            raise ValueError("alignment needs at least one positive pair.")

    def score(self, vectors: Vectors) -> Scores:
        return compute_metric(
            "alignment_uniformity",
            predictions=vectors["sentence1"].numpy(),
            references=vectors["sentence2"].numpy(),
            positives=self.positives,
        )

    def score_layer(self, vectors: Vectors, dims: Sequence[int]) -> dict[int, Scores]:
        geometry = geometry_scores(self._all(vectors), dims)
        return {dim: scores | geometry[dim] for dim, scores in super().score_layer(vectors, dims).items()}

    def variances(self, vectors: Vectors) -> list[float]:
        return self._all(vectors).double().var(dim=0).tolist()

    @staticmethod
    def _all(vectors: Vectors) -> torch.Tensor:
        """Embeddings of all texts, `(2 * pairs, dim)`."""
        return torch.cat([vectors["sentence1"], vectors["sentence2"]])
