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

from dataclasses import MISSING, dataclass
from pathlib import Path

from .. import trainers
from ..data.formats import check_files
from ..data.mining import MiningOptions, mine
from ..encode.device import ComputeArguments
from ..utils.durable import replacing
from ..utils.help_texts import option
from .command import parse_options


@dataclass(kw_only=True)
class MiningArguments(MiningOptions):
    """Which pairs, which teacher, and which negatives."""

    teacher_name_or_path: str = option(MISSING, "Folder or Hub id of the teacher.", aliases=["--teacher"])
    files: list[str] = option(MISSING, "Pairs: .jsonl, .csv or .parquet files, also gzipped.")
    teacher_revision: str | None = option(None, "Branch, tag or commit of the teacher.")
    teacher_pooling: str | None = option(None, "mean, cls, lasttoken, pooler, ... Default: as published.")
    teacher_max_length: int | None = option(None, "Longest text in tokens. Default: the teacher's limit.")
    trust_remote_code: bool = option(False, "Run code that comes with the teacher.")
    corpus_files: list[str] | None = option(None, "Files with further candidates.")
    corpus_column: str = option("text", "Column with the candidates in --corpus_files.")
    output_file: str = option("runs/negatives.jsonl", "JSON Lines file to write.")


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
