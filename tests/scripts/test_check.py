"""The check of an objective: it passes the one of the documentation, and finds what is wrong with others."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from scripts.check import main
from tests import warm_processes
from tests.scripts.conftest import ROOT
from tests.snippets import read, snippets


CHECKS = ["card", "terms", "encoder", "teacher", "processes"]
# What fails -> a line of the objective, what is in its place, and what the message says.
MISTAKES = {
    "card": ('equation = "max(', 'equation = "" and "max(', "no title or equation: Margin"),
    "terms": ("= rows.mean(losses)", "= losses", "not finite scalars: margin_2x8, "),
    "encoder": (
        "= self.embeddings(batch, layer)",
        "= (text.detach() for text in self.embeddings(batch, layer))",
        "no gradient reaches it",
    ),
    "teacher": (
        "rows.mean(losses)",
        'rows.mean(losses + batch.teacher["anchor"].mean(dim=1))',
        "gradients reach the embeddings of anchor",
    ),
    "processes": ("RankRows.of(len(anchors), anchors.device)", "RankRows((len(anchors),))", "gradients differ by "),
}  # fmt: skip


@pytest.fixture
def objective(tmp_path) -> Callable[..., str]:
    """The method of the documentation's objective, with one text replaced."""
    (code,) = [
        snippet.code
        for snippet in snippets(read("docs/write-an-objective.md"))
        if snippet.code.startswith("# mine.py")
    ]

    def write(old: str = "", new: str = "") -> str:
        assert old in code
        (tmp_path / "mine.py").write_text(code.replace(old, new) if old else code)
        return f"{tmp_path}/mine.py:MarginConfig"

    return write


@pytest.fixture
def warm(monkeypatch) -> None:
    """The two processes have imported the libraries before."""

    def spawn(function: Callable, args: tuple[list[str], str], nprocs: int) -> None:
        arguments, folder = args
        code = f"import os, sys\nfrom scripts.check import {function.__name__} as run\n"
        code += "run(int(os.environ['RANK_OF_CHECK']), sys.argv[2:], sys.argv[1])"
        ranks = [{**os.environ, "RANK_OF_CHECK": str(rank)} for rank in range(nprocs)]
        words = [folder, *arguments]
        done = warm_processes.server().run(code, ROOT, ranks, path=[str(ROOT)], arguments=words)
        assert [each.returncode for each in done] == [0, 0], "".join(each.stderr[-2000:] for each in done)

    monkeypatch.setattr("torch.multiprocessing.spawn", spawn)


def results(printed: str) -> dict[str, str]:
    """Check -> `ok`, or what is wrong."""
    found = {}
    for line in printed.splitlines():
        status, rest = line.split(maxsplit=1)
        name, _, problem = rest.partition(": ")
        assert (status == "ok") == (problem == "")
        found[name] = problem or status
    return found


def test_the_objective_of_the_documentation_passes(warm, objective, capsys):
    main([objective()])
    assert results(capsys.readouterr().out) == dict.fromkeys(CHECKS, "ok")


@pytest.mark.parametrize("method", ["multigranular-mlm", "2dmse"])
def test_methods_of_the_package_pass(warm, method, capsys):
    """One with labels and a sum over tokens, one that draws granularities, which all processes share."""
    main([method])
    assert results(capsys.readouterr().out) == dict.fromkeys(CHECKS, "ok")


@pytest.mark.parametrize("check", MISTAKES)
def test_a_mistake_fails_its_check_only(warm, objective, check, capsys):
    old, new, reason = MISTAKES[check]
    with pytest.raises(SystemExit) as end:
        main([objective(old, new)])
    assert end.value.code == 1
    found = results(capsys.readouterr().out)
    assert [name for name, result in found.items() if result != "ok"] == [check]
    assert found[check].startswith(reason)


def test_options_are_those_of_the_config(objective):
    method = objective("self.margin = margin", 'raise ValueError(f"a margin of {margin}")')
    with pytest.raises(ValueError, match="^a margin of 0.5$"):
        main([method, "--margin", "0.5"])
    with pytest.raises(ValueError, match="unknown option --marge"):
        main([method, "--marge", "0.5"])


@pytest.mark.slow
def test_the_command_starts_two_processes_itself(objective, run_module):
    done = run_module("m3bert", "check", objective())
    assert done.returncode == 0, done.stderr
    assert results(done.stdout) == dict.fromkeys(CHECKS, "ok")
