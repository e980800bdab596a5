"""The page on indexes: what it prints and says of the engines is what they print and are."""

from __future__ import annotations

import ast
import json
import re
from importlib.util import find_spec

import pytest

from benchmarks import index_costs, index_engines
from tests.snippets import ROOT, read, snippets
from tests.trainers.index.collection import Collection, add, make_layout, opened
from tests.trainers.index.test_engines import MODULES
from trainers.core.codes import CODES
from trainers.index.engine import BY_HAND, ENGINES, find_engine
from trainers.index.engines.lines import with_imports


PAGE = "docs/deploy.md"
TITLES = {"faiss": "faiss", "Qdrant": "qdrant", "LanceDB": "lancedb"}
INSTALLED = [name for name in ENGINES if find_spec(MODULES[name]) is not None]


def rows(header: str) -> dict[str, list[str]]:
    """Engine -> cells of the other columns, of the table with a header."""
    lines = read(PAGE).partition(header)[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {TITLES[re.sub(r"\[([\w -]+)\].*", r"\1", first)]: rest for first, *rest in cells}


def codes_of(text: str) -> set[str]:
    """The codes that a cell names: `all but int4`, or `float32, binary, qama`."""
    left_out = text.removeprefix("all but ").split(", ") if text.startswith("all") else None
    if left_out is not None:
        return set(CODES) - set(left_out)
    return {code for code in CODES for name in text.split(", ") if code == name or code.startswith(f"{name}-")}


@pytest.mark.parametrize("name", INSTALLED)
def test_the_lines_of_the_page_are_those_that_are_printed(tmp_path, name):
    collection = Collection.make(120, 2, 384)
    index = opened(tmp_path, make_layout(collection, "64@float32>100>384@float32"), name)
    add(index, collection, range(120))
    printed = with_imports(index.example()).replace(str(tmp_path), f"runs/{name}")
    index.close()
    sections = {
        TITLES.get(snippet.heading): snippet for snippet in snippets(read(PAGE)) if snippet.language == "python"
    }
    # The formatter of the pages has its own quotes and line breaks.
    assert ast.dump(ast.parse(sections[name].code)) == ast.dump(ast.parse(f"{printed}\nprint(found)"))


@pytest.mark.parametrize("benchmark", [index_engines, index_costs], ids=["quality", "costs"])
def test_the_figures_of_the_page_are_those_of_the_results_file(benchmark):
    file = ROOT / "benchmarks" / "results" / f"{benchmark.BENCHMARK.name}.json"
    results, page = json.loads(file.read_text(encoding="utf-8")), read(PAGE)
    assert benchmark.table(results) in page
    assert results.get("chosen", "") in " ".join(line.removeprefix("> ") for line in page.splitlines())
    for figure, bound in benchmark.BOUNDS.items():
        assert bound is None or bound.holds(results[figure], results["threads"]), figure


@pytest.mark.parametrize("name", INSTALLED)
def test_the_tables_say_what_the_engines_have(name):
    engine = find_engine(name)
    _, kinds = rows("| vector store | what it is | index types |")[name]
    assert tuple(kinds.split(", ")) == engine.kinds
    first, second = rows("| vector store | precisions of the first search |")[name]
    assert (codes_of(first), codes_of(second)) == (set(engine.codes), set(engine.second_codes))


def test_the_section_that_refusals_name_is_there():
    section = read(PAGE).partition("\n## Other vector stores\n")[2].partition("\n## ")[0]
    assert section and all(f"### {name}\n" in section for name in BY_HAND)
