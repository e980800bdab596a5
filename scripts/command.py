"""Tools of the commands: reading options, and ending with a one-line error message."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..models.repository import MODEL_FILES, one_line
from ..utils.durable import only_writer
from ..utils.help_texts import did_you_mean


if TYPE_CHECKING:
    from ..encode.device import ComputeArguments

EXPORT_FILES = (*MODEL_FILES, "onnx", "router_config.json", "query_[0-9]_*", "document_[0-9]_*")
SIZE_FOLDERS = ("[0-9]*-layers", "table")  # of an export of several sizes


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description as written, every option with one spelling, and every default that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action, argparse._StoreFalseAction):
            return f"The opposite of --{action.dest}."
        if action.required or action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = [name for name in action.option_strings if "-" not in name.strip("-")]
        value = "" if action.nargs == 0 else f" {self._format_args(action, action.dest.upper())}"
        return ", ".join(names) + value


class CommandParser(argparse.ArgumentParser):
    """A parser that is [`arranged`]."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arranged(self, args)
        return super().parse_args(args, namespace)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """An empty parser whose help begins with a description."""
    return CommandParser(description=description, formatter_class=HelpFormatter)


def arranged(parser: argparse.ArgumentParser, arguments: Sequence[str], *first: str) -> None:
    """Order the options in the help: required ones first, then those in the examples, which the description indents.
    The usage names the required ones, after the words `first`. ValueError for an unknown option: it names the nearest
    one."""
    examples = {*re.findall(r"--\w+", " ".join(re.findall(r"^ {4}.*", parser.description or "", re.MULTILINE)))}
    either = [action for group in parser._mutually_exclusive_groups for action in group._group_actions]
    needed = [action for action in parser._actions if action.required or not action.option_strings]
    common = [one for one in parser._actions if one not in needed + either and examples & {*one.option_strings}]
    for title, actions in (("required", needed + either), ("in the examples above", common)):
        for group in parser._action_groups:
            group._group_actions = [action for action in group._group_actions if action not in actions]
        parser.add_argument_group(title)._group_actions += actions
    parser._action_groups = parser._action_groups[-2:] + parser._action_groups[2:-2] + parser._action_groups[:2]
    choice = [f"({' | '.join(map(_spelled, either))})"] if either else []
    parser.usage = " ".join(["%(prog)s", *first, *map(_spelled, needed), *choice, "[options]"])
    known = [name for action in parser._actions for name in action.option_strings]
    for word in itertools.takewhile("--".__ne__, arguments):
        name = word.partition("=")[0]
        if name.startswith("--") and not any(option.startswith(name) for option in known):
            raise ValueError(f"unknown option {name}{did_you_mean(name, known)}; --help lists all.")


def _spelled(action: argparse.Action) -> str:
    """An argument in a usage."""
    name = action.dest.upper() + (" ..." if action.nargs == "+" else "")
    return " ".join([*action.option_strings[:1], name if action.nargs != "?" else f"[{name}]"])


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of [`ComputeArguments`] to a parser; [`compute_of`] reads them."""
    from dataclasses import fields

    from ..encode.device import ComputeArguments

    for option in fields(ComputeArguments):
        text = option.metadata["help"]
        if isinstance(option.default, bool):
            parser.add_argument(f"--{option.name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{option.name}", default=option.default, help=text)


def compute_of(options: argparse.Namespace) -> ComputeArguments:
    """The values of [`add_compute_options`]."""
    from ..encode.device import ComputeArguments

    return ComputeArguments(**{name: getattr(options, name) for name in vars(ComputeArguments())})


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A field of a dataclass of options, with its help; a list is copied. `MISSING` makes it required."""
    metadata["help"] = text
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parse_options(
    classes: Sequence[type], description: str | None, arguments: list[str], **positionals: dict[str, Any]
) -> tuple[Any, ...]:
    """
    Read options into dataclasses, one option per field.

    Args:
        classes (`Sequence[type]`): The dataclasses.
        description (`str`, *optional*): Text above the options in the help.
        arguments (`list[str]`): The command line.
        positionals (`dict[str, Any]`, *optional*): Arguments without an option: name -> what `add_argument` takes.

    Returns:
        `tuple`: one object per dataclass, and with `positionals` a namespace of their values.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser(classes, description=description, formatter_class=HelpFormatter)
    for name, values in positionals.items():
        parser.add_argument(name, **values)
    arranged(parser, arguments)
    return parser.parse_args_into_dataclasses(arguments)


def check_overwriting(
    folder: str | Path,
    files: Sequence[str],
    overwrite: bool,
    source: str | None = None,
    instead: str = "or name another folder",
) -> None:
    """Raise a ValueError if a folder holds files of these patterns, which a command is to write, and `overwrite` is
    not set, or the folder is the source of the command. `instead` is what else the user can do."""
    found = next((path.name for pattern in files for path in sorted(Path(folder).glob(pattern))), None)
    if found is None:
        return
    if source is not None and Path(folder).resolve() == Path(source).resolve():
        raise ValueError(f"{folder} is the source: name another folder for the result.")
    if not overwrite:
        raise ValueError(f"{folder} holds {found}: pass --overwrite to replace it, {instead}.")


@contextmanager
def writing_to(folder: str | Path, files: Sequence[str], *args: Any, **kwargs: Any) -> Iterator[None]:
    """[`check_overwriting`], and keep other commands from the folder ([`only_writer`])."""
    with only_writer(Path(folder)):
        check_overwriting(folder, files, *args, **kwargs)
        yield


def run_command(main: Callable[[list[str]], None]) -> None:
    """Call a command's `main` with the command line. A ValueError or OSError is printed as one line, without a
    traceback unless the environment variable `M3BERT_DEBUG` is set."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough: `m3bert recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        if os.environ.get("M3BERT_DEBUG", "0") not in ("", "0"):
            raise
        sys.exit(f"error: {one_line(error)}")


def next_step(*words: object, model: str | Path | None = None, trust_remote_code: bool = False) -> None:
    """Print the command that usually follows: for a `model`, its evaluation on texts that come with Python."""
    if model is not None:
        folder = f"{str(model).rstrip('/')}-evaluation"
        words = ("m3bert", "evaluate", "--model_name_or_path", model, "--tasks", "stdlib", "--output_dir", folder)
        words += ("--trust_remote_code",) * trust_remote_code
    print(f"Next: {shlex.join(map(str, words))}")
