"""The file `.eval_results/*.yaml` of a repository: results for the leaderboards of benchmarks on the Hub."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from ..encode.granularity import Granularity
from ..evaluation.results import GridResults
from ..evaluation.tasks import TASKS
from ..utils.durable import replace_text
from .upload import EVAL_RESULTS, RESULTS


def eval_results(results: GridResults, full: Granularity, repo_id: str) -> list[EvalResultEntry]:
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
    content = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, width=1000)
    replace_text(file, content)
