"""Hard negatives for pairs, found with a teacher: texts that are close to a query but do not answer it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..utils.extras import require_extra, require_sentence_transformers
from ..utils.help_texts import option


if TYPE_CHECKING:
    from datasets import Dataset

    from .teacher import Teacher


@dataclass
class MiningOptions:
    """Which negatives to find."""

    batch_size: int = option(64, "Texts of 128 tokens per batch; more of shorter ones.")
    query_prompt: str | None = option(None, "Prompt for queries.")
    document_prompt: str | None = option(None, "Prompt for candidates.")
    query_column: str = option("anchor", "Column with the queries.")
    positive_column: str = option("positive", "Column with the positives.")
    negatives: int = option(8, "Negatives per pair (IBKD: 8).")
    range_min: int = option(0, "Skip this many nearest candidates, which may be answers as well.")
    range_max: int | None = option(None, "Consider only this many nearest candidates.")
    relative_margin: float | None = option(0.05, "Skip candidates over (1 - margin) x the similarity of the positive.")
    sampling: Literal["top", "random"] = option("top", "top: the nearest candidates in range; random: a sample.")
    seed: int = option(0, "Random seed, for --sampling random.")


def mine(pairs: Dataset, teacher: Teacher, options: MiningOptions, corpus: list[str] | None = None) -> Dataset:
    """Pairs with one column per negative. Candidates are all positives and the corpus, but not the query itself."""
    require_sentence_transformers("Mining")
    require_extra("faiss", "evaluation", "Mining")
    import numpy as np
    from datasets import Dataset
    from sentence_transformers.util import mine_hard_negatives

    random.seed(options.seed)
    np.random.seed(options.seed)
    model, columns = teacher.load(), (options.query_column, options.positive_column)
    queries, positives = (pairs[column][:] for column in columns)
    # A query that is a candidate is an answer to itself, so that the search leaves it out.
    both = [*{*queries} & {*positives, *(corpus or ())}]
    with teacher.autocast(model):
        mined = mine_hard_negatives(
            Dataset.from_dict(dict(zip(columns, (queries + both, positives + both), strict=True))),
            model,
            anchor_column_name=options.query_column,
            positive_column_name=options.positive_column,
            corpus=corpus,
            num_negatives=options.negatives,
            range_min=options.range_min,
            range_max=options.range_max,
            relative_margin=options.relative_margin,
            sampling_strategy=options.sampling,
            query_prompt=options.query_prompt,
            corpus_prompt=options.document_prompt,
            batch_size=options.batch_size,
            output_format="n-tuple",
            use_faiss=True,
            verbose=False,
        )
    return mined.filter(lambda query, positive: query != positive, input_columns=[*columns])
