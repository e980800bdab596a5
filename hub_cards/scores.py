"""The scores that hold for what is published, in the Hub's two forms: metadata of a card, and leaderboards."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml

from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT, PRECISIONS
from ..evaluation.results import GridResults
from ..evaluation.tasks import TASKS
from ..models.settings import MODULES_FILE
from ..utils.durable import replace_text
from .checkpoint import Checkpoint
from .files import EVAL_RESULTS, RESULTS
from .native_export import lost_layers, state_only
from .tables import dataset_of, title_of


logger = logging.getLogger(__name__)
# Our task type -> task type on the Hub.
TASK_TYPES = {
    "sts": "sentence-similarity",
    "classification": "text-classification",
    "pair_classification": "text-classification",
    "retrieval": "text-retrieval",
    "bitext": "translation",
}


def results_of(checkpoint: Checkpoint, results: GridResults, repo_id: str) -> GridResults:
    """The results, with the repository as the name of the model. Raises a ValueError if they belong to other weights
    or settings."""
    if results.weights != checkpoint.weights_fingerprint:
        raise ValueError(f"The results do not belong to the weights in {checkpoint.folder}: evaluate these.")
    for name in ("config", "tokenizer"):  # which results of earlier versions do not have
        if results.settings.get(name, checkpoint.identity[name]) != checkpoint.identity[name]:
            raise ValueError(f"The results were measured with another {name} than {checkpoint.folder} has.")
    if (checkpoint.folder / MODULES_FILE).is_file():
        published = checkpoint.settings
        for name, known in (("pooling", published.pooling), ("prompts", published.used_prompts)):
            if (used := results.settings.get(name, known)) != known:
                raise ValueError(
                    f"The results were measured with {name}={used!r}; the checkpoint is published with {known!r}."
                )
    learned = [code for code in results.granularities.codes if PRECISIONS[code].learned]
    fingerprint = checkpoint.quantizer.fingerprint if learned and checkpoint.quantizer is not None else None
    if learned and results.settings.get("quantizer") != fingerprint:
        raise ValueError(
            f"The results have scores of {', '.join(learned)} by another quantizer than that of {checkpoint.folder}: "
            "evaluate the checkpoint again."
        )
    return replace(results, model=repo_id)


def results_that_hold(
    checkpoint: Checkpoint, results: GridResults, size: Granularity, repo_id: str, *, native: bool, quantizer: bool
) -> GridResults | None:
    """The scores of a checkpoint that are also those of the model that is published at a size, as it is or as a
    native export, with or without the quantizer; `None` if none are. Raises a ValueError if the results belong to
    other weights or settings."""
    if native and state_only(checkpoint, size.layer):
        logger.warning(
            f"The scores of depth {size.layer} are left out: they are of an exit that reads the static table, which a "
            "native export lacks. Evaluate the folder of `m3bert export --format native`."
        )
        return None
    lost: set[int] = set()  # layers that the published model does not have
    if native:
        lost = lost_layers(checkpoint, size)
    elif size.layer < checkpoint.full.layer:
        lost = {*checkpoint.depths.aligned} - {size.layer}
    results = results_of(checkpoint, results, repo_id).within(size, lost)
    if not quantizer:
        results = results.only(g for g in results.granularities if not PRECISIONS[g.code].learned)
    return results


def card_results(results: GridResults) -> list[EvalResult]:
    """One result per task and size in float32: the main metric as measured, not in percent. Readers of the metadata
    would take the scores of other precisions for those of the model."""
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


def leaderboard_entries(results: GridResults, full: Granularity, repo_id: str) -> list[EvalResultEntry]:
    """
    The results of a model for leaderboards. A leaderboard has one value per model, so only the full size is in them,
    which is what users of the model load by default. Only tasks of MTEB and of a benchmark on the Hub
    ([`HubData.benchmark`]) are in them; where both were scored, that of MTEB. All other scores in float32 are in the
    metadata of the card.

    Args:
        results ([`GridResults`]): Results of its evaluation.
        full ([`Granularity`]): The full size of the published model. Its scores are those in float32.
        repo_id (`str`): The repository, `user/model`, which also has the results file.

    Returns:
        `list[EvalResultEntry]`: One entry per task, the value in percent as in MTEB.
    """
    settings, by_mteb = results.settings, results.settings.get("mteb", {})
    notes = [f"full size {full.size}"]
    notes += [f"{name} {settings[name]}" for name in ("pooling", "max_length", "max_lengths") if settings.get(name)]
    notes += ["with prompts"] if settings.get("prompts") else []
    entries: dict[tuple[str, str], EvalResultEntry] = {}
    for score in (score for score in results.scores if score.main and score.granularity == str(full.size)):
        hub, mteb = TASKS[score.task].hub if score.task in TASKS else None, by_mteb.get(score.task)
        key = (mteb["dataset"], score.task) if mteb else (hub.path, hub.benchmark) if hub and hub.benchmark else None
        if key is None or (key in entries and not mteb):
            continue
        entries[key] = EvalResultEntry(
            dataset_id=key[0],
            task_id=key[1],
            dataset_revision=mteb.get("revision") if mteb else None,
            value=round(100 * score.value, 4),
            date=results.date,
            source_url=f"https://huggingface.co/{repo_id}/blob/main/{RESULTS}",
            source_name="All scores",
            notes=", ".join([*notes, f"scored by {'mteb' if mteb else 'm3bert evaluate'}"]),
        )
    return list(entries.values())


def write_eval_results(folder: Path, entries: list[EvalResultEntry]) -> None:
    """Write the entries into the folder of a checkpoint. Without entries, remove the file of an earlier evaluation."""
    file = folder / EVAL_RESULTS
    if not entries:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(exist_ok=True)
    replace_text(file, yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, width=1000))
