"""
Sharded training: parameters, gradients and the optimizer's state are divided among ranks, by torch's `fully_shard`
(FSDP2).

A rank gathers the parameters of one transformer layer at a time. Checkpoints hold whole tensors, in the format of an
unsharded run: a run can be continued with or without sharding, and on another number of ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from .distributed import world_size
from .states import unwrap_encoder


logger = logging.getLogger(__name__)


def check_sharding(args: Any, mini_batch_size: int | None, optimizer: torch.optim.Optimizer | None = None) -> None:
    """
    Check that a run can be sharded.

    Args:
        args ([`~transformers.TrainingArguments`]): Training arguments.
        mini_batch_size (`int`, *optional*): See [`NestedModel`].
        optimizer (`torch.optim.Optimizer`, *optional*): An optimizer that was passed to the trainer.

    Raises:
        ValueError: names the option that excludes sharding.
    """
    if args.world_size < 2:
        raise ValueError("fully_shard needs two processes or more: start the run with torchrun or accelerate launch.")
    if mini_batch_size is not None:
        raise ValueError(
            "fully_shard does not work with mini_batch_size: cached gradients need the whole parameters. "
            "Pass gradient_checkpointing instead of mini_batch_size, or train without fully_shard."
        )
    if optimizer is not None:
        raise ValueError(
            "fully_shard replaces the parameters by shards, which an optimizer that was made before does not train: "
            "pass optim in the training arguments instead of an optimizer."
        )
    # Evaluation in another dtype moves the model, and keeps it off the device until then.
    evaluation = ("fp16_full_eval", "bf16_full_eval")
    for name in ("fsdp", "deepspeed", "auto_find_batch_size", "torch_compile", *evaluation):
        if getattr(args, name):
            raise ValueError(f"fully_shard and {name} exclude each other: pass one of them.")


def is_sharded(model: nn.Module) -> bool:
    """Whether [`shard`] was called for the model."""
    return isinstance(model, FSDPModule)


def shard(model: nn.Module, encoder: nn.Module) -> None:
    """
    Divide the parameters of a model among all ranks, in place. All ranks start with the parameters of the first one.
    Parameters without dimensions, such as a temperature, stay whole on every rank.

    Args:
        model (`torch.nn.Module`): The model, whole on every rank. Its own forward pass gathers the parameters outside
            the transformer layers.
        encoder ([`~transformers.PreTrainedModel`] or peft model): The part of it with transformer layers.
    """
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            distributed.broadcast(tensor.data, src=0)
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (world_size(),))
    whole = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    for layer in transformer_layers(encoder):
        fully_shard(layer, mesh=mesh, ignored_params=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)


def transformer_layers(encoder: Any) -> list[nn.Module]:
    """The transformer layers of an encoder: those of its list with `num_hidden_layers` modules. Empty if there is no
    such list, as in ALBERT, whose layers share their parameters."""
    encoder = unwrap_encoder(encoder)
    depth = encoder.config.num_hidden_layers
    for module in encoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return list(module)
    logger.warning(
        f"{type(encoder).__name__} has no list of {depth} layers: all of its parameters are gathered at once."
    )
    return []


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank; any other tensor as it is. All ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_like(tensor: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A whole tensor, sharded as `target` is; as it is if `target` is whole."""
    if not isinstance(target, DTensor):
        return tensor
    return distribute_tensor(tensor.to(target.device), target.device_mesh, target.placements)


@contextmanager
def whole_root(model: nn.Module) -> Iterator[None]:
    """
    Within the context, the parameters outside the transformer layers are whole, for a forward pass of a part of the
    model: only the model's own forward pass gathers them. All ranks must enter it. Does nothing for a model that is
    not sharded.
    """
    if not isinstance(model, FSDPModule):
        yield
        return
    model.unshard()
    try:
        yield
    finally:
        model.reshard()


@contextmanager
def _without_shard_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context, `load_state_dict` of modules with whole parameters does not look for shards."""
    removed = []
    for module in set(modules):
        hooks = module._load_state_dict_post_hooks
        ours = {key: hook for key, hook in hooks.items() if hook.__module__.startswith(fully_shard.__module__)}
        for key in ours:
            del hooks[key]
        removed.append((hooks, ours))
    try:
        yield
    finally:
        for hooks, ours in removed:
            hooks.update(ours)


@contextmanager
def whole_parameters(model: nn.Module, write: bool = False) -> Iterator[None]:
    """
    Within the context, the parameters of a sharded model are whole: its state dict can be saved, or another one be
    loaded. All ranks must enter it. Does nothing for other models.

    Args:
        model (`torch.nn.Module`): The model.
        write (`bool`, *optional*, defaults to `False`): Whether changes of the parameters are kept.
    """
    if not is_sharded(model):
        yield
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    owners: list[tuple[nn.Module, str, Any]] = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    ]
    sharded = {id(parameter): parameter for _, _, parameter in owners}  # tied parameters stay tied
    whole = {
        key: nn.Parameter(full_tensor(parameter.detach()), requires_grad=parameter.requires_grad)
        for key, parameter in sharded.items()
    }
    for module, name, parameter in owners:
        module._parameters[name] = whole[id(parameter)]
    try:
        with _without_shard_hooks(module for module, _, _ in owners):
            yield
    finally:
        for module, name, parameter in owners:
            module._parameters[name] = parameter
    if write:
        with torch.no_grad():
            for key, parameter in sharded.items():
                parameter.copy_(sharded_like(whole[key].detach(), parameter))


def join_groups(optimizer: torch.optim.Optimizer, model: nn.Module, decayed: Collection[str]) -> None:
    """
    Put sharded and whole parameters into the two groups of an unsharded run, so that the optimizer's state has the
    same order. The Trainer gives them groups of their own, because one kernel cannot update both: the joined groups
    are updated one parameter at a time.

    Args:
        optimizer (`torch.optim.Optimizer`): A new optimizer of the Trainer.
        model (`torch.nn.Module`): A sharded model.
        decayed (`Collection[str]`): Names of the parameters with weight decay.
    """
    groups = list(optimizer.param_groups)
    if len(groups) == 2:
        return
    joined = []
    for decays in (True, False):
        parameters = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and (name in decayed) is decays
        ]
        members = {id(parameter) for parameter in parameters}
        like = next((group for group in groups if members & {id(each) for each in group["params"]}), groups[0])
        one_by_one: dict[str, Any] = {name: False for name in ("foreach", "fused") if name in like}
        joined.append({**like, **one_by_one, "params": parameters})
    optimizer.param_groups[:] = joined


@contextmanager
def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the context, the state of the optimizer is whole, as that of an unsharded run. All ranks must enter
    it."""
    sharded = {parameter: dict(values) for parameter, values in optimizer.state.items()}
    for parameter, values in sharded.items():
        optimizer.state[parameter] = {
            name: full_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in values.items()
        }
    try:
        yield
    finally:
        optimizer.state.update(sharded)


def shard_loaded_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """
    The state dict of an unsharded optimizer, for one with sharded parameters: a pre-hook of `load_state_dict`.

    Args:
        optimizer (`torch.optim.Optimizer`): An optimizer of sharded parameters.
        state (`Mapping[str, Any]`): State dict of an optimizer of the same parameters, whole.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    target = dict(zip(numbers, parameters, strict=True))
    return {
        **state,
        "state": {
            number: {
                name: (
                    sharded_like(value, target[number])
                    if isinstance(value, torch.Tensor) and value.shape == target[number].shape
                    else value
                )
                for name, value in values.items()
            }
            for number, values in state["state"].items()
        },
    }
