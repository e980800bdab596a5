"""
Filling a teacher's cache against calling the teacher's model directly on all texts, measured in turn; then reading the
full cache.

    python -m benchmarks.teacher_cache              # four minutes on two cores
    python -m benchmarks.teacher_cache --quick      # 256 texts

Teacher: all-MiniLM-L6-v2 with sentence-transformers (extras `quickstart`, `sentence-transformers`); 2,048 texts of 3
to 60 random words, batches of 64. Both use the same loaded teacher; `teacher` is the time without a cache. The last
line printed is a JSON object.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from unittest import mock

from transformers import AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_least, at_most
from scripts.command import run_command
from scripts.sources import default_base
from trainers import Teacher


BOUNDS: Bounds = {"fill_speed_vs_teacher": at_least(0.95), "seconds_to_read_again": at_most(2.0)}
FULL, QUICK = (2048, 5), (256, 2)  # texts, rounds


def measure(run: Run) -> dict[str, float]:
    count, rounds = QUICK if run.quick else FULL
    teacher = Teacher(default_base())
    model = teacher.load()
    draw = random.Random(SEED)
    words = sorted(word for word in AutoTokenizer.from_pretrained(default_base()).get_vocab() if word.isalpha())
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 60))) for _ in range(count)]

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Teacher, "load", lambda self: model):
        fills = 0

        def fill() -> None:
            nonlocal fills
            fills += 1
            teacher.embed(texts, Path(folder) / str(fills))

        def encode() -> None:
            model.encode(texts, batch_size=teacher.batch_size, show_progress_bar=False)

        seconds = run.time(f"embedding {count:,} texts", {"teacher": encode, "fill": fill}, rounds)
        read = {"read": lambda: teacher.embed(texts, Path(folder) / str(fills))}
        again = run.time("the full cache", read, rounds)
    return {
        "fill_speed_vs_teacher": seconds["teacher"] / seconds["fill"],
        "seconds_to_read_again": again["read"],
    }


BENCHMARK = Benchmark("teacher_cache", __doc__, BOUNDS, measure, packages=("sentence-transformers",))


if __name__ == "__main__":
    run_command(BENCHMARK.main)
