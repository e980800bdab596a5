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
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch

from ..encode.granularity import Granularity
from ..encode.hybrid import CANDIDATES, FUSIONS, Ranking, bm25_search
from ..encode.search import SHORTLISTS, exact_search, nearest, products_share, rerank
from ..encode.states import truncate
from ..utils.columns import Role
from ..utils.extras import require_extra
from ..utils.hashing import fingerprint_of
from .geometry import geometry_scores
from .metrics import (
    alignment,
    classification_scores,
    pair_cosines,
    pair_scores,
    ranking_scores,
    similarity_scores,
    uniformity,
)
from .results import AsymmetricSearch, HybridSearch, RescoredSearch, TwoStageSearch


if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

    from ..encode.encoder import GridEncoder

Vectors = Mapping[str, torch.Tensor]
Scores = dict[str, float]
Embed = Callable[[str, int], torch.Tensor]  # name of a list of texts, and layer -> embeddings, not normalised
Search = TypeVar("Search", TwoStageSearch, RescoredSearch, AsymmetricSearch, HybridSearch)
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

    def read_as(self, role: Role, encoder: GridEncoder) -> Role | None:
        """How an encoder reads texts of a role: if it has a default prompt, `None` for those that are not searched
        with, as `encode` of sentence-transformers."""
        return role if isinstance(self, Retrieval) or encoder.default_prompt_name is None else None

    def fingerprint(self) -> str:
        """A digest of all texts and gold labels."""
        gold = (list(getattr(self, each.name)) for each in fields(self) if each.name != "texts")
        texts = (text for name, its in self.texts.items() for text in (name, str(len(its)), *its))
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


def fit_classifier(train: torch.Tensor, labels: Sequence[Any]) -> LogisticRegression:
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

    train_labels: Sequence[Any]
    test_labels: Sequence[Any]

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
        own = np.arange(len(sides[0]))
        return {
            name: float((exact_search(first, second, 1)[:, 0] == own).mean())
            for name, (first, second) in (("accuracy", sides), ("accuracy_reverse", sides[::-1]))
        }


@dataclass(frozen=True)
class Retrieval(Evaluator):
    """Exact search of `documents` by `queries`. `relevant` maps, per query, the row of each relevant document to its
    grade. `cutoffs` are the values of k for Recall@k; those above the number of documents are left out. `own` has, per
    query, the row of the document that is the query itself, which its searches leave out, or -1; empty: all have
    none."""

    task_type: ClassVar[str] = "retrieval"
    main_metric: ClassVar[str] = "ndcg@10"

    relevant: Sequence[Mapping[int, float]]
    cutoffs: Sequence[int] = (1, 10, 100)
    own: Sequence[int] = ()

    def score(self, vectors: Vectors) -> Scores:
        found = self._nearest(vectors["queries"], vectors["documents"], self._depth)
        return ranking_scores(found.rows, self.relevant, self.cutoffs)

    def two_stage_searches(self, task: str, layer: int, vectors: Vectors, dims: Sequence[int]) -> list[TwoStageSearch]:
        """Measure searches with a short prefix that are reranked with a longer one, for every pair of dims (ascending)
        and every length in [`SHORTLISTS`] up to the size of the collection. The vectors are those of one layer at the
        widest of the dims."""
        queries, documents = vectors["queries"], vectors["documents"]
        sizes = [size for size in SHORTLISTS if size <= self._others]
        searches: list[TwoStageSearch] = []
        for position, first in enumerate(dims[:-1] if sizes else ()):
            shortlist = self._nearest(truncate(queries, first), truncate(documents, first), sizes[-1]).rows
            for second in dims[position + 1 :]:
                stages = {"task": task, "layer": layer, "first_dim": first, "second_dim": second}
                ranked = rerank(truncate(queries, second), truncate(documents, second), shortlist, sizes)
                for size in sizes:
                    share = products_share(len(documents), (first, second), size)
                    searches.append(
                        self._measured(TwoStageSearch, ranked[size], **stages, shortlist=size, products_share=share)
                    )
        return searches

    def rescored_searches(
        self, task: str, size: Granularity, coded: Vectors, rescorers: Mapping[str, Callable[[], Vectors]]
    ) -> list[RescoredSearch]:
        """Measure searches that find a shortlist in a precision and rescore it, for every length in [`SHORTLISTS`] up
        to 100 and to the size of the collection. `rescorers` are functions that give the vectors that rescore."""
        lengths = [length for length in SHORTLISTS if length <= min(self._others, LONGEST_RESCORED)]
        if not lengths or not rescorers:
            return []
        shortlist = self._nearest(coded["queries"], coded["documents"], lengths[-1]).rows
        fields = {"task": task, "layer": size.layer, "dim": size.dim, "code": size.code}
        searches = []
        for name, vectors_of in rescorers.items():
            vectors = vectors_of()
            for length, ranked in rerank(vectors["queries"], vectors["documents"], shortlist, lengths).items():
                searches.append(self._measured(RescoredSearch, ranked, **fields, rescore=name, shortlist=length))
        return searches

    def asymmetric_searches(
        self, task: str, embeddings: Embed, dims: Mapping[int, Sequence[int]]
    ) -> list[AsymmetricSearch]:
        """Measure exact searches with queries and documents at different layers, for every pair of layers and dim that
        both have. `dims` maps layers to their dims, ascending."""
        queries = {layer: embeddings("queries", layer) for layer in dims}
        searches = []
        for document_layer in dims:
            documents = embeddings("documents", document_layer)
            for dim in dims[document_layer]:
                others = [layer for layer in dims if layer != document_layer and dim in dims[layer]]
                if not others:
                    continue
                # One search serves the queries of all layers, and finds as many as ndcg@10 reads.
                sides = torch.cat([truncate(queries[layer], dim) for layer in others])
                found = np.split(self._nearest(sides, truncate(documents, dim), 10).rows, len(others))
                for layer, ranked in zip(others, found, strict=True):
                    fields = {"task": task, "query_layer": layer, "document_layer": document_layer, "dim": dim}
                    searches.append(self._measured(AsymmetricSearch, ranked, **fields))
        return searches

    def hybrid_searches(self, task: str, embeddings: Embed, dims: Mapping[int, Sequence[int]]) -> list[HybridSearch]:
        """Measure BM25 alone, and beside exact search with queries at every layer and documents at the last one, for
        every dim that both have."""
        last, none = max(dims), dict.fromkeys(("query_layer", "document_layer", "dim", "fusion"))
        documents = embeddings("documents", last)
        searches = [self._measured(HybridSearch, self._bm25_ranked(), task=task, **none)]
        for layer in dims:
            queries = embeddings("queries", layer)
            for dim in (dim for dim in dims[layer] if dim in dims[last]):
                vectors = {"queries": truncate(queries, dim), "documents": truncate(documents, dim)}
                fields = {"task": task, "query_layer": layer, "document_layer": last, "dim": dim}
                searches += [
                    self._measured(HybridSearch, self._bm25_ranked(vectors, name), **fields, fusion=name)
                    for name in FUSIONS
                ]
        return searches

    def score_bm25(self, vectors: Vectors | None = None, fusion: str = "scores") -> Scores:
        """Metrics of BM25, beside exact search by embeddings if there are some. `fusion` is `"scores"` or `"ranks"`;
        see [`fuse_scores`] and [`fuse_ranks`]."""
        return ranking_scores(self._bm25_ranked(vectors, fusion), self.relevant, self.cutoffs)

    def _bm25_ranked(self, vectors: Vectors | None = None, fusion: str = "scores") -> np.ndarray:
        if vectors is None:
            return self._words.rows[:, : self._depth]
        found = self._nearest(vectors["queries"], vectors["documents"], CANDIDATES)
        return FUSIONS[fusion](found, self._words, self._depth)

    def _measured(self, kind: type[Search], ranked: np.ndarray, **fields: Any) -> Search:
        """A search with its value of the main metric."""
        value = ranking_scores(ranked, self.relevant, self.cutoffs)[self.main_metric]
        return kind(documents=len(self.texts["documents"]), metric=self.main_metric, value=value, **fields)

    @property
    def _depth(self) -> int:
        """Length of the ranked lists: nDCG and MRR read the first 10."""
        return max([*self.cutoffs, 10])

    @property
    def _others(self) -> int:
        """Number of documents that every query can find."""
        return len(self.texts["documents"]) - bool(self.own)

    @cached_property
    def _words(self) -> Ranking:
        """BM25's best documents."""
        return self._others_found(partial(bm25_search, self.texts["queries"], self.texts["documents"]), CANDIDATES)

    def _nearest(self, queries: torch.Tensor, documents: torch.Tensor, k: int) -> Ranking:
        """The nearest documents of the task's queries, which may come several times, one list behind another."""
        return self._others_found(lambda length: Ranking(*nearest(queries, documents, length)), k)

    def _others_found(self, search: Callable[[int], Ranking], k: int) -> Ranking:
        """The `k` best documents of a search that are not the query itself."""
        if not self.own:
            return search(k)
        found = search(k + 1)
        return found.without(np.resize(self.own, len(found.rows)), k)


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
