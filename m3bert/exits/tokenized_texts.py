"""Texts that are read once and tokenised once, into a temporary file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from ..encode.ranks import rank, sum_over_ranks, world_size
from ..utils.hashing import fingerprint_of


TEXTS_AT_ONCE = 1024  # sorted by length when they are encoded, so that a batch has little padding


class TokenizedText(NamedTuple):
    """A text of a source, and its token ids with the prompt and special tokens."""

    source: str
    text: str
    ids: list[int]


class TokenizedTexts:
    """
    This rank's share of the texts of several sources, which every rank passes. The texts, truncated to `max_length`
    tokens, and their token ids are in a temporary file, so that memory does not grow with their number; iterate over
    it as often as needed. Empty texts are left out. The prompts are put before the texts in turn.

    Attributes:
        counts (`dict[str, int]`): Source -> its number of texts on all ranks.
        fingerprint (`str`): Digest of the texts in their order.
    """

    def __init__(
        self,
        sources: Mapping[str, Iterable[str]],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        prompts: Sequence[str],
    ) -> None:
        self.counts: dict[str, int] = {}
        self._file = tempfile.TemporaryFile("w+", encoding="utf-8")  # closed with the object
        digest = blake2b(digest_size=16)
        self._token_counts = torch.zeros(len(tokenizer), dtype=torch.float64)
        for source, texts in sources.items():
            self.counts[source] = 0
            remaining = (text for text in texts if text.strip())
            while chunk := list(islice(remaining, TEXTS_AT_ONCE * world_size())):
                fingerprint_of(chunk, digest)
                start, part = self.counts[source], chunk[rank() :: world_size()]
                self.counts[source] += len(chunk)
                if not part:
                    continue
                turns = range(start + rank(), start + len(chunk), world_size())
                prompted = [prompts[turn % len(prompts)] + text for turn, text in zip(turns, part, strict=True)]
                encoded = tokenizer(prompted, truncation=True, max_length=max_length, return_attention_mask=False)
                for text, ids in zip(part, encoded["input_ids"], strict=True):
                    self._file.write(json.dumps(TokenizedText(source, text, ids)) + "\n")
                every = torch.tensor(list(chain(*encoded["input_ids"])), dtype=torch.long)
                self._token_counts += torch.bincount(every, minlength=len(tokenizer))
        self.fingerprint = digest.hexdigest()

    @property
    def tokens(self) -> int:
        """Number of tokens of this rank's texts."""
        return int(self._token_counts.sum())

    def __len__(self) -> int:
        """Number of texts on all ranks."""
        return sum(self.counts.values())

    def __iter__(self) -> Iterator[list[TokenizedText]]:
        """Groups of texts of this rank."""
        self._file.seek(0)
        while lines := list(islice(self._file, TEXTS_AT_ONCE)):
            yield [TokenizedText(*json.loads(line)) for line in lines]

    def shares(self, vocab_size: int, ignored: Sequence[int]) -> torch.Tensor:
        """Share of each token in the texts of all ranks, without the ignored ones: `(vocab_size,)`."""
        counts = torch.zeros(vocab_size, dtype=torch.float64)
        counts[: len(self._token_counts)] = sum_over_ranks(self._token_counts)
        counts[list(ignored)] = 0
        return (counts / counts.sum().clamp(min=1)).float()
