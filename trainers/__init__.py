"""
Trainers that optimise every granularity of an encoder: one module per method, and packages that methods share. The
first use of a name imports all of them.
"""

if __name__ == "trainers":
    raise ImportError("Import m3bert.trainers: the folder trainers is a part of the package m3bert.")

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .names import *  # noqa: F403

# Name on the command line -> config and trainer of the method.
MASKED_LM_METHODS = {
    "multigranular-mlm": ("MultigranularMLMConfig", "MultigranularMLMTrainer"),
    "matryoshka-distillation": ("MatryoshkaDistillationConfig", "MatryoshkaDistillationTrainer"),
}
METHODS = {
    **MASKED_LM_METHODS,
    "contrastive": ("ContrastiveConfig", "ContrastiveTrainer"),
    "simcse": ("SimCSEConfig", "SimCSETrainer"),
    "scored-pairs": ("ScoredPairsConfig", "ScoredPairsTrainer"),
    "espresso": ("EspressoConfig", "EspressoTrainer"),
    "2dmse": ("Matryoshka2dConfig", "Matryoshka2dTrainer"),
    "starbucks": ("StarbucksConfig", "StarbucksTrainer"),
    "mipic": ("MIPICConfig", "MIPICTrainer"),
    "mic": ("MICConfig", "MICTrainer"),
    "mixture": ("MixtureConfig", "MixtureTrainer"),
    "exit-distillation": ("ExitDistillationConfig", "ExitDistillationTrainer"),
    "qama": ("QAMAConfig", "QAMATrainer"),
    "ibkd": ("IBKDConfig", "IBKDTrainer"),
    "ibkd-finetuning": ("IBKDFinetuningConfig", "IBKDFinetuningTrainer"),
}
# Configs that a method of your own may derive from, with their trainers.
BASES = [("DistillationConfig", "DistillationTrainer"), ("TextTrainingArguments", "EmbeddingTrainer")]


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names = import_module(".names", __name__)
    if name == "__all__":
        return sorted(name for name in vars(names) if not name.startswith("_"))
    if not hasattr(names, name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(names, name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]
