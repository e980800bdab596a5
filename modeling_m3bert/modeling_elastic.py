"""
Elastic encoders, 5 of 5: any encoder of transformers, run with some of its layers and the first of its dimensions.

[`ElasticMixin`] adds exits, paths and a static table to the native class. A loaded size is the native model of the
layers that run, and its exit.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_elastic import SIZE, Elasticity, Size, entries, for_new_weights, resolve_size
from .files_elastic import HEADS, Source, plain_if_lost, source_of
from .loading_elastic import AutoMapClass, ElasticConfig, ElasticLoading, Loading, has_own_code
from .parts_elastic import ElasticParts, check_parts, layer_list, replaced, static_vectors, view


AffineMap = tuple[torch.Tensor, torch.Tensor]  # weight and bias


class ElasticMixin(ElasticLoading):
    """
    Depths, exits, paths and a static table for the class of an encoder, or of an encoder with a head, in front of
    which it stands ([`elastic_class`]).
    """

    def __init__(self, config: PretrainedConfig, *args: Any, loading: Loading | None = None, **kwargs: Any):
        super().__init__(for_new_weights(config) if loading is None else config, *args, **kwargs)
        encoder = self.base_model
        if not isinstance(encoder, ElasticMixin):
            encoder.__class__ = elastic_class(encoder.__class__, False)
        encoder.elastic = ElasticParts()
        if loading is not None:
            loading.before_weights(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if has_own_code(self) else (_empty, self.made_of, self.__dict__)

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
            shallow = view(self, size.layers, self.layers_at(size.depth))
            output = shallow.native_forward(*args, return_dict=True, **kwargs)
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
        depth without an exit is truncated only. `static` are the static vectors of the texts, in a shape that
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
        check_parts(self, tensors, spec, "The new depths")
        tensors = {name: value.detach().to(like, copy=True).contiguous() for name, value in tensors.items()}
        self.elastic = ElasticParts(tensors)
        config.elastic = {**entries(config), "fit": None}  # `declare` would keep an old record
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

    # Token embeddings, of encoders and heads: a model that is a static table alone has those of the table

    def _table_alone(self) -> Any:
        encoder = self.base_model
        return encoder.elastic.table if encoder.config.num_hidden_layers == 0 else None

    def get_input_embeddings(self) -> Any:
        return self._table_alone() or super().get_input_embeddings()

    def set_input_embeddings(self, value: Any) -> None:
        if self._table_alone() is not None:
            self.base_model.elastic.table = value
        else:
            super().set_input_embeddings(value)

    def _resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        encoder = self.base_model
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


# Classes. The native class keeps its name and module, because the library treats classes of other modules as custom
# code: it then renames no stored tensors, finds no attention kernels and writes other `architectures`.


@functools.cache
def elastic_class(native: Any, head: bool, /) -> Any:  # positional: the cache tells `head=` from a position
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


def make_elastic(model: PreTrainedModel) -> PreTrainedModel:
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


class ElasticModel(AutoMapClass):
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
    def from_pretrained(cls, name_or_path: Any, *args: Any, config: PretrainedConfig = None, **kwargs: Any) -> Any:
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


# One class for each head, such as ElasticForMaskedLM.
globals().update(
    (f"ElasticFor{head}", type(f"ElasticFor{head}", (ElasticModel,), {"auto_class": f"AutoModelFor{head}"}))
    for head in HEADS
)

# Remote code is loaded by its path. dill looks for it by name, in its package, else it would pickle all of it.
setattr(sys.modules[__package__], __name__.rpartition(".")[2], sys.modules[__name__])
