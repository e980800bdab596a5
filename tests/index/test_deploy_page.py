"""The page on indexes: what it prints and says of the engines is what they print and are."""

import json
import re

import pytest

from benchmarks import index_engines
from m3bert.encode.precisions import PRECISIONS
from m3bert.index.engine import find_engine
from tests.index.test_engines import INSTALLED
from tests.snippets import ROOT, read


PAGE = "docs/deploy.md"
TITLES = {"faiss": "faiss", "Qdrant": "qdrant", "LanceDB": "lancedb"}


def rows(header: str) -> dict[str, list[str]]:
    """Engine -> cells of the other columns, of the table with a header."""
    lines = read(PAGE).partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {TITLES[re.sub(r"\[([\w -]+)\].*", r"\1", first)]: rest for first, *rest in cells}


def codes_of(text: str) -> set[str]:
    """The codes that a cell names: `all but int4`, or `float32, binary, qama`."""
    left_out = text.removeprefix("all but ").split(", ") if text.startswith("all") else None
    if left_out is not None:
        return set(PRECISIONS) - set(left_out)
    return {code for code in PRECISIONS for name in text.split(", ") if code == name or code.startswith(f"{name}-")}


def test_the_figures_of_the_page_are_those_of_the_results_file():
    file = ROOT / "benchmarks" / "results" / f"{index_engines.BENCHMARK.name}.json"
    results, page = json.loads(file.read_text(encoding="utf-8")), read(PAGE)
    assert index_engines.table(results) in page


@pytest.mark.parametrize("name", INSTALLED)
def test_the_tables_say_what_the_engines_have(name):
    engine = find_engine(name)
    _, kinds = rows("| vector store | what it is | index types |")[name]
    assert tuple(kinds.split(", ")) == engine.kinds
    first, second = rows("| vector store | precisions of the first search |")[name]
    assert (codes_of(first), codes_of(second)) == (set(engine.codes), set(engine.second_codes))
