"""Loading of elastic repositories with the code of this package, which needs no `trust_remote_code`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, PretrainedConfig
from transformers.models.auto import auto_factory
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from . import modeling_elastic
from .modeling_elastic import AUTO_CLASSES, HUB_OPTIONS, ElasticConfig


def with_own_code(find: Any) -> Any:
    """A loader of remote code for which this package's code stands in where a folder names it without having it: the
    source's class saves so what was loaded without remote code."""

    @functools.wraps(find)
    def found(reference: str, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        module, _, its = reference.partition(".")
        folder = Path(name_or_path, kwargs.get("subfolder") or "")
        if module == "modeling_elastic" and folder.is_dir() and not (folder / f"{module}.py").is_file():
            return getattr(modeling_elastic, its)
        return find(reference, name_or_path, *args, **kwargs)

    return found


auto_factory.get_class_from_dynamic_module = with_own_code(auto_factory.get_class_from_dynamic_module)


def base_of(name_or_path: Any, **hub_options: Any) -> tuple[Any, dict[str, Any]]:
    """The model that a folder or Hub id with an adapter alone is for, else itself; and the hub options to read it."""
    file = find_adapter_config_file(name_or_path, **hub_options)
    if file is None or cached_file(
        name_or_path, "config.json", _raise_exceptions_for_missing_entries=False, **hub_options
    ):
        return name_or_path, hub_options
    options = {name: its for name, its in hub_options.items() if name not in ("revision", "subfolder")}
    return json.loads(Path(file).read_text("utf-8"))["base_model_name_or_path"], options


def is_elastic_native(name_or_path: Any, **hub_options: Any) -> bool:
    """Whether a folder or Hub id is an elastic repository of a native encoder."""
    values, _ = PretrainedConfig.get_config_dict(name_or_path, **hub_options)
    return bool(values.get("elastic")) and values.get("model_type") != "m3bert"


def load_config(name_or_path: Any, **options: Any) -> Any:
    """The config of a folder or Hub id, as [`~transformers.AutoConfig.from_pretrained`]; of an adapter, that of its
    base model."""
    hub = {name: options.pop(name) for name in HUB_OPTIONS if name in options}
    base, hub = base_of(name_or_path, **hub)
    kind = ElasticConfig if is_elastic_native(base, **hub) else AutoConfig
    return kind.from_pretrained(base, **hub, **options)


def load_model(name_or_path: Any, auto_class: Any = AutoModel, **options: Any) -> Any:
    """The model of a folder or Hub id, as `auto_class.from_pretrained`. An elastic repository can be loaded at a size
    (`output_layer`, `output_dim`)."""
    given = {name: options[name] for name in HUB_OPTIONS if name in options}
    base, hub = base_of(name_or_path, **given)
    if not is_elastic_native(base, **hub):
        return auto_class.from_pretrained(name_or_path, **options)
    if auto_class.__name__ not in AUTO_CLASSES:
        raise ValueError(f"An elastic repository has no {auto_class.__name__}; legal: {', '.join(AUTO_CLASSES)}.")
    options = {name: its for name, its in options.items() if name not in (*HUB_OPTIONS, "trust_remote_code")}
    if base is not name_or_path:
        options["adapter_kwargs"] = {"_adapter_model_path": name_or_path, **given}
    return getattr(modeling_elastic, AUTO_CLASSES[auto_class.__name__]).from_pretrained(base, **hub, **options)
