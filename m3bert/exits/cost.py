"""How long a fit takes."""

from __future__ import annotations

import time

from ..encode.ranks import world_size
from .layer_lists import candidates_of
from .passes import PATH_TEXTS, REFIT_TEXTS, RawStates
from .plan import FitPlan
from .spans import QUERIES
from .tokenized_texts import TokenizedTexts


# Tokens of a span, layers that cost as much as a refit, all lists per list with one gap.
SPAN_TOKENS, GRAM_LAYERS, LISTS = 14, 4, 4


def cost_of(plan: FitPlan, raw: RawStates, texts: TokenizedTexts) -> str:
    """Estimate work and time from one batch."""
    last, count = plan.last, len(texts)
    depths = [*plan.paths, *plan.chosen]
    rows = len(raw.tokenizer) if plan.options.static else 0
    cost = float((texts.tokens + 4 * rows) * last)  # in tokens and layers
    if depths:
        lists = sum(len(candidates_of(depth, last)) for depth in plan.chosen) * LISTS
        cost += texts.tokens * min(1, REFIT_TEXTS / count) * (last + GRAM_LAYERS * (last / 4 + len(depths)))
        cost += SPAN_TOKENS * min(count, PATH_TEXTS) * QUERIES * lists * last
    ids = [text.ids for text in next(iter(texts), [])[:64]]
    raw.pooled(ids[:8], [last])  # the first call is slower
    start = time.perf_counter()
    raw.pooled(ids, [last])
    minutes = cost / max(1, sum(map(len, ids)) * last) * (time.perf_counter() - start) / 60 / world_size()
    of_vocabulary = f", {rows:,} tokens of the vocabulary" if rows else ""
    of_paths = f", {len(depths)} paths" if depths else ""
    return f"About {max(1, round(minutes))} min: {count:,} texts ({texts.tokens:,} tokens){of_vocabulary}{of_paths}."
