"""What the commands share: reading options, and ending with a one-line error message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from trainers.core.compute import ComputeArguments


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints the description as written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if action.required or default is False or default in (None, "", [], argparse.SUPPRESS):
            return action.help
        return f"{action.help or ''} (default: %(default)s)".strip()


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """An empty parser whose help begins with a description."""
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of [`ComputeArguments`] to a parser; [`compute_of`] reads them."""
    from dataclasses import fields

    from trainers.core.compute import ComputeArguments

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
    from trainers.core.compute import ComputeArguments

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
    return parser.parse_args_into_dataclasses(arguments)


def run_command(main: Callable[[list[str]], None]) -> None:
    """Call a command's `main` with the command line. Errors that the user can fix are printed without a traceback."""
    try:
        main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough: `m3bert recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError) as error:
        sys.exit(f"error: {one_line(error)}")


def one_line(error: Exception) -> str:
    """The first line of an error, since some libraries add a page of advice. For files: name and reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
