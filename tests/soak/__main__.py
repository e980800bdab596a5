"""
What people leave running is killed, runs out of disk, loses a process, and gets broken files, for some minutes:

    make soak                             # 20 minutes
    python -m tests.soak --minutes 60

It prints one table (case, number tried, outcome), writes `benchmarks/results/soak.json`, and fails if anything was
lost. A case ends when it was tried often enough, or its share of the minutes is over.
Each trial is a process that is forked from this one, which has imported everything and computes nothing itself.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import TrainerCallback
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks import _measure
from hub_cards.tables import markdown
from scripts import train
from scripts.command import argument_parser, run_command
from tests import test_fuzz
from trainers import Granularity
from trainers.core.durable import replace_text
from trainers.evaluation import GridEncoder

from .places import PLACES, STEPS, TRAININGS, anchors, begin, check, digest, fit, prepare
from .processes import call, end, fail_writes, failed, start


ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Outcome:
    tried: int
    outcome: str


def killed_training(name: str, work: Path, deadline: float) -> Outcome:
    """Kill a training at random moments until it is done; its weights are those of one that was not killed."""
    seconds = call(work, fit, "whole", name)
    kills = rounds = 0
    while kills < 14 and time.monotonic() < deadline:
        shutil.rmtree(work / "killed", ignore_errors=True)
        for _ in range(4):
            kills += end(start(work, fit, "killed", name), random.uniform(0, 1) * seconds) == -signal.SIGKILL
        call(work, fit, "killed", name)
        assert digest(work / "killed") == digest(work / "whole"), "the weights differ"
        rounds += 1
    return Outcome(kills, f"{rounds} runs of {STEPS} steps ended with equal weights, bit for bit")


def killed_write(name: str, work: Path, deadline: float) -> Outcome:
    """Kill a process while it writes."""
    folder = work / "place"
    call(work, begin, folder, name)
    seconds = call(work, PLACES[name].write, folder, 1)
    call(work, check, folder, name, True)
    kills = 0
    while kills < 8 and time.monotonic() < deadline:
        call(work, begin, folder, name)
        kills += end(start(work, PLACES[name].write, folder, 1), random.uniform(0, seconds)) == -signal.SIGKILL
        call(work, check, folder, name, False)
        call(work, PLACES[name].write, folder, 1)
        call(work, check, folder, name, True)
    return Outcome(kills, "old, new or refused; the next try succeeds")


def failed_write(name: str, work: Path, deadline: float) -> Outcome:
    """No room on the disk, and errors of single calls."""
    folder, errors = work / "place", 0
    for trial in range(12):
        if time.monotonic() > deadline:
            break
        call(work, begin, folder, name)
        limited = {"limit": random.choice([100, 1000, 5000, 20_000]), "number": None}
        options = limited if trial % 2 else {"limit": None, "number": trial // 2 + 1}
        function = lambda: fail_writes(PLACES[name].write, folder, 1, **options)  # noqa: B023, E731
        errors += failed(work, function)
        call(work, check, folder, name, False)
        call(work, PLACES[name].write, folder, 1)
        call(work, check, folder, name, True)
    return Outcome(errors, "one line; old, new or refused; the next try succeeds")


def failed_training(name: str, work: Path, deadline: float) -> Outcome:
    """A disk that is full during a training."""
    call(work, fit, "whole", name)
    sizes = sorted(file.stat().st_size for file in (work / "whole").rglob("*") if file.is_file())
    errors = rounds = 0
    while rounds < 3 and time.monotonic() < deadline:
        shutil.rmtree(work / "full", ignore_errors=True)
        for trial in range(4):
            limited = {"limit": random.choice(sizes[len(sizes) // 2 :]) - 1, "number": None}
            options = limited if trial % 2 else {"limit": None, "number": random.randint(1, 60)}
            errors += failed(work, lambda: fail_writes(fit, "full", name, **options))  # noqa: B023
        call(work, fit, "full", name)
        assert digest(work / "full") == digest(work / "whole"), "the weights differ"
        rounds += 1
    return Outcome(errors, f"one line; {rounds} runs ended with equal weights, bit for bit")


def one_rank(rank: int, port: str) -> None:
    """One of two processes that train without end."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "1"}
    try:
        fit("ranks", "contrastive, cached gradients", "--max_steps", "1000000")
    except RuntimeError as error:  # of gloo
        raise OSError(str(error)) from error


def dead_rank(name: str, work: Path, deadline: float) -> Outcome:
    """Kill one of two processes."""
    longest, tried = 0.0, 0
    while tried < 4 and time.monotonic() < deadline:
        shutil.rmtree(work / "ranks", ignore_errors=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        processes = [start(work, one_rank, rank, port) for rank in (0, 1)]
        while not (work / "ranks" / "checkpoint-2" / "trainer_state.json").is_file():
            assert time.monotonic() < deadline + 60, (work / "output").read_text()[-1500:]
            time.sleep(0.1)
        time.sleep(random.uniform(0, 2))
        dead = tried % 2
        assert end(processes[dead], 0) == -signal.SIGKILL, (work / "output").read_text()[-1500:]
        begun = time.monotonic()
        status = end(processes[1 - dead], 60)
        assert status not in (0, -signal.SIGKILL), f"the other process: {status}"
        longest, tried = max(longest, time.monotonic() - begun), tried + 1
    return Outcome(tried, f"the other process ended with an error within {longest:.1f} s")


def slope_of(samples: Sequence[tuple[int, float]]) -> float:
    """MB per 1,000, by least squares, without the first quarter."""
    numbers, megabytes = np.array(samples[len(samples) // 4 :]).T
    return 1000 * float(np.polyfit(numbers, megabytes, 1)[0])


def train_long(steps: int) -> None:
    samples: list[tuple[int, float]] = []

    class Sample(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % 20 == 0:
                samples.append((state.global_step, _measure.resident_megabytes()))

    build = train.embedding_trainer

    def sampled(*arguments: Any) -> Any:
        trainer = build(*arguments)
        trainer.add_callback(Sample())
        return trainer

    train.embedding_trainer = sampled
    fit(
        "long",
        "contrastive, cached gradients",
        "--max_steps",
        str(steps),
        "--save_steps",
        "500",
        "--logging_steps",
        "100",
    )
    Path("samples").write_text(json.dumps(samples))


def evaluate_long(count: int) -> None:
    encoder, samples = GridEncoder.from_pretrained("model0", grid="2,4,6x8,32"), []
    texts = anchors()[:16]
    for number in range(count):
        encoder.encode(texts).at(Granularity(6, 32)).mean()
        if number % 20 == 0:
            samples.append((number, _measure.resident_megabytes()))
    Path("samples").write_text(json.dumps(samples))


def memory(name: str, work: Path, deadline: float) -> Outcome:
    """Memory over many steps."""
    function, count = (train_long, 2000) if "steps" in name else (evaluate_long, 1000)
    call(work, function, count)
    slope = slope_of(json.loads((work / "samples").read_text()))
    assert slope < 2, f"grows by {slope:.2f} MB per 1,000"
    return Outcome(count, f"flat: {slope:+.2f} MB per 1,000")


FUZZED = {
    "grids": (100_000, ("grid",)),
    "broken checkpoints": (2_000, ("weights_that",)),
    "texts and data files": (300, ("text", "data_file")),
}
SEVERAL = {"grid": test_fuzz.GRIDS}  # cases per example


def fuzz_once(words: Sequence[str], scale: int) -> None:
    os.environ["M3BERT_FUZZ"] = str(scale)
    sys.modules.pop("tests.test_fuzz")  # which reads it
    os.chdir(ROOT)
    file = str(ROOT / "tests" / "test_fuzz.py")
    assert pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", " or ".join(words), file]) == 0


def fuzz(name: str, work: Path, deadline: float) -> Outcome:
    """The tests of `test_fuzz.py` with other examples, round by round."""
    wanted, words = FUZZED[name]
    each = 0
    for key, test in vars(test_fuzz).items():
        if key.startswith("test_") and any(word in key for word in words):
            examples = test._hypothesis_internal_use_settings.max_examples
            each += examples * next((many for word, many in SEVERAL.items() if word in key), 1)
    tried, scale = 0, 1
    while tried < wanted and scale > 0:
        begun = time.monotonic()
        call(work, fuzz_once, words, scale)
        tried, now = tried + scale * each, time.monotonic()
        fits = int(scale * 0.8 * (deadline - now) / (now - begun))
        scale = min(10 * scale, fits, -(-(wanted - tried) // each))
    return Outcome(tried, "read, or refused in one line")


@dataclass(frozen=True)
class Case:
    """
    A case.

    Args:
        run (`Callable`): Takes the name, a folder and a deadline, raises an AssertionError if something is lost.
        share (`float`): Part of the minutes.
        names (`Sequence[str]`): What it is run on.
    """

    run: Callable[[str, Path, float], Outcome]
    share: float
    names: Sequence[str]


CASES = {
    "kill -9 while training": Case(killed_training, 6, list(TRAININGS)),
    "kill -9 while writing": Case(killed_write, 4, list(PLACES)),
    "full disk or write error": Case(failed_write, 4, list(PLACES)),
    "full disk while training": Case(failed_training, 2, ["masked LM", "IBKD with a teacher's cache", "a stream"]),
    "a dead rank of two": Case(dead_rank, 1, ["contrastive, gloo"]),
    "memory": Case(memory, 2, ["training steps", "evaluations"]),
    "fuzz": Case(fuzz, 8, list(FUZZED)),
}


def soak(minutes: float, names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Cases, in turn, within some minutes: the name of each, and what is written of it."""
    begun = time.monotonic()
    left = [(name, CASES[name], item) for name in names for item in CASES[name].names]
    while left:
        name, case, item = left[0]
        total = sum(other.share / len(other.names) for _, other, _ in left)
        now = time.monotonic()
        share = case.share / len(case.names) / total
        deadline = now + share * (begun + 60 * minutes - now)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            try:
                call(work, prepare, work)
                found = case.run(item, work, deadline)
            except AssertionError as error:
                found = Outcome(0, f"LOST: {error}")
        seconds = round(time.monotonic() - now)
        print(f"{name}: {item}: {found.tried:,}, {found.outcome} ({seconds} s)", flush=True)
        yield f"{name}: {item}", {"tried": found.tried, "outcome": found.outcome, "seconds": seconds}
        left.pop(0)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("cases", nargs="*", help=f"cases to run; the file keeps the others: {', '.join(CASES)}")
    parser.add_argument("--minutes", type=float, default=20, help="when to stop (default: 20)")
    options = parser.parse_args(arguments)
    if unknown := {*options.cases} - {*CASES}:
        raise ValueError(f"{unknown.pop()!r} is not a case; cases: {', '.join(CASES)}.")
    set_verbosity_error()
    disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    described = _measure.about(packages=("datasets", "safetensors", "faiss-cpu", "hypothesis"))
    file, rows = _measure.RESULTS / "soak.json", {}
    kept = json.loads(file.read_text(encoding="utf-8"))["cases"] if options.cases and file.is_file() else {}
    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        for name, row in soak(options.minutes, options.cases or [*CASES]):
            rows[name] = {**row, "date": described["date"], "commit": described["commit"]}
            replace_text(file, json.dumps({**described, "cases": {**kept, **rows}}, indent=1) + "\n")
    table = [[name, f"{row['tried']:,}", row["outcome"].splitlines()[0]] for name, row in rows.items()]
    print(markdown(("case", "tried", "outcome"), table))
    if any("LOST" in row["outcome"] for row in rows.values()):
        raise ValueError("Something was lost: see the rows above.")


if __name__ == "__main__":
    run_command(main)
