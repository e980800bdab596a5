"""The rooms of the project and the direction of the arrows between them, read from the imports."""

import ast
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer
from tests.trainers.tiny_run import pair_config, pair_trainer


ROOT = Path(__file__).parent.parent
# Installed package -> its folder in a checkout.
FOLDERS = {
    "m3bert.modeling": "modeling_m3bert", "m3bert.trainers": "trainers", "m3bert.hub_cards": "hub_cards",
    "m3bert.commands": "scripts", "m3bert": "m3bert", "benchmarks": "benchmarks",
}  # fmt: skip
# From the bottom to the top. A module imports its own room and those below. The first name that fits counts.
ROOMS = (
    ("m3bert.modeling", 0), ("m3bert.utils", 0), ("m3bert.models", 1), ("m3bert.encode", 2), ("m3bert.data", 3),
    ("m3bert.exits", 4), ("m3bert.evaluation", 4), ("m3bert.index", 5), ("m3bert.hub_cards", 5),
    ("m3bert.trainers.core", 6), ("m3bert.trainers.embedding", 7), ("m3bert.trainers.distillation", 7),
    ("m3bert.trainers", 8), ("m3bert.commands", 9), ("m3bert", 9), ("benchmarks", 10),
)  # fmt: skip
# Lines of the package and of the templates of cards. Lower it freely; raise it only in a commit that says what the
# user gets for it.
MOST_SOURCE_LINES = 32_934


class Import(NamedTuple):
    """One module of the project imports another, at the top of the file or inside a function."""

    source: str
    target: str
    line: int
    deferred: bool


def project_files() -> dict[str, Path]:
    """Module -> its file. The folders of packages are linked in `m3bert/`; a file counts once."""
    files = {}
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = file
    return files


def imports_of(name: str, file: Path, modules: set[str]) -> Iterator[Import]:
    """Imports of modules of the project, those for a type checker, too."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, deferred: bool) -> Iterator[Import]:
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            targets = [full if full in modules else base for full in names]
        for target in dict.fromkeys(targets):
            if target in modules and target != name:
                yield Import(name, target, node.lineno, deferred)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    yield from visit(ast.parse(file.read_text(encoding="utf-8")), False)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    files = project_files()
    return [found for name, file in files.items() for found in imports_of(name, file, set(files))]


def room(module: str) -> tuple[str, int]:
    return next((name, level) for name, level in ROOMS if f"{module}.".startswith(f"{name}."))


def circles(imports: list[Import]) -> list[list[str]]:
    """Groups of modules that import each other, deferred imports counted (Tarjan's strongly connected components)."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        graph.setdefault(found.source, set()).add(found.target)
        graph.setdefault(found.target, set())
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found_circles: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for target in sorted(graph[module]):
            if target not in index:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], index[target])
        if lowest[module] == index[module]:
            members = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(members) > 1:
                found_circles.append(sorted(members))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found_circles


def foreign_private(imports: list[Import]) -> list[Import]:
    """Private modules (`_name`) that are used from outside the folder they are in."""
    foreign = []
    for found in imports:
        parts = found.target.split(".")
        private = next((position for position, part in enumerate(parts) if part.startswith("_")), None)
        if private is not None and not f"{found.source}.".startswith(".".join(parts[:private]) + "."):
            foreign.append(found)
    return foreign


def test_no_module_imports_one_above_it_and_none_is_in_a_circle(imports):
    assert [each for each in imports if room(each.target)[1] > room(each.source)[1]] == []
    assert circles(imports) == []


def test_top_folders_do_not_import_each_other(imports):
    """The faces of the package, which hand on the names of all folders, are of no folder."""
    pairs = set()
    for found in imports:
        if found.source not in ("m3bert", "m3bert.cli"):
            folders = [next(name for name in FOLDERS if f"{end}.".startswith(f"{name}.")) for end in found[:2]]
            pairs.add(tuple(folders))
    assert sorted(pair for pair in pairs if pair[0] < pair[1] and pair[::-1] in pairs) == []


def test_private_modules_stay_in_their_room(imports):
    assert foreign_private(imports) == []


def test_cards_do_not_read_the_faces(imports):
    faces = {"m3bert.trainers", "m3bert.evaluation"}
    assert [found for found in imports if room(found.source)[0] == "m3bert.hub_cards" and found.target in faces] == []


def test_core_trainer_knows_nothing_of_publication(imports):
    """Publication is a matter of the methods' trainers."""
    graph: dict[str, set[str]] = {}
    for found in imports:
        graph.setdefault(found.source, set()).add(found.target)
    seen, waiting = set(), ["m3bert.trainers.core.trainer"]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph.get(module, ())
    assert not [module for module in seen if module.startswith("m3bert.hub_cards")]


# Files of trainers/ that a reader of one step of Matryoshka fine-tuning has to know.
MOST_FILES_OF_A_STEP = 11


def test_a_training_step_is_read_in_few_files(tiny_tokenizer, sentences, tmp_path):
    """Counted after the first step, in the threads of the step and its backward pass."""
    args = pair_config(ContrastiveConfig, tmp_path, grid="2,6x8,32", max_steps=2)
    trainer = pair_trainer(ContrastiveTrainer, args, tiny_tokenizer, sentences)
    step, steps, files = trainer.training_step, [], set()

    def watch(frame, event, argument):
        files.add(frame.f_code.co_filename)

    def watched_step(*inputs):
        steps.append(inputs)
        for set_profile in (sys.setprofile, threading.setprofile):
            set_profile(watch if len(steps) == 2 else None)
        try:
            return step(*inputs)
        finally:
            for set_profile in (sys.setprofile, threading.setprofile):
                set_profile(None)

    trainer.training_step = watched_step
    trainer.train()
    rooms = tuple(f"{ROOT / 'm3bert' / room}/" for room in ("trainers", "encode"))
    own = sorted(str(Path(file).relative_to(ROOT)) for file in files if file.startswith(rooms))
    assert "m3bert/trainers/embedding/info_nce.py" in own
    assert len(own) <= MOST_FILES_OF_A_STEP, own


def test_every_package_is_installed():
    """A package that pyproject.toml does not list is missing from the wheel."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    own = {name: file for name, file in project_files().items() if not name.startswith("benchmarks")}
    assert {name for name, file in own.items() if file.name == "__init__.py"} == set(setup["packages"])
    assert setup["package-dir"] == {
        name: folder for name, folder in FOLDERS.items() if name not in ("m3bert", "benchmarks")
    }


LONGEST_FUNCTION, MOST_ARGUMENTS = 60, 10


def test_functions_fit_on_a_page_and_take_few_arguments():
    """Constructors aside: what a user may set is listed there."""
    long = []
    for name, file in project_files().items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not name.startswith("benchmarks"):
                arguments = [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
                count = len([argument for argument in arguments if argument not in ("self", "cls")])
                is_long = (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
                if is_long or (count > MOST_ARGUMENTS and node.name != "__init__"):
                    long.append(f"{name}.{node.name}")
    assert long == []


def test_the_package_does_not_grow():
    files = [file for name, file in project_files().items() if not name.startswith("benchmarks")]
    files += (ROOT / "hub_cards").glob("*.md")
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert lines <= MOST_SOURCE_LINES
