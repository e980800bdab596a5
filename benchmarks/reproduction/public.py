"""
Public numbers of an encoder: the 13 sets of NanoBEIR, and tasks of MTEB that take minutes, in one command:

    python -m benchmarks.reproduction.public intfloat/multilingual-e5-small --price    # texts and minutes, no more
    python -m benchmarks.reproduction.public intfloat/multilingual-e5-small
    python -m benchmarks.reproduction.report                                           # write the table

`m3bert fit` makes it elastic, with a table and paths of a third, a half and two thirds of its layers, on 15,000 texts
of the Hub. `m3bert evaluate` then scores these and the full size, at three numbers of dims. Finished steps and tasks
are skipped: interrupted, call again. It needs the extra `mteb`. The results are in results/public, and all scores in
--output_dir, from which `m3bert push` writes them into the card of the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from transformers import AutoConfig

from benchmarks._measure import about
from m3bert.commands import evaluate, fit
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.commands.sources import local_data
from m3bert.data.hub_data import load_hub
from m3bert.evaluation.readers import load_task
from m3bert.evaluation.results import GridResults
from m3bert.evaluation.tasks import find_tasks
from m3bert.utils.durable import replace_text
from m3bert.utils.extras import require_extra


RESULTS = Path(__file__).with_name("results") / "public"
FIT_TEXTS = (
    ("sentence-transformers/gooaq", "question"),
    ("sentence-transformers/gooaq", "answer"),
    ("sentence-transformers/simple-wiki", "text"),
)
PER_SOURCE = 5000
# Family -> tasks of MTEB.
MTEB = {
    "STS": ("STSBenchmark", "STS12", "STS13", "STS14", "STS15", "STS16", "SICK-R", "BIOSSES"),
    "classification": ("Banking77Classification", "EmotionClassification", "TweetSentimentExtractionClassification"),
    "pairs": ("TwitterSemEval2015",),
    "clustering": ("StackExchangeClustering.v2",),
}
SAMPLE = 512  # texts that are timed


def sizes_of(layers: int, width: int) -> tuple[list[int], list[int]]:
    """The depths of the paths (a third, a half and two thirds), and three numbers of dims."""
    depths = sorted({max(1, round(layers * part)) for part in (1 / 3, 1 / 2, 2 / 3)} - {layers})
    return depths, [width // 6, width // 3, width]


def texts_to_score() -> tuple[dict[str, int], list[str]]:
    """Task -> number of its texts, and some texts of NanoBEIR. MTEB gives numbers of rows: a pair is two texts."""
    mteb = require_extra("mteb", "mteb", "benchmarks.reproduction.public")
    evaluators = {task.name: load_task(task, local_data()) for task in find_tasks(["nanobeir"])}
    counts = {name: sum(map(len, evaluator.texts.values())) for name, evaluator in evaluators.items()}
    for task in mteb.get_tasks(tasks=[name for names in MTEB.values() for name in names]):
        samples = task.metadata.n_samples or {}
        rows = sum(samples.get(split, 0) for split in task.metadata.eval_splits)
        counts[task.metadata.name] = rows * (2 if task.metadata.type in ("STS", "PairClassification") else 1)
    some = [text for evaluator in evaluators.values() for text in evaluator.texts["documents"]]
    return counts, some[:: max(1, len(some) // SAMPLE)]


def minutes(encoding: EncoderArguments, some: Sequence[str], texts: int, shares: Sequence[float]) -> float:
    """The estimated minutes to encode texts at some shares of the depth, by the time of a sample at full depth. A fit
    passes its texts about four times."""
    encoder = load_encoder(encoding)
    encoder.encode(some[:32])
    start = time.perf_counter()
    encoder.encode(some)
    per_text = (time.perf_counter() - start) / len(some)
    return per_text * (texts * sum(shares) + 4 * PER_SOURCE * len(FIT_TEXTS)) / 60


def write_fit_texts(folder: Path) -> list[str]:
    """Write the texts of the fit, a file for each source, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, column in FIT_TEXTS:
        file = folder / f"{Path(name).name}-{column}.jsonl"
        if not file.is_file():
            rows = islice(load_hub(name, streaming=True), PER_SOURCE)
            replace_text(file, "".join(json.dumps({"text": row[column]}) + "\n" for row in rows))
        files.append(str(file))
    return files


def in_short(results: GridResults) -> dict[str, Any]:
    """Family -> granularity -> mean of its tasks, of 1; of NanoBEIR also with documents at full depth."""
    nanobeir = results.tasks("retrieval")
    last = max(results.granularities.layers)
    scores = {"NanoBEIR": results.quality(nanobeir)} | {
        family: results.quality(names) for family, names in MTEB.items() if {*names} <= {*results.tasks()}
    }
    written: dict[str, Mapping[str, float]] = {
        family: {str(g): round(value, 5) for g, value in values.items()} for family, values in scores.items()
    }
    asymmetric = results.asymmetric_quality(nanobeir)
    written["NanoBEIR, documents by all layers"] = {
        f"{layer}x{g.dim}": round(value, 5) for (g, layer), value in asymmetric.items() if g.layer == last
    }
    return written


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model", help="Hub id, or folder, of an encoder")
    parser.add_argument("--price", action="store_true", help="print the number of texts and minutes, and stop")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/public"), help="folder (default: %(default)s)")
    parser.add_argument("--query_prompt", help='"query: "; default: as published')
    parser.add_argument("--document_prompt", help='"passage: "; default: as published')
    options = parser.parse_args(arguments)
    prompts = {name: value for name in ("query_prompt", "document_prompt") if (value := getattr(options, name))}
    name, config = options.model.strip("/").replace("/", "--"), AutoConfig.from_pretrained(options.model)
    depths, dims = sizes_of(config.num_hidden_layers, config.hidden_size)
    counts, some = texts_to_score()
    layers = config.num_hidden_layers
    encoding = EncoderArguments(model_name_or_path=options.model, grid=f"{layers}x{dims[-1]}", **prompts)
    estimate = minutes(encoding, some, sum(counts.values()), [1, *(depth / layers for depth in depths)])
    print(f"{sum(counts.values()):,} texts of {len(counts)} tasks; about {estimate:.0f} minutes on this machine")
    if options.price:
        return
    folder, evaluation = options.output_dir / name / "model", options.output_dir / name / "evaluation"
    if not (folder / "config.json").is_file():
        files = write_fit_texts(options.output_dir / "texts")
        fit.main([options.model, str(folder), "--files", *files, "--depths", *map(str, depths)])
    if not (evaluation / "results.json").is_file():
        grid = f"{','.join(map(str, [0, *depths, layers]))}x{','.join(map(str, dims))}"
        asked = [part for option, value in prompts.items() for part in (f"--{option}", value)]
        tasks = ["--tasks", "nanobeir", "--mteb", *(task for names in MTEB.values() for task in names)]
        more = ["--two_stages", "false", "--latency", "false"]
        evaluate.main(
            ["--model_name_or_path", str(folder), "--grid", grid, "--output_dir", str(evaluation)]
            + [*tasks, *asked, *more]
        )
    results = GridResults.load(evaluation / "results.json")
    written = {"model": options.model, "command": f"python -m benchmarks.reproduction.public {options.model}"}
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {**written, **about(packages=("mteb",)), "texts": counts, "scores": in_short(results)}
    replace_text(RESULTS / f"{name}.json", json.dumps(content, indent=1) + "\n")
    print({family: f"{100 * mean(values.values()):.1f}" for family, values in content["scores"].items() if values})


if __name__ == "__main__":
    run_command(main)
