"""Trainers that optimise every granularity of an encoder: one module per method, and packages that methods share."""

from typing import TYPE_CHECKING

from .core.face import face


if TYPE_CHECKING:
    from .contrastive import (
        Contrastive as Contrastive,
    )
    from .contrastive import (
        ContrastiveConfig as ContrastiveConfig,
    )
    from .contrastive import (
        ContrastiveTrainer as ContrastiveTrainer,
    )
    from .core.arguments import NestedTrainingArguments as NestedTrainingArguments
    from .core.composition import Composition as Composition
    from .core.embedding import EmbeddingConfig as EmbeddingConfig
    from .core.embedding import EmbeddingObjective as EmbeddingObjective
    from .core.granularity import Granularity as Granularity
    from .core.granularity import Grid as Grid
    from .core.model import NestedModel as NestedModel
    from .core.objective import Identity as Identity
    from .core.objective import NestedBatch as NestedBatch
    from .core.objective import Objective as Objective
    from .core.objective import Term as Term
    from .core.papers import Paper as Paper
    from .core.parts.cross_depth import CrossDepth as CrossDepth
    from .core.parts.hsic import HSIC as HSIC
    from .core.parts.pic import PIC as PIC
    from .core.parts.quantization import QAMA as QAMA
    from .core.parts.scr import SCR as SCR
    from .core.parts.sia import SIA as SIA
    from .core.parts.sir import SIR as SIR
    from .core.parts.teacher import (
        CRD as CRD,
    )
    from .core.parts.teacher import (
        HPD as HPD,
    )
    from .core.parts.teacher import (
        TeacherContrast as TeacherContrast,
    )
    from .core.parts.teacher import (
        TeacherMSE as TeacherMSE,
    )
    from .core.parts.teacher_space import TeacherSpace as TeacherSpace
    from .core.projection import Projection as Projection
    from .core.states import NestedStates as NestedStates
    from .core.states import nested_states as nested_states
    from .core.states import truncate as truncate
    from .core.trainer import NestedTrainer as NestedTrainer
    from .data.collators import TextColumnsCollator as TextColumnsCollator
    from .data.teacher import Teacher as Teacher
    from .data.teacher import TeacherEmbeddings as TeacherEmbeddings
    from .distillation import DistillationConfig as DistillationConfig
    from .distillation import DistillationTrainer as DistillationTrainer
    from .embedding import EmbeddingTrainer as EmbeddingTrainer
    from .espresso import Espresso as Espresso
    from .espresso import EspressoConfig as EspressoConfig
    from .espresso import EspressoTrainer as EspressoTrainer
    from .exit_distillation import ExitDistillation as ExitDistillation
    from .exit_distillation import ExitDistillationConfig as ExitDistillationConfig
    from .exit_distillation import ExitDistillationTrainer as ExitDistillationTrainer
    from .exits import ExitFit as ExitFit
    from .exits import fit_exits as fit_exits
    from .ibkd import (
        IBKDConfig as IBKDConfig,
    )
    from .ibkd import (
        IBKDFinetuningConfig as IBKDFinetuningConfig,
    )
    from .ibkd import (
        IBKDFinetuningTrainer as IBKDFinetuningTrainer,
    )
    from .ibkd import (
        IBKDTrainer as IBKDTrainer,
    )
    from .matryoshka_2d import (
        Matryoshka2d as Matryoshka2d,
    )
    from .matryoshka_2d import (
        Matryoshka2dConfig as Matryoshka2dConfig,
    )
    from .matryoshka_2d import (
        Matryoshka2dTrainer as Matryoshka2dTrainer,
    )
    from .matryoshka_distillation import (
        MatryoshkaDistillation as MatryoshkaDistillation,
    )
    from .matryoshka_distillation import (
        MatryoshkaDistillationConfig as MatryoshkaDistillationConfig,
    )
    from .matryoshka_distillation import (
        MatryoshkaDistillationTrainer as MatryoshkaDistillationTrainer,
    )
    from .mic import MICConfig as MICConfig
    from .mic import MICTrainer as MICTrainer
    from .mipic import MIPICConfig as MIPICConfig
    from .mipic import MIPICTrainer as MIPICTrainer
    from .mixture import MixtureConfig as MixtureConfig
    from .mixture import MixtureTrainer as MixtureTrainer
    from .multigranular_mlm import (
        MultigranularMLM as MultigranularMLM,
    )
    from .multigranular_mlm import (
        MultigranularMLMConfig as MultigranularMLMConfig,
    )
    from .multigranular_mlm import (
        MultigranularMLMTrainer as MultigranularMLMTrainer,
    )
    from .publishing import PublishingTrainer as PublishingTrainer
    from .qama import QAMAConfig as QAMAConfig
    from .qama import QAMATrainer as QAMATrainer
    from .simcse import SimCSE as SimCSE
    from .simcse import SimCSEConfig as SimCSEConfig
    from .simcse import SimCSETrainer as SimCSETrainer
    from .starbucks import (
        Starbucks as Starbucks,
    )
    from .starbucks import (
        StarbucksConfig as StarbucksConfig,
    )
    from .starbucks import (
        StarbucksTrainer as StarbucksTrainer,
    )

__getattr__, __dir__, __all__ = face(__name__, __file__)

# Name on the command line -> prefix of the method's classes: `StarbucksConfig`, `StarbucksTrainer`.
METHODS = {
    "multigranular-mlm": "MultigranularMLM",
    "matryoshka-distillation": "MatryoshkaDistillation",
    "contrastive": "Contrastive",
    "simcse": "SimCSE",
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
