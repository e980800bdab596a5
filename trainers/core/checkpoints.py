"""Checkpoints of training: which one is complete, and how its weights are loaded."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import TypeVar

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME


Module = TypeVar("Module", bound=nn.Module)


def complete_checkpoints(output_dir: str | Path) -> list[str]:
    """The complete checkpoints in the output folder of a run, in their order. A checkpoint that was being written when
    the run was killed is not complete."""
    steps = {
        int(file.parent.name.removeprefix("checkpoint-")): str(file.parent)
        for file in Path(output_dir).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if _is_json(file)
    }
    return [steps[step] for step in sorted(steps)]


def last_checkpoint(output_dir: str | Path) -> str:
    """The last complete checkpoint in the output folder of a run; ValueError if there is none."""
    checkpoints = complete_checkpoints(output_dir)
    if not checkpoints:
        raise ValueError(f"{output_dir} has no complete checkpoint to resume from.")
    return checkpoints[-1]


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


@contextmanager
def reading_tensors(what: str) -> Iterator[None]:
    """Turn the errors of a file of tensors that is broken into a ValueError that names it."""
    try:
        yield
    except (UnpicklingError, SafetensorError, EOFError, OSError, RuntimeError, KeyError) as error:
        raise ValueError(f"{what} cannot be read: {textwrap.shorten(str(error), 300)}") from error


def part_of(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}


def with_weights(module: Module, state_dict: Mapping[str, torch.Tensor]) -> Module:
    """A copy of a module, whose own parameters FSDP may have divided, with these whole ones."""
    module = deepcopy(module)
    module.load_state_dict(state_dict, assign=True)
    return module


def load_weights(model: PreTrainedModel, folder: str) -> None:
    """Load the weights in `folder` into `model`, also exits, paths and static table, by way of a second model.
    ValueError if a file cannot be read, or a tensor is missing or has the wrong shape."""
    with reading_tensors(f"The model in {folder}"):
        saved, info = type(model).from_pretrained(folder, output_loading_info=True, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
    if missing := sorted(info["missing_keys"]):
        raise ValueError(f"The checkpoint {folder} lacks {len(missing)} tensor(s), such as {', '.join(missing[:3])}.")
