"""
Translations found by multilingual-e5-small, whole and trimmed to the tokens of the texts.

    python -m benchmarks.reproduction.encoders e5 runs/e5
    python -m benchmarks.reproduction.tatoeba_trim runs/e5                # five minutes

`m3bert trim` keeps the tokens of the texts of some languages of Tatoeba. Both encoders then embed these texts. The
score is the mean accuracy of both directions.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from transformers import AutoConfig

from benchmarks.reproduction.embedding import embed
from benchmarks.reproduction.study import Scores, add_results, tests_there
from m3bert.commands import trim
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder
from m3bert.trainers import Granularity


TASKS = ("tatoeba-deu", "tatoeba-rus", "tatoeba-cmn")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path, help="folder of the encoder")
    source = parser.parse_args(arguments).source
    tests = tests_there(TASKS, data_folder())
    config = AutoConfig.from_pretrained(source)
    size = Granularity(config.num_hidden_layers, config.hidden_size)
    scores: dict[str, dict[str, Scores]] = {"whole": {}, "trimmed": {}}
    differences: list[float] = []
    with TemporaryDirectory() as temporary:
        folder, file = Path(temporary, "trimmed"), Path(temporary, "texts.jsonl")
        texts = [text for test in tests.values() for side in test.texts.values() for text in side]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        trim.main([str(source), str(folder), "--files", str(file)])
        tokens = AutoConfig.from_pretrained(folder).vocab_size
        for name, test in tests.items():
            vectors = {
                run: {side: embed(where, "queries", rows) for side, rows in test.texts.items()}
                for run, where in (("whole", source), ("trimmed", folder))
            }
            for run, sides in vectors.items():
                scores[run][name] = {size: mean(test.score(sides).values())}
            differences += [
                float((one - vectors["trimmed"][side]).abs().max()) for side, one in vectors["whole"].items()
            ]
            print(name, {run: values[name][size] for run, values in scores.items()}, max(differences), flush=True)
    about = {
        "command": "python -m benchmarks.reproduction.tatoeba_trim",
        "settings": {"tokens": config.vocab_size, "tokens kept": tokens},
        "largest difference of a number of an embedding": max(differences),
        "metric": "accuracy, mean of both directions; run -> seed -> test -> granularity",
    }
    add_results("tatoeba_trim", {run: {"0": values} for run, values in scores.items()}, about)


if __name__ == "__main__":
    run_command(main)
