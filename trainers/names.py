"""The public names of `m3bert.trainers`, which imports them when the first one is used."""

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
    CRD as CRD,
    HPD as HPD,
    TeacherContrast as TeacherContrast,
    TeacherMSE as TeacherMSE,
)
from .distillation.trainer import (
    DistillationConfig as DistillationConfig,
    DistillationTrainer as DistillationTrainer,
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
