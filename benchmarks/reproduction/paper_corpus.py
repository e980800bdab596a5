"""
Write the training corpus of MIPIC and MIC (2604.24374, A.2; 2605.29987, B.2), one sentence per line:

    python -m benchmarks.reproduction.paper_corpus sentences.txt
    m3bert train mic --config mic_bert --train_files sentences.txt ...

It draws 3,000 texts each of Banking77 and of tweets, and 1,500 pairs each of STS-B, SICK, MRPC and WiC, from training
sets, and writes each sentence once. They are 18,000 at most; the papers' 24,000 do not follow from these numbers.
The papers call the tweets TweetEval, which has no part with as many test texts as they name, 3,434;
tweet-sentiment-extraction, from which we draw, has 3,534. Many of STS-B's training pairs are test pairs of STS12 to
STS16.

The data sets are read from the folder in the environment variable M3BERT_DATA (`python -m benchmarks.data` fills it),
else from the Hub. The corpus is written without those that are not there, which are named.
"""

from __future__ import annotations

import random
from pathlib import Path

from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import local_data
from m3bert.evaluation import find_task
from m3bert.evaluation.readers import read_part
from m3bert.utils.durable import replace_text


# Task -> texts or pairs to draw from its training set.
SIZES = {"banking77": 3000, "tweet-sentiment-extraction": 3000, "stsb": 1500, "sick": 1500, "mrpc": 1500, "wic": 1500}
COLUMNS = ("text", "sentence1", "sentence2")


def paper_corpus(data: Path | None, seed: int = 0) -> list[str]:
    """
    The sentences, in random order.

    Args:
        data (`Path`, *optional*): Folder of local data sets; `None` reads from the Hub.
        seed (`int`, *optional*, defaults to 0): Seed of draws and order.
    """
    draw, sentences = random.Random(seed), []
    for name, size in SIZES.items():
        try:
            rows = read_part(find_task(name), data, "train")
        except (FileNotFoundError, ValueError) as error:
            print(f"{name} is left out: {str(error).splitlines()[0]}")
            continue
        for row in draw.sample(rows, min(size, len(rows))):
            sentences += [" ".join(row[column].split()) for column in COLUMNS if column in row]
    sentences = list(dict.fromkeys(sentences))
    draw.shuffle(sentences)
    return sentences


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, help="text file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of draws and order (default: 0)")
    options = parser.parse_args(arguments)
    if options.file.exists():
        raise ValueError(f"{options.file} exists: name another file, or remove it.")
    sentences = paper_corpus(local_data(), options.seed)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(options.file, "".join(f"{sentence}\n" for sentence in sentences))
    print(f"{options.file}: {len(sentences):,} sentences")


if __name__ == "__main__":
    run_command(main)
