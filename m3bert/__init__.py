"""
m3BERT: elastic text encoders. One checkpoint, loaded with the layers and dimensions that you can afford.

All public names are here: the architecture, the conversion, the trainers and the evaluation. Each is imported when it
is first used, so `import m3bert` imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import evaluation, trainers


if TYPE_CHECKING:
    from .data.text_files import TextFiles as TextFiles
    from .evaluation import *  # noqa: F403
    from .exits.plan import FitOptions as FitOptions
    from .exits.repository import fit as fit
    from .modeling import *  # noqa: F403
    from .models.conversion import convert_to_m3bert as convert_to_m3bert
    from .models.native import convert_to_native as convert_to_native
    from .models.settings import EmbeddingSettings as EmbeddingSettings
    from .models.trim import trim as trim
    from .trainers import *  # noqa: F403

__version__ = "0.2.0"

# Importing the architecture imports torch, so its names are spelled out.
ARCHITECTURE = (
    "M3BertConfig",
    "M3BertForMaskedLM",
    "M3BertForSequenceClassification",
    "M3BertForTokenClassification",
    "M3BertModel",
    "M3BertPreTrainedModel",
    "M3BertQuantizer",
    "M3BertQuantizerConfig",
)
MODULES = {
    "EmbeddingSettings": "models.settings",
    "FitOptions": "exits.plan",
    "TextFiles": "data.text_files",
    "convert_to_m3bert": "models.conversion",
    "convert_to_native": "models.native",
    "fit": "exits.repository",
    "trim": "models.trim",
}
__all__ = sorted(("__version__", *ARCHITECTURE, *MODULES, *trainers.__all__, *evaluation.__all__))


def __getattr__(name: str) -> Any:
    if name in ARCHITECTURE:
        return getattr(import_module(".modeling", __name__), name)
    if name in MODULES:
        return getattr(import_module(f".{MODULES[name]}", __name__), name)
    for package in (trainers, evaluation):
        if name in package.__all__:
            return getattr(package, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
