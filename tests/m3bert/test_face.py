"""The public names of `m3bert`."""

from __future__ import annotations

from importlib.metadata import version

import m3bert
import m3bert.evaluation
from m3bert import modeling as modeling_m3bert, trainers


def test_the_names_are_those_of_the_architecture_the_trainers_and_the_evaluation():
    assert sorted(m3bert.ARCHITECTURE) == sorted(modeling_m3bert.__all__)
    exported = [*m3bert.ARCHITECTURE, *m3bert.MODULES, *trainers.__all__, *m3bert.evaluation.__all__]
    assert sorted(m3bert.__all__) == sorted(["__version__", *exported])
    assert len(set(m3bert.__all__)) == len(m3bert.__all__), "a name means one thing"
    assert dir(m3bert) == sorted(m3bert.__all__)


def test_every_name_is_there():
    for name in set(m3bert.__all__) - {"__version__", *m3bert.MODULES}:
        owners = [owner for owner in (modeling_m3bert, trainers, m3bert.evaluation) if name in owner.__all__]
        assert [getattr(owner, name) for owner in owners] == [getattr(m3bert, name)], name


def test_the_version_is_that_of_the_distribution():
    assert m3bert.__version__ == version("m3bert")
