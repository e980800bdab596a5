"""Trainers that optimise every granularity of an encoder: one module per method, and packages that methods share."""

from typing import TYPE_CHECKING

from .core.lazy import face


if TYPE_CHECKING:
    from hub_cards.publishing import PublishingTrainer as PublishingTrainer

    from .contrastive import (
        Contrastive as Contrastive,
        ContrastiveConfig as ContrastiveConfig,
        ContrastiveTrainer as ContrastiveTrainer,
    )
    from .core.arguments import (
        NestedTrainingArguments as NestedTrainingArguments,
        TextTrainingArguments as TextTrainingArguments,
    )
    from .core.composition import Composition as Composition
    from .core.embedding import EmbeddingConfig as EmbeddingConfig, EmbeddingObjective as EmbeddingObjective
    from .core.granularity import Granularity as Granularity, Grid as Grid
    from .core.model import NestedModel as NestedModel
    from .core.objective import Identity as Identity, NestedBatch as NestedBatch, Objective as Objective, Term as Term
    from .core.papers import Paper as Paper
    from .core.projection import Projection as Projection
    from .core.states import NestedStates as NestedStates, nested_states as nested_states, truncate as truncate
    from .core.trainer import NestedTrainer as NestedTrainer
    from .data.collators import TextColumnsCollator as TextColumnsCollator
    from .data.teacher import Teacher as Teacher, TeacherEmbeddings as TeacherEmbeddings
    from .distillation import DistillationConfig as DistillationConfig, DistillationTrainer as DistillationTrainer
    from .embedding import EmbeddingTrainer as EmbeddingTrainer
    from .espresso import Espresso as Espresso, EspressoConfig as EspressoConfig, EspressoTrainer as EspressoTrainer
    from .exit_distillation import (
        ExitDistillation as ExitDistillation,
        ExitDistillationConfig as ExitDistillationConfig,
        ExitDistillationTrainer as ExitDistillationTrainer,
    )
    from .exits.fit import ExitFit as ExitFit, fit_exits as fit_exits
    from .ibkd import (
        IBKDConfig as IBKDConfig,
        IBKDFinetuningConfig as IBKDFinetuningConfig,
        IBKDFinetuningTrainer as IBKDFinetuningTrainer,
        IBKDTrainer as IBKDTrainer,
    )
    from .matryoshka_2d import (
        Matryoshka2d as Matryoshka2d,
        Matryoshka2dConfig as Matryoshka2dConfig,
        Matryoshka2dTrainer as Matryoshka2dTrainer,
    )
    from .matryoshka_distillation import (
        MatryoshkaDistillation as MatryoshkaDistillation,
        MatryoshkaDistillationConfig as MatryoshkaDistillationConfig,
        MatryoshkaDistillationTrainer as MatryoshkaDistillationTrainer,
    )
    from .mic import MICConfig as MICConfig, MICTrainer as MICTrainer
    from .mipic import MIPICConfig as MIPICConfig, MIPICTrainer as MIPICTrainer
    from .mixture import MixtureConfig as MixtureConfig, MixtureTrainer as MixtureTrainer
    from .multigranular_mlm import (
        MultigranularMLM as MultigranularMLM,
        MultigranularMLMConfig as MultigranularMLMConfig,
        MultigranularMLMTrainer as MultigranularMLMTrainer,
    )
    from .nested_loss import NestedLoss as NestedLoss
    from .objectives.cross_depth import CrossDepth as CrossDepth
    from .objectives.hsic import HSIC as HSIC
    from .objectives.mic import SCR as SCR, SIR as SIR
    from .objectives.pic import PIC as PIC
    from .objectives.quantization import QAMA as QAMA
    from .objectives.sia import SIA as SIA
    from .objectives.teacher import (
        CRD as CRD,
        HPD as HPD,
        TeacherContrast as TeacherContrast,
        TeacherMSE as TeacherMSE,
    )
    from .objectives.teacher_space import TeacherSpace as TeacherSpace
    from .qama import QAMAConfig as QAMAConfig, QAMATrainer as QAMATrainer
    from .scored_pairs import (
        ScoredPairs as ScoredPairs,
        ScoredPairsConfig as ScoredPairsConfig,
        ScoredPairsTrainer as ScoredPairsTrainer,
    )
    from .simcse import SimCSE as SimCSE, SimCSEConfig as SimCSEConfig, SimCSETrainer as SimCSETrainer
    from .starbucks import (
        Starbucks as Starbucks,
        StarbucksConfig as StarbucksConfig,
        StarbucksTrainer as StarbucksTrainer,
    )

__getattr__, __dir__, __all__ = face(__name__, __file__)

# Name on the command line -> prefix of the method's classes: `StarbucksConfig`, `StarbucksTrainer`.
METHODS = {
    "multigranular-mlm": "MultigranularMLM",
    "matryoshka-distillation": "MatryoshkaDistillation",
    "contrastive": "Contrastive",
    "simcse": "SimCSE",
    "scored-pairs": "ScoredPairs",
    "espresso": "Espresso",
    "2dmse": "Matryoshka2d",
    "starbucks": "Starbucks",
    "mipic": "MIPIC",
    "mic": "MIC",
    "mixture": "Mixture",
    "exit-distillation": "ExitDistillation",
    "qama": "QAMA",
    "ibkd": "IBKD",
    "ibkd-finetuning": "IBKDFinetuning",
}
