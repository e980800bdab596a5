"""Tools of the commands: reading options, and ending with a one-line error message."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..encode.durable import only_writer


if TYPE_CHECKING:
    from ..encode.device import ComputeArguments

# Files of a model. A model that replaces another one removes all of them.
MODEL_FILES = (
    "config.json", "model*.safetensors", "model.safetensors.index.json", "*_m3bert.py", "modeling_elastic.py",
    "elastic", "tokenizer*.json", "special_tokens_map.json", "vocab.txt", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "1_Pooling", "[2-9]_Dense", "[2-9]_Normalize", "quantizer",
    "training.json",
)  # fmt: skip
EXPORT_FILES = (*MODEL_FILES, "onnx", "router_config.json", "query_[0-9]_*", "document_[0-9]_*")


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Prints the description as written, and the default of every option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.required or action.default is False or action.default in (None, "", []):
            return action.help
        return super()._get_help_string(action)


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """An empty parser whose help begins with a description."""
    return argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)


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

    usage = " ".join(["%(prog)s", *(name.upper() for name in positionals), "[options]"])
    parser = HfArgumentParser(classes, usage=usage, description=description, formatter_class=HelpFormatter)
    for name, values in positionals.items():
        parser.add_argument(name, **values)
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


def one_line(error: Exception) -> str:
    """The first line of an error, since some libraries add a page of advice. For files: name and reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
