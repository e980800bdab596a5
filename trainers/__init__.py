"""Trainers that optimise every granularity of an encoder: one module per method, and packages that methods share."""

if __name__ == "trainers":
    raise ImportError("Import m3bert.trainers: the folder trainers is a part of the package m3bert.")

from typing import TYPE_CHECKING

from ..utils.lazy import face


if TYPE_CHECKING:
    from ..data.collators import TextColumnsCollator as TextColumnsCollator
    from ..data.teacher import Teacher as Teacher, TeacherEmbeddings as TeacherEmbeddings
    from ..encode.granularity import Granularity as Granularity, Grid as Grid
    from ..encode.projection import Projection as Projection
    from ..encode.ranks import RankRows as RankRows
    from ..encode.states import NestedStates as NestedStates, nested_states as nested_states, truncate as truncate
    from ..exits.fit import fit_exits as fit_exits
    from ..exits.record import ExitFit as ExitFit
    from ..utils.help_texts import described as described
    from ..utils.papers import Identity as Identity, Paper as Paper
    from .baselines.espresso import (
        Espresso as Espresso,
        EspressoConfig as EspressoConfig,
        EspressoTrainer as EspressoTrainer,
    )
    from .baselines.matryoshka_2d import (
        Matryoshka2d as Matryoshka2d,
        Matryoshka2dConfig as Matryoshka2dConfig,
        Matryoshka2dTrainer as Matryoshka2dTrainer,
    )
    from .baselines.simcse import SimCSE as SimCSE, SimCSEConfig as SimCSEConfig, SimCSETrainer as SimCSETrainer
    from .baselines.starbucks import (
        Starbucks as Starbucks,
        StarbucksConfig as StarbucksConfig,
        StarbucksTrainer as StarbucksTrainer,
    )
    from .contrastive.contrastive import (
        Contrastive as Contrastive,
        ContrastiveConfig as ContrastiveConfig,
        ContrastiveTrainer as ContrastiveTrainer,
    )
    from .contrastive.scored_pairs import (
        ScoredPairs as ScoredPairs,
        ScoredPairsConfig as ScoredPairsConfig,
        ScoredPairsTrainer as ScoredPairsTrainer,
    )
    from .core.arguments import (
        NestedTrainingArguments as NestedTrainingArguments,
        TextTrainingArguments as TextTrainingArguments,
    )
    from .core.composition import Composition as Composition
    from .core.model import NestedModel as NestedModel
    from .core.objective import NestedBatch as NestedBatch, Objective as Objective, Term as Term
    from .core.publishing import PublishingTrainer as PublishingTrainer
    from .core.trainer import NestedTrainer as NestedTrainer
    from .distillation.objective import (
        DistillationConfig as DistillationConfig,
        DistillationTrainer as DistillationTrainer,
    )
    from .distillation.teacher import (
        CRD as CRD,
        HPD as HPD,
        TeacherContrast as TeacherContrast,
        TeacherMSE as TeacherMSE,
    )
    from .embedding.nested_loss import NestedLoss as NestedLoss
    from .embedding.objective import EmbeddingConfig as EmbeddingConfig, EmbeddingObjective as EmbeddingObjective
    from .embedding.trainer import EmbeddingTrainer as EmbeddingTrainer
    from .exit_distillation.cross_depth import CrossDepth as CrossDepth
    from .exit_distillation.teacher_space import TeacherSpace as TeacherSpace
    from .exit_distillation.trainer import (
        ExitDistillation as ExitDistillation,
        ExitDistillationConfig as ExitDistillationConfig,
        ExitDistillationTrainer as ExitDistillationTrainer,
    )
    from .ibkd.hsic import HSIC as HSIC
    from .ibkd.trainer import (
        IBKDConfig as IBKDConfig,
        IBKDFinetuningConfig as IBKDFinetuningConfig,
        IBKDFinetuningTrainer as IBKDFinetuningTrainer,
        IBKDTrainer as IBKDTrainer,
    )
    from .m3bert_mlm.matryoshka_distillation import (
        MatryoshkaDistillation as MatryoshkaDistillation,
        MatryoshkaDistillationConfig as MatryoshkaDistillationConfig,
        MatryoshkaDistillationTrainer as MatryoshkaDistillationTrainer,
    )
    from .m3bert_mlm.multigranular_mlm import (
        MultigranularMLM as MultigranularMLM,
        MultigranularMLMConfig as MultigranularMLMConfig,
        MultigranularMLMTrainer as MultigranularMLMTrainer,
    )
    from .mic.objectives import SCR as SCR, SIR as SIR
    from .mic.trainer import MICConfig as MICConfig, MICTrainer as MICTrainer
    from .mipic.pic import PIC as PIC
    from .mipic.sia import SIA as SIA
    from .mipic.trainer import MIPICConfig as MIPICConfig, MIPICTrainer as MIPICTrainer
    from .mixture import MixtureConfig as MixtureConfig, MixtureTrainer as MixtureTrainer
    from .qama.objective import QAMA as QAMA
    from .qama.trainer import QAMAConfig as QAMAConfig, QAMATrainer as QAMATrainer

# Module -> its public names, as type checkers see them above.
EXPORTS = {
    "..encode.granularity": "Granularity Grid",
    "..encode.projection": "Projection",
    "..encode.ranks": "RankRows",
    "..encode.states": "NestedStates nested_states truncate",
    "..exits.fit": "fit_exits",
    "..exits.record": "ExitFit",
    ".core.publishing": "PublishingTrainer",
    ".baselines.espresso": "Espresso EspressoConfig EspressoTrainer",
    ".baselines.matryoshka_2d": "Matryoshka2d Matryoshka2dConfig Matryoshka2dTrainer",
    ".baselines.simcse": "SimCSE SimCSEConfig SimCSETrainer",
    ".baselines.starbucks": "Starbucks StarbucksConfig StarbucksTrainer",
    ".contrastive.contrastive": "Contrastive ContrastiveConfig ContrastiveTrainer",
    ".contrastive.scored_pairs": "ScoredPairs ScoredPairsConfig ScoredPairsTrainer",
    ".core.arguments": "NestedTrainingArguments TextTrainingArguments",
    ".core.composition": "Composition",
    ".core.model": "NestedModel",
    ".core.objective": "NestedBatch Objective Term",
    "..utils.help_texts": "described",
    "..utils.papers": "Identity Paper",
    ".core.trainer": "NestedTrainer",
    "..data.collators": "TextColumnsCollator",
    "..data.teacher": "Teacher TeacherEmbeddings",
    ".exit_distillation.cross_depth": "CrossDepth",
    ".exit_distillation.teacher_space": "TeacherSpace",
    ".exit_distillation.trainer": "ExitDistillation ExitDistillationConfig ExitDistillationTrainer",
    ".ibkd.hsic": "HSIC",
    ".ibkd.trainer": "IBKDConfig IBKDFinetuningConfig IBKDFinetuningTrainer IBKDTrainer",
    ".m3bert_mlm.matryoshka_distillation": "MatryoshkaDistillation MatryoshkaDistillationConfig "
    "MatryoshkaDistillationTrainer",
    ".m3bert_mlm.multigranular_mlm": "MultigranularMLM MultigranularMLMConfig MultigranularMLMTrainer",
    ".mic.objectives": "SCR SIR",
    ".mic.trainer": "MICConfig MICTrainer",
    ".mipic.pic": "PIC",
    ".mipic.sia": "SIA",
    ".mipic.trainer": "MIPICConfig MIPICTrainer",
    ".mixture": "MixtureConfig MixtureTrainer",
    ".qama.objective": "QAMA",
    ".qama.trainer": "QAMAConfig QAMATrainer",
    ".distillation.objective": "DistillationConfig DistillationTrainer",
    ".embedding.objective": "EmbeddingConfig EmbeddingObjective",
    ".embedding.trainer": "EmbeddingTrainer",
    ".embedding.nested_loss": "NestedLoss",
    ".distillation.teacher": "CRD HPD TeacherContrast TeacherMSE",
}
__getattr__, __dir__, __all__ = face(__name__, EXPORTS)

# Name on the command line -> config and trainer of the method.
METHODS = {
    "multigranular-mlm": ("MultigranularMLMConfig", "MultigranularMLMTrainer"),
    "matryoshka-distillation": ("MatryoshkaDistillationConfig", "MatryoshkaDistillationTrainer"),
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
