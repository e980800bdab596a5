"""
m3BERT: elastic text encoders. One checkpoint, loaded with the layers and dimensions that you can afford.

The names that most users need are here. `m3bert.trainers`, `m3bert.evaluation` and `m3bert.index` have all names of
training, evaluation and indexes. Each name is imported when it is first used, so `import m3bert` imports no torch.
"""

from typing import TYPE_CHECKING

from .utils.lazy import lazy_exports


if TYPE_CHECKING:
    from .data.teacher import TeacherEmbeddings as TeacherEmbeddings
    from .data.text_files import TextFiles as TextFiles
    from .encode.encoder import GridEncoder as GridEncoder
    from .encode.granularity import Granularity as Granularity, Grid as Grid
    from .evaluation.evaluate import evaluate_grid as evaluate_grid
    from .evaluation.readers import load_task as load_task
    from .evaluation.while_training import GridEvaluator as GridEvaluator
    from .exits.fit import fit_exits as fit_exits
    from .exits.join import join as join
    from .exits.plan import FitOptions as FitOptions
    from .exits.repository import fit as fit
    from .index import Corpus as Corpus, Index as Index, Plan as Plan
    from .modeling import (
        M3BertConfig as M3BertConfig,
        M3BertForMaskedLM as M3BertForMaskedLM,
        M3BertForSequenceClassification as M3BertForSequenceClassification,
        M3BertForTokenClassification as M3BertForTokenClassification,
        M3BertModel as M3BertModel,
        M3BertQuantizer as M3BertQuantizer,
    )
    from .modeling.modeling_elastic import make_elastic as make_elastic
    from .models.auto import load_model as load_model
    from .models.conversion import convert_to_m3bert as convert_to_m3bert
    from .models.native import convert_to_native as convert_to_native
    from .models.settings import EmbeddingSettings as EmbeddingSettings
    from .models.trim import trim as trim
    from .trainers import (
        ContrastiveConfig as ContrastiveConfig,
        ContrastiveTrainer as ContrastiveTrainer,
        EspressoConfig as EspressoConfig,
        EspressoTrainer as EspressoTrainer,
        ExitDistillationConfig as ExitDistillationConfig,
        ExitDistillationTrainer as ExitDistillationTrainer,
        IBKDConfig as IBKDConfig,
        IBKDFinetuningConfig as IBKDFinetuningConfig,
        IBKDFinetuningTrainer as IBKDFinetuningTrainer,
        IBKDTrainer as IBKDTrainer,
        Matryoshka2dConfig as Matryoshka2dConfig,
        Matryoshka2dTrainer as Matryoshka2dTrainer,
        MatryoshkaDistillationConfig as MatryoshkaDistillationConfig,
        MatryoshkaDistillationTrainer as MatryoshkaDistillationTrainer,
        MICConfig as MICConfig,
        MICTrainer as MICTrainer,
        MIPICConfig as MIPICConfig,
        MIPICTrainer as MIPICTrainer,
        MixtureConfig as MixtureConfig,
        MixtureTrainer as MixtureTrainer,
        MultigranularMLMConfig as MultigranularMLMConfig,
        MultigranularMLMTrainer as MultigranularMLMTrainer,
        NestedLoss as NestedLoss,
        QAMAConfig as QAMAConfig,
        QAMATrainer as QAMATrainer,
        ScoredPairsConfig as ScoredPairsConfig,
        ScoredPairsTrainer as ScoredPairsTrainer,
        SimCSEConfig as SimCSEConfig,
        SimCSETrainer as SimCSETrainer,
        StarbucksConfig as StarbucksConfig,
        StarbucksTrainer as StarbucksTrainer,
    )

__version__ = "0.2.0"

# Module -> its public names, as type checkers see them above.
EXPORTS = {
    ".data.teacher": "TeacherEmbeddings",
    ".data.text_files": "TextFiles",
    ".encode.encoder": "GridEncoder",
    ".encode.granularity": "Granularity Grid",
    ".evaluation.evaluate": "evaluate_grid",
    ".evaluation.while_training": "GridEvaluator",
    ".evaluation.readers": "load_task",
    ".exits.fit": "fit_exits",
    ".exits.join": "join",
    ".exits.plan": "FitOptions",
    ".exits.repository": "fit",
    ".index": "Corpus Index Plan",
    ".modeling": "M3BertConfig M3BertForMaskedLM M3BertForSequenceClassification M3BertForTokenClassification "
    "M3BertModel M3BertQuantizer",
    ".modeling.modeling_elastic": "make_elastic",
    ".models.auto": "load_model",
    ".models.conversion": "convert_to_m3bert",
    ".models.native": "convert_to_native",
    ".models.settings": "EmbeddingSettings",
    ".models.trim": "trim",
    ".trainers": "ContrastiveConfig ContrastiveTrainer EspressoConfig EspressoTrainer ExitDistillationConfig "
    "ExitDistillationTrainer IBKDConfig IBKDFinetuningConfig IBKDFinetuningTrainer IBKDTrainer Matryoshka2dConfig "
    "Matryoshka2dTrainer MatryoshkaDistillationConfig MatryoshkaDistillationTrainer MICConfig MICTrainer MIPICConfig "
    "MIPICTrainer MixtureConfig MixtureTrainer MultigranularMLMConfig MultigranularMLMTrainer NestedLoss QAMAConfig "
    "QAMATrainer ScoredPairsConfig ScoredPairsTrainer SimCSEConfig SimCSETrainer StarbucksConfig StarbucksTrainer",
}
__getattr__, __dir__, names = lazy_exports(__name__, EXPORTS)
__all__ = ["__version__", *names]
