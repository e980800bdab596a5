"""
Pretrain a small m3BERT through all stages on local text in 35 languages, in less than 40 minutes on two CPU cores:

    python -m benchmarks.pretrain_mini              # as `make pretrain-mini`; continues where it was interrupted
    python -m benchmarks.pretrain_mini --table      # print the tables of the results file

The stages are in pretrain_mini.yaml: tokenizer, masked language modelling on English, then on all languages,
Matryoshka distillation, averaged checkpoints, contrastive training on translations, and on English pairs. The model is
scored before the first stage and after each. The data sets are in `M3BERT_DATA`; no sentence of a scored set is
trained on.
"""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks._measure import RESULTS, about
from hub_cards.tables import markdown
from scripts.command import argument_parser, run_command
from scripts.pipeline import run_pipeline
from scripts.sources import data_folder
from scripts.stages import Stage, read_pipeline
from trainers import Grid
from trainers.core.checkpoints import last_checkpoint
from trainers.evaluation import GridResults
from trainers.evaluation.readers import read_rows
from trainers.evaluation.tasks import BITEXT_LANGUAGES


PIPELINE = Path(__file__).with_suffix(".yaml")
FILE = RESULTS / "pretrain_mini.json"
GRID = Grid.parse("2,4,6 x 32,64,128,256")
XNLI = ("ar", "bg", "de", "el", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh")
ENGLISH = ("news", "web", "books", "brown")
ENGLISH_EVAL, EVAL_PER_LANGUAGE, EVAL_PAIRS = 600, 20, 512
# What the table calls a model -> the stage that trained it (None: no training), and the stage that scored it.
MODELS = {
    "untrained": (None, "untrained-scores"),
    "stage 1, English": ("stage1", "stage1-scores"),
    "stage 2, 35 languages": ("stage2", "stage2-scores"),
    "distilled and averaged": ("distilled", "averaged-scores"),
    "stage 3, translations": ("stage3", "stage3-scores"),
    "fine-tuned, English pairs": ("finetuned", "finetuned-scores"),
}


def lines(file: Path) -> list[str]:
    """The lines of a gzipped file that are not empty."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return [line.strip() for line in opened if line.strip()]


def scored_sentences(data: Path) -> set[str]:
    """The sentences that the models are scored on, in lower case."""
    files = [data / "stsb" / "test.jsonl.gz"]
    files += [data / "tatoeba" / f"{language}-eng.jsonl.gz" for language in BITEXT_LANGUAGES]
    return {
        row[side].strip().lower() for file in files for row in read_rows(file) for side in ("sentence1", "sentence2")
    }


def translations(data: Path) -> list[tuple[str, str]]:
    """English sentences of XNLI's development set, which is no test here, and their translations."""
    english = read_rows(data / "xnli" / "en-dev.jsonl.gz")
    found = {}
    for language in XNLI:
        for row, other in zip(english, read_rows(data / "xnli" / f"{language}-dev.jsonl.gz"), strict=True):
            found |= {(row[side], other[side]): None for side in ("sentence1", "sentence2")}
    return list(found)


def english_pairs(data: Path, draw: random.Random) -> list[tuple[str, str]]:
    """Two captions of an image, and entailed sentences of SNLI."""
    pairs = []
    for row in read_rows(data / "multi30k-captions" / "train.jsonl.gz"):
        first, second = draw.sample(row["captions"], 2)
        pairs.append((first, second))
    for row in read_rows(data / "snli" / "train.jsonl.gz"):
        if row["label_text"] == "entailment":
            pairs.append((row["sentence1"], row["sentence2"]))
    return pairs


def write_text(data: Path, folder: Path) -> None:
    """
    Write the text of all stages, without the sentences that are scored: `english/eng` and `train/LANGUAGE` for masked
    language modelling, pairs, and held-out parts of each.
    """
    if folder.is_dir():
        return
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    scored, draw = scored_sentences(data), random.Random(0)

    def kept(texts: Iterable[str]) -> list[str]:
        return [text for text in texts if text.lower() not in scored]

    def write(name: str, texts: Sequence[str]) -> None:
        file = unfinished / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    def write_pairs(name: str, pairs: list[tuple[str, str]]) -> None:
        own = [pair for pair in pairs if not {text.strip().lower() for text in pair} & scored]
        draw.shuffle(own)
        rows = [json.dumps({"anchor": first, "positive": second}, ensure_ascii=False) for first, second in own]
        write(f"{name}-eval.jsonl", rows[:EVAL_PAIRS])
        write(f"{name}.jsonl", rows[EVAL_PAIRS:])

    english = kept(line for name in ENGLISH for line in lines(data / "text-english" / f"{name}.txt.gz"))
    draw.shuffle(english)
    write("english-eval.txt", english[:ENGLISH_EVAL])
    for place in ("english/eng", "train/eng"):
        write(f"{place}/text.txt", english[ENGLISH_EVAL:])
    held_out = english[:EVAL_PER_LANGUAGE]
    for file in sorted((data / "text-multilingual").glob("*.txt.gz")):
        texts = kept(lines(file))
        held_out += texts[:EVAL_PER_LANGUAGE]
        write(f"train/{file.name.removesuffix('.txt.gz')}/text.txt", texts[EVAL_PER_LANGUAGE:])
    write("multilingual-eval.txt", held_out)
    write_pairs("parallel", translations(data))
    write_pairs("english", english_pairs(data, draw))
    unfinished.rename(folder)


def losses(stage: Stage) -> dict[str, dict[str, float]]:
    """Granularity -> `before` and `after`: the loss of held-out texts at the start of a stage and at its end."""
    state = json.loads(Path(last_checkpoint(stage.folder), "trainer_state.json").read_text(encoding="utf-8"))
    before = next(entry for entry in state["log_history"] if entry["step"] == 0)
    after = json.loads((stage.folder / "eval_results.json").read_text(encoding="utf-8"))
    found = {}
    for g in GRID:
        (name,) = (key for key in after if key.startswith("eval_") and key.endswith(f"_{g}"))
        found[str(g)] = {"before": round(before[name], 4), "after": round(after[name], 4)}
    return found


def collected(stages: Sequence[Stage]) -> dict[str, Any]:
    """What all stages gave: losses, scores and seconds."""
    by_name = {stage.name: stage for stage in stages}
    seconds = {
        name: json.loads(stage.record.read_text(encoding="utf-8"))["seconds"] for name, stage in by_name.items()
    }
    models: dict[str, Any] = {}
    for model, (trained, scored) in MODELS.items():
        results = GridResults.load(by_name[scored].folder / "results.json")
        bitext = [f"tatoeba-{language}" for language in BITEXT_LANGUAGES]
        tasks = {"stsb": ["stsb"], "tatoeba": bitext}
        models[model] = {
            "losses": losses(by_name[trained]) if trained else {},
            **{
                name: {str(g): round(value, 4) for g, value in results.quality(its).items()}
                for name, its in tasks.items()
            },
        }
    return {"seconds": seconds, "total_seconds": round(sum(seconds.values())), "models": models}


def tables(results: dict[str, Any]) -> str:
    """Two tables, one row per granularity: the losses of each stage before and after it, and the scores after it."""
    models = results["models"]
    trained = [name for name, its in models.items() if its["losses"]]
    loss_rows = [
        [
            str(g),
            *(
                f"{its['before']:.2f} → {its['after']:.2f}"
                for its in (models[name]["losses"][str(g)] for name in trained)
            ),
        ]
        for g in GRID
    ]
    score_rows = [
        [str(g), *(f"{100 * its['stsb'][str(g)]:.1f} / {100 * its['tatoeba'][str(g)]:.1f}" for its in models.values())]
        for g in GRID
    ]
    means = [(mean(its["stsb"].values()), mean(its["tatoeba"].values())) for its in models.values()]
    average = ["mean", *(f"{100 * stsb:.1f} / {100 * tatoeba:.1f}" for stsb, tatoeba in means)]
    return "\n".join(
        [
            "Loss of held-out texts before and after each stage:",
            "",
            markdown(["granularity", *trained], loss_rows),
            "",
            "STS-B (Spearman) / Tatoeba (accuracy, mean of 14 languages) in percent:",
            "",
            markdown(["granularity", *models], [*score_rows, average]),
        ]
    )


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
