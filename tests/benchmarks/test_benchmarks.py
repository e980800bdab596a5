"""Benchmarks: options, bounds, results files, and the table of all of them."""

from __future__ import annotations

import json
import re
import subprocess
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as everything, _measure
from benchmarks._measure import (
    Benchmark,
    Bound,
    Run,
    added_peak,
    allocated_peak,
    at_least,
    at_most,
    in_new_process,
    in_new_processes,
    results_file,
    sent_bytes,
)


FIGURES = {"fast": at_most(0.5, one_thread=0.7), "good": at_least(0.9), "plain": None}
BENCHMARK = Benchmark("example", "An example.", FIGURES, lambda run: {"fast": 0.61234, "good": 0.95, "plain": 3.0})


@pytest.fixture
def results(tmp_path, monkeypatch) -> Path:
    """A folder for results in a git repository of its own."""
    monkeypatch.setattr(_measure, "RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "file.py").write_text("one\n")
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "file.py"], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path / "benchmarks" / "results"


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def last_line(capsys) -> dict[str, object]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_benchmarks_are_run_together():
    folder = Path(_measure.__file__).parent
    # A calculator; a comparison of two commits; studies of scores, which have no bounds.
    others = {"plan", "method_values", "static_graphs", "static_peers"}
    assert {*everything.NAMES} | others == {file.stem for file in folder.glob("[a-z]*.py")}


@pytest.mark.parametrize("name", everything.NAMES)
def test_every_benchmark_has_bounds_and_a_quick_run(name, capsys):
    if name in ("peers", "teacher_cache"):
        pytest.importorskip("sentence_transformers")
    if name == "quantised_search":
        pytest.importorskip("faiss")
    module = import_module(f"benchmarks.{name}")
    assert module.BENCHMARK.name == name
    assert module.BENCHMARK.bounds is module.BOUNDS
    assert any(isinstance(bound, Bound) for bound in module.BOUNDS.values())
    assert f"python -m benchmarks.{name} --quick" in module.__doc__
    with pytest.raises(SystemExit, match="0"):
        module.BENCHMARK.main(["--help"])
    assert {"--quick", "--threads"} <= set(capsys.readouterr().out.replace("]", " ").split())


@pytest.mark.parametrize("name", everything.NAMES)
def test_committed_results_have_the_figures_of_the_bounds(name):
    bounds = import_module(f"benchmarks.{name}").BOUNDS
    for file in _measure.RESULTS.glob(f"{name}.*json"):
        result = json.loads(file.read_text(encoding="utf-8"))
        assert bounds.keys() <= result.keys(), file.name
        assert result["quick"] == ("quick" in file.name)


def test_a_result_says_what_it_depends_on(results, capsys):
    BENCHMARK.main(["--quick"])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == _measure.QUICK
    written = json.loads((results / "example.quick.json").read_text(encoding="utf-8"))
    assert {"fast": 0.6123, "good": 0.95, "plain": 3.0}.items() <= written.items(), "four significant digits"
    assert written["quick"] is True
    assert written["threads"] == torch.get_num_threads()
    assert {"date", "machine", "processor", "cores", "seed", "commit", "seconds", "megabytes"} <= written.keys()
    assert written["versions"].keys() == {"torch", "transformers"}
    assert written.items() >= json.loads(said[-1]).items()
    BENCHMARK.main([])
    assert last_line(capsys)["quick"] is False
    full = json.loads((results / "example.json").read_text(encoding="utf-8"))
    assert full.keys() == written.keys(), "the same keys"


def test_other_threads_have_a_file_of_their_own(results, capsys):
    torch.set_num_threads(2)
    BENCHMARK.main(["--threads", "2"])
    assert (results / "example.json").exists()
    BENCHMARK.main(["--threads", "1", "--quick"])
    assert last_line(capsys)["threads"] == torch.get_num_threads() == 1
    assert (results / "example.1thread.quick.json").exists()
    assert results_file("example", False, 3).name == "example.3threads.json"
    with pytest.raises(ValueError, match="--threads 0 must be 1 or more"):
        BENCHMARK.main(["--threads", "0"])


def test_a_commit_is_dirty_if_files_other_than_results_differ(results):
    BENCHMARK.main([])
    commit = _measure.commit()
    assert len(commit) == 12
    assert json.loads((results / "example.json").read_text(encoding="utf-8"))["commit"] == commit
    (results / "study").mkdir()
    (results / "study" / "run.json").write_text("{}")
    assert _measure.commit() == commit
    (results.parent.parent / "file.py").write_text("two\n")
    assert _measure.commit() == f"{commit}-dirty"


def test_figures_and_bounds_name_the_same(results):
    wrong = Benchmark("example", None, FIGURES, lambda run: {"fast": 0.6, "good": 0.95})
    with pytest.raises(ValueError, match=r"example has the figures \['fast', 'good'\], but bounds for"):
        wrong.main([])
    assert not results.exists(), "nothing is written"


def test_bounds_depend_on_threads_where_they_say_so():
    fast, good = FIGURES["fast"], FIGURES["good"]
    assert fast.holds(0.5, 2) and not fast.holds(0.51, 2) and fast.holds(0.7, 1) and not fast.holds(0.71, 1)
    assert good.holds(0.9, 1) and good.holds(0.9, 2) and not good.holds(0.89, 1)


def test_the_table_marks_missed_bounds():
    rows = everything.figure_rows("example", {"fast": 0.6123, "good": 0.95, "plain": 3.0, "threads": 2}, FIGURES)
    assert rows == [
        ["example", "fast", "0.612", "<= 0.5", "MISSED"],
        ["example", "good", "0.95", ">= 0.9", "ok"],
        ["example", "plain", "3", "", ""],
    ]
    assert everything.succeeded(rows, quick=True)
    assert not everything.succeeded(rows, quick=False)
    assert everything.succeeded(rows[1:], quick=False)


def test_a_benchmark_that_fails_fails_the_command(capsys):
    rows = everything.run_one("no_such_benchmark", quick=True, threads=None)
    assert rows == [["no_such_benchmark", "", "", "", "FAILED"]]
    assert not everything.succeeded(rows, quick=True)
    with pytest.raises(ValueError, match="There is no benchmark 'no_such_benchmark'; there are masked_lm_head"):
        everything.main(["no_such_benchmark"])


def test_all_are_run_with_the_options_and_the_head_also_with_one_thread(monkeypatch, capsys):
    runs = []

    def run_one(name: str, quick: bool, threads: int | None) -> list[list[str]]:
        runs.append((name, quick, threads))
        return [[name, "fast", "2", "<= 1", everything.MISSED]]

    monkeypatch.setattr(everything, "run_one", run_one)
    everything.main(["--quick"])
    assert runs == [("masked_lm_head", True, None), ("masked_lm_head", True, 1)] + [
        (name, True, None) for name in everything.NAMES if name != "masked_lm_head"
    ]
    printed = capsys.readouterr().out
    assert _measure.QUICK in printed and "| peers | fast | 2 | <= 1 | MISSED |" in printed
    with pytest.raises(SystemExit):
        everything.main(["peers"])


def fill(megabytes: int) -> float:
    return added_peak(lambda: torch.ones(megabytes, 2**18).sum())


def test_memory_is_that_of_a_new_process(capsys):
    run = Run(quick=True, threads=1)
    held = torch.ones(256, 2**18)  # of this process, and of no other
    peaks = run.memory("filling", {"little": partial(fill, 16), "much": partial(fill, 128)})
    assert 16 <= peaks["little"] < 48 and 128 <= peaks["much"] < 160 and len(held) == 256
    assert run.measured["megabytes"]["filling"].keys() == peaks.keys()
    assert capsys.readouterr().out.startswith("filling, megabytes: little ")
    assert in_new_process(torch.get_num_threads, 1) == 1


def test_a_quick_run_from_end_to_end(results, capsys):
    from benchmarks.elastic_loading import BENCHMARK as loading

    loading.main(["--quick"])
    written = json.loads((results / "elastic_loading.quick.json").read_text(encoding="utf-8"))
    assert 0 < written["memory_vs_full"] < 1 < written["bytes_with_exits"] < 1.1
    assert written["megabytes"]["added by loading and one forward pass"].keys() == {
        "full", "4 layers", "4 layers, exits"
    }  # fmt: skip


def test_figures_of_the_documentation_are_those_of_the_results_files():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "speed.md").read_text(encoding="utf-8")
    peers = json.loads((root / "benchmarks" / "results" / "peers.json").read_text())
    table = page.partition("## Beside sentence-transformers")[2].partition("##")[0]
    shown = [float(ratio) for ratio in re.findall(r"\| (\d\.\d\d) \|$", table, flags=re.MULTILINE)]
    assert shown == [round(peers[name], 2) for name in import_module("benchmarks.peers").BOUNDS]
    head = json.loads((root / "benchmarks" / "results" / "masked_lm_head.json").read_text())
    shown = [float(ratio) for ratio in re.findall(r"\| (\d\.\d\d) \| `masked_lm_head` \|", page)]
    assert shown == [round(head[name], 2) for name in import_module("benchmarks.masked_lm_head").BOUNDS]
    assert not peers["quick"] and not head["quick"]


def test_the_allocator_is_counted_exactly():
    """Two tensors together, and not what is freed before or after."""

    def work() -> None:
        first = torch.empty(2**18)  # 1 MB
        del first
        second, third = torch.empty(2**18), torch.empty(2**19)
        del second
        third.resize_(0)

    assert allocated_peak(work) == pytest.approx(3.0, abs=0.01)


def sent_by_all_reduce() -> int:
    before = sent_bytes()
    torch.distributed.all_reduce(torch.ones(2**18))
    torch.distributed.barrier()
    return sent_bytes() - before


def test_bytes_are_counted_on_the_way_out():
    """Of two processes, each sends half of 1 MB, and half of the sum."""
    for sent in in_new_processes(sent_by_all_reduce, 2, threads=1):
        assert sent == pytest.approx(2**20, rel=0.01)
