"""The passes of a fit over its texts, whose results are kept for when it is interrupted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..encode.identity import encoder_parts
from ..encode.ranks import rank
from .cost import cost_of
from .kept import KeptParts
from .passes import PATH_TEXTS, RawStates, TextPasses, token_features
from .plan import FitPlan
from .queries import Queries
from .sums import ExitSums
from .tokenized_texts import TokenizedTexts


@dataclass(frozen=True)
class Encoded:
    """
    What a fit has read of its texts.

    Args:
        passes ([`TextPasses`]): The passes over the texts, with the features of tokens.
        parts ([`KeptParts`]): Finished parts of the fit.
        sums ([`ExitSums`]): The sums that exits are fitted from.
        queries ([`Queries`]): What depths are compared on, with targets as embeddings at full depth.
    """

    passes: TextPasses
    parts: KeptParts
    sums: ExitSums
    queries: Queries


def encode(
    plan: FitPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenizedTexts,
    target_fingerprint: str,
) -> Encoded:
    """Encode the vocabulary, the texts and spans of some, each once. Arguments as in [`fit_exits`]; with a progress
    bar, the cost is printed first. ValueError if a hidden state is not finite."""
    options, encoder = plan.options, model.base_model
    raw = RawStates(encoder, tokenizer, plan.pooling, options.batch_size, options.compute_dtype)
    if options.description is not None and rank() == 0:
        tqdm.write(cost_of(plan, raw, texts))
    # The pooler is not read, and many checkpoints leave it to chance.
    identity: dict[str, Any] = {
        **encoder_parts(model, tokenizer, without=("elastic", "pooler")),
        "pooling": plan.pooling,
        "compute_dtype": str(options.compute_dtype or encoder.dtype),
    }
    tokens = None
    if options.static:
        progress = options.description is not None
        tokens = token_features(raw, texts, plan.prompts, options.cache_dir, identity, progress=progress)
    passes = TextPasses(raw, texts, tokens, options.description)
    identity["settled"] = [plan.layers, plan.paths, plan.chosen, options.static, plan.max_length]
    identity["prompts"] = [plan.query_prompt, plan.prompts]
    identity["data"] = [texts.fingerprint, texts.counts, target_fingerprint]
    parts = KeptParts(options.cache_dir, identity, encoder.device)
    sums, targets = parts("sums", lambda: passes.sums(plan.layers, plan.projection, options.teacher))
    groups, of_queries = passes.sampled(PATH_TEXTS), targets
    if options.teacher is None:  # a teacher has no embeddings of spans
        groups = passes.spans(plan.query_prompt, plan.max_length)
        of_queries = parts("spans", lambda: passes.targets(groups, plan.projection))
    return Encoded(passes, parts, sums, Queries.of(zip(groups, of_queries, strict=True), torch.cat(targets)))
