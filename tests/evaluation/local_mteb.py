"""MTEB's tasks over local data."""

import sys

from datasets import Dataset, DatasetDict
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.multilabel_classification import AbsTaskMultilabelClassification
from mteb.abstasks.sts import AbsTaskSTS
from mteb.abstasks.task_metadata import TaskMetadata


def metadata(name: str, kind: str, score: str) -> TaskMetadata:
    return TaskMetadata(
        name=name, description="local data", dataset={"path": "local/data", "revision": "1"}, type=kind,
        eval_langs=["eng-Latn"], main_score=score,
    )  # fmt: skip


def similarity_task(evaluator):
    class LocalSTS(AbsTaskSTS):
        metadata = globals()["metadata"]("LocalSTS", "STS", "cosine_spearman")

        def load_data(self, **kwargs):
            rows = {**evaluator.texts, "score": evaluator.scores}
            self.dataset = {"default": DatasetDict({"test": Dataset.from_dict(rows)})}
            self.data_loaded = True

    return LocalSTS()


def classification_task(evaluator, kind="Classification"):
    """One label per text, or a set of labels, for which MTEB draws texts from a generator of the task."""
    several = kind == "MultilabelClassification"

    class LocalClassification(AbsTaskMultilabelClassification if several else AbsTaskClassification):
        metadata = globals()["metadata"](f"Local{kind}", kind, "accuracy")
        samples_per_label = 4

        def load_data(self, **kwargs):
            def split(name, labels):
                labels = [[label, label + 3] for label in labels] if several else labels
                return Dataset.from_dict({"text": evaluator.texts[name], "label": labels})

            train, test = split("train", evaluator.train_labels), split("test", evaluator.test_labels)
            self.dataset = DatasetDict({"train": train, "test": test})
            if several:
                self.dataset = {"default": self.dataset}
            self.data_loaded = True

    return LocalClassification()


def register(monkeypatch, *tasks):
    """Let MTEB know tasks by their names."""
    registry = sys.modules["mteb.get_tasks"]._TASKS_REGISTRY
    for task in tasks:
        monkeypatch.setitem(registry, task.metadata.name, type(task))
