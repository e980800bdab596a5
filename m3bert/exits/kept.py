"""Finished parts of a fit in a folder, as safetensors and JSON: to read them runs no code."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..encode.ranks import rank, sum_over_ranks, world_size
from ..utils.durable import replacing
from ..utils.hashing import key_of
from .record import ChosenLayers, PathFit, RefittedPath
from .ridge import Moments
from .sums import ExitSums


logger = logging.getLogger(__name__)
VERSION = 4  # raise it where the same fit has other parts
CONTENT = "content"  # the tensor that holds the JSON
OBJECTS = {kind.__name__: kind for kind in (ChosenLayers, ExitSums, Moments, PathFit, RefittedPath)}


class KeptParts:
    """
    Finished parts of a fit. A part is made once and read afterwards. A file that is truncated, or that another fit
    wrote, is named in a warning, and the part is made anew.

    Args:
        folder (`str` or `Path`, *optional*): Folder of the files. `None` keeps nothing.
        identity (`dict`): Everything that the parts depend on, as JSON values.
        device (`torch.device`): Device of the tensors that were not on the CPU.
    """

    def __init__(self, folder: str | Path | None, identity: Mapping[str, Any], device: torch.device) -> None:
        self.folder, self.device = None if folder is None else Path(folder), device
        self.key = key_of({**identity, "version": VERSION})

    def __call__(self, name: str, make: Callable[[], Any], *, of_all_ranks: bool = False) -> Any:
        """The part of this name, which is the same on all ranks, or differs between them. All ranks call it, and all
        make the part again if one lacks it."""
        if self.folder is None:
            return make()
        owner = "" if of_all_ranks else f"-{rank()}-of-{world_size()}"
        file = self.folder / f"m3bert-{name}-{self.key}{owner}.safetensors"
        part = self._read(file) if file.is_file() else None
        if float(sum_over_ranks(torch.tensor(float(part is not None)))) == world_size():
            return part
        tensors: dict[str, torch.Tensor] = {}
        content = json.dumps(_packed(make(), tensors))
        if not of_all_ranks or rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            as_bytes = torch.frombuffer(bytearray(content, "utf-8"), dtype=torch.uint8)
            with replacing(file, mark=f"{os.getpid()}.draft") as draft:
                save_file({**tensors, CONTENT: as_bytes}, draft, metadata={"key": self.key})
        return self._unpacked(json.loads(content), tensors)

    def _read(self, file: Path) -> Any:
        try:
            with safe_open(file, "pt") as opened:
                if (opened.metadata() or {}).get("key") != self.key:
                    raise ValueError("another fit wrote it")
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            return self._unpacked(json.loads(tensors[CONTENT].numpy().tobytes()), tensors)
        except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
            logger.warning(f"{file} cannot be read ({error}): this part of the fit is made anew.")
            return None

    def _unpacked(self, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """The value that [`_packed`] gave. Its tensors are copies, aligned as those that a fit makes."""
        if isinstance(content, list):
            return [self._unpacked(item, tensors) for item in content]
        if not isinstance(content, dict):
            return content
        ((kind, packed),) = content.items()
        if kind in ("cpu", "device"):
            return tensors[packed].to("cpu" if kind == "cpu" else self.device, copy=True)
        inner = self._unpacked(packed, tensors)
        if kind in ("tuple", "dict"):
            return tuple(inner) if kind == "tuple" else dict(inner)
        value = object.__new__(OBJECTS[kind])
        value.__dict__.update(inner)
        return value


def _packed(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A value as JSON: numbers, texts and lists as they are, anything else as `{kind: content}`. Its tensors are
    copied into `tensors` and named."""
    if isinstance(value, torch.Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return {"cpu" if value.device.type == "cpu" else "device": name}
    if isinstance(value, list):
        return [_packed(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_packed(item, tensors) for item in value]}
    if isinstance(value, dict):
        return {"dict": [_packed(item, tensors) for item in value.items()]}
    kind = type(value).__name__
    return {kind: _packed(vars(value), tensors)} if kind in OBJECTS else value
