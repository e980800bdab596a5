"""The quantizer that is published with an encoder, in the subfolder `quantizer` of its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ..modeling import M3BertQuantizer, quantization_m3bert
from ..modeling.files_elastic import Source
from ..models.settings import hub_id, safetensors_only


QUANTIZER_FOLDER = "quantizer"
QUANTIZER_CODE = "quantization_m3bert.py"


def find_quantizer(name_or_path: str | Path, **hub_options: Any) -> M3BertQuantizer | None:
    """The quantizer that was published with an encoder (folder or Hub id), if there is one."""
    return quantizer_of(Source.at(name_or_path, hub_options))


def quantizer_of(source: Source) -> M3BertQuantizer | None:
    """As [`find_quantizer`], where an encoder was loaded from. This package loads it, without remote code."""
    if not has_quantizer(source):
        return None
    folder = "/".join(part for part in (source.subfolder, QUANTIZER_FOLDER) if part)
    options = {**safetensors_only(source.name, folder), **source.hub, "subfolder": folder}
    return M3BertQuantizer.from_pretrained(source.name, **options).eval()


def has_quantizer(source: Source) -> bool:
    """Whether a quantizer was published with an encoder. `False` if its folder or repository is not there."""
    if not Path(source.name).is_dir() and hub_id(source.name) is None:
        return False
    return source.file(f"{QUANTIZER_FOLDER}/config.json", _raise_exceptions_for_connection_errors=False) is not None


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
