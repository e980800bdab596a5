"""What the commands share: reading options, and ending with a one-line error message."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.core.durable import only_writer


if TYPE_CHECKING:
    from trainers.core.device import ComputeArguments

# What a model consists of: a model in the place of another one keeps none of these.
MODEL_FILES = (
    "config.json", "model*.safetensors", "model.safetensors.index.json", "*_m3bert.py", "modeling_elastic.py",
    "elastic", "tokenizer*.json", "special_tokens_map.json", "vocab.txt", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "1_Pooling", "[2-9]_Dense", "[2-9]_Normalize", "quantizer",
    "training.json",
)  # fmt: skip
EXPORT_FILES = (*MODEL_FILES, "onnx", "router_config.json", "query_[0-9]_*", "document_[0-9]_*")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the description as written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if action.required or default is False or default in (None, "", [], argparse.SUPPRESS):
            return action.help
        return f"{action.help or ''} (default: %(default)s)".strip()


class BriefHelpFormatter(HelpFormatter):
    """One line per option: its name and the first sentence of its help."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=34, **options)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return action.option_strings[0] if action.option_strings else super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        return re.split(r"(?<=[.;])(?<!Eq\.) ", action.help or "")[0].rstrip(".;")

    def _split_lines(self, text: str, width: int) -> list[str]:
        return [textwrap.shorten(text, width, placeholder=" ...")]


class ArgumentParser(argparse.ArgumentParser):
    """Refuses unknown options as [`refuse_unknown`] does."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = self.parse_known_args(args, namespace)
        refuse_unknown(self, rest)
        return options


def argument_parser(description: str | None) -> ArgumentParser:
    """An empty parser whose help begins with a description."""
    return ArgumentParser(description=description, formatter_class=HelpFormatter)


def refuse_unknown(parser: argparse.ArgumentParser, rest: Sequence[str]) -> None:
    """
    Check that a parser has read all arguments.

    Raises:
        ValueError: names the first argument that is left, and the options whose names are most similar.
    """
    named = [argument.partition("=")[0] for argument in rest if argument.startswith("--")]
    if named:
        options = [option for action in parser._actions for option in action.option_strings]
        known = [option for option in options if option.startswith("--") and "-" not in option[2:]]
        similar = difflib.get_close_matches(named[0], known, n=3)
        meant = f" Did you mean {' or '.join(similar)}?" if similar else " --help lists all options."
        raise ValueError(f"unknown option {named[0]}.{meant}")
    if rest:
        raise ValueError(f"{rest[0]!r} belongs to no option; --help lists all options.")


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of [`ComputeArguments`] to a parser; [`compute_of`] reads them."""
    from dataclasses import fields

    from trainers.core.device import ComputeArguments

    for option in fields(ComputeArguments):
        text = option.metadata["help"]
        if isinstance(option.default, bool):
            parser.add_argument(f"--{option.name}", action="store_true", help=text)
        else:
            parser.add_argument(f"--{option.name}", default=option.default, help=text)


def compute_of(options: argparse.Namespace) -> ComputeArguments:
    """
    The values of [`add_compute_options`].

    Raises:
        ValueError: as [`ComputeArguments`].
    """
    from trainers.core.device import ComputeArguments

    return ComputeArguments(**{name: getattr(options, name) for name in vars(ComputeArguments())})


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

    parser = HfArgumentParser(
        classes,
        usage=" ".join(["%(prog)s", *(name.upper() for name in positionals), "[options]"]),
        description=description,
        formatter_class=HelpFormatter,
    )
    for name, values in positionals.items():
        parser.add_argument(name, **values)
    return read_options(parser, arguments)


def read_options(parser: Any, arguments: list[str]) -> tuple[Any, ...]:
    """
    The dataclasses that a parser reads from arguments.

    Args:
        parser ([`~transformers.HfArgumentParser`]): The parser.
        arguments (`list[str]`): The command line.

    Raises:
        ValueError: as [`refuse_unknown`], or if a dataclass refuses a value.
    """
    *found, rest = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    refuse_unknown(parser, rest)
    return tuple(found)


def group_options(parser: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> None:
    """
    Move the options of a parser into groups of its help, in this order. Other options stay where they are, above.

    Args:
        parser (`argparse.ArgumentParser`): The parser.
        groups (`Mapping[str, Sequence[str]]`): Title -> names of options.
    """
    options = parser._optionals._group_actions
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        group._group_actions += [action for name in names for action in options if action.dest == name]
        options[:] = [action for action in options if action.dest not in names]


def check_overwriting(
    folder: str | Path,
    files: Sequence[str],
    overwrite: bool,
    source: str | None = None,
    instead: str = "or name another folder",
) -> None:
    """
    Check that a command may write to a folder. What is there is then replaced.

    Args:
        folder (`str`): The folder.
        files (`Sequence[str]`): Patterns of the names that the command writes.
        overwrite (`bool`): Whether the folder may hold such files.
        source (`str`, *optional*): What the files are made of.
        instead (`str`, *optional*): What else the user can do.

    Raises:
        ValueError: if the folder holds such files, and `overwrite` is not set or it is the source.
    """
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


@contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Name a model in the error if it cannot be loaded: the libraries' message says that there is no connection."""
    try:
        yield
    except RuntimeError as error:  # how transformers refuses tensors of another shape
        raise ValueError(f"{source} cannot be loaded: {one_line(error)}") from error
    except OSError as error:
        if Path(source).is_dir():
            raise
        raise OSError(f"{source} is not a folder, and could not be loaded from the Hub: {one_line(error)}") from error


def run_command(main: Callable[[list[str]], None]) -> None:
    """
    Call a command's `main` with the command line. Errors that the user can fix are printed without a traceback, unless
    the environment variable `M3BERT_DEBUG` is set.
    """
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough: `m3bert recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        if os.environ.get("M3BERT_DEBUG", "0") not in ("", "0"):
            raise
        sys.exit(f"error: {one_line(error)}")


def one_line(error: Exception) -> str:
    """The first line of an error, since some libraries add a page of advice. For files: name and reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
