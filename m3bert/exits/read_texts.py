"""The passes of a fit over its texts, whose results are kept for when it is interrupted."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..encode.identity import encoder_parts
from ..encode.ranks import rank, sum_over_ranks, world_size
from .kept import KeptParts
from .layer_lists import candidates_of
from .passes import PATH_TEXTS, REFIT_TEXTS, TextPasses
from .plan import FitPlan
from .queries import QUERIES, Queries
from .raw_states import RawStates
from .sums import ExitSums
from .token_features import token_features
from .tokenized_texts import TokenizedTexts


SPAN_TOKENS = 14  # tokens of a span
GRAM_LAYERS = 4  # layers that cost as much as a refit
LISTS = 4  # lists that are compared per list with one gap


@dataclass(frozen=True)
class ReadTexts:
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


def read_texts(
    plan: FitPlan,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: TokenizedTexts,
    target_fingerprint: str,
) -> ReadTexts:
    """Encode the vocabulary, all texts, and spans of some texts. Arguments as in [`fit_exits`]; with a progress
    bar, the cost is printed first. ValueError if a hidden state is not finite."""
    options, encoder = plan.options, model.base_model
    raw = RawStates(encoder, tokenizer, plan.pooling, options.batch_size, options.compute_dtype)
    all_tokens = int(sum_over_ranks(torch.tensor(float(texts.tokens))))
    if options.description is not None and rank() == 0:
        tqdm.write(cost_of(plan, raw, texts, all_tokens))
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
    # The vocabulary's features, above, do not depend on what follows.
    identity["settled"] = [plan.prefixes, plan.paths, plan.chosen, options.static, plan.max_length]
    identity["prompts"] = [plan.query_prompt, plan.prompts]
    identity["data"] = [texts.fingerprint, texts.counts, target_fingerprint]
    parts = KeptParts(options.cache_dir, identity, encoder.device)
    sums, targets = parts("sums", lambda: passes.sums(plan.prefixes, plan.projection, options.teacher))
    groups, of_queries = passes.sampled(PATH_TEXTS), targets
    if options.teacher is None:  # a teacher has no embeddings of spans
        groups = passes.spans(plan.query_prompt, plan.max_length)
        of_queries = parts("spans", lambda: passes.targets(groups, plan.projection))
    return ReadTexts(passes, parts, sums, Queries.of(zip(groups, of_queries, strict=True), torch.cat(targets)))


def cost_of(plan: FitPlan, raw: RawStates, texts: TokenizedTexts, tokens: int) -> str:
    """The estimated minutes and amount of work, timed on one batch, as a sentence; `tokens` are of all ranks."""
    last, count = plan.last, len(texts)
    depths = [*plan.paths, *plan.chosen]
    rows = len(raw.tokenizer) if plan.options.static else 0
    cost = float((tokens + 4 * rows) * last)  # in tokens and layers
    if depths:
        lists = sum(len(candidates_of(depth, last)) for depth in plan.chosen) * LISTS
        cost += tokens * min(1, REFIT_TEXTS / count) * (last + GRAM_LAYERS * (last / 4 + len(depths)))
        cost += SPAN_TOKENS * min(count, PATH_TEXTS) * QUERIES * lists * last
    ids = [text.ids for text in next(iter(texts), [])[:64]]
    raw.pooled(ids[:8], [last])  # the first call is slower
    start = time.perf_counter()
    raw.pooled(ids, [last])
    minutes = cost / max(1, sum(map(len, ids)) * last) * (time.perf_counter() - start) / 60 / world_size()
    of_vocabulary = f", {rows:,} tokens of the vocabulary" if rows else ""
    of_paths = f", {len(depths)} paths" if depths else ""
    return f"About {max(1, round(minutes))} min: {count:,} texts ({tokens:,} tokens){of_vocabulary}{of_paths}."
