"""Loading of elastic repositories with the code of this package, which needs no `trust_remote_code`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.models.auto import auto_factory, configuration_auto

from ..modeling import modeling_elastic
from ..modeling.files_elastic import AUTO_CLASSES, Source
from ..modeling.loading_elastic import ElasticConfig
from .settings import safetensors_only


def own_code_first(find: Any, reference: str, name: Any, /, *args: Any, **kwargs: Any) -> Any:
    """As `get_class_from_dynamic_module` of transformers (`find`), but with this package's class where a folder names
    our code and lacks it: the source's class saves so what was loaded without remote code."""
    module, _, member = reference.partition(".")
    folder = Path(name, kwargs.get("subfolder") or "")
    if module == "modeling_elastic" and folder.is_dir() and not (folder / f"{module}.py").is_file():
        return getattr(modeling_elastic, member)
    return find(reference, name, *args, **kwargs)


def let_auto_classes_find_own_code() -> None:
    """Make the Auto classes of transformers call [`own_code_first`], also where users and sentence-transformers call
    them. A second call changes nothing."""
    for auto in (auto_factory, configuration_auto):
        find: Any = auto.get_class_from_dynamic_module
        if getattr(find, "func", None) is not own_code_first:
            auto.get_class_from_dynamic_module = partial(own_code_first, find)


let_auto_classes_find_own_code()


def base_of(source: Source) -> Source:
    """The source of the model that a folder or Hub id with an adapter alone is for, else itself."""
    adapter = source.file("adapter_config.json")
    if adapter is None or source.file("config.json"):
        return source
    options = {name: value for name, value in source.options.items() if name not in ("revision", "subfolder")}
    return Source.at(json.loads(Path(adapter).read_text("utf-8"))["base_model_name_or_path"], options)


def is_elastic_native(source: Source) -> bool:
    """Whether a folder or repository is elastic, and of a native encoder."""
    values, _ = PretrainedConfig.get_config_dict(source.name, **source.hub)
    return bool(values.get("elastic")) and values.get("model_type") != "m3bert"


def load_config(name_or_path: Any, **options: Any) -> Any:
    """The config of a folder or Hub id, as [`~transformers.AutoConfig.from_pretrained`]; of an adapter, its base
    model's."""
    source = base_of(Source.at(name_or_path, options))
    kind = ElasticConfig if is_elastic_native(source) else AutoConfig
    return kind.from_pretrained(source.name, **{**options, **source.hub})


def load_model(name_or_path: Any, auto_class: Any = AutoModel, **options: Any) -> Any:
    """The model of a folder or Hub id, as `auto_class.from_pretrained`, from safetensors alone ([`safetensors_only`]).
    An elastic repository can be loaded at a size (`output_layer`, `output_dim`). `loaded_from` of the encoder is its
    [`Source`]."""
    given = Source.at(name_or_path, options)
    options |= safetensors_only(given.name, given.subfolder)
    source = base_of(given)
    if is_elastic_native(source):
        if auto_class.__name__ not in AUTO_CLASSES:
            raise ValueError(f"An elastic repository has no {auto_class.__name__}; legal: {', '.join(AUTO_CLASSES)}.")
        auto_class = getattr(modeling_elastic, AUTO_CLASSES[auto_class.__name__])
        if source is not given:
            options["adapter_kwargs"] = {"_adapter_model_path": given.name, **given.hub}
            name_or_path, options = source.name, {**options, "revision": None, "subfolder": ""}
            given = source
    model = auto_class.from_pretrained(name_or_path, **{**options, **given.hub})
    encoder = model.base_model
    if "loaded_from" not in encoder.__dict__:
        encoder.loaded_from = source.with_settings()
    return model
