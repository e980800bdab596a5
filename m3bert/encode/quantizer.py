"""The quantizer that is published with an encoder, in the subfolder `quantizer` of its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from ..modeling import M3BertQuantizer, quantization_m3bert
from ..modeling.settings_m3bert import hub_id, safetensors_only


QUANTIZER_FOLDER = "quantizer"
QUANTIZER_CODE = "quantization_m3bert.py"


def find_quantizer(name_or_path: str, **hub_options: Any) -> M3BertQuantizer | None:
    """The quantizer that was published with an encoder (folder or Hub id), if there is one. This package loads it,
    without remote code."""
    if not has_quantizer(name_or_path, **hub_options):
        return None
    options = {**safetensors_only(name_or_path, QUANTIZER_FOLDER), **hub_options}
    return M3BertQuantizer.from_pretrained(name_or_path, subfolder=QUANTIZER_FOLDER, **options).eval()


def has_quantizer(name_or_path: str, **hub_options: Any) -> bool:
    """Whether a quantizer was published with an encoder, in a folder or on the Hub. `False` if neither is there."""
    if not name_or_path or not (Path(name_or_path).is_dir() or hub_id(name_or_path)):
        return False
    missing = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    return cached_file(name_or_path, f"{QUANTIZER_FOLDER}/config.json", **hub_options, **missing) is not None


def write_quantizer(folder: str | Path, quantizer: M3BertQuantizer) -> Path:
    """Write a quantizer into the folder of an encoder: weights in a subfolder, which is returned, and the code that
    loads them, which is looked for at the root of a repository. Raises a ValueError if it has no thresholds."""
    if not quantizer.calibrated:
        raise ValueError("This quantizer has no thresholds yet: train it, or call calibrate.")
    target = Path(folder) / QUANTIZER_FOLDER
    quantizer.save_pretrained(target)
    # save_pretrained puts the code beside the weights; remote code is read from the root only.
    (target / QUANTIZER_CODE).unlink(missing_ok=True)
    shutil.copyfile(quantization_m3bert.__file__, Path(folder) / QUANTIZER_CODE)
    return target
