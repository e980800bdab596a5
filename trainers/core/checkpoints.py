"""Checkpoints of training: which one is complete, and how its weights are loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from modeling_m3bert.modeling_elastic import EXTRAS_FILE, EXTRAS_FOLDER


STATE_FILES = ("optimizer.pt", "scheduler.pt", "rng_state*.pth")


def complete_checkpoints(output_dir: str | Path) -> list[str]:
    """
    The complete checkpoints in the output folder of a run, in their order. A checkpoint that was being written when
    the run was killed is not complete.
    """
    steps = {
        int(file.parent.name.removeprefix("checkpoint-")): str(file.parent)
        for file in Path(output_dir).glob(f"checkpoint-*/{TRAINER_STATE_NAME}")
        if _is_json(file)
    }
    return [steps[step] for step in sorted(steps)]


def last_checkpoint(output_dir: str | Path) -> str:
    """
    The last complete checkpoint in the output folder of a run.

    Raises:
        ValueError: if there is none.
    """
    found = complete_checkpoints(output_dir)
    if not found:
        raise ValueError(f"{output_dir} has no complete checkpoint to resume from.")
    return found[-1]


def _is_json(file: Path) -> bool:
    try:
        json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True


def check_training_state(folder: str) -> None:
    """
    Check that the pickled state of the optimizer, the scheduler and the generators in a checkpoint is of tensors and
    numbers only, and complete. Tensors stay on the disk.

    Raises:
        ValueError: if it is not. Reading anything else could run code.
    """
    for name in STATE_FILES:
        for file in sorted(Path(folder).glob(name)):
            try:
                with safe_globals():
                    torch.load(file, weights_only=True, mmap=True, map_location="cpu")
            except (UnpicklingError, EOFError, RuntimeError, KeyError) as error:
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(f"The state of the training run in {folder} cannot be read: {reason}") from error


def part_of(state_dict: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries whose names start with `prefix`, without the prefix."""
    return {name.removeprefix(prefix): tensor for name, tensor in state_dict.items() if name.startswith(prefix)}


def load_weights(model: PreTrainedModel, folder: str) -> None:
    """
    Load the weights in `folder` into `model`, one tensor at a time: also exits, paths and static table. A second model
    is built only where the file has other names than the model, as some architectures and saved sizes have.

    Raises:
        ValueError: if a file cannot be read, a tensor is missing, or a tensor has the wrong shape.
    """
    targets = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    saved = model.state_dict().keys()  # without buffers that are not persistent
    targets = {name: tensor for name, tensor in targets.items() if name in saved}
    unknown = False  # whether the file has names that the model lacks
    found: set[int] = set()  # addresses of the loaded tensors: a file has only one of several tied weights
    parts = "elastic." if model.base_model is model else f"{model.base_model_prefix}.elastic."
    for file in [*sorted(Path(folder).glob("model*.safetensors")), Path(folder, EXTRAS_FOLDER, EXTRAS_FILE)]:
        if not file.is_file():  # no exits
            continue
        start = parts if file.name == EXTRAS_FILE else ""
        try:
            with safe_open(file, "pt") as tensors, torch.no_grad():
                for stored in tensors.keys():  # not a mapping
                    name = f"{start}{stored}" + (".weight" if start and stored == "table" else "")
                    unknown = unknown or name not in targets
                    if name in targets and list(targets[name].shape) == tensors.get_slice(stored).get_shape():
                        targets[name].copy_(tensors.get_tensor(stored))
                        found.add(targets[name].data_ptr())
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read; it may be truncated: {error}.") from error
    wrong = sorted(name for name, tensor in targets.items() if tensor.data_ptr() not in found)
    if wrong and not (unknown and _load_renamed(model, folder)):
        raise ValueError(
            f"The checkpoint {folder} lacks {len(wrong)} tensors of the model, or has them in another shape: "
            f"{', '.join(wrong[:3])}, ..."
        )


def _load_renamed(model: PreTrainedModel, folder: str) -> bool:
    """Load weights that are stored under other names by way of a second model; `False` if some are missing."""
    try:
        other, info = type(model).from_pretrained(folder, output_loading_info=True, dtype=model.dtype)
    except (ValueError, RuntimeError):
        return False
    if not info["missing_keys"]:
        model.load_state_dict(other.state_dict())
    return not info["missing_keys"]
