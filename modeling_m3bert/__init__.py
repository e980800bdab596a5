"""The m3BERT architecture. Importing this package registers `m3bert` with the Auto classes of transformers."""

if __name__ == "modeling_m3bert":
    raise ImportError("Import m3bert.modeling: the folder modeling_m3bert is a part of the package m3bert.")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_m3bert import M3BertConfig
from .modeling_m3bert import (
    M3BertForMaskedLM,
    M3BertForSequenceClassification,
    M3BertForTokenClassification,
    M3BertModel,
    M3BertPreTrainedModel,
)
from .quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig


AutoConfig.register(M3BertConfig.model_type, M3BertConfig)
AutoModel.register(M3BertConfig, M3BertModel)
AutoModelForMaskedLM.register(M3BertConfig, M3BertForMaskedLM)
AutoModelForSequenceClassification.register(M3BertConfig, M3BertForSequenceClassification)
AutoModelForTokenClassification.register(M3BertConfig, M3BertForTokenClassification)
AutoConfig.register(M3BertQuantizerConfig.model_type, M3BertQuantizerConfig)
AutoModel.register(M3BertQuantizerConfig, M3BertQuantizer)

__all__ = [
    "M3BertConfig",
    "M3BertForMaskedLM",
    "M3BertForSequenceClassification",
    "M3BertForTokenClassification",
    "M3BertModel",
    "M3BertPreTrainedModel",
    "M3BertQuantizer",
    "M3BertQuantizerConfig",
]
