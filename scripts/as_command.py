"""Run a file of this folder, `python scripts/fit.py`, as its command, `m3bert fit`."""

from __future__ import annotations

import sys
from pathlib import Path


def run() -> None:
    """Run the command of the file that Python was started with, and exit."""
    file = Path(sys.argv[0]).resolve()
    sys.path[0] = str(file.parent.parent)  # instead of this folder, whose evaluate.py would hide a library
    from m3bert.cli import COMMANDS, main

    (name,) = (name for name, (module, _) in COMMANDS.items() if module == file.stem)
    main([name, *sys.argv[1:]])
    sys.exit()
