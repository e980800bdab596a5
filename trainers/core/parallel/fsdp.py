"""
Sharded training: what accelerate's FSDP2 (`--fsdp`) needs to know of this package.

accelerate divides the parameters with torch's `fully_shard`: each layer that `NestedModel._no_split_modules` names,
then everything else. Only the forward pass of the whole model gathers what is outside the layers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.trainer import FSDP_MODEL_NAME


Module = TypeVar("Module", bound=nn.Module)
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Training arguments that replace the model or its type, which sharded parameters do not allow.
EXCLUDED = ("torch_compile", "auto_find_batch_size", "fp16_full_eval", "bf16_full_eval")


def require_accelerator(args: Any) -> None:
    """
    Check that a run with `fsdp` has devices that accelerate shards.

    Raises:
        ValueError: if `fsdp` is set on a CPU.
    """
    if args.fsdp and args.device.type == "cpu":
        raise ValueError("fsdp needs GPUs: on a CPU, accelerate trains the whole model in each process instead (DDP).")


def check_fsdp(args: Any, plugin: Any, mini_batch_size: int | None) -> None:
    """
    Check that a run can be sharded.

    Args:
        args ([`~transformers.TrainingArguments`]): Training arguments.
        plugin ([`~accelerate.FullyShardedDataParallelPlugin`]): FSDP's options.
        mini_batch_size (`int`, *optional*): See [`NestedModel`].

    Raises:
        ValueError: names the option that excludes sharding.
    """
    if mini_batch_size is not None:
        raise ValueError(
            "fsdp and mini_batch_size exclude each other: cached gradients need the whole parameters. Pass "
            "activation_checkpointing instead of mini_batch_size, or train without fsdp."
        )
    for name in EXCLUDED:
        if getattr(args, name):
            raise ValueError(f"fsdp and {name} exclude each other: pass one of them.")
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_config has version {plugin.fsdp_version}; only FSDP2 is supported: leave it out.")
    if plugin.state_dict_type.name != "FULL_STATE_DICT":
        raise ValueError(
            f"fsdp_config has state_dict_type {plugin.state_dict_type.name}, which saves no model that can be loaded: "
            "use FULL_STATE_DICT."
        )


def check_checkpoint(folder: str, fsdp: bool) -> None:
    """
    Check that a checkpoint was written with FSDP if the run that continues it uses FSDP, and without if not.

    Raises:
        ValueError: if only one of them uses FSDP. The optimizer's state is then in another format.
    """
    if Path(folder, f"{FSDP_MODEL_NAME}.bin").is_file() != fsdp:
        was, now = ("without", "with") if fsdp else ("with", "without")
        raise ValueError(
            f"{folder} was written {was} fsdp and cannot be resumed {now} it: resume {was} it, or start a run from "
            "its weights (model_name_or_path)."
        )


def precision_policy(mixed_precision: str) -> MixedPrecisionPolicy | None:
    """
    FSDP's precision for accelerate's `mixed_precision`: parameters are gathered in 16 bits, and gradients are reduced
    in float32. Inputs and the loss keep their types. `None` for training in float32.
    """
    dtype = COMPUTE_DTYPES.get(mixed_precision)
    if dtype is None:
        return None
    return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)


@contextmanager
def whole_root(model: nn.Module) -> Iterator[None]:
    """
    Within the context, the parameters outside the layers are whole, for a forward pass of a part of the model. All
    ranks must enter it. Does nothing for a model that is not sharded.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


def with_weights(module: Module, state_dict: Mapping[str, torch.Tensor]) -> Module:
    """A copy of a module whose parameters are sharded, with these whole ones; a module that is not sharded as it
    is."""
    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        return module
    module = copy.deepcopy(module)
    module.load_state_dict(state_dict, assign=True)
    return module
