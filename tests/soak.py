"""
What people leave running is killed, runs out of disk, loses a process, and gets broken files, for some minutes:

    make soak                             # 20 minutes
    python -m tests.soak --minutes 60

It prints one table (case, number tried, outcome), writes `benchmarks/results/soak.json`, and fails if anything was
lost. A case ends when it was tried often enough, or its share of the minutes is over.
Each trial is a process that is forked from this one, which has imported everything and computes nothing itself.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from benchmarks import _measure
from hub_cards.metadata import Statements
from hub_cards.publication import Options, write_card
from hub_cards.tables import markdown
from modeling_m3bert import EmbeddingSettings, M3BertForMaskedLM
from scripts import convert, embed, push_to_hub, train
from scripts.command import argument_parser, one_line, run_command
from tests import test_fuzz
from tests.conftest import WORDS, tiny_config, word_tokenizer
from trainers import Granularity, Teacher
from trainers.data import teacher
from trainers.evaluation import GridEncoder
from trainers.index import Corpus, Index, Plan, Target, index


ROOT = Path(__file__).parents[1]
STEPS = 12
TRAINING = {
    "per_device_train_batch_size": 8, "max_steps": STEPS, "save_steps": 2, "save_total_limit": 2, "logging_steps": 4,
    "learning_rate": 1e-3, "report_to": "none", "disable_tqdm": "true", "use_cpu": "true", "overwrite": "true",
    "resume_from_checkpoint": "auto",
}  # fmt: skip
PAIRS = {"train_files": "pairs.jsonl", "grid": "2,6x8,32", "text_columns": "anchor positive"}
# Method, and its options. A resumed run must have the weights of one that was never stopped, bit for bit.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked LM": ("multigranular-mlm", {"train_files": "text.txt", "max_length": 32, "warmup_steps": 2}),
    "contrastive, cached gradients": ("contrastive", {**PAIRS, "mini_batch_size": 4}),
    "MIPIC": ("mipic", {**PAIRS, "unsupervised": "false"}),
    "IBKD with a teacher's cache": (
        "ibkd", {"train_files": "text.txt", "teacher_name_or_path": "teacher", "teacher_cache_dir": "{out}/cache"},
    ),
    "a stream": (
        "contrastive",
        {**PAIRS, "streaming": "true", "shuffle_buffer_size": 16, "dataloader_num_workers": 2},
    ),
}  # fmt: skip
STATEMENTS = [Statements(license="mit"), Statements(license="apache-2.0", languages=("en",))]
REFUSALS = (ValueError, OSError)


# --- Processes ------------------------------------------------------------------------------------------------------


def start(work: Path, function: Callable[..., None], *arguments: Any) -> int:
    """A forked process that calls a function. It ends with 0, with 1 and one line in `said` for an error that a user
    can act on, or with 2 and a traceback."""
    sys.stdout.flush()
    if process := os.fork():
        return process
    status = 2
    try:
        os.chdir(work)
        for number in (1, 2):
            os.dup2(os.open("output", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_TRUNC), number)
        torch.set_num_threads(1)
        teacher.ROWS_OF_A_BATCH, index.CHUNK = 8, 8
        (work / "said").unlink(missing_ok=True)
        try:
            function(*arguments)
            status = 0
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            builtins.open = io.open = OPEN
    except REFUSALS as error:
        status = 1
        (work / "said").write_text(one_line(error))
        traceback.print_exc()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


OPEN, REPLACE = builtins.open, os.replace


def end(process: int, seconds: float | None = None) -> int:
    """The exit status of a process, which is killed after some seconds; -9 then."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is not None and time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    if deadline is not None:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def call(work: Path, function: Callable[..., None], *arguments: Any) -> float:
    """Call a function in a process of its own, which must succeed. Returns its seconds."""
    begun = time.monotonic()
    status = end(start(work, function, *arguments))
    assert status == 0, f"exit status {status}: {(work / 'output').read_text()[-1500:]}"
    return time.monotonic() - begun


# --- What is written, and how it is read ----------------------------------------------------------------------------


def prepare(work: Path) -> None:
    """Models, a teacher and data."""
    tokenizer, draw = word_tokenizer(), random.Random(0)
    torch.manual_seed(0)
    config = tiny_config(embedding_dropout=0.1)
    M3BertForMaskedLM(config).save_pretrained(work / "masked")
    base = BertConfig(vocab_size=99, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    BertModel(base).save_pretrained(work / "teacher")
    six_layers = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 37}
    for version in (0, 1):
        bert = BertConfig(vocab_size=99, max_position_embeddings=48, **six_layers)
        BertModel(bert).save_pretrained(work / f"bert{version}")
        EmbeddingSettings(pooling="cls", max_length=48).write(work / f"bert{version}", width=32)
    for name in ("masked", "teacher", "bert0", "bert1"):
        tokenizer.save_pretrained(work / name)
    for version in (0, 1):
        convert.convert(str(work / f"bert{version}"), str(work / f"model{version}"))
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(96)]
    (work / "text.txt").write_text("".join(f"{text}\n" for text in texts))
    pairs = [{"id": f"d{row}", "anchor": text, "positive": texts[-row - 1]} for row, text in enumerate(texts)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def fit(out: str, name: str, *more: str) -> None:
    """Train, or go on with a training that was stopped."""
    method, options = TRAININGS[name]
    base = "masked" if method == "multigranular-mlm" else "model0"
    options = {**TRAINING, **options, "model_name_or_path": base, "output_dir": out}
    words = [word for key, value in options.items() for word in (f"--{key}", *str(value).format(out=out).split())]
    train.main([method, *words, *more])


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob("2_Dense/*.safetensors")]):
        found.update(file.read_bytes())
    return found.hexdigest()


def weights_of(folder: Path, work: Path) -> int:
    """Which version of the model a folder holds, whole and with its settings."""
    encoder = GridEncoder.from_pretrained(folder)
    assert encoder.pooling == "cls", f"the pooling of {folder} is lost"
    found = encoder.model.state_dict()
    for version in (0, 1):
        saved = load_file(work / f"model{version}" / "model.safetensors")
        if all(torch.equal(found[name], saved[name]) for name in saved):
            return version
    raise AssertionError(f"{folder} has weights of no version")


@dataclass(frozen=True)
class Place:
    """
    Something that is written.

    Args:
        write (`Callable`): Writes version 0 or 1 of it into a folder.
        read (`Callable`): The version that the folder holds. Raises what a reader of it raises.
        begins_with (`int`, *optional*): The version that is there before; `None` for an empty folder.
    """

    write: Callable[[Path, int], None]
    read: Callable[[Path], int]
    begins_with: int | None = 0


def write_checkpoint(folder: Path, version: int) -> None:
    convert.convert(f"bert{version}", str(folder), overwrite=True)


def write_publication(folder: Path, version: int) -> None:
    push_to_hub.main([str(folder), "user/name", "--dry_run", "--license", STATEMENTS[version].license or ""])


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def read_card(folder: Path) -> int:
    text = card(folder)
    assert text.rstrip().endswith("My own words.") and text.startswith("---"), f"half a card: {text[-300:]}"
    return int("apache-2.0" in text)


def write_index(folder: Path, version: int) -> None:
    plan = Plan(Granularity(6, 32), first_dim=8, shortlist=10)
    encoder = GridEncoder.from_pretrained("model0", grid=plan.grid())
    Index.build(Target(folder, "faiss", "flat"), plan, encoder, Corpus(["pairs.jsonl"], "anchor", "id")).close()


def read_index(folder: Path) -> int:
    with Index.open(folder, GridEncoder.from_pretrained("model0", grid=Plan(Granularity(6, 32)).grid())) as opened:
        rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
        hits = opened.search([row["anchor"] for row in rows], 96)
    assert all({hit.id for hit in found} == {row["id"] for row in rows} for found in hits)
    return 1


def write_parts(folder: Path, version: int, *more: str) -> None:
    words = ["--model_name_or_path", "model0", "--files", "pairs.jsonl", "--text_column", "anchor", "--grid", "6x32"]
    embed.main([*words, "--batch_size", "1", "--device", "cpu", "--output_dir", str(folder), *more])


def read_vectors(vectors: Any, texts: Sequence[str], expected: Any) -> int:
    np.testing.assert_allclose(np.asarray(vectors), expected(texts), atol=1e-4)
    return 1


def expected_vectors(texts: Sequence[str]) -> np.ndarray:
    found = GridEncoder.from_pretrained("model0", grid="6x32").encode(list(texts), role="document")
    return found.at(Granularity(6, 32)).numpy()


def read_parquet(file: Path) -> int:
    table = pq.read_table(file).to_pydict()
    return read_vectors(table["layer_6"], table["anchor"], expected_vectors) if len(table["anchor"]) == 96 else -1


def anchors() -> list[str]:
    return [json.loads(line)["anchor"] for line in Path("pairs.jsonl").read_text().splitlines()]


def write_cache(folder: Path, version: int) -> None:
    Teacher("teacher", batch_size=1).embed(anchors(), folder)


def read_cache(folder: Path) -> int:
    files = [*folder.glob("*/embeddings.npy")]
    if not files:
        raise FileNotFoundError(folder)
    found = np.load(files[0])
    assert (np.abs(found).sum(axis=1) > 0).all(), "rows without embeddings"
    write_cache(folder, 1)
    np.testing.assert_array_equal(np.load(files[0]), found)
    return 1


PLACES: dict[str, Place] = {
    "a checkpoint": Place(write_checkpoint, lambda folder: weights_of(folder, Path.cwd())),
    "a card": Place(lambda folder, v: write_card(folder, "user/name", Options(statements=STATEMENTS[v])), read_card),
    "a publication (--dry_run)": Place(write_publication, read_card),
    "an index": Place(write_index, read_index, None),
    "a part of a folder of embeddings": Place(
        lambda folder, v: write_parts(folder, v, "--shard", "0/1"),
        lambda folder: read_parquet(folder / "pairs.parquet"), None,
    ),
    "embeddings as a Parquet file": Place(
        lambda folder, v: write_parts(folder, v, "--format", "parquet"),
        lambda folder: read_parquet(folder / "embeddings.parquet"), None,
    ),
    "embeddings as arrays": Place(
        write_parts, lambda folder: read_vectors(np.load(folder / "layer_6.npy"), anchors(), expected_vectors), None,
    ),
    "a teacher's cache": Place(write_cache, read_cache, None),
}  # fmt: skip


def begin(folder: Path, name: str) -> None:
    """What is there before a trial."""
    shutil.rmtree(folder, ignore_errors=True)
    if PLACES[name].begins_with is None:
        return
    shutil.copytree("model0", folder)
    if name != "a checkpoint":
        write_card(folder, "user/name", Options(statements=STATEMENTS[0]))
        text = card(folder)
        (folder / "README.md").write_text(text.rstrip() + "\n\nMy own words.\n", encoding="utf-8")


def check(folder: Path, name: str, complete: bool) -> None:
    """The place holds the old version, the new one, or is refused; the new one if it is complete."""
    place = PLACES[name]
    allowed = {place.begins_with, 1} if name != "a publication (--dry_run)" else {0}
    try:
        found = place.read(folder)
    except REFUSALS as error:
        assert not complete, f"a complete write is refused: {error}"
        assert "\n" not in one_line(error)
        return
    assert found in ({1} & allowed or {0} if complete else allowed), f"version {found} of {allowed}"


# --- Cases ----------------------------------------------------------------------------------------------------------


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


def fail_writes(function: Callable[..., None], *arguments: Any, limit: int | None, number: int | None) -> None:
    """Call a function without room for files over a limit, or whose n-th file cannot be opened or renamed."""
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    calls: Iterator[int] = iter(range(1, sys.maxsize))

    def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        if {*mode} & {*"wax+"} and next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return OPEN(file, mode, *rest, **options)

    def replace(source: Any, target: Any) -> None:
        if next(calls) == number:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        REPLACE(source, target)

    builtins.open, io.open, os.replace = open_, open_, replace
    function(*arguments)


def failed_write(name: str, work: Path, deadline: float) -> Outcome:
    """No room on the disk, and errors of single calls."""
    folder, errors = work / "place", 0
    for trial in range(12):
        if time.monotonic() > deadline:
            break
        call(work, begin, folder, name)
        limited = {"limit": random.choice([0, 100, 1000, 5000, 20_000]), "number": None}
        options = limited if trial % 2 else {"limit": None, "number": trial // 2 + 1}
        function = lambda: fail_writes(PLACES[name].write, folder, 1, **options)  # noqa: B023, E731
        errors += failed(work, function)
        call(work, check, folder, name, False)
        call(work, PLACES[name].write, folder, 1)
        call(work, check, folder, name, True)
    return Outcome(errors, "one line; old, new or refused; the next try succeeds")


def failed(work: Path, function: Callable[[], None]) -> bool:
    """Whether a function failed, in one line."""
    status = end(start(work, function))
    assert status in (0, 1), f"exit status {status}: {(work / 'output').read_text()[-1500:]}"
    if status == 1:
        said = (work / "said").read_text()
        assert said and "\n" not in said, said
    return status == 1


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


def one_rank(rank: int, store: str) -> None:
    """One of two processes that train without end."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store, "ACCELERATE_USE_CPU": "1"}
    try:
        fit("ranks", "contrastive, cached gradients", "--max_steps", "1000000")
    except RuntimeError as error:  # of gloo
        raise OSError(str(error)) from error


def dead_rank(name: str, work: Path, deadline: float) -> Outcome:
    """Kill one of two processes."""
    longest, tried = 0.0, 0
    while tried < 4 and time.monotonic() < deadline:
        shutil.rmtree(work / "ranks", ignore_errors=True)
        with _socket() as store:
            processes = [start(work, one_rank, rank, store) for rank in (0, 1)]
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


class _socket:
    """A port that is free."""

    def __enter__(self) -> str:
        import socket

        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return str(found.getsockname()[1])

    def __exit__(self, *_: object) -> None: ...


def slope_of(samples: Sequence[tuple[int, float]]) -> float:
    """MB per 1,000, by least squares, without the first quarter."""
    numbers, megabytes = np.array(samples[len(samples) // 4 :]).T
    return 1000 * float(np.polyfit(numbers, megabytes, 1)[0])


def train_long(steps: int) -> None:
    from transformers import TrainerCallback

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
    "grids and recipes": (90_000, ("grid", "recipe")),
    "results, plans, records and settings": (15_000, ("json_file", "settings")),
    "broken checkpoints": (2_000, ("weights_that", "tensors_that")),
    "texts and data files": (300, ("text", "surrogate", "data_file")),
}


def fuzz(name: str, work: Path, deadline: float) -> Outcome:
    """The tests of `test_fuzz.py` with other examples, round by round."""
    wanted, words = FUZZED[name]
    tests = {
        key: test._hypothesis_internal_use_settings.max_examples
        for key, test in vars(test_fuzz).items()
        if key.startswith("test_") and any(word in key for word in words)
    }
    # The test of JSON files is of several kinds of them.
    each = sum(count * (len(test_fuzz.READERS) if "json_file" in key else 1) for key, count in tests.items())
    tried, scale = 0, 1
    while tried < wanted and time.monotonic() < deadline:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_fuzz.py"]
        done = subprocess.run(
            [*command, "-k", " or ".join(words)], cwd=ROOT, env={**os.environ, "M3BERT_FUZZ": str(scale)},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:]
        tried += scale * each
        now = time.monotonic()
        fits = int(scale * 0.8 * (deadline - now) / (now - begun))
        scale = min(5 * scale, fits, -(-(wanted - tried) // each))
        if fits < 1:
            break
    return Outcome(tried, "read or refused in one line")


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


def soak(minutes: float) -> list[dict[str, Any]]:
    """All cases, in turn, within some minutes."""
    rows, begun = [], time.monotonic()
    left = [(name, case, item) for name, case in CASES.items() for item in case.names]
    while left:
        name, case, item = left[0]
        total = sum(other.share / len(other.names) for _, other, _ in left)
        now = time.monotonic()
        share = case.share / len(case.names) / total
        deadline = now + share * (begun + 60 * minutes - now)
        with tempfile.TemporaryDirectory() as folder, suppress(OSError):
            work = Path(folder)
            try:
                call(work, prepare, work)
                found = case.run(item, work, deadline)
            except AssertionError as error:
                found = Outcome(0, f"LOST: {error}")
        rows.append({"case": f"{name}: {item}", "tried": found.tried, "outcome": found.outcome})
        rows[-1]["seconds"] = round(time.monotonic() - now, 1)
        print(f"{rows[-1]['case']}: {found.tried:,}, {found.outcome} ({rows[-1]['seconds']:.0f} s)", flush=True)
        left.pop(0)
    return rows


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20, help="when to stop (default: 20)")
    minutes = parser.parse_args(arguments).minutes
    set_verbosity_error()
    disable_progress_bar()
    datasets.disable_progress_bars()
    torch.set_num_threads(1)
    described = _measure.about(packages=("datasets", "safetensors", "faiss-cpu", "hypothesis"))
    with tempfile.TemporaryDirectory() as cache:
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        rows = soak(minutes)
    file = _measure.RESULTS / "soak.json"
    file.write_text(json.dumps({**described, "minutes": minutes, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    table = [[row["case"], f"{row['tried']:,}", row["outcome"].splitlines()[0]] for row in rows]
    print(markdown(("case", "tried", "outcome"), table, words=1))
    if any("LOST" in row["outcome"] for row in rows):
        raise ValueError("Something was lost: see the rows above.")


if __name__ == "__main__":
    run_command(main)
