"""
Elastic encoders, 3 of 3: any encoder of transformers, loaded with some of its layers and the first of its dimensions.

[`ElasticMixin`] adds exits, paths and a static table to the native class. A loaded size is the native model of the
layers that run, and its exit.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from .configuration_elastic import (
    PER_LAYER,
    SIZE,
    Elasticity,
    Size,
    cut_config,
    entries,
    for_new_weights,
    resolve_size,
    set_layers,
)
from .files_elastic import (
    HEADS,
    INDEX,
    WEIGHTS,
    Source,
    describe,
    of_variant,
    parts_file,
    plain_if_lost,
    read_parts,
    shards_of,
    source_of,
    trained_size,
    uploading,
    write_parts,
    write_settings,
)


if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model
else:
    _Model = object
PUSH_OPTIONS = ("repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description")
AffineMap = tuple[torch.Tensor, torch.Tensor]  # weight and bias
Part = TypeVar("Part", bound=torch.Tensor | nn.Module)


# The parts that a native model lacks


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


def view(model: Any, layers: Sequence[int], modules: Sequence[nn.Module] | None = None) -> Any:
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


@dataclass
class Loading:
    """How a model is loaded: from a source, at a size. Of a smaller size, `layers` names its list of layers, and
    `left_out` is a pattern of the tensors that it does not read."""

    source: Source
    size: Size
    layers: str = ""
    left_out: str = ""


class ElasticMixin(_Model):
    """
    Depths, exits, paths and a static table for the class of an encoder, or of an encoder with a head, in front of
    which it stands ([`elastic_class`]).
    """

    elastic: ElasticParts
    made_of: tuple[type, bool] | None = None  # native class, and whether it has a head; `None` for m3BERT

    def __init__(self, config: PretrainedConfig, *args: Any, loading: Loading | None = None, **kwargs: Any):
        super().__init__(for_new_weights(config) if loading is None else config, *args, **kwargs)
        encoder: Any = self.base_model
        if not isinstance(encoder, ElasticMixin):
            encoder.__class__ = elastic_class(encoder.__class__, False)
        encoder.elastic = ElasticParts()
        if loading is not None:
            encoder.loading = loading
            self._leave_out(loading)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.made_of is None else (_empty, self.made_of, self.__dict__)

    # Running, of encoders

    def forward(
        self,
        *args: Any,
        output_layer: int | None = None,
        output_dim: int | None = None,
        static_states: torch.Tensor | None = None,
        before_exit: bool = False,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        As the native `forward`, at a size: a depth (`output_layer`) and a number of dims to return (`output_dim`), by
        default the config's, else all. `static_states` `(batch, 1 or tokens, hidden_size)` are the result of
        [`~ElasticMixin.static_states`], for a depth that reads the static table beside other inputs than `input_ids`.
        With `before_exit`, the native output of all layers.

        Returns:
            The native output, whose `last_hidden_state` `(batch, tokens, output_dim)` is the exit of the hidden state.
            `hidden_states` are those of the layers that run, before any exit. Depth 0 runs nothing and has none.

        Raises:
            ValueError: if the size is not legal, or the depth reads the static table and there are no `input_ids`.
        """
        if before_exit:
            return self.native_forward(*args, return_dict=return_dict is not False, **kwargs)
        size = Size.of(self.config, output_layer, output_dim)
        given = dict(zip(("input_ids", "attention_mask"), args, strict=False)) | kwargs
        ids, static = given.get("input_ids"), static_states
        if size.reads_table and static is None:
            if ids is None:
                raise ValueError(
                    f"Depth {size.depth} reads the static table by token ids: pass input_ids, or static_states beside "
                    "inputs_embeds."
                )
            width = size.dim if size.depth == 0 else None
            static = self.static_states(ids, given.get("attention_mask"), given.get("cu_seq_lens_q"), width)
        if size.depth == 0:
            like = given["inputs_embeds"][..., :1] if ids is None else ids.unsqueeze(-1)
            output: Any = BaseModelOutput(last_hidden_state=like)
        elif size.is_whole:
            output = self.native_forward(*args, return_dict=True, **kwargs)
        else:
            if "use_cache" in inspect.signature(self.forward).parameters:
                kwargs["use_cache"] = False  # the layers have other numbers in a cache
            output = self.at(size.depth).native_forward(*args, return_dict=True, **kwargs)
        output.last_hidden_state = self.exit_state(size.depth, output.last_hidden_state, size.dim, static)
        as_dict = getattr(self.config, "return_dict", True) if return_dict is None else return_dict
        return output if as_dict else output.to_tuple()

    def native_forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)

    def static_states(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cu_seq_lens: torch.Tensor | None = None,
        dim: int | None = None,
    ) -> torch.Tensor:
        """The static vectors of texts at the first `dim` dims ([`static_vectors`]). Raises a ValueError if the model
        has no static table."""
        if self.elastic.table is None:
            raise ValueError("The model has no static table.")
        ignored = Elasticity.of(self.config).ignored_ids
        return static_vectors(self.elastic.table.weight[:, :dim], ignored, input_ids, attention_mask, cu_seq_lens)

    def exit_state(
        self, depth: int, state: torch.Tensor, dim: int | None = None, static: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        The exit of the hidden state `(..., hidden_size)` of a depth, after the final norm, at the first `dim` dims. A
        depth without an exit only does the latter. `static` are the static vectors of the texts, in a shape that
        broadcasts to `state`; a depth that does not read the static table ignores it.

        Raises:
            ValueError: if the depth reads the static table and there is no `static`.
        """
        is_table, exit = depth == 0 and self.elastic.table is not None, self.elastic.exit(depth)
        if is_table or (exit is not None and exit.joint):
            if static is None:
                raise ValueError(f"Depth {depth} reads the static table: pass static, from static_states(...).")
            if is_table:
                return static[..., :dim].expand(*state.shape[:-1], -1)
        else:
            static = None
        return state[..., :dim] if exit is None else exit(state, dim, static)

    def layers_at(self, depth: int) -> list[nn.Module]:
        """The layers of a depth as they run there, with the refitted matrices of its path."""
        name, all_layers = layer_list(self, self.config.num_hidden_layers)
        refitted = self.elastic.refitted(depth)
        layers: list[nn.Module] = []
        for place, number in enumerate(Elasticity.of(self.config).layers_of(depth)):
            start, layer = f"{name}.{place}.", all_layers[number - 1]
            tensors = {key.removeprefix(start): value for key, value in refitted.items() if key.startswith(start)}
            layers.append(replaced(layer, tensors) if tensors else layer)
        return layers

    def at(self, depth: int) -> Any:
        """A [`view`] of the native model at a depth, without its exit."""
        return view(self, Elasticity.of(self.config).layers_of(depth), self.layers_at(depth))

    # Depths

    def set_depths(
        self,
        *,
        exits: Mapping[int, AffineMap] = {},
        joints: Mapping[int, AffineMap] = {},
        paths: Mapping[int, tuple[list[int], Mapping[str, torch.Tensor]]] = {},
        depths: Iterable[int] = (),
        table: torch.Tensor | None = None,
        ignored_ids: Iterable[int] = (),
        fit: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Replace the depths of the model.

        Args:
            exits (`Mapping[int, tuple]`): Depth -> weight `(hidden_size, hidden_size)` and bias `(hidden_size,)`.
            joints (`Mapping[int, tuple]`): Depth with an exit -> weight `(hidden_size, 2 * hidden_size)` and bias of
                the map of hidden state and static vector that is its exit instead.
            paths (`Mapping[int, tuple]`): Depth -> its layers, counted from 1, and its refitted matrices by their
                names in the native model of this depth.
            depths (`Iterable[int]`): Further depths, which are prefixes.
            table (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): The static table, depth 0.
            ignored_ids (`Iterable[int]`): Token ids that the static vectors leave out.
            fit (`Mapping`, *optional*): Record of the fit.

        Raises:
            ValueError: if a depth or a shape does not fit the model.
        """
        config, like = self.config, next(self.parameters())
        if (joints and table is None) or not {*joints} <= {*exits}:
            raise ValueError(f"joints={sorted(joints)} must have an exit, and read a static table.")
        zero = [] if table is None else [0]
        layers = {depth: [*range(1, depth + 1)] for depth in {*exits, *depths} - {config.num_hidden_layers}}
        layers |= {depth: numbers for depth, (numbers, _) in paths.items()} | dict.fromkeys(zero, [])
        refitted = [depth for depth, (_, matrices) in paths.items() if matrices]
        spec = Elasticity(layers, [*zero, *exits], [*zero, *joints], [*ignored_ids], fit, refitted)
        spec.validate(config)
        tensors = {} if table is None else {"table": table}
        for kind, maps in (("", exits), ("joint.", joints)):
            for depth, (weight, bias) in maps.items():
                tensors |= {f"exits.{depth}.{kind}weight": weight, f"exits.{depth}.{kind}bias": bias}
        for depth, (_, matrices) in paths.items():
            tensors |= {f"paths.{depth}.{name}": matrix for name, matrix in matrices.items()}
        self._check_parts(tensors, spec, "The new depths")
        tensors = {name: value.detach().to(like, copy=True).contiguous() for name, value in tensors.items()}
        self.elastic = ElasticParts(tensors)
        config.elastic = {**entries(config), "fit": None}
        spec.declare(config)

    def drop_depths(self, depths: Iterable[int]) -> None:
        """Remove some depths with their exits and paths, and the static table if no other depth reads it."""
        spec, gone = Elasticity.of(self.config), {*depths}
        rest = spec.of_depths({*spec.depths, *spec.exits} - gone)
        rest.validate(self.config)
        rest.declare(self.config)
        for modules in (self.elastic.exits, self.elastic.paths):
            for name in [name for name in modules if int(name) in gone]:
                del modules[name]
        self.elastic.table = self.elastic.table if rest.table else None

    def _check_parts(self, tensors: Mapping[str, torch.Tensor], spec: Elasticity, what: str) -> None:
        """Raise a ValueError that says `what` lacks a tensor of these depths, or has one of another shape."""
        width = self.config.hidden_size
        shapes: dict[str, Any] = {"table": (self.config.vocab_size, width)} if spec.table else {}
        for depth in {*spec.exits} - {0}:
            shapes |= {f"exits.{depth}.weight": (width, width), f"exits.{depth}.bias": (width,)}
            if depth in spec.table:
                shapes |= {f"exits.{depth}.joint.weight": (width, 2 * width), f"exits.{depth}.joint.bias": (width,)}
        parameters = {name: parameter.shape for name, parameter in self.named_parameters()}
        for key in [key for key in tensors if key.startswith("paths.")]:
            _, depth_name, name = key.split(".", 2)
            list_name, _ = layer_list(self, self.config.num_hidden_layers)
            shapes[key] = parameters.get(_in_source(name, list_name, spec.layers_of(int(depth_name))))
        for key, shape in shapes.items():
            given = tensors[key].shape if key in tensors else None
            if shape is None or given != shape:
                raise ValueError(f"{what}: {key!r} has the shape {given}, and the model needs {shape}.")

    # Token embeddings, of encoders and heads: a model that is a static table alone has those of the table

    def _table_alone(self) -> Any:
        encoder: Any = self.base_model
        return encoder.elastic.table if encoder.config.num_hidden_layers == 0 else None

    def get_input_embeddings(self) -> Any:
        return self._table_alone() or super().get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        if self._table_alone() is not None:
            self.base_model.elastic.table = value
        else:
            super().set_input_embeddings(value)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        encoder: Any = self.base_model
        table = encoder.elastic.table
        rows = None if table is None else table.weight.detach()
        resized = super()._resize_token_embeddings(*args, **kwargs)
        if rows is None:
            return resized
        tokens = resized.weight.shape[0]
        rows = nn.functional.pad(rows, (0, 0, 0, tokens - len(rows)))  # a negative number cuts
        encoder.elastic.table = nn.Embedding.from_pretrained(rows, freeze=not table.weight.requires_grad)
        spec = Elasticity.of(encoder.config)
        replace(spec, ignored_ids=[token for token in spec.ignored_ids if token < tokens]).declare(encoder.config)
        return self.get_input_embeddings()

    # Loading, of encoders and heads

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        config: Any = None,
        output_layer: int | None = None,
        output_dim: int | None = None,
        output_loading_info: bool = False,
        adapter_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """
        As [`~transformers.PreTrainedModel.from_pretrained`], at a size: only the layers of the depth `output_layer`
        are built and read, and `output_dim` dims returned; by default all. Weights are read from safetensors only.

        Raises:
            ValueError: if the size is not legal, a tensor of the encoder is missing, the file of exits and table does
                not belong to these weights, or an adapter was trained at another size.
        """
        name, source = pretrained_model_name_or_path, Source.at(pretrained_model_name_or_path, kwargs)
        if isinstance(config, PretrainedConfig):
            config = copy.deepcopy(config)
        else:
            origin = source if config is None else Source.at(config, kwargs)
            config, kwargs = origin.config(ElasticConfig if cls.made_of else cls.config_class, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key != "code_revision"}
        kwargs |= {**source.hub, "use_safetensors": True}
        adapter = {key: value for key, value in source.hub.items() if key in ("cache_dir", "local_files_only")}
        adapter |= adapter_kwargs or {}
        adapter_path = adapter.pop("_adapter_model_path", None)  # of a folder with an adapter alone
        trained = {} if adapter_path is None else trained_size(adapter_path, adapter)
        for option, value in zip(SIZE, (output_layer, output_dim), strict=True):
            if value is None and getattr(config, option, None) is None:
                value = trained.get(option)
            if value is not None:
                setattr(config, option, value)
        Elasticity.of(config).validate(config)
        loading = Loading(source, Size.of(config))
        if kwargs.get("force_download"):
            source.file(parts_file(source.variant), force_download=True)
        try:
            model, info = super().from_pretrained(
                name, *args, config=config, loading=loading, output_loading_info=True, **kwargs
            )
        except SafetensorError as error:
            raise ValueError(f"The weights in {name} cannot be read: {error}.") from error
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        if missing := sorted(key for key in info["missing_keys"] if key.startswith(prefix) and "pooler" not in key):
            raise ValueError(
                f"{name} is incomplete or of another architecture: {len(missing)} tensors of the encoder are missing, "
                f"such as {missing[0]}."
            )
        model._finish_loading()
        if adapter_path is not None and not model._hf_peft_config_loaded:  # one beside the weights is
            model.load_adapter(adapter_path, adapter_kwargs=adapter)
        return (model, info) if output_loading_info else model

    def _finish_loading(self) -> None:
        """Reduce the model that the library has read to its size. A second call does nothing."""
        encoder: Any = self.base_model
        loading: Loading | None = vars(encoder).pop("loading", None)
        if loading is None:
            return
        if any(parameter.is_meta for parameter in self.parameters()):
            self.tie_weights()  # transformers 5.3 leaves this out in remote code
        size, spec = loading.size, Elasticity.of(encoder.config)
        if not size.is_whole:
            spec = spec.of_depths([size.depth])
            if size.depth > 0:
                encoder._number_layers(loading.layers)
            encoder._cut_config(size.depth)
            for model in (self, encoder):
                if ignored := model._keys_to_ignore_on_load_unexpected:
                    rest = [pattern for pattern in ignored if pattern != loading.left_out]
                    model._keys_to_ignore_on_load_unexpected = type(ignored)(rest)
        if spec.depths or spec.exits:
            encoder._read_parts(loading, spec, vars(self).get("hf_device_map"))
        encoder.loaded_from = loading.source.with_settings()
        self.eval()

    def _leave_out(self, loading: Loading) -> None:
        """Remove what does not run, before weights are read. The layers that run keep their numbers in the source
        until then: some encoders read these when they are built."""
        encoder: Any = self.base_model
        size = loading.size
        if size.is_whole:
            return
        loading.layers, layers = layer_list(encoder, encoder.config.num_hidden_layers)
        if size.depth > 0:
            numbers = {*range(1, len(layers) + 1)}.difference(size.layers)
            left_out = [f"{loading.layers}.{number - 1}" for number in sorted(numbers)]
            for number in numbers:
                delattr(layers, str(number - 1))
        else:
            left_out = [name for name, _ in encoder.named_children() if name != "elastic"]
            for name in left_out:
                is_list = isinstance(getattr(encoder, name), nn.ModuleList)
                setattr(encoder, name, nn.ModuleList() if is_list else nn.Module())
        loading.left_out = rf"(^|\.)({'|'.join(map(re.escape, left_out))})\."
        ignored: Any = getattr(self, "_keys_to_ignore_on_load_unexpected", None)
        kind = list if ignored is None else type(ignored)  # a set, since transformers 5.12
        self._keys_to_ignore_on_load_unexpected = kind([*(ignored or ()), loading.left_out])

    def _number_layers(self, name: str) -> None:
        """Number the layers of the list of this name that are there as a native model of them does."""
        path, _, leaf = name.rpartition(".")
        running = nn.ModuleList(self.get_submodule(name).children())
        setattr(self.get_submodule(path), leaf, running)
        for place, layer in enumerate(running):
            for module in layer.modules():
                if "layer_idx" in vars(module):  # of its keys and values in a cache
                    vars(module)["layer_idx"] = place

    def _cut_config(self, depth: int) -> None:
        """Make the config that of a native model of a depth. It remembers what the source has."""
        config, whole = self.config, self.config.num_hidden_layers
        names = ("num_hidden_layers", "rope_parameters", *PER_LAYER)
        source = {name: copy.deepcopy(getattr(config, name)) for name in names if hasattr(config, name)}
        cut_config(config, depth)
        if self.made_of and config.elastic:
            config.elastic["source"] = source
        for module in self.modules():  # some have a copy of the config
            if getattr(vars(module).get("config"), "num_hidden_layers", None) == whole:
                module.config = config

    def _read_parts(self, loading: Loading, spec: Elasticity, device_map: Mapping[str, Any] | None) -> None:
        """Read the parts of some depths. Exits are put where the last layer runs, and the table where token ids are:
        the first accelerator of a device map, which runs what is offloaded."""
        config, source, depth = self.config, loading.source, self.config.num_hidden_layers
        tensors = read_parts(source, spec)
        self._check_parts(tensors, Elasticity.of(config), f"{source.name}/{parts_file(source.variant)}")
        like = next(self.parameters(), torch.empty(0, dtype=dtype_of(config)))
        main = like.device
        if device_map is not None:
            accelerators = [place for place in device_map.values() if str(place) not in ("cpu", "disk")]
            main = torch.device(accelerators[0] if accelerators else "cpu")
        last = next((value.device for value in layer_list(self, depth)[1][-1].parameters()), main) if depth else main
        places = {True: main, False: main if last.type == "meta" else last}
        parts = ElasticParts({key: value.to(places[key == "table"], like.dtype) for key, value in tensors.items()})
        if not loading.size.is_whole:
            for key, matrix in parts.refitted(depth).items():
                replace_weight(self, key, matrix.detach())
            parts.paths = nn.ModuleDict()
        self.elastic = parts.eval()

    # Saving, and adapters, of encoders and heads

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        *args: Any,
        push_to_hub: bool = False,
        exact: bool = False,
        **kwargs: Any,
    ) -> None:
        """
        As [`~transformers.PreTrainedModel.save_pretrained`], with exits, paths and table, this code, and, of an
        encoder, the settings of sentence-transformers that it was loaded with. A size gives the same vectors when it
        is loaded again. The table becomes float16 unless `exact`, with which training resumes exactly. If the
        model has an adapter, only the adapter is saved, with the size that it was trained at.
        """
        folder = Path(save_directory)
        if push_to_hub:
            hub = {key: kwargs.pop(key) for key in PUSH_OPTIONS if key in kwargs}
            with uploading(folder, **{"repo_id": folder.name, **hub}) if is_main_process else nullcontext():
                self.save_pretrained(folder, is_main_process, state_dict, *args, exact=exact, **kwargs)
            return
        if self._hf_peft_config_loaded:
            for name in self.active_adapters():
                adapter, size = self.peft_config[name], self._adapted_size()
                if self.base_model.made_of is None:  # all layers of an m3BERT are for each of its sizes
                    size = {key: value for key, value in size.items() if getattr(self.config, key, None) is not None}
                adapter.auto_mapping = {**(adapter.auto_mapping or {}), "elastic": size}
            super().save_pretrained(folder, is_main_process, state_dict, *args, **kwargs)
        else:
            self._save_whole(folder, is_main_process, state_dict, *args, exact=exact, **kwargs)
        encoder: Any = self.base_model
        if is_main_process and (encoder is self or self.get_output_embeddings() is not None):
            write_settings(encoder, folder)  # a classifier embeds nothing

    def _save_whole(
        self, folder: Path, is_main_process: bool, state_dict: Any, *args: Any, exact: bool, **kwargs: Any
    ) -> None:
        """Save a model without an adapter, but for the settings of sentence-transformers."""
        encoder: Any = self.base_model
        prefix = ("" if encoder is self else f"{self.base_model_prefix}.") + "elastic."
        tensors = self.state_dict() if state_dict is None else state_dict
        parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        native = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
        has_own_code, size = encoder.made_of is None, Size.of(encoder.config, encoder.config.num_hidden_layers)
        is_native = has_own_code or size.is_native
        if not is_native and size.depth > 0:  # layers have the numbers of the source, which some encoders read
            name = layer_list(encoder, size.depth)[0]
            if "hf_device_map" in vars(self):
                native |= {key: getitem(*offloaded(self, key)) for key, value in native.items() if value.is_meta}
            native = {_in_source(key, name, size.source_layers): value for key, value in native.items()}
        super().save_pretrained(folder, is_main_process, native, *args, **kwargs)
        if not is_main_process:
            return
        variant = kwargs.get("variant")
        single, index = (folder / of_variant(file, variant) for file in (WEIGHTS, INDEX))
        if size.depth == 0:  # the library writes no file then, and reads none without one
            save_file({}, single, metadata={"format": "pt"})
        if single.is_file() and index.is_file():  # one of them is of an earlier save, whose shards the library removed
            shards = [folder / shard for shard in shards_of(index)]
            (single if shards and all(shard.is_file() for shard in shards) else index).unlink()
        write_parts(folder, parts, exact=exact, variant=variant)
        if entries(encoder.config) and not has_own_code:
            describe(folder, native=is_native)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in the library. Raises a ValueError if the adapter was trained at another size, or on another source."""
        self._finish_loading()  # of one beside the model, which the library loads after the weights
        report = super().load_adapter(*args, **kwargs)
        name = kwargs.get("adapter_name", args[1] if len(args) > 1 else None) or "default"
        trained, size = (self.peft_config[name].auto_mapping or {}).get("elastic", {}), self._adapted_size()
        wrong = [key for key, value in trained.items() if None not in (value, size.get(key)) and value != size[key]]
        if wrong:
            self.delete_adapter(name)
            said = "; ".join(f"{key}={trained[key]!r}, and the model has {size[key]!r}" for key in wrong)
            raise ValueError(f"The adapter was trained for {said}: load it with the model that it was trained for.")
        return report

    def _adapted_size(self) -> dict[str, Any]:
        """What an adapter of this model is for: the depth, the dims, and the digest of the source's weights."""
        config = self.base_model.config
        layer, dim = resolve_size(config)
        source = (Elasticity.of(config).fit or {}).get("source_sha256")
        return {"output_layer": layer, "output_dim": dim, "source": source}


def _in_source(key: str, name: str, numbers: Sequence[int]) -> str:
    """The name in the source of a tensor of some of its layers, whose numbers are counted from 1; `name` is that of
    the list of layers. Empty if the tensor's layer is none of them."""
    match = re.fullmatch(rf"((?:.*\.)?{re.escape(name)}\.)(\d+)(\..*)", key)
    if match is None or int(match[2]) >= len(numbers):
        return "" if match else key
    return f"{match[1]}{numbers[int(match[2])] - 1}{match[3]}"


def dtype_of(config: PretrainedConfig) -> torch.dtype:
    """Type of the weights that a config names, else float32."""
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype


def offloaded(model: nn.Module, name: str) -> tuple[Any, str]:
    """What accelerate reads an offloaded weight of a model from, and the name of the weight there."""
    path, _, leaf = name.rpartition(".")
    hook: Any = model.get_submodule(path)._hf_hook
    return next(part.weights_map for part in getattr(hook, "hooks", [hook]) if hasattr(part, "weights_map")), leaf


def replace_weight(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put other values into a weight, or into where accelerate reads an offloaded one from."""
    weight = model.get_parameter(name)
    if not weight.is_meta:
        weight.data.copy_(tensor)
    elif "_hf_hook" in vars(model.get_submodule(name.rpartition(".")[0])):  # else the whole model has no values
        stored, leaf = offloaded(model, name)
        stored.dataset.state_dict[stored.prefix + leaf] = tensor.cpu()


# Classes. The native class keeps its name and module, because the library treats classes of other modules as custom
# code: it then renames no stored tensors, finds no attention kernels and writes other `architectures`.


@functools.cache
def elastic_class(native: Any, head: bool) -> Any:
    """The elastic class of a class of transformers, with its name and module. If that is an encoder with a `head`, the
    native `forward` stays, and calls the encoder's."""
    if issubclass(native, ElasticMixin):
        return native
    members = {name: getattr(native, name) for name in ("__module__", "__qualname__", "__doc__", "forward")}
    if not head:
        members["forward"] = with_size(native.forward)
    return type(native.__name__, (ElasticMixin, native), {**members, "made_of": (native, head)})


def with_size(native: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of an elastic class, with the signature of the native one and the two arguments of a size."""

    @functools.wraps(native)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ElasticMixin.forward(self, *args, **kwargs)

    signature = inspect.signature(native)
    sizes = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in SIZE]
    parameters = sorted([*signature.parameters.values(), *sizes], key=lambda parameter: parameter.kind)
    vars(forward)["__signature__"] = signature.replace(parameters=parameters)
    return forward


def _empty(native: type, head: bool) -> Any:
    kind = elastic_class(native, head)
    return kind.__new__(kind)


def make_elastic(model: Any) -> Any:
    """Make a model elastic in place, without any depths yet ([`~ElasticMixin.set_depths`]), and return it."""
    encoder = model.base_model
    if not isinstance(encoder, ElasticMixin):
        layer_list(encoder, encoder.config.num_hidden_layers)
        encoder.loaded_from = source_of(encoder)
        encoder.__class__ = elastic_class(encoder.__class__, False)
        encoder.elastic = ElasticParts()
    if model is not encoder and not isinstance(model, ElasticMixin):
        model.__class__ = elastic_class(model.__class__, True)
    return model


class _Named:
    """A class that the files of a repository name."""

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Nothing: the library would name only one of these classes."""


class ElasticConfig(_Named):
    """Loads the config of an elastic repository: the native one, with the key `elastic`."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *, return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """As [`~transformers.AutoConfig.from_pretrained`]."""
        name, source = pretrained_model_name_or_path, Source.at(pretrained_model_name_or_path, kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in ("name_or_path", *source.options)}
        values, kwargs = PretrainedConfig.get_config_dict(name, **kwargs, **source.hub)
        elastic = values.get("elastic") or {}
        model_type = elastic.get("model_type", values.get("model_type"))
        code = elastic.get("source_auto_map", {}).get("AutoConfig")
        kind = source.dynamic_class(code) if code else CONFIG_MAPPING[model_type]
        config, unused = kind.from_dict({**values, "model_type": model_type}, return_unused_kwargs=True, **kwargs)
        config.name_or_path = str(name)
        asked = {option: value for option in SIZE if (value := unused.pop(option, None)) is not None}
        config = plain_if_lost(config, source, asked)
        config.__dict__.update(asked)
        return (config, unused) if return_unused_kwargs else config


class ElasticModel(_Named):
    """Loads an elastic repository at a size: an instance of the native class of its config."""

    auto_class = "AutoModel"

    @classmethod
    def native_class(cls, config: PretrainedConfig, source: Source | None = None) -> Any:
        """The native class of a config, which may be code of the source. Raises a ValueError if there is no such
        head."""
        code = entries(config).get("source_auto_map", {}).get(cls.auto_class)
        if code is not None:
            return (source or Source.at(config.name_or_path, {})).dynamic_class(code)
        mapping = getattr(transformers, cls.auto_class)._model_mapping
        registered = mapping._extra_content.get(type(config))
        if getattr(registered, "__name__", None) == cls.__name__:
            del mapping._extra_content[type(config)]  # some versions register this class for all such configs
        names = mapping._model_mapping.get(config.model_type)
        if names is None or not type(config).__module__.startswith("transformers."):  # a source's own may share a type
            raise ValueError(f"{type(config).__name__} has no class for {cls.auto_class}.")
        return getattr(transformers, names if isinstance(names, str) else names[0])

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        """As [`~ElasticMixin.from_pretrained`]. Heads read the hidden state of the depth, without an exit."""
        source, head = Source.at(name_or_path, kwargs), cls.auto_class != "AutoModel"
        if config is None:
            config, kwargs = source.config(ElasticConfig, kwargs)
        else:
            config = plain_if_lost(config, source, kwargs)
        native = cls.native_class(config, source)
        if not entries(config):
            kwargs = {key: value for key, value in kwargs.items() if key not in (*SIZE, "code_revision")}
            return native.from_pretrained(name_or_path, *args, config=config, **{**kwargs, **source.hub})
        depth, dim = resolve_size(config, *map(kwargs.get, SIZE))
        if head and dim < config.hidden_size:
            raise ValueError(f"output_dim={dim}: the head of {native.__name__} reads all dims.")
        if head and depth == 0:
            raise ValueError("output_layer=0 is a static table, which no head reads: use one above 0.")
        kwargs |= source.options
        loaded = elastic_class(native, head).from_pretrained(name_or_path, *args, config=config, **kwargs)
        if head:  # it was trained on hidden states
            encoder = (loaded[0] if isinstance(loaded, tuple) else loaded).base_model
            encoder.drop_depths([encoder.config.num_hidden_layers])
        return loaded

    @classmethod
    def _from_config(cls, config: PretrainedConfig, **kwargs: Any) -> Any:
        return cls.native_class(config)._from_config(for_new_weights(config), **kwargs)


for _head in HEADS:
    globals()[f"ElasticFor{_head}"] = type(
        f"ElasticFor{_head}",
        (ElasticModel,),
        {"__module__": __name__, "__doc__": "[`ElasticModel`] with this head.", "auto_class": f"AutoModelFor{_head}"},
    )

# Remote code is loaded by its path. dill looks for it by name, in its package, else it would pickle all of it.
setattr(sys.modules[__package__], __name__.rpartition(".")[2], sys.modules[__name__])
