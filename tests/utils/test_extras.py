"""Packages that only some uses need."""

from __future__ import annotations

import json
import sys

import pytest

from m3bert.utils.extras import require_extra


def test_a_package_that_is_there_is_imported():
    assert require_extra("json", "evaluation", "A test") is json


def test_a_package_that_is_not_there_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    with pytest.raises(
        ValueError, match=r"Retrieval needs the package sklearn: pip install 'm3bert\[evaluation\]', in a"
    ):
        require_extra("sklearn.metrics", "evaluation", "Retrieval")
    with pytest.raises(ValueError, match=r"needs the package sklearn: pip install sklearn\.$"):
        require_extra("sklearn.metrics", None, "Retrieval")
