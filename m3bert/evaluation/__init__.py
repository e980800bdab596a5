"""
Evaluation of all granularities of a grid, with each text encoded once.

A [`Task`] (`tasks`, `own_data`) names data; `readers` makes an [`Evaluator`] of it (`evaluators`: one class per task
type), which scores embeddings. `evaluate` scores an encoder on many tasks and measures its `searches` and `latency`;
`while_training` scores one that is in training. Its `results` are a file, from which `choice` picks a size.
"""

from typing import TYPE_CHECKING

from ..utils.lazy import lazy_exports


if TYPE_CHECKING:
    from ..encode.embeddings import GridEmbeddings as GridEmbeddings
    from ..encode.encoder import GridEncoder as GridEncoder
    from .choice import Budget as Budget, Choice as Choice, SearchPlan as SearchPlan, choose as choose
    from .evaluate import (
        evaluate_grid as evaluate_grid,
        run_facts as run_facts,
        score_grid as score_grid,
        score_vectors as score_vectors,
    )
    from .evaluators import (
        STS as STS,
        BitextMining as BitextMining,
        Classification as Classification,
        Evaluator as Evaluator,
        Geometry as Geometry,
        PairClassification as PairClassification,
        Retrieval as Retrieval,
    )
    from .hybrid import bm25_search as bm25_search, fuse_ranks as fuse_ranks, fuse_scores as fuse_scores
    from .latency import measure_latency as measure_latency
    from .metrics import library_metrics as library_metrics, ranking_scores as ranking_scores
    from .own_data import collection_task as collection_task, labels_task as labels_task, pairs_task as pairs_task
    from .readers import load_task as load_task
    from .results import (
        GridResults as GridResults,
        Latency as Latency,
        MeasuredSearch as MeasuredSearch,
        Score as Score,
    )
    from .search import exact_search as exact_search, rerank as rerank
    from .tasks import (
        GROUPS as GROUPS,
        TASKS as TASKS,
        HubData as HubData,
        Task as Task,
        find_task as find_task,
        find_tasks as find_tasks,
    )
    from .while_training import GridEvaluator as GridEvaluator, as_sentence_transformer as as_sentence_transformer

# Module -> its public names, as type checkers see them above.
EXPORTS = {
    "..encode.embeddings": "GridEmbeddings",
    "..encode.encoder": "GridEncoder",
    ".choice": "Budget Choice SearchPlan choose",
    ".evaluators": "STS BitextMining Classification Evaluator Geometry PairClassification Retrieval",
    ".evaluate": "evaluate_grid run_facts score_grid score_vectors",
    ".while_training": "GridEvaluator as_sentence_transformer",
    ".hybrid": "bm25_search fuse_ranks fuse_scores",
    ".latency": "measure_latency",
    ".metrics": "library_metrics ranking_scores",
    ".own_data": "collection_task labels_task pairs_task",
    ".readers": "load_task",
    ".results": "GridResults Latency MeasuredSearch Score",
    ".search": "exact_search rerank",
    ".tasks": "GROUPS TASKS HubData Task find_task find_tasks",
}
__getattr__, __dir__, __all__ = lazy_exports(__name__, EXPORTS)
