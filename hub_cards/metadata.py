"""The metadata of a card, as the Hub reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from trainers import Grid
from trainers.evaluation import TASKS, GridResults


# Family of tasks -> type of task on the Hub.
TASK_TYPES = {
    "sts": "sentence-similarity",
    "classification": "text-classification",
    "pair_classification": "text-classification",
    "retrieval": "text-retrieval",
    "bitext": "translation",
}
# What a person may have written into the metadata, and what stays where nothing else is said now.
STATED = ("license", "license_name", "license_link", "language", "datasets", "base_model", "base_model_relation")

# Tags that say what a checkpoint is: one that is not said now is not true any more.
OWN_TAGS = ("matryoshka", "onnx", "sentence-transformers", "feature-extraction", "generated_from_trainer")


@dataclass(frozen=True)
class Statements:
    """
    What only a person can say of a checkpoint. What is left out stays as it is on the card that is there.

    Args:
        license (`str`, *optional*): Identifier of a license on the Hub.
        languages (`tuple[str, ...]`, *optional*): Codes of languages.
        datasets (`tuple[str, ...]`, *optional*): Hub ids of data that it was trained on, beside those on record.
        base_model (`str`, *optional*): Hub id it comes from, where none is on record or the wrong one.
        tags (`tuple[str, ...]`, *optional*): More tags.
    """

    license: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    base_model: str | None = None
    tags: tuple[str, ...] = ()


def evaluations(results: GridResults) -> list[EvalResult]:
    """One result for every task and granularity: its main metric, as measured and not in percent."""
    found = []
    for score in results.scores:
        if not score.main or score.family not in TASK_TYPES:
            continue
        hub = TASKS[score.task].hub if score.task in TASKS else None
        (granularity,) = Grid.parse(score.granularity)
        found.append(
            EvalResult(
                task_type=TASK_TYPES[score.family],
                task_name=score.family.replace("_", " "),
                dataset_type=hub.path if hub else score.task,
                dataset_name=score.task,
                dataset_config=hub.config if hub else None,
                dataset_split=score.split,
                metric_type=score.metric,
                metric_name=f"{score.metric} at {granularity}",
                metric_value=round(score.value, 6),
                metric_args={"layer": granularity.layer, "dim": granularity.dim},
            )
        )
    return found


def kept(metadata: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """New metadata, with what a person put into the old: keys of theirs, statements that nobody makes now, tags."""
    generated = {"model-index", "tags", "pipeline_tag", "library_name"}
    theirs = {key: value for key, value in old.items() if key not in (*generated, *STATED)}
    stated = {key: old[key] for key in STATED if key in old}
    theirs_too = [tag for tag in old.get("tags") or [] if tag not in OWN_TAGS]
    tags = dict.fromkeys([*metadata.get("tags", []), *theirs_too])
    return {**theirs, **stated, **metadata, "tags": list(tags)}


def card_data(values: dict[str, Any], name: str, results: GridResults | None) -> ModelCardData:
    """
    Metadata of a card.

    Args:
        values (`dict`): Keys of the Hub's specification and their values; `None` and empty ones are left out.
        name (`str`): Of the model, in the results.
        results ([`GridResults`], *optional*): Of its evaluation.
    """
    given = {key: value for key, value in values.items() if value}
    scores = evaluations(results) if results is not None else []
    if not scores:
        return ModelCardData(**given)
    return ModelCardData(**given, model_name=name, eval_results=scores)
