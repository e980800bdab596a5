"""Evaluation of all granularities of a grid, with each text encoded once."""

from typing import TYPE_CHECKING

from ..core.face import face


if TYPE_CHECKING:
    from .choice import Budget as Budget
    from .choice import Choice as Choice
    from .choice import SearchPlan as SearchPlan
    from .choice import choose as choose
    from .embeddings import GridEmbeddings as GridEmbeddings
    from .encoding import GridEncoder as GridEncoder
    from .evaluators import (
        STS as STS,
    )
    from .evaluators import (
        BitextMining as BitextMining,
    )
    from .evaluators import (
        Classification as Classification,
    )
    from .evaluators import (
        Evaluator as Evaluator,
    )
    from .evaluators import (
        Geometry as Geometry,
    )
    from .evaluators import (
        PairClassification as PairClassification,
    )
    from .evaluators import (
        Retrieval as Retrieval,
    )
    from .grid_evaluation import evaluate_grid as evaluate_grid
    from .grid_evaluation import run_facts as run_facts
    from .grid_evaluation import score_grid as score_grid
    from .grid_evaluation import score_vectors as score_vectors
    from .grid_evaluation import tfidf_scores as tfidf_scores
    from .hybrid import bm25_search as bm25_search
    from .hybrid import fuse_ranks as fuse_ranks
    from .hybrid import fuse_scores as fuse_scores
    from .latency import measure_latency as measure_latency
    from .own_data import collection_task as collection_task
    from .own_data import labels_task as labels_task
    from .own_data import pairs_task as pairs_task
    from .readers import load_task as load_task
    from .results import (
        AsymmetricSearch as AsymmetricSearch,
    )
    from .results import (
        GridResults as GridResults,
    )
    from .results import (
        HybridSearch as HybridSearch,
    )
    from .results import (
        Latency as Latency,
    )
    from .results import (
        RescoredSearch as RescoredSearch,
    )
    from .results import (
        Score as Score,
    )
    from .results import (
        TwoStageSearch as TwoStageSearch,
    )
    from .search import exact_search as exact_search
    from .search import ranking_scores as ranking_scores
    from .search import rerank as rerank
    from .tasks import (
        GROUPS as GROUPS,
    )
    from .tasks import (
        TASKS as TASKS,
    )
    from .tasks import (
        HubData as HubData,
    )
    from .tasks import (
        Task as Task,
    )
    from .tasks import (
        find_task as find_task,
    )
    from .tasks import (
        find_tasks as find_tasks,
    )

__getattr__, __dir__, __all__ = face(__name__, __file__)
