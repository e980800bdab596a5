"""
Pretrain a small m3BERT through its three stages on local text in 35 languages, in about 20 minutes on two CPU cores:

    python -m benchmarks.pretrain_mini              # as `make pretrain-mini`; continues where it was interrupted
    python -m benchmarks.pretrain_mini --page       # put the tables of the results file into docs/pretrain.md

stages.sh is the run: tokenizer, masked language modelling on English, then on all languages, contrastive training on
pairs. Its sizes are in mlm.yaml and pairs.yaml. The model is scored as it begins and after each stage. The data sets
are in `M3BERT_DATA`; no sentence of a scored set is trained on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoConfig, AutoModel, AutoTokenizer, set_seed

from benchmarks._measure import RESULTS, SEED, about
from benchmarks.pretrain_mini.text import write_text
from m3bert.commands import evaluate
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder
from m3bert.evaluation import GridResults
from m3bert.hub_cards.tables import markdown
from m3bert.trainers import Grid
from m3bert.trainers.core.checkpoints import last_checkpoint


FOLDER = Path(__file__).parent
FILE = RESULTS / "pretrain_mini.json"
PAGE = FOLDER.parents[1] / "docs" / "pretrain.md"
MARKS = "<!-- results of make pretrain-mini -->", "<!-- end of results -->"
GRID = Grid.parse("2,4,6 x 16,32,64,128")
TASKS = {
    "sts": ["stsb"],
    "bitext": ["tatoeba-ara", "tatoeba-cmn", "tatoeba-deu", "tatoeba-fra", "tatoeba-rus", "tatoeba-tur"],
}
SETTINGS = {"VOCABULARY": "16000", "LENGTH": "128"}  # of stages.sh
EVALUATION = {"stage1": "english-eval.txt", "stage2": "multilingual-eval.txt", "stage3": "pairs-eval.jsonl"}
# Folder of a model -> what the tables call it.
MODELS = {
    "untrained": "untrained",
    "stage1": "stage 1, English",
    "stage2": "stage 2, 35 languages",
    "stage3": "stage 3, pairs",
}


def run_stages(text: Path, run: Path, more: Sequence[str]) -> None:
    """
    Run stages.sh at small scale.

    Args:
        text (`Path`): What [`write_text`] wrote.
        run (`Path`): Folder of the tokenizer and the models.
        more (`Sequence[str]`): Further options of all stages.

    Raises:
        ValueError: if a stage fails.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**SETTINGS, **os.environ, "PATH": path}
    for stage, file in EVALUATION.items():
        sizes = FOLDER / ("pairs.yaml" if stage == "stage3" else "mlm.yaml")
        options = ["--config", sizes, "--eval_files", text / file, *more]
        environment[stage.upper()] = " ".join(map(str, options))
    if code := subprocess.run(["bash", FOLDER / "stages.sh", text, run], env=environment).returncode:
        raise ValueError(f"stages.sh failed with exit status {code}; its last lines say why.")


def write_untrained(trained: Path, folder: Path) -> None:
    """Write a model as stage 1 begins with: its config and tokenizer, and random weights."""
    set_seed(SEED)
    AutoModel.from_config(AutoConfig.from_pretrained(trained)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained).save_pretrained(folder)


def score(model: Path, output: Path, tasks: Sequence[str]) -> None:
    """Score a model at every granularity, unless it is done."""
    if (output / "results.json").is_file():
        return
    options = ["--max_length", "64", "--batch_size", "128", "--no_latency", "--no_two_stages"]
    grid = ["--grid", ",".join(map(str, GRID))]
    evaluate.main(
        ["--model_name_or_path", str(model), "--output_dir", str(output), "--tasks", *tasks, *grid, *options]
    )


def losses(stage: Path) -> dict[str, dict[str, float]]:
    """Granularity -> `before` and `after`: the loss of held-out texts at the start of a stage and at its end."""
    state = json.loads(Path(last_checkpoint(stage), "trainer_state.json").read_text(encoding="utf-8"))
    before = next(entry for entry in state["log_history"] if entry["step"] == 0)
    after = json.loads((stage / "eval_results.json").read_text(encoding="utf-8"))
    by_size = {}
    for g in GRID:
        (name,) = (key for key in after if key.startswith("eval_") and key.endswith(f"_{g}"))
        by_size[str(g)] = {"before": round(before[name], 4), "after": round(after[name], 4)}
    return by_size


def collected(run: Path) -> dict[str, Any]:
    """What the stages gave: losses and scores."""
    models: dict[str, Any] = {}
    for folder, model in MODELS.items():
        results = GridResults.load(run / f"{folder}-scores" / "results.json")
        models[model] = {"losses": losses(run / folder) if folder in EVALUATION else {}}
        for task_type in TASKS:
            quality = results.quality(results.tasks(task_type))
            models[model][task_type] = {str(g): round(value, 4) for g, value in quality.items()}
    return {"tasks": {task_type: results.tasks(task_type) for task_type in TASKS}, "models": models}


def tables(results: dict[str, Any]) -> str:
    """How long it took, and two tables, one row per granularity: the losses of each stage before and after it, and the
    scores after it."""
    models = results["models"]
    grid = list(models["untrained"]["sts"])
    trained = {name: scores["losses"] for name, scores in models.items() if scores["losses"]}
    loss_rows = [
        [g, *(f"{by_size[g]['before']:.2f} → {by_size[g]['after']:.2f}" for by_size in trained.values())] for g in grid
    ]
    score_rows = [[g, *(cell(scores["sts"][g], scores["bitext"][g]) for scores in models.values())] for g in grid]
    means = [
        "mean",
        *(cell(mean(scores["sts"].values()), mean(scores["bitext"].values())) for scores in models.values()),
    ]
    return "\n".join(
        [
            f"It took {results['seconds'] / 60:.0f} minutes on {results['cores']} cores ({results['processor']}), "
            f"with seed {results['seed']},",
            f"on {results['date']} (`benchmarks/results/pretrain_mini.json`).",
            "",
            "Loss of held-out texts before and after each stage:",
            "",
            markdown(["granularity", *trained], loss_rows),
            "",
            f"STS-B (Spearman) / Tatoeba (accuracy, mean of {len(results['tasks']['bitext'])} languages) after each "
            "stage, in percent:",
            "",
            markdown(["granularity", *models], [*score_rows, means]),
        ]
    )


def cell(sts: float, bitext: float) -> str:
    """Two scores in percent."""
    return f"{100 * sts:.1f} / {100 * bitext:.1f}"


def with_tables(page: str, results: dict[str, Any]) -> str:
    """A page with the tables of these results between its marks."""
    begin, end = MARKS
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{tables(results)}\n\n{end}{rest.partition(end)[2]}"


def pretrain(folder: Path, file: Path, tasks: Sequence[str], more: Sequence[str] = ()) -> None:
    """
    Run everything that is not done, and write the results file.

    Args:
        folder (`Path`): Folder of text and models.
        file (`Path`): The results file.
        tasks (`Sequence[str]`): Tasks that score each model.
        more (`Sequence[str]`, *optional*): Further options of all stages.
    """
    data, text, run = data_folder(), folder / "text", folder / "run"
    described, continued, begun = about(SEED), text.is_dir(), time.monotonic()
    write_text(data, text)
    run_stages(text, run, more)
    write_untrained(run / "stage1", run / "untrained")
    for model in MODELS:
        score(run / model, run / f"{model}-scores", tasks)
    seconds = {"seconds": round(time.monotonic() - begun), "continued": continued}
    content = described | seconds | collected(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/pretrain-mini"), help="folder of text and models")
    parser.add_argument("--results", type=Path, default=FILE, help="file to write")
    parser.add_argument("--page", action="store_true", help="write the results into docs/pretrain.md, and run nothing")
    options = parser.parse_args(arguments)
    if not options.page:
        pretrain(options.folder, options.results, [task for tasks in TASKS.values() for task in tasks])
    results = json.loads(options.results.read_text(encoding="utf-8"))
    if options.page:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    print(tables(results))


if __name__ == "__main__":
    run_command(main)
