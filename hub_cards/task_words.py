"""Tasks in words."""

from __future__ import annotations

from ..evaluation.results import GridResults
from ..evaluation.tasks import TASKS


TITLES = {
    "sts": "semantic similarity",
    "classification": "classification",
    "pair_classification": "pair classification",
    "retrieval": "retrieval",
    "bitext": "bitext mining",
    "geometry": "geometry of the embeddings",
}
SCORED = {
    "spearman": "Spearman correlation of cosines with the scores of people",
    "macro_f1": "F1, averaged over the classes, of a logistic regression that is fitted on all training texts; not "
    "MTEB's protocol, which fits on a few texts per class",
    "accuracy": "share of right answers",
    "ndcg@10": "how high the right documents rank among the first 10 that are found (nDCG@10)",
    "uniformity": "how far the embeddings spread (lower: farther)",
}

METRICS = {"ndcg@10": "nDCG@10", "spearman": "Spearman correlation", "macro_f1": "macro F1"}  # as papers spell them


def title_of(task_type: str) -> str:
    """A task type in words."""
    kind = task_type.removeprefix("mteb_")
    words = TITLES.get(kind, kind.replace("_", " "))
    return words if kind == task_type else f"{words} (MTEB)"


def tasks_counted(results: GridResults, task_type: str) -> str:
    """`mean of 3 tasks`, or the name of the only task of a type."""
    tasks = results.tasks(task_type)
    return tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"


def about_task(results: GridResults, task: str) -> str:
    """The texts of a task in words; empty if unknown."""
    if task in results.settings.get("own_data", {}):
        return f"own data: `{dataset_of(results, task)}`"
    if task in results.settings.get("mteb", {}):
        return f"MTEB's task by MTEB's own protocol, on `{dataset_of(results, task)}`"
    return TASKS[task].about if task in TASKS else ""


def dataset_of(results: GridResults, task: str) -> str | None:
    """Hub id of the data of a task, or the file or folder of your own data; `None` if it is neither."""
    if found := results.settings.get("mteb", {}).get(task):
        return found["dataset"]
    hub = TASKS[task].hub if task in TASKS else None
    return results.settings.get("own_data", {}).get(task) or (hub.path if hub else None)
