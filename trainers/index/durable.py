"""Writing to the folder of an index."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np


def append(file: Path, end: int, rows: np.ndarray) -> None:
    """Write rows at an offset. What a killed process left after it is removed."""
    with file.open("ab") as opened:
        opened.truncate(end)
        opened.write(np.ascontiguousarray(rows).data)
        opened.flush()
        os.fsync(opened.fileno())
