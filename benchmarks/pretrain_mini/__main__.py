"""
Pretrain a small m3BERT through all stages on local text in 35 languages, in less than 40 minutes on two CPU cores:

    python -m benchmarks.pretrain_mini              # as `make pretrain-mini`; continues where it was interrupted
    python -m benchmarks.pretrain_mini --table      # print the tables of the results file

The stages are in pipeline.yaml: tokenizer, masked language modelling on English, then on all languages,
Matryoshka distillation, averaged checkpoints, contrastive training on translations, and on English pairs. The model is
scored before the first stage and after each. The data sets are in `M3BERT_DATA`; no sentence of a scored set is
trained on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._measure import RESULTS, about
from benchmarks.pretrain_mini.text import write_text
from hub_cards.tables import markdown
from scripts.command import argument_parser, run_command
from scripts.pipeline import run_pipeline
from scripts.sources import data_folder
from scripts.stages import Stage, read_pipeline
from trainers import Grid
from trainers.core.checkpoints import last_checkpoint
from trainers.evaluation import GridResults


PIPELINE = Path(__file__).with_name("pipeline.yaml")
FILE = RESULTS / "pretrain_mini.json"
# What the tables call a model -> the stage that trained it (None: no training), and the stage that scored it.
MODELS = {
    "untrained": (None, "untrained-scores"),
    "stage 1, English": ("stage1", "stage1-scores"),
    "stage 2, 35 languages": ("stage2", "stage2-scores"),
    "distilled and averaged": ("distilled", "averaged-scores"),
    "stage 3, translations": ("stage3", "stage3-scores"),
    "fine-tuned, English pairs": ("finetuned", "finetuned-scores"),
}


def losses(stage: Stage) -> dict[str, dict[str, float]]:
    """Granularity -> `before` and `after`: the loss of held-out texts at the start of a stage and at its end."""
    state = json.loads(Path(last_checkpoint(stage.folder), "trainer_state.json").read_text(encoding="utf-8"))
    before = next(entry for entry in state["log_history"] if entry["step"] == 0)
    after = json.loads((stage.folder / "eval_results.json").read_text(encoding="utf-8"))
    found = {}
    for g in Grid.parse(stage.options["grid"]):
        # The loss of a granularity is one term; a divergence's name has two granularities.
        (name,) = (key for key in after if key.startswith("eval_") and key.endswith(f"_{g}") and ">" not in key)
        found[str(g)] = {"before": round(before[name], 4), "after": round(after[name], 4)}
    return found


def collected(stages: Sequence[Stage]) -> dict[str, Any]:
    """What all stages gave: seconds, losses and scores."""
    by_name = {stage.name: stage for stage in stages}
    seconds = {
        name: json.loads(stage.record.read_text(encoding="utf-8"))["seconds"] for name, stage in by_name.items()
    }
    models: dict[str, Any] = {}
    for model, (trained, scored) in MODELS.items():
        results = GridResults.load(by_name[scored].folder / "results.json")
        models[model] = {"losses": losses(by_name[trained]) if trained else {}}
        for task_type in ("sts", "bitext"):
            quality = results.quality(results.tasks(task_type))
            models[model][task_type] = {str(g): round(value, 4) for g, value in quality.items()}
    tasks = {task_type: results.tasks(task_type) for task_type in ("sts", "bitext")}
    return {"seconds": seconds, "total_seconds": round(sum(seconds.values())), "tasks": tasks, "models": models}


def tables(results: dict[str, Any]) -> str:
    """Two tables, one row per granularity: the losses of each stage before and after it, and the scores after it."""
    models = results["models"]
    grid = list(models["untrained"]["sts"])
    trained = {name: its["losses"] for name, its in models.items() if its["losses"]}
    loss_rows = [[g, *(f"{its[g]['before']:.2f} → {its[g]['after']:.2f}" for its in trained.values())] for g in grid]
    score_rows = [[g, *(cell(its["sts"][g], its["bitext"][g]) for its in models.values())] for g in grid]
    means = ["mean", *(cell(mean(its["sts"].values()), mean(its["bitext"].values())) for its in models.values())]
    languages = len(results["tasks"]["bitext"])
    return "\n".join(
        [
            "Loss of held-out texts before and after each stage:",
            "",
            markdown(["granularity", *trained], loss_rows),
            "",
            f"STS-B (Spearman) / Tatoeba (accuracy, mean of {languages} languages) after each stage, in percent:",
            "",
            markdown(["granularity", *models], [*score_rows, means]),
        ]
    )


def cell(sts: float, bitext: float) -> str:
    """Two scores in percent."""
    return f"{100 * sts:.1f} / {100 * bitext:.1f}"


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain-mini"), help="folder of all stages")
    parser.add_argument("--pipeline", type=Path, default=PIPELINE, help="the stages")
    parser.add_argument("--results", type=Path, default=FILE, help="file to write")
    parser.add_argument("--table", action="store_true", help="print the tables of the results file, and run nothing")
    options = parser.parse_args(arguments)
    if not options.table:
        described = about()
        os.environ["PRETRAIN_MINI"] = str(options.folder)
        write_text(data_folder(), options.folder / "text")
        stages = read_pipeline(options.pipeline)
        run_pipeline(stages)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        content = described | collected(stages)
        options.results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    results = json.loads(options.results.read_text(encoding="utf-8"))
    print(tables(results))
    print(
        f"\n{results['total_seconds'] / 60:.0f} minutes: "
        + ", ".join(f"{n} {s:.0f} s" for n, s in results["seconds"].items())
    )


if __name__ == "__main__":
    run_command(main)
