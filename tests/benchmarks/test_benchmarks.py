"""Benchmarks: options, bounds, results files, and the table of all of them."""

import json
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as everything, _measure, gpu_steps
from benchmarks._measure import Benchmark, Bound, at_least, at_most
from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import Grid, MultigranularMLM, NestedModel
from tests.conftest import tiny_config


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


def test_all_benchmarks_are_run_together():
    files = Path(_measure.__file__).parent.glob("[a-z]*.py")
    assert {*everything.NAMES} == {file.stem for file in files if "\nBENCHMARK = " in file.read_text(encoding="utf-8")}


@pytest.mark.parametrize("name", everything.NAMES)
def test_every_benchmark_has_bounds_and_a_quick_run(name, capsys):
    if name == "peers":
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
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["quick"] is False
    full = json.loads((results / "example.json").read_text(encoding="utf-8"))
    assert full.keys() == written.keys(), "the same keys"


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


def test_the_loop_that_a_gpu_is_compared_with_has_the_same_gradients():
    grid = Grid.parse("2,4,6x8,16,32")
    torch.manual_seed(0)
    config = tiny_config(embedding_dropout=0.0, attention_dropout=0.0, sparse_prediction=True, initializer_range=0.1)
    model = M3BertForMaskedLM(config).train().to(gpu_steps.DEVICE)
    ids = torch.randint(5, 99, (8, 16), device=gpu_steps.DEVICE)
    labels = torch.where(torch.rand(ids.shape, device=ids.device) < 0.5, ids, -100)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    gradients = []
    for step in (
        lambda: gpu_steps.step_of(NestedModel(model, MultigranularMLM(grid)), batch, torch.bfloat16),
        lambda: gpu_steps.loop(model, grid, batch),
    ):
        model.zero_grad()
        step()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()
