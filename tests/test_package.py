"""What an installed copy of the project consists of."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages


ROOT = Path(__file__).resolve().parents[1]


def test_every_package_is_installed():
    listed = re.search(r"packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"([\w.]+)"', listed[1]))
    assert names == set(find_packages(str(ROOT), include=["modeling_m3bert*", "trainers*", "hub_cards*"]))
