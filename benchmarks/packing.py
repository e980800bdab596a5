"""
Training steps on packed rows against steps on padded ones: real tokens per second of the same documents.

    python -m benchmarks.packing              # minutes on two cores
    python -m benchmarks.packing --quick      # a smaller model

Documents are lines of English news, web pages, books and the Brown corpus (text-english of the local data), with the
tokenizer of the extra `quickstart`. A step is a forward, a backward and AdamW of multigranular masked-LM training, on
the documents of 8 packed rows of 512 tokens: the same documents and the same masked tokens for every variant.

- packed: the 8 rows, as `m3bert prepare` makes them and `m3bert train` reads them
- padded: one document per row, padded to the longest of the batch, in one pass
- chunked: the same, as it is trained without packing: in passes over documents of similar length

The last line printed is a JSON object. `packed_vs_padded` and `packed_vs_chunked` are ratios of tokens per second,
from the medians of steps that are timed in turn. On a CPU, packed rows are unpacked and encoded in passes over
documents of similar length, too, so that `packed_vs_chunked` is about 1: both avoid the padding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_least
from m3bert.commands.command import run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.data.collators import MaskedLMCollator
from m3bert.data.files import load_files
from m3bert.data.packing import DOCUMENT_LENGTHS, Frame, packed_rows
from m3bert.encode.packed_rows import Flattened
from m3bert.encode.padded_batches import PassCost
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM
from m3bert.trainers import Grid, MultigranularMLM, NestedModel


BOUNDS: Bounds = {
    "packed_vs_padded": at_least(1.3),
    "packed_vs_chunked": None,
}
SOURCES = ("news", "web", "books", "brown")
MAX_LENGTH = 512
ONE_PASS = PassCost(2**40)  # so large an overhead that all documents share a pass
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Layers, width, dims to train, packed rows of a step, steps, and timings of each variant."""

    layers: int
    width: int
    dims: tuple[int, ...]
    rows: int
    steps: int
    rounds: int

    @property
    def grid(self) -> Grid:
        third = self.layers // 3
        return Grid.product([third, 2 * third, self.layers], self.dims)


FULL = Sizes(6, 384, (32, 64, 128, 384), rows=8, steps=1, rounds=4)
QUICK = Sizes(3, 96, (32, 96), rows=2, steps=1, rounds=3)


def documents(tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[list[int]]:
    """Lines of all sources in random order, tokenised, with at least so many tokens together."""
    folder, draw = data_folder() / "text-english", random.Random(SEED)
    lines = [line for name in SOURCES for line in load_files([str(folder / f"{name}.txt.gz")])["text"]]
    draw.shuffle(lines)
    tokenized: list[list[int]] = []
    total = 0
    for line in lines:
        tokenized.append(tokenizer(line, add_special_tokens=False)["input_ids"])
        total += len(tokenized[-1])
        if total >= tokens:
            return tokenized
    raise ValueError(f"{folder} has {total:,} tokens, fewer than {tokens:,}.")


def unpacked(batch: Batch, pad_token_id: int) -> Batch:
    """The documents of a packed batch, one per row, as the collator of single documents pads them."""
    row = Flattened.of(batch, 0)
    ids, labels = row.inputs["input_ids"], row.inputs["labels"]
    return {
        "input_ids": row.separate(ids, pad_token_id),
        "attention_mask": row.separate(torch.ones_like(ids), 0),
        "labels": row.separate(labels, -100),
    }


def packed_batches(tokenizer: PreTrainedTokenizerBase, sizes: Sizes) -> list[Batch]:
    """The packed batch of each step, with masked tokens."""
    torch.manual_seed(SEED)
    count = sizes.rows * sizes.steps
    tokens, lengths = packed_rows(documents(tokenizer, (count + 2) * MAX_LENGTH), Frame.of(tokenizer), MAX_LENGTH)
    rows = [{"input_ids": row, DOCUMENT_LENGTHS: each} for row, each in zip(tokens, lengths, strict=True)][:count]
    collator = MaskedLMCollator(tokenizer)
    return [dict(collator(rows[start : start + sizes.rows])) for start in range(0, count, sizes.rows)]


@contextmanager
def in_one_pass() -> Iterator[None]:
    """Documents of different lengths share a pass, as with other trainers."""
    with patch.object(PassCost, "on", lambda device: ONE_PASS):
        yield


class Steps:
    """Training steps of one model on the same documents, packed or not."""

    def __init__(self, sizes: Sizes) -> None:
        tokenizer = AutoTokenizer.from_pretrained(default_base())
        self.packed = packed_batches(tokenizer, sizes)
        self.padded = [unpacked(batch, tokenizer.pad_token_id) for batch in self.packed]
        torch.manual_seed(SEED)
        config = M3BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=sizes.width,
            intermediate_size=4 * sizes.width,
            num_hidden_layers=sizes.layers,
            num_attention_heads=12,
            matryoshka_layers=sizes.grid.layers,
            matryoshka_dims=sizes.grid.dims,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=0.2,  # a loss that depends on what tokens attend to
        )
        self.model = NestedModel(M3BertForMaskedLM(config), MultigranularMLM(sizes.grid))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)

    @property
    def tokens(self) -> int:
        """Real tokens of all steps."""
        return sum(int((batch["document_ids"] > 0).sum()) for batch in self.packed)

    def run(self, batches: list[Batch]) -> None:
        """One step per batch."""
        for batch in batches:
            self.model(**batch)["loss"].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run_in_one_pass(self, batches: list[Batch]) -> None:
        with in_one_pass():
            self.run(batches)

    def variants(self) -> dict[str, Callable[[], None]]:
        return {
            "packed": partial(self.run, self.packed),
            "padded": partial(self.run_in_one_pass, self.padded),
            "chunked": partial(self.run, self.padded),
        }

    def check_equal(self) -> None:
        """
        Compare the losses of the variants, without dropout.

        Raises:
            ValueError: if one differs from that of padded rows by more than 1e-5 of it.
        """
        self.model.eval()
        with torch.no_grad():
            packed, padded = (self.model(**batches[0])["loss"].item() for batches in (self.packed, self.padded))
        self.model.train()
        difference = abs(packed / padded - 1)
        print(f"largest relative difference from the loss of padded rows: {difference:.1e}", flush=True)
        if difference > 1e-5:
            raise ValueError(f"Packed rows have the loss {packed}, padded ones {padded}.")


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL
    steps = Steps(sizes)
    steps.check_equal()
    seconds = run.time(f"{sizes.steps} steps of {steps.tokens:,} tokens", steps.variants(), sizes.rounds)
    run.record("all steps", {name: steps.tokens / value for name, value in seconds.items()}, "tokens_per_second")
    return {
        "packed_vs_padded": seconds["padded"] / seconds["packed"],
        "packed_vs_chunked": seconds["chunked"] / seconds["packed"],
    }


BENCHMARK = Benchmark("packing", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
