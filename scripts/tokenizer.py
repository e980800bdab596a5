"""
Train a tokenizer on text of one or many languages: byte-pair encoding of bytes, which covers every text.

    m3bert tokenizer --files data/*.txt.gz --vocab_size 32000 --output_dir runs/tokenizer
    m3bert prepare --files data --tokenizer_name runs/tokenizer --output_dir runs/prepared
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .command import parse_options, run_command


@dataclass
class TokenizerArguments:
    """Which text, and how many tokens."""

    files: list[str] = field(
        default_factory=list, metadata={"help": "Text: .txt, .jsonl, .csv, .tsv or .parquet files, also gzipped."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    vocab_size: int = field(default=32_000, metadata={"help": "Number of tokens."})
    max_length: int = field(default=512, metadata={"help": "Longest text in tokens, as the tokenizer's limit."})
    output_dir: str = field(default="runs/tokenizer", metadata={"help": "Folder to write."})


def main(arguments: list[str]) -> None:
    (options,) = parse_options((TokenizerArguments,), __doc__, arguments)
    if not options.files:
        raise ValueError("A tokenizer needs --files FILE ...")
    from trainers.core.dataset_checks import require_columns
    from trainers.data.files import load_files
    from trainers.data.tokenizer_training import train_tokenizer

    texts = load_files(options.files)
    require_columns(texts, [options.text_column])
    rows = (row[options.text_column] or "" for row in texts)
    tokenizer = train_tokenizer(rows, options.vocab_size, options.max_length)
    tokenizer.save_pretrained(options.output_dir)
    print(f"{options.output_dir}: {len(tokenizer):,} tokens from {len(texts):,} texts")


if __name__ == "__main__":
    run_command(main)
