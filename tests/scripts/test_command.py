"""What the commands share: options with their defaults, and errors of one line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import pytest

from scripts import (
    evaluate,
    export,
    index,
    quickstart,
    train,
)
from scripts.command import (
    add_compute_options,
    argument_parser,
    compute_of,
    parse_options,
    run_command,
)
from trainers.core.device import ComputeArguments


@dataclass
class Options:
    """Some options."""

    name: str | None = field(default=None, metadata={"help": "A name. Default: none."})
    sizes: list[int] = field(default_factory=list, metadata={"help": "Sizes."})
    seed: int = field(default=0, metadata={"help": "Random seed."})
    fast: bool = field(default=False, metadata={"help": "Be fast."})
    tidy: bool = field(default=True, metadata={"help": "Be tidy."})


def test_options_are_fields():
    (options,) = parse_options((Options,), None, ["--sizes", "1", "2", "--fast", "--no_tidy"])
    assert options == Options(sizes=[1, 2], fast=True, tidy=False)


def test_help_has_the_defaults_that_say_something(capsys):
    with pytest.raises(SystemExit):
        parse_options((Options,), "About:\n\n    an example", ["--help"])
    printed = capsys.readouterr().out
    assert "[options]\n\nAbout:\n\n    an example\n" in printed
    assert "Random seed. (default: 0)" in printed and "Be tidy. (default: True)" in printed
    assert printed.count("(default:") == 2


def test_both_kinds_of_parsers_read_the_same_options_for_computing():
    line = ["--device", "cpu", "--compute_dtype", "bfloat16", "--attn_implementation", "eager", "--compile"]
    for words in (line, []):
        parser = argument_parser("About.")
        add_compute_options(parser)
        (expected,) = parse_options((ComputeArguments,), None, words)
        assert compute_of(parser.parse_args(words)) == expected
    with pytest.raises(ValueError, match="device='abacus' is not on this machine; legal values: "):
        compute_of(parser.parse_args(["--device", "abacus"]))


def test_a_required_option_has_no_default(capsys):
    parser = argument_parser("About.")
    parser.add_argument("--documents", type=int, required=True, help="number of documents")
    parser.add_argument("--tolerance", type=float, default=0.01, help="share that may be lost")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    printed = capsys.readouterr().out
    assert "number of documents\n" in printed and "share that may be lost (default: 0.01)" in printed


@pytest.mark.parametrize(
    "main, words",
    [
        (train.main, ["mipic"]),
        (evaluate.main, []),
        (export.main, []),
        (export.main, ["--format", "native"]),
        (export.main, ["--format", "static"]),
        (export.main, ["--format", "router"]),
        (index.main, ["plan.json"]),
        (quickstart.main, []),
    ],
)
def test_the_model_has_the_same_option_everywhere(main, words):
    for option in ("--model", "--model_name_or_path"):
        with pytest.raises(ValueError, match=r"^unknown option --nothing\."):
            main([*words, option, "runs/model", "--nothing", "1"])


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


def test_a_bug_is_not_hidden(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["name"])
    with pytest.raises(KeyError):
        run_command(lambda arguments: {}["missing"])
