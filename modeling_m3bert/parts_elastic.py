"""
Elastic encoders, 3 of 5: exits, refitted matrices and the static table, and views that run some layers of a model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .configuration_elastic import Elasticity, set_layers


Part = TypeVar("Part", bound=torch.Tensor | nn.Module)


class Exit(nn.Module):
    """
    The exit of a depth: an affine map from its hidden state to the embedding space of the whole model. `d` dims use
    the first `d` rows. A *joint* map reads `[x, static]`, the hidden state and the static vector of its text; `weight`
    and `bias` are then the map of the hidden state alone, which native models have instead. An exit is no `nn.Linear`:
    peft would adapt, and merge, the map that is not read.

    Args:
        tensors (`dict`): `weight` `(hidden_size, hidden_size)` and `bias` `(hidden_size,)`, and of a joint map
            `joint.weight` `(hidden_size, 2 * hidden_size)` and `joint.bias` `(hidden_size,)`.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        super().__init__()
        self.weight, self.bias = nn.Parameter(tensors["weight"]), nn.Parameter(tensors["bias"])
        self.joint = nn.ParameterDict(grouped(tensors).get("joint", {}))

    def forward(self, x: torch.Tensor, dim: int | None = None, static: torch.Tensor | None = None) -> torch.Tensor:
        """Map `(..., hidden_size)` to `(..., dim)`; `static` has a shape that broadcasts to `x`. Without it, the map
        of the hidden state alone is read."""
        x = x.to(self.weight.device)
        if static is None:
            return nn.functional.linear(x, self.weight[:dim], self.bias[:dim])
        # The static vector is the same for all tokens of a text, so it is mapped once.
        of_state, of_static = self.joint["weight"][:dim].split(x.shape[-1], dim=1)
        mapped = nn.functional.linear(static.to(x.device), of_static, self.joint["bias"][:dim])
        return nn.functional.linear(x, of_state) + mapped


class ElasticParts(nn.Module):
    """
    The parts of an elastic model that the native one lacks, from tensors by their names in the file.

    Attributes:
        exits (`nn.ModuleDict`): Depth -> [`Exit`].
        paths (`nn.ModuleDict`): Depth -> the refitted matrices of its path, by their names in the native model of
            this depth.
        table (`nn.Embedding`, *optional*): The static table, with one row per token of the vocabulary.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor] = {}) -> None:
        super().__init__()
        exits, paths = (grouped(grouped(tensors).get(kind, {})) for kind in ("exits", "paths"))
        self.exits = nn.ModuleDict({depth: Exit(named) for depth, named in exits.items()})
        self.paths = nn.ModuleDict({depth: module_of(named) for depth, named in paths.items()})
        table = tensors.get("table")
        self.table = None if table is None else nn.Embedding.from_pretrained(table, freeze=False)

    # torch.compile cannot make a name out of a depth that varies between calls.

    def exit(self, depth: int) -> Exit | None:
        """The exit of a depth; `None` if it has none."""
        exits: Any = self.exits.items()
        return next((module for name, module in exits if int(name) == depth), None)

    def refitted(self, depth: int) -> dict[str, torch.Tensor]:
        """The refitted matrices of a depth."""
        return next((dict(path.named_parameters()) for name, path in self.paths.items() if int(name) == depth), {})


def grouped(parts: Mapping[str, Part]) -> dict[str, dict[str, Part]]:
    """Parts by the first step of their names, and by the rest of it."""
    groups: dict[str, dict[str, Part]] = {}
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        groups.setdefault(first, {})[rest] = part
    return groups


def module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A module whose parameters have these names, dots included."""
    module = nn.Module()
    for name, group in grouped(tensors).items():
        if "" in group:
            module.register_parameter(name, nn.Parameter(group[""]))
        else:
            module.add_module(name, module_of(group))
    return module


def static_vectors(
    table: torch.Tensor,
    ignored_ids: Sequence[int],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    cu_seq_lens: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    The static vector of each text `(batch, 1, dim)`: the mean of the table's rows `(vocab_size, dim)` over the tokens
    of `input_ids` `(batch, tokens)`, without padding and ignored tokens; zero for a text without others. In a
    flattened row of texts with the cumulative lengths `cu_seq_lens`, each token has the vector of its text,
    `(1, tokens, dim)`.
    """
    rows = nn.functional.embedding(input_ids, table)
    # A mean over hundreds of tokens loses precision in float16 and bfloat16.
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    counted = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if ignored_ids:
        ignored = input_ids.unsqueeze(-1) == input_ids.new_tensor(list(ignored_ids))
        counted = counted.bool() & ~ignored.any(dim=-1)
    counted = counted.to(rows.dtype)
    if cu_seq_lens is None:
        means = torch.bmm(counted.unsqueeze(1), rows) / counted.sum(dim=1).clamp(min=1)[:, None, None]
    else:
        text, counted = texts_of_tokens(cu_seq_lens, input_ids.shape[1]), counted[0].unsqueeze(-1)
        per_text = rows.new_zeros(len(cu_seq_lens), 1)  # the last entry is for tokens after the last text
        numbers = per_text.index_add(0, text, counted).clamp(min=1)
        totals = per_text.repeat(1, rows.shape[-1]).index_add(0, text, counted * rows[0])
        means = (totals / numbers)[text].unsqueeze(0)
    return means.to(table.dtype)


def texts_of_tokens(boundaries: torch.Tensor, tokens: int) -> torch.Tensor:
    """Text of each of `tokens` tokens in a flattened row, `(tokens,)`, from the cumulative lengths of the texts."""
    index = torch.arange(tokens, device=boundaries.device)
    return torch.searchsorted(boundaries[1:].to(index.dtype).contiguous(), index, right=True)


def check_parts(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], spec: Elasticity, what: str) -> None:
    """Raise a ValueError that says `what` lacks a tensor of the depths of a spec, or has one of another shape."""
    width = model.config.hidden_size
    shapes: dict[str, Any] = {"table": (model.config.vocab_size, width)} if spec.table else {}
    for depth in {*spec.exits} - {0}:
        shapes |= {f"exits.{depth}.weight": (width, width), f"exits.{depth}.bias": (width,)}
        if depth in spec.table:
            shapes |= {f"exits.{depth}.joint.weight": (width, 2 * width), f"exits.{depth}.joint.bias": (width,)}
    parameters = {name: parameter.shape for name, parameter in model.named_parameters()}
    for key in [key for key in tensors if key.startswith("paths.")]:
        _, depth_name, name = key.split(".", 2)
        list_name, _ = layer_list(model, model.config.num_hidden_layers)
        shapes[key] = parameters.get(in_source(name, list_name, spec.layers_of(int(depth_name))))
    for key, shape in shapes.items():
        given = tensors[key].shape if key in tensors else None
        if shape is None or given != shape:
            raise ValueError(f"{what}: {key!r} has the shape {given}, and the model needs {shape}.")


def in_source(key: str, name: str, numbers: Sequence[int]) -> str:
    """The name in the source of a tensor of some of its layers, whose numbers are counted from 1; `name` is that of
    the list of layers. Empty if the tensor's layer is none of them."""
    match = re.fullmatch(rf"((?:.*\.)?{re.escape(name)}\.)(\d+)(\..*)", key)
    if match is None or int(match[2]) >= len(numbers):
        return "" if match else key
    return f"{match[1]}{numbers[int(match[2])] - 1}{match[3]}"


# Views: other layers or matrices of a model in memory


def layer_list(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList]:
    """Name and module of the list of layers of a model: the outermost `nn.ModuleList` with this number of modules.
    Raises a ValueError if there is none."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return name, module
    raise ValueError(f"{type(model).__name__} has no list of its {depth} layers, so it cannot skip any.")


def shallow_copy(module: nn.Module) -> nn.Module:
    """A module with the same parameters and submodules, in which others can be put in their place."""
    if "forward" in module.__dict__:
        raise ValueError(
            f"{type(module).__name__} runs on several devices: load the size that you need (output_layer=...)."
        )
    new = module.__class__.__new__(module.__class__)
    new.__dict__.update(module.__dict__)
    new.__dict__.pop("_compiled_call_impl", None)
    new.__dict__["_modules"], new.__dict__["_parameters"] = dict(module._modules), dict(module._parameters)
    return new


def replaced(module: nn.Module, parts: Mapping[str, torch.Tensor | nn.Module]) -> Any:
    """A module in which some parameters or submodules are others; everything else is shared. An adapter of a changed
    submodule is left out: it was made for the other weights."""
    new = shallow_copy(module)
    for name, group in grouped(parts).items():
        part = group.get("")
        if part is None:
            child = module.get_submodule(name)
            part = replaced(getattr(child, "base_layer", child), group)
        vars(new)["_modules" if isinstance(part, nn.Module) else "_parameters"][name] = part
    return new


def view(model: PreTrainedModel, layers: Sequence[int], modules: Sequence[nn.Module] | None = None) -> PreTrainedModel:
    """
    A model that runs some layers of another (counted from 1; without a head), with which it shares all weights. The
    native `forward` makes masks, positions and the final norm. `modules` run in the place of the layers, if given.
    """
    name, all_layers = layer_list(model, model.config.num_hidden_layers)
    config = copy.copy(model.config)
    set_layers(config, layers)
    hooks = getattr(transformers.utils, "output_capturing", None)
    # Once per model: a view that installs its own would record every state twice.
    if hooks is not None and not torch.compiler.is_compiling():
        hooks.maybe_install_capturing_hooks(model)
    new = replaced(model, {name: nn.ModuleList(modules or [all_layers[layer - 1] for layer in layers])})
    new.config = config
    path, _, _ = name.rpartition(".")
    while path:  # the modules around the list, which are copies, too
        module = new.get_submodule(path)
        if "config" in vars(module):
            module.config = config
        path, _, _ = path.rpartition(".")
    return new
