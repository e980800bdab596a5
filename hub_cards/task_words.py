"""What a task is, in words."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.evaluation.results import GridResults
from trainers.evaluation.tasks import TASKS, find_task


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


def title_of(task_type: str) -> str:
    """A task type in words."""
    kind = task_type.removeprefix("mteb_")
    words = TITLES.get(kind, kind.replace("_", " "))
    return words if kind == task_type else f"{words} (MTEB)"


def tasks_counted(results: GridResults, task_type: str) -> str:
    """How many tasks of a type a number is the mean of; the name of the task if it is one."""
    tasks = results.tasks(task_type)
    return tasks[0] if len(tasks) == 1 else f"mean of {len(tasks)} tasks"


def texts_counted(texts: Mapping[str, int]) -> str:
    """The numbers of texts of a task, in words; empty if they are not known."""
    if texts.keys() == {"sentence1", "sentence2"}:
        return f"{texts['sentence1']:,} pairs"
    return ", ".join(f"{number:,} {name}" for name, number in texts.items())


def about_task(results: GridResults, task: str) -> str:
    """What the texts of a task are, in words; empty if it is not known."""
    if task in results.settings.get("own_data", {}):
        return f"own data: `{dataset_of(results, task)}`"
    if task in results.settings.get("mteb", {}):
        return f"MTEB's task by MTEB's own protocol, on `{dataset_of(results, task)}`"
    try:
        return find_task(task).about
    except ValueError:  # a task of code that is not here
        return ""


def dataset_of(results: GridResults, task: str) -> str | None:
    """Hub id of the data of a task, or the file or folder of your own data; `None` if it is neither."""
    if found := results.settings.get("mteb", {}).get(task):
        return found["dataset"]
    if found := results.settings.get("own_data", {}).get(task):
        return found
    hub = TASKS[task].hub if task in TASKS else None
    return hub.path if hub else None
