"""The stages of a pipeline, read from its file and checked before any work."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from .command import parse_options


REFERENCE = re.compile(r"\{([A-Za-z0-9_-]+)\}")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
NAME = re.compile(r"[A-Za-z0-9_-]+")
# Options that name files or folders to read.
FILES = ("files", "train_files", "eval_files", "corpus_files", "prepared_data", "checkpoints", "run")
KEYS = {"command", "options", "launcher"}


@dataclass(frozen=True)
class Stage:
    """
    One stage of a pipeline.

    Args:
        name (`str`): Name, also that of its output folder.
        command (`tuple[str, ...]`): The command of m3bert, such as `("train", "contrastive")`.
        options (`dict[str, Any]`): Its options, with folders in place of references.
        after (`tuple[str, ...]`): The stages whose output it reads.
        launcher (`tuple[str, ...]`): What starts the command.
        folder (`Path`): Its output folder.
    """

    name: str
    command: tuple[str, ...]
    options: Mapping[str, Any]
    after: tuple[str, ...]
    launcher: tuple[str, ...]
    folder: Path

    @property
    def record(self) -> Path:
        """File that says with which options the stage ran, and whether it is finished."""
        return self.folder.with_name(f"{self.name}.json")

    @property
    def arguments(self) -> list[str]:
        """The words after the command: its method, if it has one, and its options."""
        return [*self.command[1:], *option_list({**self.options, "output_dir": str(self.folder)})]

    @property
    def inputs(self) -> list[tuple[str, Path]]:
        """The option and the path of each local file or folder that the stage reads."""
        named = [(option, path) for option in FILES for path in as_list(self.options.get(option, []))]
        return [(option, Path(path)) for option, path in named if not _is_url(path)]

    @property
    def words(self) -> list[str]:
        """The command line. The command is a module beside this one, in a checkout and when installed."""
        return [*self.launcher, f"{__package__}.{self.command[0]}", *self.arguments]


def as_list(value: Any) -> list[Any]:
    """A list as it is; another value as the one member of a list."""
    return value if isinstance(value, list) else [value]


def option_list(options: Mapping[str, Any]) -> list[str]:
    """Options as words of a command line. `config` may be a list, and is then repeated."""
    words: list[str] = []
    for name, value in options.items():
        if name == "config":
            for recipe in as_list(value):
                words += ["--config", str(recipe)]
        elif isinstance(value, Mapping):
            words += [f"--{name}", json.dumps(value)]
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        elif isinstance(value, bool):
            words += [f"--{name}", str(value).lower()]
        else:
            words += [f"--{name}", str(value)]
    return words


def read_pipeline(file: Path) -> list[Stage]:
    """
    The stages of a file, checked.

    Raises:
        ValueError: if the file is not a pipeline, a stage has an unknown command or option, refers to a stage that is
            not before it, or a file or an environment variable is missing. The message names the stage.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("stages"), Mapping) or not content["stages"]:
        raise ValueError(f"{file} has no stages: it needs output_dir, and stages with a command each.")
    unknown = content.keys() - {"output_dir", "launcher", "shared", "stages"}
    if unknown or "output_dir" not in content:
        found = ", ".join(map(str, content))
        raise ValueError(f"{file} must have output_dir and stages, and may have launcher and shared; found: {found}.")
    folder = Path(_expanded(str(content["output_dir"])))
    stages: list[Stage] = []
    for name, described in content["stages"].items():
        try:
            stages.append(_stage(str(name), described, folder, content.get("launcher"), [its.name for its in stages]))
        except ValueError as error:
            raise ValueError(f"{file}, stage {str(name)!r}: {error}") from error
    return stages


def _stage(name: str, described: Any, folder: Path, launcher: str | None, before: list[str]) -> Stage:
    if not NAME.fullmatch(name):
        raise ValueError("a name has letters, digits, - and _ only.")
    if not isinstance(described, Mapping) or "command" not in described or described.keys() - KEYS:
        raise ValueError("a stage has a command, and may have options and launcher.")
    command = tuple(str(described["command"]).split())
    if not command or command[0] not in CHECKS:
        raise ValueError(f"unknown command {described['command']!r}; commands: {', '.join(CHECKS)}.")
    given = described.get("options") or {}
    if not isinstance(given, Mapping):
        raise ValueError("options must map names to values.")
    if "output_dir" in given:
        raise ValueError(f"output_dir is {folder / name}: leave it out.")
    found: list[str] = []
    options = {str(key): _resolved(str(key), value, folder, before, found) for key, value in given.items()}
    starter = described.get("launcher", launcher if command[0] == "train" else None)
    own = tuple(shlex.split(starter)) if starter else (sys.executable, "-m")
    stage = Stage(name, command, options, tuple(dict.fromkeys(found)), own, folder / name)
    with _one_line_errors():
        CHECKS[command[0]](stage.arguments)
    return stage


def _resolved(option: str, value: Any, folder: Path, before: list[str], found: list[str]) -> Any:
    """A value with folders in place of references, and files in place of patterns. Adds the references to `found`."""
    if isinstance(value, Mapping):
        return {key: _resolved(option, its, folder, before, found) for key, its in value.items()}
    if isinstance(value, list):
        members = [_resolved(option, its, folder, before, found) for its in value]
        return [one for its in members for one in (its if isinstance(its, list) else [its])]
    if not isinstance(value, str):
        return value

    def folder_of(reference: re.Match[str]) -> str:
        name = reference.group(1)
        if name not in before:
            raise ValueError(
                f"{option} refers to {{{name}}}, but the stages before it are: {', '.join(before) or 'none'}."
            )
        found.append(name)
        return str(folder / name)

    expanded = REFERENCE.sub(folder_of, _expanded(value))
    if option not in FILES or REFERENCE.search(value) or _is_url(expanded):
        return expanded
    files = sorted(glob(expanded)) if "*" in expanded else [expanded] if os.path.exists(expanded) else []
    if not files:
        raise ValueError(f"{option}: {expanded} does not exist.")
    return files if "*" in expanded else expanded


def _is_url(path: str) -> bool:
    from trainers.data.files import is_url

    return is_url(path)


def _expanded(value: str) -> str:
    """A text with the values of environment variables."""
    missing = [name for name in VARIABLE.findall(value) if name not in os.environ]
    if missing:
        raise ValueError(f"the environment variable {missing[0]} is not set.")
    return os.path.expandvars(value)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns the exit of argparse, which prints a usage text, into an error of one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except SystemExit as error:
        lines = printed.getvalue().strip().splitlines() or [str(error)]
        raise ValueError(lines[-1].partition("error: ")[2] or lines[-1]) from error


def _check_train(arguments: list[str]) -> None:
    from .train import check_options, method_of, parse

    if not arguments or arguments[0].startswith("-"):
        raise ValueError("train needs a method: `command: train contrastive`.")
    check_options(*parse(method_of(arguments[0])[0], arguments[1:]))


def _check_evaluate(arguments: list[str]) -> None:
    from .encoder import EncoderArguments
    from .evaluate import EvaluationArguments, tasks_of

    _, options = parse_options((EncoderArguments, EvaluationArguments), None, arguments)
    if not tasks_of(options):
        raise ValueError("nothing to score: name tasks.")


def _check_average(arguments: list[str]) -> None:
    from .average import AveragingArguments, check

    (options,) = parse_options((AveragingArguments,), None, arguments)
    check(options)


def _check_prepare(arguments: list[str]) -> None:
    from trainers.data.files import format_of
    from trainers.data.preparing import files_by_language

    from .prepare import PreparingArguments

    (options,) = parse_options((PreparingArguments,), None, arguments)
    if not options.files or options.tokenizer_name is None:
        raise ValueError("prepare needs files and tokenizer_name.")
    there = [file for file in options.files if os.path.exists(file)]  # an earlier stage writes the others
    if options.language_column is not None:
        return
    for language, files in files_by_language(there).items():
        try:
            format_of(files)
        except ValueError as error:
            raise ValueError(f"language {language!r} cannot be read: {error}") from error


def _check_tokenizer(arguments: list[str]) -> None:
    from .tokenizer import TokenizerArguments

    (options,) = parse_options((TokenizerArguments,), None, arguments)
    if not options.files:
        raise ValueError("tokenizer needs files.")


# Command -> what checks its options without any work.
CHECKS: dict[str, Callable[[list[str]], None]] = {
    "tokenizer": _check_tokenizer,
    "prepare": _check_prepare,
    "train": _check_train,
    "average": _check_average,
    "evaluate": _check_evaluate,
}
