"""Trainers that make every granularity of an encoder good, and the foundations that they share."""

from .arguments import NestedTrainingArguments
from .collators import TextColumnsCollator
from .composition import Composition
from .contrastive import Contrastive, ContrastiveConfig, ContrastiveTrainer
from .data import require_columns, smoothed_probabilities
from .embedding import EmbeddingConfig, EmbeddingObjective, EmbeddingTrainer
from .espresso import Espresso, EspressoConfig, EspressoTrainer
from .granularity import Granularity, Grid
from .ibkd import IBKDConfig, IBKDFinetuningConfig, IBKDFinetuningTrainer, IBKDTrainer
from .matryoshka_2d import Matryoshka2d, Matryoshka2dConfig, Matryoshka2dTrainer
from .matryoshka_distillation import (
    MatryoshkaDistillation,
    MatryoshkaDistillationConfig,
    MatryoshkaDistillationTrainer,
)
from .mic import MICConfig, MICTrainer
from .mipic import MIPICConfig, MIPICTrainer
from .multigranular_mlm import MultigranularMLM, MultigranularMLMConfig, MultigranularMLMTrainer
from .nested import NestedStates, PooledStates, ProjectedStates, nested_states, prefix
from .nested_model import NestedModel
from .objective import NestedBatch, Objective
from .projection import Projection
from .regularized import RegularizedConfig, RegularizedTrainer
from .regularizers import HSIC, PIC, SCR, SIA, SIR
from .representation_distillation import CRD, HPD, RepresentationDistillation, TeacherContrast, TeacherMSE
from .simcse import SimCSE, SimCSEConfig, SimCSETrainer
from .starbucks import Starbucks, StarbucksConfig, StarbucksTrainer
from .teacher import Teacher, TeacherEmbeddings
from .trainer import NestedTrainer


__all__ = [
    "CRD",
    "HPD",
    "HSIC",
    "IBKDConfig",
    "IBKDFinetuningConfig",
    "IBKDFinetuningTrainer",
    "IBKDTrainer",
    "PIC",
    "SCR",
    "SIA",
    "SIR",
    "Composition",
    "MICConfig",
    "MICTrainer",
    "MIPICConfig",
    "MIPICTrainer",
    "RegularizedConfig",
    "RegularizedTrainer",
    "Contrastive",
    "ContrastiveConfig",
    "ContrastiveTrainer",
    "EmbeddingConfig",
    "EmbeddingObjective",
    "EmbeddingTrainer",
    "Espresso",
    "EspressoConfig",
    "EspressoTrainer",
    "Granularity",
    "Grid",
    "Matryoshka2d",
    "Matryoshka2dConfig",
    "Matryoshka2dTrainer",
    "MatryoshkaDistillation",
    "MatryoshkaDistillationConfig",
    "MatryoshkaDistillationTrainer",
    "MultigranularMLM",
    "MultigranularMLMConfig",
    "MultigranularMLMTrainer",
    "NestedBatch",
    "NestedModel",
    "NestedStates",
    "NestedTrainer",
    "NestedTrainingArguments",
    "Objective",
    "PooledStates",
    "ProjectedStates",
    "Projection",
    "RepresentationDistillation",
    "SimCSE",
    "SimCSEConfig",
    "SimCSETrainer",
    "Starbucks",
    "StarbucksConfig",
    "StarbucksTrainer",
    "Teacher",
    "TeacherContrast",
    "TeacherEmbeddings",
    "TeacherMSE",
    "TextColumnsCollator",
    "nested_states",
    "prefix",
    "require_columns",
    "smoothed_probabilities",
]
