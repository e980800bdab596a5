"""The mean of the weights of several checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


# Parts of config.json that do not change what the weights mean.
NOT_COMPARED = ("_name_or_path", "transformers_version", "dtype")


def average(states: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """
    The mean of several states, computed in float64 and rounded once to the type of the first. Tensors that are not
    floats, such as counters, must be equal in all of them.

    Args:
        states (`Sequence[Mapping[str, torch.Tensor]]`): Name -> tensor, with the same names and shapes.

    Returns:
        `dict[str, torch.Tensor]`: Name -> mean.

    Raises:
        ValueError: if there is no state, or names, shapes or tensors that are not floats differ.
    """
    if not states:
        raise ValueError("There is nothing to average.")
    first, *others = states
    for other in others:
        if first.keys() != other.keys():
            different = sorted(first.keys() ^ other.keys())
            raise ValueError(f"Not all checkpoints have the same tensors: {', '.join(different[:3])}.")
    means = {}
    for name, tensor in first.items():
        for other in others:
            if other[name].shape != tensor.shape:
                raise ValueError(f"{name} has different shapes: {list(tensor.shape)}, {list(other[name].shape)}.")
            if not tensor.is_floating_point() and not torch.equal(other[name], tensor):
                raise ValueError(f"{name} is not a float tensor and differs between checkpoints.")
        if tensor.is_floating_point():
            total = tensor.double()
            for other in others:
                total = total + other[name].double()
            means[name] = (total / len(states)).to(tensor.dtype)
        else:
            means[name] = tensor.clone()
    return means


def average_checkpoints(folders: Sequence[str | Path], output_dir: str | Path) -> None:
    """
    Write a checkpoint whose weights are the mean of several, one file in memory at a time. All other files are those
    of the last checkpoint, but for the state of its training. It appears when it is complete.

    Args:
        folders (`Sequence[str | Path]`): The checkpoints, at least two.
        output_dir (`str | Path`): Folder to write, which must not exist.

    Raises:
        ValueError: if there are fewer than two, their configs or tensors differ, a file cannot be read, or
            `output_dir` exists.
    """
    checkpoints = [Path(folder) for folder in folders]
    if len(checkpoints) < 2:
        raise ValueError("Averaging needs two checkpoints or more.")
    target = Path(output_dir)
    if target.exists():
        raise ValueError(f"{target} exists already: choose another folder.")
    configs = [_config(folder) for folder in checkpoints]
    for folder, config in zip(checkpoints, configs, strict=True):
        different = [name for name in config.keys() | configs[0].keys() if config.get(name) != configs[0].get(name)]
        if different:
            raise ValueError(f"{folder} has another config than {checkpoints[0]}: {', '.join(sorted(different))}.")
    names = [_weights(folder) for folder in checkpoints]
    if not names[0]:
        raise ValueError(f"{checkpoints[0]} has no file *.safetensors.")
    for folder, its in zip(checkpoints, names, strict=True):
        if its != names[0]:
            raise ValueError(f"{folder} has other weights files than {checkpoints[0]}: {', '.join(its)}.")
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(checkpoints[-1], unfinished, ignore=_not_published)
    for name in names[0]:
        _average_file([folder / name for folder in checkpoints], unfinished / name)
    unfinished.rename(target)


def _config(folder: Path) -> dict[str, Any]:
    """The values of a checkpoint's config that matter."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"{folder} is no checkpoint: it has no config.json.")
    values = json.loads(file.read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in NOT_COMPARED}


def _weights(folder: Path) -> list[str]:
    """The weights files of a checkpoint, also those of its modules, relative to it."""
    files = (file.relative_to(folder) for file in folder.rglob("*.safetensors"))
    return sorted(file.as_posix() for file in files if not file.parts[0].startswith("checkpoint-"))


def _not_published(folder: str, names: list[str]) -> set[str]:
    """The files of a run that are no part of a checkpoint to load, and weights, which are computed."""
    training = ("checkpoint-", "optimizer", "scheduler", "rng_state", "trainer_state", "training_args", "stream-")
    return {name for name in names if name.startswith(training) or name.endswith((".safetensors", ".pt", ".pth"))}


def _average_file(files: Sequence[Path], target: Path) -> None:
    """Average a file of weights, tensor by tensor."""
    try:
        opened = [safe_open(file, "pt") for file in files]
        means: dict[str, torch.Tensor] = {}
        for name in opened[0].keys():
            missing = [str(file) for file, its in zip(files, opened, strict=True) if name not in its.keys()]
            if missing:
                raise ValueError(f"{missing[0]} lacks the tensor {name}.")
            means |= average([{name: its.get_tensor(name)} for its in opened])
        for file, its in zip(files, opened, strict=True):
            more = sorted(set(its.keys()) - means.keys())
            if more:
                raise ValueError(f"{file} has a tensor that the others lack: {more[0]}.")
    except SafetensorError as error:
        raise ValueError(f"A weights file cannot be read; it may be truncated: {error}.") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(means, target, metadata={"format": "pt"})
