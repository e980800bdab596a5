"""
List the recipes for `m3bert train METHOD --config NAME`, or print one:

    m3bert recipes
    m3bert recipes mipic_bert

A recipe is a YAML file of options. `--config` can be repeated: later files override earlier ones, and options on the
command line override all files. Recipes in `ablations/` and `studied/` are made to go on top of another recipe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ...utils.help_texts import did_you_mean
from ..command import argument_parser


FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Names of the recipes in this package, such as `mipic_bert` and `ablations/mic_scr_only`."""
    files = sorted(FOLDER.rglob("*.yaml"), key=lambda file: (file.parent != FOLDER, file))
    return [file.relative_to(FOLDER).with_suffix("").as_posix() for file in files]


def find_recipe(name: str) -> Path:
    """The file of a recipe: one of [`recipe_names`], or the path of a YAML file. ValueError if there is none."""
    for file in (Path(name), FOLDER / f"{name}.yaml"):
        if file.is_file():
            return file
    names = recipe_names()
    raise ValueError(f"{name} is neither a recipe nor a file{did_you_mean(name, names)}; recipes: {', '.join(names)}.")


def read_recipes(names: Iterable[str]) -> dict[str, Any]:
    """The options of several recipes together. Later ones override earlier ones; mappings, such as the arguments of a
    part (`pic: {pooling: mean}`), are merged."""
    options: dict[str, Any] = {}
    for name in names:
        with open(find_recipe(name), encoding="utf-8") as file:
            options = merged(options, yaml.safe_load(file) or {})
    return options


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` updated with `over`. Nested mappings are merged; all other values are replaced."""
    both = {
        name: merged(base[name], over[name])
        for name in base.keys() & over.keys()
        if isinstance(base[name], Mapping) and isinstance(over[name], Mapping)
    }
    return {**base, **over, **both}


def title_of(file: Path) -> str:
    """The first comment line of a recipe: what it is."""
    return file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ").rstrip(".")


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("name", nargs="?", help="print this recipe")
    options = parser.parse_args(arguments)
    if options.name is not None:
        print(find_recipe(options.name).read_text(encoding="utf-8"), end="")
        return
    width = max(map(len, recipe_names()))
    for name in recipe_names():
        print(f"{name:<{width}}  {title_of(FOLDER / f'{name}.yaml')}")
