"""What this project writes loads without it, in older and newer versions of transformers and sentence-transformers."""

import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_folders_load_in_other_versions():
    command = ["make", "-o", ".venv/installed-dev", f"BIN={Path(sys.executable).parent}", "test-loading"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-2000:]
