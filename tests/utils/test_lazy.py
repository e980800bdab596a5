"""Lazy packages: what type checkers see, what `__all__` names and what is there are the same; and extras."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import m3bert
import m3bert.evaluation
from m3bert import modeling as modeling_m3bert, trainers
from m3bert.utils.extras import require_extra
from tests.conftest import refused
from tests.trainers.tiny_run import ROOT


PACKAGES = [m3bert, trainers, m3bert.evaluation]


def seen_by_type_checkers(package) -> dict[str, str]:
    """Public name -> module that the block `if TYPE_CHECKING:` imports it from."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = [
        statement
        for statement in tree.body
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING"
    ]
    found: dict[str, str] = {}
    for line in block.body:
        assert isinstance(line, ast.ImportFrom), "imports, and nothing else"
        for alias in line.names:
            name = alias.asname or alias.name
            assert name not in found, f"{name} is imported twice"
            found[name] = importlib.util.resolve_name("." * line.level + (line.module or ""), package.__name__)
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_all_sides_name_the_same(package):
    if package is not trainers:  # whose names are imports that both sides read
        seen = seen_by_type_checkers(package)
        assert [name for name in package.__all__ if name != "__version__"] == sorted(seen) == dir(package)
        for name, module in seen.items():
            assert getattr(package, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        _ = package.nothing
    everything: dict = {}
    exec(f"from {package.__name__} import *", everything)
    assert set(package.__all__) <= set(everything)


def test_importing_a_face_imports_nothing_heavy():
    code = "import sys, m3bert.trainers, m3bert.evaluation\n"
    code += "print(sorted({'torch', 'transformers', 'faiss'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_every_method_has_its_config_and_trainer_at_the_top_and_the_version_is_there():
    for prefix in ("MIPIC", "MIC", "IBKD", "QAMA", "Contrastive", "ExitDistillation", "MultigranularMLM"):
        for end in ("Config", "Trainer"):
            assert getattr(m3bert, prefix + end) is getattr(trainers, prefix + end)
    assert m3bert.M3BertModel is modeling_m3bert.M3BertModel
    assert m3bert.__version__ == version("m3bert")


def test_a_package_that_is_there_is_imported_and_another_names_the_extra(monkeypatch):
    assert require_extra("json", "evaluation", "A test") is json
    monkeypatch.setitem(sys.modules, "sklearn.metrics", None)
    message = r"Retrieval needs the package sklearn: pip install 'm3bert\[evaluation\]', in a"
    refused(message, require_extra, "sklearn.metrics", "evaluation", "Retrieval")
    refused(r"needs the package sklearn: pip install sklearn\.$", require_extra, "sklearn.metrics", None, "Retrieval")
