"""The metadata of a card, in the form that the Hub reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub import EvalResult

from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT
from ..evaluation.results import GridResults
from ..evaluation.tasks import TASKS
from .tables import dataset_of, title_of


# Our task type -> task type on the Hub.
TASK_TYPES = {
    "sts": "sentence-similarity",
    "classification": "text-classification",
    "pair_classification": "text-classification",
    "retrieval": "text-retrieval",
    "bitext": "translation",
}
GENERATED = ("model-index", "tags", "pipeline_tag", "library_name")  # keys whose old values are dropped
# Generated tags. Stale ones are removed; all other tags of an old card stay.
OWN_TAGS = (
    "matryoshka",
    "onnx",
    "sentence-transformers",
    "feature-extraction",
    "generated_from_trainer",
    "text-embeddings-inference",
)


@dataclass(frozen=True)
class Statements:
    """
    What only a person knows about a checkpoint. Anything left out here stays as it is on the existing card.

    Args:
        license (`str`, *optional*): License identifier on the Hub.
        languages (`tuple[str, ...]`, *optional*): Language codes.
        datasets (`tuple[str, ...]`, *optional*): Hub ids of training data, in addition to those on record.
        base_model (`str`, *optional*): Hub id of the base model, in place of the one on record.
        tags (`tuple[str, ...]`, *optional*): Additional tags.
    """

    license: str | None = None
    languages: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    base_model: str | None = None
    tags: tuple[str, ...] = ()


def evaluations(results: GridResults) -> list[EvalResult]:
    """
    One result per task and size in float32: the main metric as measured, not in percent. Other precisions are left
    out, because readers of the metadata would take their scores for those of the model.
    """
    entries = []
    for score in results.scores:
        mteb, g = results.settings.get("mteb", {}).get(score.task), Granularity.parse(score.granularity)
        if not score.main or g.code != FLOAT or (mteb is None and score.task_type not in TASK_TYPES):
            continue
        hub = TASKS[score.task].hub if score.task in TASKS else None
        entries.append(
            EvalResult(
                task_type=mteb["type"] if mteb else TASK_TYPES[score.task_type],  # the Hub's pages read MTEB's types
                task_name=title_of(score.task_type) if mteb else score.task_type.replace("_", " "),
                dataset_type=dataset_of(results, score.task) or score.task,
                dataset_name=f"MTEB {score.task}" if mteb else score.task,
                dataset_config=hub.config if hub else None,
                dataset_split=score.split,
                dataset_revision=mteb["revision"] if mteb else None,
                metric_type=score.metric,
                metric_name=f"{score.metric} at {g}",
                metric_value=round(score.value, 6),
                metric_args={"layer": g.layer, "dim": g.dim},
            )
        )
    return entries


def with_edits(metadata: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """New metadata, with what a person added to the old: keys without a new value, and tags."""
    theirs = {key: value for key, value in old.items() if key not in GENERATED}
    their_tags = [tag for tag in old.get("tags") or [] if tag not in OWN_TAGS]
    return {**theirs, **metadata, "tags": list(dict.fromkeys([*metadata.get("tags", []), *their_tags]))}
