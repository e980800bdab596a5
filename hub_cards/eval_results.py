"""The file `.eval_results/*.yaml` of a repository: results for the leaderboards of benchmarks on the Hub."""

from __future__ import annotations

from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from trainers.core.durable import replace_text
from trainers.core.granularity import Granularity
from trainers.evaluation.results import GridResults
from trainers.evaluation.tasks import TASKS

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
    settings, full = results.settings, full.size
    notes = [f"full size {full}"]
    notes += [f"{name} {settings[name]}" for name in ("pooling", "max_length", "max_lengths") if settings.get(name)]
    notes += ["with prompts"] if settings.get("prompts") else []
    by_mteb = results.settings.get("mteb", {})
    entries: dict[tuple[str, str], EvalResultEntry] = {}
    for score in results.scores:
        if not score.main or score.granularity != str(full):
            continue
        hub = TASKS[score.task].hub if score.task in TASKS else None
        if score.task in by_mteb:
            dataset, benchmark, scored = by_mteb[score.task]["dataset"], score.task, "by mteb"
        elif hub is not None and hub.benchmark is not None and (hub.path, hub.benchmark) not in entries:
            dataset, benchmark, scored = hub.path, hub.benchmark, "by m3bert evaluate"
        else:
            continue
        entries[dataset, benchmark] = EvalResultEntry(
            dataset_id=dataset,
            task_id=benchmark,
            dataset_revision=by_mteb.get(score.task, {}).get("revision"),
            value=round(100 * score.value, 4),
            date=results.date,
            source_url=f"https://huggingface.co/{repo_id}/blob/main/{RESULTS}",
            source_name="All scores",
            notes=", ".join([*notes, f"scored {scored}"]),
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
