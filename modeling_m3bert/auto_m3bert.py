"""Loading of elastic repositories with the code of this package, which needs no `trust_remote_code`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel, PretrainedConfig

from . import modeling_elastic
from .modeling_elastic import AUTO_CLASSES, ElasticConfig, Source


def is_elastic_native(source: Source) -> bool:
    """Whether a folder or repository is elastic, and of a native encoder."""
    values, _ = PretrainedConfig.get_config_dict(source.name, **source.hub)
    return bool(values.get("elastic")) and values.get("model_type") != "m3bert"


def load_config(name_or_path: Any, **options: Any) -> Any:
    """The config of a folder or Hub id, as [`~transformers.AutoConfig.from_pretrained`]."""
    source = Source.at(name_or_path, options)
    kind = ElasticConfig if is_elastic_native(source) else AutoConfig
    return kind.from_pretrained(name_or_path, **{**options, **source.hub})


def load_model(name_or_path: Any, auto_class: Any = AutoModel, **options: Any) -> Any:
    """The model of a folder or Hub id, as `auto_class.from_pretrained`. An elastic repository can be loaded at a size
    (`output_layer`, `output_dim`). `loaded_from` of the encoder is its [`Source`]."""
    source = Source.at(name_or_path, options)
    if is_elastic_native(source):
        if auto_class.__name__ not in AUTO_CLASSES:
            raise ValueError(f"An elastic repository has no {auto_class.__name__}; legal: {', '.join(AUTO_CLASSES)}.")
        auto_class = getattr(modeling_elastic, AUTO_CLASSES[auto_class.__name__])
    model = auto_class.from_pretrained(name_or_path, **{**options, **source.hub})
    encoder = model.base_model
    if "loaded_from" not in encoder.__dict__:
        encoder.loaded_from = source.with_settings()
    return model
