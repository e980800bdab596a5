"""
Elastic encoders, 4 of 5: loading at a size, saving, and adapters.

A smaller size is built without the layers that do not run, before the library reads the weights. After that, its
config becomes that of a native model of the layers that run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from operator import getitem
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from .configuration_elastic import PER_LAYER, SIZE, Elasticity, Size, cut_config, entries, resolve_size
from .files_elastic import (
    INDEX,
    PARTS_FILE,
    WEIGHTS,
    Source,
    add_code,
    of_variant,
    plain_if_lost,
    read_parts,
    shards_in,
    trained_size,
    uploading,
    write_parts,
    write_settings,
)
from .parts_elastic import ElasticParts, check_parts, in_source, layer_list


if TYPE_CHECKING:
    from transformers import PreTrainedModel as _Model
else:
    _Model = object  # at run time, the native class stands behind these mixins
PUSH_OPTIONS = ("repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description")


class AutoMapClass:
    """A class that `auto_map` in the config of a repository names."""

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Does nothing: the library would write this class alone into `auto_map`, which names all."""


class ElasticConfig(AutoMapClass):
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


@dataclass
class Loading:
    """
    A model that is loaded at a size: what happens before and after the library reads the weights.

    Args:
        source ([`Source`]): Where its files are.
        size ([`Size`]): The size.
        list_name (`str`): Name of the list of layers, of a smaller size.
        left_out (`str`): Pattern of the tensors that a smaller size does not read.
    """

    source: Source
    size: Size
    list_name: str = ""
    left_out: str = ""

    def before_weights(self, model: PreTrainedModel) -> None:
        """Remove what does not run. The layers that run keep their numbers in the source until the weights are read:
        tensors have these in their names, and some encoders read them when they are built."""
        encoder = model.base_model
        encoder.loading = self
        if self.size.is_whole:
            return
        self.list_name, layers = layer_list(encoder, encoder.config.num_hidden_layers)
        if self.size.depth > 0:
            numbers = [str(number) for number in range(len(layers)) if number + 1 not in self.size.layers]
            left_out = [f"{self.list_name}.{number}" for number in numbers]
            for number in numbers:
                delattr(layers, number)
        else:
            left_out = [name for name, _ in encoder.named_children() if name != "elastic"]
            for name in left_out:
                is_list = isinstance(getattr(encoder, name), nn.ModuleList)
                setattr(encoder, name, nn.ModuleList() if is_list else nn.Module())
        self.left_out = rf"(^|\.)({'|'.join(map(re.escape, left_out))})\."
        ignored: Any = getattr(model, "_keys_to_ignore_on_load_unexpected", None)
        kind = list if ignored is None else type(ignored)  # a set, since transformers 5.12
        model._keys_to_ignore_on_load_unexpected = kind([*(ignored or ()), self.left_out])

    def after_weights(self, model: PreTrainedModel) -> None:
        """Make the model one of the size, with its parts. A second call does nothing."""
        encoder = model.base_model
        if encoder.loading is None:
            return
        del encoder.loading
        if any(parameter.is_meta for parameter in model.parameters()):
            model.tie_weights()  # transformers 5.3 leaves this out in remote code
        spec = Elasticity.of(encoder.config)
        if not self.size.is_whole:
            spec = spec.of_depths([self.size.depth])
            if self.size.depth > 0:
                self.number_layers(encoder)
            self.cut_configs(encoder)
            for each in (model, encoder):  # the head of an m3BERT has the patterns of its encoder
                if ignored := each._keys_to_ignore_on_load_unexpected:
                    rest = [pattern for pattern in ignored if pattern != self.left_out]
                    each._keys_to_ignore_on_load_unexpected = type(ignored)(rest)
        if spec.depths or spec.exits:
            self.add_parts(encoder, spec, vars(model).get("hf_device_map"))
        encoder.loaded_from = self.source.with_settings()
        model.eval()

    def number_layers(self, encoder: PreTrainedModel) -> None:
        """Number the layers that are left as a native model of them does."""
        path, _, leaf = self.list_name.rpartition(".")
        running = nn.ModuleList(encoder.get_submodule(self.list_name).children())
        setattr(encoder.get_submodule(path), leaf, running)
        for place, layer in enumerate(running):
            for module in layer.modules():
                if "layer_idx" in vars(module):  # of its keys and values in a cache
                    vars(module)["layer_idx"] = place

    def cut_configs(self, encoder: PreTrainedModel) -> None:
        """Make the config that of a native model of the depth. It remembers what the source has."""
        config, whole = encoder.config, encoder.config.num_hidden_layers
        names = ("num_hidden_layers", "rope_parameters", *PER_LAYER)
        source = {name: copy.deepcopy(getattr(config, name)) for name in names if hasattr(config, name)}
        cut_config(config, self.size.depth)
        if not has_own_code(encoder) and config.elastic:
            config.elastic["source"] = source
        for module in encoder.modules():  # some have a copy of the config
            if getattr(vars(module).get("config"), "num_hidden_layers", None) == whole:
                module.config = config

    def add_parts(self, encoder: PreTrainedModel, spec: Elasticity, device_map: Mapping[str, Any] | None) -> None:
        """Read the parts of some depths. Exits are put where the last layer runs, and the table where token ids are:
        the first accelerator of a device map, which runs what is offloaded."""
        config, source, depth = encoder.config, self.source, encoder.config.num_hidden_layers
        tensors = read_parts(source, spec)
        check_parts(encoder, tensors, Elasticity.of(config), f"{source.name}/{of_variant(PARTS_FILE, source.variant)}")
        like = next(encoder.parameters(), torch.empty(0, dtype=dtype_of(config)))
        main = like.device
        if device_map is not None:
            accelerators = [place for place in device_map.values() if str(place) not in ("cpu", "disk")]
            main = torch.device(accelerators[0] if accelerators else "cpu")
        last = next((each.device for each in layer_list(encoder, depth)[1][-1].parameters()), main) if depth else main
        last = main if last.type == "meta" else last
        placed = {key: value.to(main if key == "table" else last, like.dtype) for key, value in tensors.items()}
        parts = ElasticParts(placed)
        if not self.size.is_whole:
            for key, matrix in parts.refitted(depth).items():
                replace_weight(encoder, key, matrix.detach())
            parts.paths = nn.ModuleDict()
        encoder.elastic = parts.eval()


class ElasticLoading(_Model):
    """The part of [`~modeling_elastic.ElasticMixin`] that loads and saves encoders, and encoders with a head."""

    elastic: ElasticParts
    loaded_from: Source
    loading: Loading | None = None  # until the weights are read
    made_of: tuple[type, bool] | None = None  # native class, and whether it has a head; `None` for m3BERT

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        config: PretrainedConfig = None,
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
            config, kwargs = origin.config(cls.config_class if has_own_code(cls) else ElasticConfig, kwargs)
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
            source.file(of_variant(PARTS_FILE, source.variant), force_download=True)
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
        loading.after_weights(model)
        if adapter_path is not None and not model._hf_peft_config_loaded:  # one beside the weights is
            model.load_adapter(adapter_path, adapter_kwargs=adapter)
        return (model, info) if output_loading_info else model

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
                if has_own_code(self.base_model):  # all layers of an m3BERT are for each of its sizes
                    size = {key: value for key, value in size.items() if getattr(self.config, key, None) is not None}
                adapter.auto_mapping = {**(adapter.auto_mapping or {}), "elastic": size}
            super().save_pretrained(folder, is_main_process, state_dict, *args, **kwargs)
        else:
            self._save_whole(folder, is_main_process, state_dict, *args, exact=exact, **kwargs)
        encoder = self.base_model
        if is_main_process and (encoder is self or self.get_output_embeddings() is not None):
            write_settings(encoder, folder)  # a classifier embeds nothing

    def _save_whole(
        self, folder: Path, is_main_process: bool, state_dict: Any, *args: Any, exact: bool, **kwargs: Any
    ) -> None:
        """Save a model without an adapter, but for the settings of sentence-transformers."""
        encoder = self.base_model
        prefix = ("" if encoder is self else f"{self.base_model_prefix}.") + "elastic."
        tensors = self.state_dict() if state_dict is None else state_dict
        parts = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        native = {key: value for key, value in tensors.items() if not key.startswith(prefix)}
        size = Size.of(encoder.config, encoder.config.num_hidden_layers)
        is_native = has_own_code(encoder) or size.is_native
        if not is_native and size.depth > 0:  # layers have the numbers of the source, which some encoders read
            name = layer_list(encoder, size.depth)[0]
            if "hf_device_map" in vars(self):
                native |= {key: getitem(*offloaded(self, key)) for key, value in native.items() if value.is_meta}
            native = {in_source(key, name, size.source_layers): value for key, value in native.items()}
        super().save_pretrained(folder, is_main_process, native, *args, **kwargs)
        if not is_main_process:
            return
        variant = kwargs.get("variant")
        single, index = (folder / of_variant(file, variant) for file in (WEIGHTS, INDEX))
        if size.depth == 0:  # the library writes no file then, and reads none without one
            save_file({}, single, metadata={"format": "pt"})
        if single.is_file() and index.is_file():  # one of them is of an earlier save, whose shards the library removed
            shards = [folder / shard for shard in shards_in(index)]
            (single if shards and all(shard.is_file() for shard in shards) else index).unlink()
        write_parts(folder, parts, exact=exact, variant=variant)
        if entries(encoder.config) and not has_own_code(encoder):
            add_code(folder, native=is_native)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in the library. Raises a ValueError if the adapter was trained at another size, or on another source."""
        if (loading := self.base_model.loading) is not None:  # the library loads an adapter beside the weights itself
            loading.after_weights(self)
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


def has_own_code(encoder: Any) -> bool:
    """Whether an encoder, or its class, is an m3BERT, whose class and code travel on their own."""
    return encoder.made_of is None


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
