"""Tools of the commands: reading options, and ending with a one-line error message."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..models.repository import MODEL_FILES, one_line
from ..utils.durable import only_writer
from ..utils.help_texts import did_you_mean


EXPORT_FILES = (*MODEL_FILES, "onnx", "router_config.json", "query_[0-9]_*", "document_[0-9]_*")
BOOLEANS = ("yes", "true", "t", "y", "1", "no", "false", "f", "n", "0")  # as transformers reads them
SIZE_FOLDERS = ("[0-9]*-layers", "table")  # of an export of several sizes


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """An empty parser whose help begins with a description, as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def parse_options(
    classes: Sequence[type],
    description: str | None,
    arguments: list[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    before: str = "",
    **positionals: dict[str, Any],
) -> tuple[Any, ...]:
    """
    Read options into dataclasses, one option per field.

    Args:
        classes (`Sequence[type]`): The dataclasses.
        description (`str`, *optional*): Text above the options in the help.
        arguments (`list[str]`): The command line.
        defaults (`Mapping[str, Any]`, *optional*): Name of an option -> default in place of the field's.
        before (`str`, *optional*): Words of the usage before the options, which the caller has read.
        positionals (`dict[str, Any]`, *optional*): Arguments without an option: name -> what `add_argument` takes.

    Returns:
        `tuple`: one object per dataclass, and with `positionals` a namespace of their values.

    Raises:
        ValueError: for an unknown option.
    """
    from transformers import HfArgumentParser

    usage = " ".join(filter(None, ["%(prog)s", before, *positionals, "[options]"]))
    formatter = argparse.RawDescriptionHelpFormatter
    parser = HfArgumentParser(classes, usage=usage, description=description, formatter_class=formatter)
    for name, values in positionals.items():
        parser.add_argument(name, **values)
    parser.set_defaults(**(defaults or {}))
    if positionals:
        arguments = with_flag_values(classes, arguments)
    *objects, words = parser.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
    if words:
        name = words[0].partition("=")[0]
        known = did_you_mean(name, re.findall(r"--\w+", parser.format_help()))
        kind = "option" if name.startswith("-") else "argument"
        raise ValueError(f"unknown {kind} {name}{known}; --help lists all.")
    return tuple(objects)


def with_flag_values(classes: Sequence[type], arguments: list[str]) -> list[str]:
    """The command line with a value for each flag: `--overwrite SOURCE` is a flag and an argument, but the parser of
    transformers would read a flag with the value SOURCE."""
    flags = {f"__{field.name}" for each in classes for field in fields(each) if field.type in (bool, "bool")}
    return [
        f"{word}=True" if word.replace("-", "_") in flags and following.lower() not in BOOLEANS else word
        for word, following in zip(arguments, [*arguments[1:], ""], strict=True)
    ]


def check_overwriting(
    folder: str | Path,
    files: Sequence[str],
    overwrite: bool,
    source: str | None = None,
    instead: str = "or name another folder",
) -> None:
    """Raise a ValueError if a folder holds files of these patterns, which a command is to write, and `overwrite` is
    not set, or the folder is the source of the command. `instead` is what else the user can do."""
    name = next((path.name for pattern in files for path in sorted(Path(folder).glob(pattern))), None)
    if name is None:
        return
    if source is not None and Path(folder).resolve() == Path(source).resolve():
        raise ValueError(f"{folder} is the source: name another folder for the result.")
    if not overwrite:
        raise ValueError(f"{folder} holds {name}: pass --overwrite to replace it, {instead}.")


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
