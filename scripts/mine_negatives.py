"""
Find hard negatives for pairs with a teacher model: texts that are close to a query but do not answer it.

    m3bert mine --teacher_name_or_path BAAI/bge-m3 --files pairs.jsonl --output_file triplets.jsonl
    m3bert train ibkd-finetuning --train_files triplets.jsonl ...

Candidates are all positives in the files, and the texts of --corpus_files. The search is `mine_hard_negatives` of
sentence-transformers with an exact faiss index. The result has one row per pair: query, positive, negative_1,
negative_2, ... Pairs with fewer negatives than asked for are dropped. Needs the extras `sentence-transformers` and
`evaluation`.
"""

from __future__ import annotations


if __name__ == "__main__":
    __import__("as_command").run()

import random
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

from .. import trainers
from ..data.formats import check_files
from ..encode.device import ComputeArguments
from ..utils.durable import replacing
from ..utils.extras import require_extra, require_sentence_transformers
from .command import option, parse_options


@dataclass
class MiningArguments:
    """Which pairs, which teacher, and which negatives."""

    teacher_name_or_path: str = option(MISSING, "Folder or Hub id of the teacher.", aliases=["--teacher"])
    files: list[str] = option(MISSING, "Pairs: .jsonl, .csv or .parquet files, also gzipped.")
    teacher_revision: str | None = option(None, "Branch, tag or commit of the teacher.")
    teacher_pooling: str | None = option(None, "mean, cls, lasttoken, pooler, ... Default: as published.")
    teacher_max_length: int | None = option(None, "Longest text in tokens. Default: the teacher's limit.")
    trust_remote_code: bool = option(False, "Run code that comes with the teacher.")
    batch_size: int = option(64, "Texts of 128 tokens per batch; more of shorter ones.")
    query_prompt: str | None = option(None, "Prompt for queries.")
    document_prompt: str | None = option(None, "Prompt for candidates.")
    query_column: str = option("anchor", "Column with the queries.")
    positive_column: str = option("positive", "Column with the positives.")
    corpus_files: list[str] | None = option(None, "Files with further candidates.")
    corpus_column: str = option("text", "Column with the candidates in --corpus_files.")
    negatives: int = option(8, "Negatives per pair (IBKD: 8).")
    range_min: int = option(0, "Skip this many nearest candidates, which may be answers as well.")
    range_max: int | None = option(None, "Consider only this many nearest candidates.")
    relative_margin: float | None = option(0.05, "Skip candidates over (1 - margin) x the similarity of the positive.")
    sampling: Literal["top", "random"] = option("top", "top: the nearest candidates in range; random: a sample.")
    seed: int = option(0, "Random seed, for --sampling random.")
    output_file: str = option("runs/negatives.jsonl", "JSON Lines file to write.")


def mine(pairs: Any, teacher: trainers.Teacher, options: MiningArguments, corpus: list[str] | None = None) -> Any:
    """The pairs with their negatives, in one column per negative. A query's own text is not among them."""
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


def main(arguments: list[str]) -> None:
    options, compute = parse_options((MiningArguments, ComputeArguments), __doc__, arguments)
    check_files(options.files, [options.query_column, options.positive_column])
    if options.corpus_files:
        check_files(options.corpus_files, [options.corpus_column])
    from ..data.files import load_files

    teacher = trainers.Teacher(
        options.teacher_name_or_path,
        revision=options.teacher_revision,
        pooling=options.teacher_pooling,
        max_length=options.teacher_max_length,
        trust_remote_code=options.trust_remote_code,
        batch_size=options.batch_size,
        compute=compute,
    )
    corpus = load_files(options.corpus_files)[options.corpus_column][:] if options.corpus_files else None
    pairs = load_files(options.files)
    mined = mine(pairs, teacher, options, corpus)
    file = Path(options.output_file)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft:
        mined.to_json(str(draft), compression="gzip" if file.suffix == ".gz" else None)
    print(f"{file}: {len(mined):,} of {len(pairs):,} pairs, {options.negatives} negatives per pair")
