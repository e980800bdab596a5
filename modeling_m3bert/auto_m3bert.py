"""Loading of elastic repositories with the code of this package, which needs no `trust_remote_code`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel, PretrainedConfig

from . import modeling_elastic
from .modeling_elastic import AUTO_CLASSES, HUB_OPTIONS, ElasticConfig


def is_elastic_native(name_or_path: Any, **hub_options: Any) -> bool:
    """Whether a folder or Hub id is an elastic repository of a native encoder."""
    values, _ = PretrainedConfig.get_config_dict(name_or_path, **hub_options)
    return bool(values.get("elastic")) and values.get("model_type") != "m3bert"


def load_config(name_or_path: Any, **options: Any) -> Any:
    """The config of a folder or Hub id, as [`~transformers.AutoConfig.from_pretrained`]."""
    elastic = is_elastic_native(name_or_path, **{name: options[name] for name in HUB_OPTIONS if name in options})
    return (ElasticConfig if elastic else AutoConfig).from_pretrained(name_or_path, **options)


def load_model(name_or_path: Any, auto_class: Any = AutoModel, **options: Any) -> Any:
    """The model of a folder or Hub id, as `auto_class.from_pretrained`. An elastic repository can be loaded at a size
    (`output_layer`, `output_dim`)."""
    if is_elastic_native(name_or_path, **{name: options[name] for name in HUB_OPTIONS if name in options}):
        if auto_class.__name__ not in AUTO_CLASSES:
            raise ValueError(f"An elastic repository has no {auto_class.__name__}; legal: {', '.join(AUTO_CLASSES)}.")
        auto_class = getattr(modeling_elastic, AUTO_CLASSES[auto_class.__name__])
        options.pop("trust_remote_code", None)
    return auto_class.from_pretrained(name_or_path, **options)
