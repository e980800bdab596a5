"""What the commands share: options with their defaults, and errors of one line."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from m3bert.commands.command import next_step, parse_options, run_command
from m3bert.utils.help_texts import option


@dataclass
class Options:
    """Some options."""

    name: str | None = option(None, "A name. Default: none.")
    sizes: list[int] = option([], "Sizes.")
    seed: int = option(0, "Random seed.")
    fast: bool = option(False, "Be fast.")
    tidy: bool = option(True, "Be tidy.")


def test_options_are_fields():
    (options,) = parse_options((Options,), None, ["--sizes", "1", "2", "--fast", "--no_tidy"])
    assert options == Options(sizes=[1, 2], fast=True, tidy=False)


@pytest.mark.parametrize("words", [["--fast", "here"], ["here", "--fast"], ["--fast", "true", "here"]])
def test_a_flag_does_not_read_the_argument_behind_it(words):
    options, place = parse_options((Options,), None, words, folder={})
    assert options.fast and place.folder == "here"


def test_help_has_the_defaults_that_say_something(capsys):
    with pytest.raises(SystemExit):
        parse_options((Options,), "About:\n\n    an example", ["--help"])
    printed = capsys.readouterr().out
    assert "[options]\n\nAbout:\n\n    an example\n" in printed
    assert "Random seed. (default: 0)" in printed and "Be tidy. (default: True)" in printed
    assert printed.count("(default:") == 3, "and of --no_tidy"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("--grid 9x9 is outside.\nA page of advice."), "error: --grid 9x9 is outside."),
        (ValueError(), "error: ValueError"),
        (FileNotFoundError(2, "No such file or directory", "a.json"), "error: a.json: No such file or directory"),
        (OSError("user/model is not on the Hub"), "error: user/model is not on the Hub"),
    ],
)
def test_what_a_user_can_mend_is_one_line(error, line, monkeypatch):
    def main(arguments: list[str]) -> None:
        assert arguments == ["--option"]
        raise error

    monkeypatch.setattr(sys, "argv", ["name", "--option"])
    with pytest.raises(SystemExit) as end:
        run_command(main)
    assert end.value.code == line


def test_the_next_step_can_be_pasted(capsys):
    next_step("m3bert", "search", Path("my index"), "a question")
    next_step(model="runs/model/", trust_remote_code=True)
    search, evaluate = capsys.readouterr().out.splitlines()
    assert search == "Next: m3bert search 'my index' 'a question'"
    assert evaluate.endswith(
        "--model_name_or_path runs/model/ --tasks stdlib --output_dir runs/model-evaluation --trust_remote_code"
    )


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["name"])
    with pytest.raises(KeyError):
        run_command(lambda arguments: {}["missing"])
