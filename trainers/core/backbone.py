"""The backbone of a trainer, by name or in memory."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...encode.states import unwrap_encoder
from ...modeling.files_elastic import source_of
from ...models.auto import load_model
from ...models.settings import EmbeddingSettings, load_tokenizer


if TYPE_CHECKING:
    from peft import PeftConfig


ONE_MODEL = "A trainer has one model: to search, make one for each trial and compare trainer.evaluate()['eval_loss']."


def backbone_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    auto_class: type[AutoModel],
    peft_config: PeftConfig | None = None,
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """
    The backbone that a trainer is to train, and its tokenizer, from the arguments of [`EmbeddingTrainer`]. A folder or
    Hub id is loaded by `auto_class`. Of a SentenceTransformer, a copy of the encoder is trained, with the settings of
    the SentenceTransformer.

    Raises:
        ValueError: if there is no tokenizer or no model, `peft_config` is passed for a model that has an adapter,
            a token has no embedding, or an adapter would not fit the published model.
    """
    if model is None or (callable(model) and not isinstance(model, nn.Module)):
        raise ValueError(ONE_MODEL)
    if peft_config is not None and isinstance(model, PreTrainedModel):
        model = copy.deepcopy(model)
    if isinstance(model, str | os.PathLike):
        model = load_model(os.fspath(model), auto_class)
    elif isinstance(encoder := getattr(model, "transformers_model", None), PreTrainedModel):
        settings = EmbeddingSettings.of_sentence_transformer(model)
        tokenizer, model = tokenizer if tokenizer is not None else model.tokenizer, copy.deepcopy(encoder)
        model.embedding_settings = settings
    encoder = unwrap_encoder(model)
    if tokenizer is None and encoder.config.name_or_path:
        source = source_of(encoder)
        tokenizer = load_tokenizer(source, EmbeddingSettings.of(encoder) if auto_class is AutoModel else None)
    if tokenizer is None:
        raise ValueError("The model has no name to find its tokenizer by: pass processing_class.")
    require_embeddings(model, tokenizer)
    if peft_config is not None:
        if not isinstance(model, PreTrainedModel):
            raise ValueError("peft_config makes a new adapter, but the model has one: pass one of them.")
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    if not isinstance(model, PreTrainedModel):
        require_published_size(model)
    return model, tokenizer


def require_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the tokenizer has tokens without an embedding."""
    rows = model.get_input_embeddings().num_embeddings
    image = getattr(tokenizer, "image_token", None)  # of Gemma: no text has it
    if new := sorted(token for token, row in tokenizer.get_vocab().items() if row >= rows and token != image):
        raise ValueError(
            f"The model has {rows} embeddings, none for the token(s) {', '.join(new[:3])}: call "
            "model.resize_token_embeddings(len(tokenizer)) before training."
        )


def require_published_size(adapted: Any) -> None:
    """Raise a ValueError if a model with an adapter has more or fewer token embeddings than its folder or Hub id, to
    which the adapter would be applied."""
    encoder, rows = unwrap_encoder(adapted), adapted.get_input_embeddings().num_embeddings
    if name := encoder.config.name_or_path:
        source = source_of(encoder)
        stored = PreTrainedConfig.get_config_dict(source.name, **source.hub)[0].get("vocab_size", rows)
        if stored != rows:
            raise ValueError(
                f"The adapter would fit no published model: {name} has {stored} token embeddings, and this model "
                f"{rows}. Save the resized model and its tokenizer to a folder, and train on that."
            )
