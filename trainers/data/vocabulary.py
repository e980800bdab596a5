"""Give an encoder the vocabulary of another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...modeling.modeling_elastic import Elasticity


SPECIAL = ("pad", "unk", "cls", "sep", "mask", "bos", "eos")
BROKEN = "\N{REPLACEMENT CHARACTER}"  # of a token that is a part of a character


def tokens_of_source(source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> list[list[int]]:
    """
    Token of the target -> tokens of the source that spell the same text. Special tokens are those of the same role. A
    token that the source cannot spell has none.
    """
    texts = [target.convert_tokens_to_string([token]) for token in target.convert_ids_to_tokens(range(len(target)))]
    found = source(texts, add_special_tokens=False)["input_ids"]
    tokens = [
        [] if BROKEN in text else [token for token in its if token != source.unk_token_id]
        for text, its in zip(texts, found, strict=True)
    ]
    for role in SPECIAL:
        own, others = (getattr(tokenizer, f"{role}_token_id") for tokenizer in (target, source))
        if own is not None and others is not None:
            tokens[own] = [others]
    return tokens


def transferred(weight: torch.Tensor, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
    """
    Embeddings of new tokens: the mean of those of the old tokens that spell the same text (fast vocabulary transfer,
    [2402.09977](https://huggingface.co/papers/2402.09977)).

    Args:
        weight (`torch.Tensor` of shape `(old tokens, width)`): The old embeddings.
        tokens (`Sequence[Sequence[int]]`): New token -> old tokens; without any, it gets the mean of all embeddings.

    Returns:
        `torch.Tensor` of shape `(new tokens, width)`
    """
    everything = weight.mean(dim=0)
    return torch.stack([weight[list(its)].mean(dim=0) if its else everything for its in tokens])


@torch.no_grad()
def transfer_vocabulary(
    model: PreTrainedModel, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase
) -> None:
    """
    Replace the vocabulary of a model, in place: the token embeddings and, if it has them, the weight of the masked-LM
    head and the static table. New tokens of which only ignored old tokens remain are ignored too.

    Args:
        model ([`~transformers.PreTrainedModel`]): An encoder, or a masked language model.
        source ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        target ([`~transformers.PreTrainedTokenizerBase`]): The tokenizer that it is to have.
    """
    tokens = tokens_of_source(source, target)
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is inputs.weight
    old, old_head = inputs.weight.clone(), None if head is None or tied else head.weight.clone()
    spec = Elasticity.of(model.config)
    old_table = model.base_model.elastic.table.weight.clone() if spec.table else None
    model.resize_token_embeddings(len(target), mean_resizing=False)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(model.config, name, getattr(target, name))
    inputs, head = model.get_input_embeddings(), model.get_output_embeddings()
    inputs.padding_idx = target.pad_token_id
    inputs.weight.copy_(transferred(old, tokens))
    if old_head is not None:
        head.weight.copy_(transferred(old_head, tokens))
    if old_table is not None:
        model.base_model.elastic.table.weight.copy_(transferred(old_table, tokens))
        ignored = [new for new, its in enumerate(tokens) if its and {*spec.ignored_ids}.issuperset(its)]
        replace(spec, ignored_ids=ignored).declare(model.config)
