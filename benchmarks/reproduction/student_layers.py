"""
Which layers a student should take: the first ones of its teacher, or layers spread over its depth. No training.

    python -m benchmarks.reproduction.student_layers    # fit and score every student
    python -m benchmarks.reproduction.report            # write the table

Teacher: all-MiniLM-L6-v2 (extra `quickstart`). Each student has some of its layers, in their order, and an exit that
maps its last hidden state to the teacher's embedding, fitted to a quarter of the texts of
benchmarks.reproduction.exits. Tests: STS-B, STS13, STS16, SICK; Cranfield, CISI, NPL, where the student embeds
queries and the teacher documents. The fit has no seed; nothing was chosen by these scores.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import normalize

from benchmarks.reproduction.exits import (
    DEPTH,
    DIMS,
    FOLDER,
    MAX_LENGTH,
    RESULTS,
    RETRIEVAL_TESTS,
    WIDTH,
    encoded,
    evaluators,
    layers_of,
    raw_states,
    sources,
)
from benchmarks.reproduction.study import add_results
from scripts.command import run_command
from scripts.convert import converted
from scripts.sources import data_folder, default_base
from trainers import Granularity, Grid, fit_exits, truncate
from trainers.data.teacher import TeacherEmbeddings
from trainers.evaluation import GridEncoder, Retrieval


STUDENTS = ["2", "1,6", "3,6", "3", "1,3,6", "2,4,6", "1,3,5", "4", "1,2,4,6", "1,3,5,6"]
STS = ("stsb", "sts13", "sts16", "sick")
SHARE = 4  # one of so many texts
FILE = RESULTS / "student_layers.json"


def fit_and_score(data: Path, layers: str, tests: Any, raw: Any) -> dict[str, Any]:
    """The scores of a student with these layers at its last layer."""
    texts, states = sources(data), raw_states(data, "texts")
    kept = {
        text: states[source][DEPTH][row]
        for source, its in texts.items()
        for row, text in enumerate(its)
        if row % SHARE == 0
    }
    vectors = normalize(torch.stack([*kept.values()]), dim=-1)
    teacher = TeacherEmbeddings.write([*kept], vectors, FOLDER / "student-teacher.npy")
    model, tokenizer = converted(default_base(), student_layers=layers)
    fit_exits(model, tokenizer, [*kept], layers=[], static=False, teacher=teacher, max_length=MAX_LENGTH)
    return score(model.eval(), tokenizer, tests, raw)


def score(model: Any, tokenizer: Any, tests: Any, raw: Any) -> dict[str, dict[Granularity, float]]:
    """Test -> granularity -> main metric of the last layer; of retrieval tests "NAME asymmetric"."""
    layer = model.config.num_hidden_layers
    encoder = GridEncoder(model, tokenizer, Grid.product([layer], [WIDTH]), max_length=MAX_LENGTH)
    scores: dict[str, dict[Granularity, float]] = {}
    for test, evaluator in tests.items():
        retrieval = isinstance(evaluator, Retrieval)
        vectors = {
            side: encoded(partial(layers_of, encoder), list(texts))[layer]
            for side, texts in evaluator.texts.items()
            if not retrieval or side == "queries"
        }
        if retrieval:
            vectors["documents"] = raw[test]["documents"][DEPTH]
        scores[f"{test} asymmetric" if retrieval else test] = {
            Granularity(layer, dim): evaluator.score({side: truncate(its, dim) for side, its in vectors.items()})[
                evaluator.main_metric
            ]
            for dim in DIMS
        }
    return scores


def main(arguments: list[str]) -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    about = {
        "command": "python -m benchmarks.reproduction.student_layers",
        "settings": {"texts": f"one of {SHARE}"},
        "metric": "Spearman correlation (STS), nDCG@10 (retrieval); student -> seed -> test -> granularity",
    }
    data = data_folder()
    every, raw = evaluators(data, False), raw_states(data, "tests")
    tests = {name: every[name] for name in (*STS, *RETRIEVAL_TESTS)}
    done = json.loads(FILE.read_text(encoding="utf-8"))["scores"] if FILE.is_file() else {}
    for layers in STUDENTS:
        if layers not in done:
            add_results(FILE, {layers: {"0": fit_and_score(data, layers, tests, raw)}}, about)
            print(f"{layers}: scored", flush=True)


if __name__ == "__main__":
    run_command(main)
