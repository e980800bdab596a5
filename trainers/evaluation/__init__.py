"""Evaluation of a whole grid from one encode."""

from .classification import classification_scores, fit_classifier
from .embeddings import GridEmbeddings
from .encoding import GridEncoder
from .geometry import (
    alignment,
    effective_rank,
    feature_correlation,
    feature_covariance,
    geometry_scores,
    prefix_residual_correlation,
    uniformity,
)
from .grid_evaluation import TaskEmbeddings, evaluate_grid, score_grid
from .latency import measure_latency, seconds_in_turn
from .pairs import bitext_accuracy, pair_classification_scores, pair_cosines, similarity_spearman
from .protocols import STS, BitextMining, Classification, Geometry, PairClassification, Protocol, Retrieval
from .results import GridResults, Latency, Plan, Score
from .search import exact_search, products_share, ranking_scores, rerank
from .tasks import GROUPS, TASKS, HubData, Task, find_task, find_tasks, read_rows


__all__ = [
    "GROUPS",
    "STS",
    "TASKS",
    "BitextMining",
    "Classification",
    "Geometry",
    "GridEmbeddings",
    "GridEncoder",
    "GridResults",
    "HubData",
    "Latency",
    "PairClassification",
    "Plan",
    "Protocol",
    "Retrieval",
    "Score",
    "Task",
    "TaskEmbeddings",
    "alignment",
    "bitext_accuracy",
    "classification_scores",
    "effective_rank",
    "evaluate_grid",
    "exact_search",
    "feature_correlation",
    "feature_covariance",
    "find_task",
    "find_tasks",
    "fit_classifier",
    "geometry_scores",
    "measure_latency",
    "pair_classification_scores",
    "pair_cosines",
    "prefix_residual_correlation",
    "products_share",
    "ranking_scores",
    "read_rows",
    "rerank",
    "score_grid",
    "seconds_in_turn",
    "similarity_spearman",
    "uniformity",
]
