"""
Filling a teacher's cache against calling the teacher's model directly on all texts, measured in turn; then reading the
full cache.

    python -m benchmarks.teacher_cache

Teacher: all-MiniLM-L6-v2 with sentence-transformers (extras `quickstart`, `sentence-transformers`); 2,048 texts of 3
to 60 random words, batches of 64. Both use the same loaded teacher; `teacher` is the time without a cache. The last
line printed is a JSON object. Takes about four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from unittest import mock

from transformers import AutoTokenizer

from benchmarks._measure import about
from scripts.command import run_command
from scripts.sources import default_base
from trainers import Teacher
from trainers.evaluation.latency import seconds_in_turn


SEED = 0


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=2048, help="number of texts")
    parser.add_argument("--rounds", type=int, default=5, help="timings of each variant")
    options = parser.parse_args(arguments)
    teacher = Teacher(default_base())
    model = teacher.load()
    draw = random.Random(SEED)
    words = sorted(word for word in AutoTokenizer.from_pretrained(default_base()).get_vocab() if word.isalpha())
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 60))) for _ in range(options.texts)]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Teacher, "load", lambda self: model):
        fills = 0

        def fill() -> None:
            nonlocal fills
            fills += 1
            teacher.embed(texts, Path(folder) / str(fills))

        def encode() -> None:
            model.encode(texts, batch_size=teacher.batch_size, show_progress_bar=False)

        seconds = seconds_in_turn({"teacher": encode, "fill": fill}, options.rounds)
        start = time.perf_counter()
        teacher.embed(texts, Path(folder) / str(fills))
        again = time.perf_counter() - start
    print("median seconds:", {name: round(value, 2) for name, value in seconds.items()})
    result = {"fill_speed_vs_teacher": seconds["teacher"] / seconds["fill"], "seconds_to_read_again": again}
    print(json.dumps({name: round(value, 3) for name, value in result.items()} | about(SEED)))


if __name__ == "__main__":
    run_command(main)
