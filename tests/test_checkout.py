"""A checkout and unusual installations: a second copy of a package, a zip, bytecode."""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
NAMES = "import m3bert; assert len(m3bert.__all__) > 50; m3bert.Grid; print(m3bert.__file__)"


def run(*arguments: str, folder: Path = ROOT, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    """Python in a folder, without what this process has on its path."""
    return subprocess.run(
        [sys.executable, *(["-I"] if isolated else []), *arguments], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("folder", ["trainers", "hub_cards", "modeling_m3bert", "scripts"])
def test_a_second_copy_of_a_package_is_refused(folder):
    done = run("-c", f"import {folder}", isolated=False)
    assert done.returncode == 1 and f"the folder {folder} is a part of the package m3bert" in done.stderr


@pytest.mark.parametrize("kind", ["zip", "bytecode"])
def test_the_package_runs_from_a_zip_and_without_its_source(kind, tmp_path):
    package = tmp_path / "lib" / "m3bert"
    shutil.copytree(ROOT / "m3bert", package, ignore=shutil.ignore_patterns("__pycache__"))
    at = package.parent
    if kind == "bytecode":
        assert compileall.compile_dir(package, quiet=1, legacy=True)
        for file in package.rglob("*.py"):
            file.unlink()
    else:
        at = tmp_path / "m3bert.zip"
        with zipfile.ZipFile(at, "w") as archive:
            for file in package.rglob("*.py"):
                archive.write(file, file.relative_to(package.parent))
    done = run("-c", f"import sys; sys.path.insert(0, {str(at)!r}); {NAMES}", folder=tmp_path)
    assert done.returncode == 0 and str(at) in done.stdout, done.stderr
