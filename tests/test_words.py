"""The words that users read: none of the old ones, and the field's words where they are explained."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.snippets import ROOT, pages, read


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("words_of_the_documentation", ROOT / "docs" / "words.py")
    assert spec is not None and spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(words) -> list:
    return list(words.hits(words.texts()))


def test_no_old_word_is_left(words, found):
    assert [hit for hit in found if words.allowance(hit) is None] == []


def test_every_allowed_place_still_has_its_word(words, found):
    assert {words.allowance(hit) for hit in found} - {None} == set(words.ALLOWED)


@pytest.mark.parametrize(
    "old",
    [
        "64 numbers per vector",
        "one layer and one width",
        "Embeddings are pooled, then cut",
        "the state of a layer",
        "all-MiniLM-L6-v2 untouched",
        "An engine that lacks it",
        "the kinds of index",
        "these are scored again",
        "Use 48 dims, or re-score",
        "*asymmetric search*",
        "an error in a\n    code that is stored",
        "Seconds since any moment",
        "the gradients, which go\n    home",
        "bytes a vector",
    ],
)
def test_an_old_word_is_found(words, old):
    assert len(list(words.hits(iter([("page.md", 1, old)])))) == 1


def test_the_words_of_the_field_and_code_are_left_alone(words):
    text = (
        "The hidden states and the\n    optimizer's state are truncated; remote code, a code of two letters.\n"
        "`state` and `--vector_store faiss`\n```bash\ncut -f 1 states | engine\n```\n"
        "Args:\n    state (`torch.Tensor`): The state dict. {{ engine }}\n"
    )
    assert list(words.hits(iter([("page.md", 1, text)]))) == []


def test_a_hit_names_its_line(words):
    (hit,) = words.hits(iter([("page.md", 5, "one\n\n    the width\n")]))
    assert (hit.file, hit.line) == ("page.md", 7)


def test_the_readme_says_first_what_it_is():
    assert read("README.md").splitlines()[0].startswith("# 2D Matryoshka embeddings (depth and dimensions)")


def test_exits_are_told_apart_from_early_exits_in_one_place():
    assert [page for page in pages() if "early exit" in read(page)] == ["docs/concepts.md"]
    section = read("docs/concepts.md").partition("\n## Exit\n")[2].partition("\n## ")[0]
    assert "tuned lens" in section and "translator" in section and "early exit" in section
