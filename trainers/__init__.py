"""Trainers that make every granularity of an encoder good, and the foundations that they share."""

from .collators import TextColumnsCollator
from .contrastive import Contrastive, ContrastiveConfig, ContrastiveTrainer
from .data import require_columns, smoothed_probabilities
from .granularity import Granularity, Grid
from .multigranular_mlm import MultigranularMLM, MultigranularMLMConfig, MultigranularMLMTrainer
from .nested import NestedStates, nested_states, prefix
from .objective import NestedBatch, Objective
from .trainer import NestedModel, NestedTrainer, NestedTrainingArguments


__all__ = [
    "Contrastive",
    "ContrastiveConfig",
    "ContrastiveTrainer",
    "Granularity",
    "Grid",
    "MultigranularMLM",
    "MultigranularMLMConfig",
    "MultigranularMLMTrainer",
    "NestedBatch",
    "NestedModel",
    "NestedStates",
    "NestedTrainer",
    "NestedTrainingArguments",
    "Objective",
    "TextColumnsCollator",
    "nested_states",
    "prefix",
    "require_columns",
    "smoothed_probabilities",
]
