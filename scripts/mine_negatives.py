"""
Find hard negatives of pairs with a teacher: texts that it takes to be close to a query and that are not its answer.

    python -m scripts.mine_negatives --teacher_name_or_path BAAI/bge-m3 --files pairs.jsonl --output triplets.jsonl
    python -m scripts.train ibkd-finetuning --train_files triplets.jsonl ...

Candidates are all positives of the file, and the texts of --corpus_files. The search is sentence-transformers'
`mine_hard_negatives` with an exact faiss index. The result has a row a pair: query, positive, negative_1, negative_2,
...; pairs with fewer negatives than asked for are left out.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import HfArgumentParser

from scripts._command import HelpFormatter, run_command
from trainers import Teacher, require_columns
from trainers.data import load_files
from trainers.teacher import require_sentence_transformers


@dataclass
class MiningArguments:
    """Which negatives of what."""

    teacher_name_or_path: str | None = field(default=None, metadata={"help": "Folder or Hub id of the teacher."})
    teacher_revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit."})
    teacher_pooling: str | None = field(default=None, metadata={"help": "mean, cls, ... Default: as published."})
    teacher_max_length: int | None = field(default=None, metadata={"help": "Longest text in tokens."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the teacher."})
    batch_size: int = field(default=64, metadata={"help": "Texts at a time."})
    query_prompt: str | None = field(default=None, metadata={"help": "Words before queries."})
    document_prompt: str | None = field(default=None, metadata={"help": "Words before candidates."})
    files: list[str] = field(default_factory=list, metadata={"help": "Pairs: .jsonl, .csv or .parquet, also .gz."})
    query_column: str = field(default="anchor", metadata={"help": "Column with the queries."})
    positive_column: str = field(default="positive", metadata={"help": "Column with their answers."})
    corpus_files: list[str] | None = field(default=None, metadata={"help": "More candidates, beside all positives."})
    corpus_column: str = field(default="text", metadata={"help": "Column with the candidates."})
    negatives: int = field(default=8, metadata={"help": "Of each pair (IBKD: 8)."})
    range_min: int = field(default=0, metadata={"help": "Leave out so many of the closest, which may be answers."})
    range_max: int | None = field(default=None, metadata={"help": "Take none beyond the so many closest."})
    relative_margin: float | None = field(
        default=0.05, metadata={"help": "Take none closer than this share below the positive's similarity."}
    )
    sampling: str = field(default="top", metadata={"help": "top: the closest of the range; random: any of it."})
    seed: int = field(default=0, metadata={"help": "Of random sampling."})
    output: str = field(default="runs/negatives.jsonl", metadata={"help": "JSON Lines file to write."})


def mine(pairs: Dataset, teacher: Teacher, options: MiningArguments, corpus: list[str] | None = None) -> Dataset:
    """
    The pairs with their negatives, a column each.

    Raises:
        ValueError: if a column is missing, or an option out of range.
    """
    require_columns(pairs, [options.query_column, options.positive_column])
    if options.negatives < 1:
        raise ValueError(f"negatives={options.negatives} must be 1 or more.")
    if options.sampling not in ("top", "random"):
        raise ValueError(f"sampling={options.sampling!r} is unknown; legal values: top, random.")
    require_sentence_transformers("Mining")
    from sentence_transformers.util import mine_hard_negatives

    random.seed(options.seed)
    np.random.seed(options.seed)
    return mine_hard_negatives(
        pairs.select_columns([options.query_column, options.positive_column]),
        teacher.load(),
        anchor_column_name=options.query_column,
        positive_column_name=options.positive_column,
        corpus=corpus,
        num_negatives=options.negatives,
        range_min=options.range_min,
        range_max=options.range_max,
        relative_margin=options.relative_margin,
        sampling_strategy=options.sampling,  # type: ignore[arg-type]  # checked above
        query_prompt=options.query_prompt,
        corpus_prompt=options.document_prompt,
        batch_size=options.batch_size,
        output_format="n-tuple",
        use_faiss=True,
        verbose=False,
    )


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser(MiningArguments, description=__doc__, formatter_class=HelpFormatter)
    (options,) = parser.parse_args_into_dataclasses(arguments)
    if options.teacher_name_or_path is None or not options.files:
        raise ValueError("Name a teacher and pairs: --teacher_name_or_path MODEL --files FILE ...")
    teacher = Teacher(
        options.teacher_name_or_path,
        revision=options.teacher_revision,
        pooling=options.teacher_pooling,
        max_length=options.teacher_max_length,
        trust_remote_code=options.trust_remote_code,
        batch_size=options.batch_size,
    )
    corpus = None
    if options.corpus_files:
        documents = load_files(options.corpus_files)
        require_columns(documents, [options.corpus_column])
        corpus = documents[options.corpus_column][:]
    pairs = load_files(options.files)
    found = mine(pairs, teacher, options, corpus)
    file = Path(options.output)
    file.parent.mkdir(parents=True, exist_ok=True)
    found.to_json(str(file))
    print(f"{file}: {len(found):,} of {len(pairs):,} pairs, {options.negatives} negatives each")


if __name__ == "__main__":
    run_command(main)
