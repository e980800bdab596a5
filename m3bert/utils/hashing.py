"""Hashes of texts and weights that are the same in every process and run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from hashlib import blake2b, file_digest
from pathlib import Path

import torch
from torch import nn


def hash_of(content: str | bytes, bits: int = 63) -> int:
    """A hash of a text or of bytes, as a number."""
    content = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return int.from_bytes(blake2b(content, digest_size=-(-bits // 8)).digest(), "big") >> -bits % 8


def key_of(settings: Mapping[str, object]) -> str:
    """A short name for settings, which are JSON values."""
    return blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def digest_of_files(patterns: Iterable[str]) -> str:
    """A digest of the content of the files of this machine that patterns of paths find; URLs do not count."""
    digest = blake2b(digest_size=8)
    for file in sorted(path for pattern in patterns for path in glob(pattern, recursive=True) if os.path.isfile(path)):
        with open(file, "rb") as content:
            digest.update(file_digest(content, "sha256").digest())
    return digest.hexdigest()


def sha256_of(file: Path) -> str:
    """SHA-256 of a file, as `sha256sum` prints it."""
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def fingerprint_of(texts: Iterable[str], digest: blake2b | None = None) -> str:
    """A digest of texts, which depends on where each begins and ends; a `digest` of texts before them is continued."""
    digest = blake2b(digest_size=16) if digest is None else digest
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()


def weights_fingerprint(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of the names and values of tensors. The same values in a wider type have the same digest."""
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(name.encode())
        for part in plain_tensors(tensor):
            plain = part.detach().cpu()
            plain = plain.float() if plain.dtype in (torch.bfloat16, torch.float16) else plain
            digest.update(plain.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or the plain tensors inside a tensor subclass, such as quantised weights and their scales."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]  # what every tensor subclass defines
    for name in names:
        yield from plain_tensors(getattr(tensor, name))
