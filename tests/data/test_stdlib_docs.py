"""The pairs of texts that come with Python."""

import pytest

from m3bert.data.stdlib_docs import docstring_pairs, split_by_module, stdlib_pairs


def test_the_pairs_are_many_and_each_is_there_once():
    pairs = stdlib_pairs()
    assert len(pairs) > 2500
    assert len({pair.summary for pair in pairs}) == len({pair.body for pair in pairs}) == len(pairs)
    modules = {pair.module for pair in pairs}
    assert {"textwrap", "builtins.str"} <= modules
    assert any(module.startswith("topics.") for module in modules)


def test_no_module_is_in_both_parts():
    train, test = split_by_module(stdlib_pairs())
    assert not {pair.module for pair in train} & {pair.module for pair in test}
    assert 800 <= len(test) < 1000
    assert all(pair.is_clean for pair in test)


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Join two paths.\n\n" + "word " * 40, ("Join two paths.", True)),
        ("Join two paths.\n" + "word " * 40, ("Join two paths.", True)),
        ("Join two or more\n" + "word " * 40, ("Join two or more", False)),
        ("Join two paths.\n\n" + "word " * 10, ("Join two paths.", False)),
        ("Join two paths.\n\n" + "word " * 7, None),
        ("join(a, b) -> str\n\nJoin two paths.\n" + "word " * 40, ("Join two paths.", True)),
        ("Join.\n\n" + "word " * 40, None),
        ("Join two paths.", None),
        ("", None),
        (None, None),
    ],
)
def test_docstrings_are_split_at_their_summary(docstring, expected):
    pair = next(docstring_pairs("module", "name", docstring), None)
    assert (pair and (pair.summary, pair.is_clean)) == expected


def test_private_names_are_not_measured_by():
    for name, public in {"a.b": True, "a._b": False, "_a.b": False, "a.__b__": True}.items():
        (pair,) = docstring_pairs("module", name, "Join two paths.\n\n" + "word " * 40)
        assert pair.is_clean == public
