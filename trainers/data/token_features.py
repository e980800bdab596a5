"""
What an encoder thinks of each token of its vocabulary, as features from which texts are predicted without running it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..core.parallel.ranks import rank, wait_for_all_ranks, world_size
from .embedding_store import EmbeddingStore
from .packing import Frame


logger = logging.getLogger(__name__)
SMOOTHING = (1e-3, 1e-4)  # a of the weights a / (a + share of the token)
TOKENS_OF_A_PART = 1024  # tokens that an interrupted pass over the vocabulary loses at most
LARGE_VOCABULARY = 100_000
LARGEST_PADDING = 128  # rows of an embedding matrix beyond the tokenizer's tokens
Encode = Callable[[list[list[int]], Sequence[int]], Mapping[int, torch.Tensor]]  # token ids, layers -> pooled states


class TokenFeatures:
    """
    Features of tokens: some vectors of each token, as they are and weighted by `a / (a + share of the token)` for each
    a of `SMOOTHING` (smooth inverse frequency), so that frequent tokens count less. The features of a text are the
    mean of those of its tokens. They are never stored for all tokens together.

    Args:
        vectors (`Sequence[torch.Tensor]`): Vectors of all tokens, `(vocabulary, width)` each.
        shares (`torch.Tensor` of shape `(vocabulary,)`): Share of each token in the texts.
        ignored (`Sequence[int]`): Tokens that do not count, such as special tokens.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], shares: torch.Tensor, ignored: Sequence[int]) -> None:
        self.vectors, self.ignored = list(vectors), list(ignored)
        self.weights = torch.stack([torch.ones_like(shares), *(a / (a + shares) for a in SMOOTHING)], dim=1)
        self.weights[self.ignored] = 0.0
        self.width = self.weights.shape[1] * sum(its.shape[1] for its in self.vectors)

    def means(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """The features of texts, given by their token ids: `(texts, features)`; 0 for a text without tokens."""
        lengths = torch.tensor([0, *map(len, ids)])
        tokens, offsets = torch.tensor(list(chain(*ids)), dtype=torch.long), lengths.cumsum(0)[:-1]
        weights = self.weights[tokens]
        sums = [
            torch.nn.functional.embedding_bag(
                tokens, vectors, offsets, mode="sum", per_sample_weights=weight.contiguous()
            )
            for vectors in self.vectors
            for weight in weights.T
        ]
        text = torch.arange(len(ids)).repeat_interleave(lengths[1:])
        counts = torch.bincount(text, weights=weights[:, 0], minlength=len(ids))
        return torch.cat(sums, dim=1) / counts.clamp(min=1)[:, None]

    def table(self, affine: torch.Tensor) -> torch.Tensor:
        """
        The image of every token under an affine map `(1 + features, width)`, `(vocabulary, width)`; 0 for ignored
        tokens. The mean of the rows of a text's tokens is the image of its features.
        """
        affine = affine.to("cpu", torch.float32)
        blocks = iter(affine[1:].split([its.shape[1] for its in self.vectors for _ in self.weights.T]))
        rows = affine[0] * (self.weights[:, :1] > 0)
        for vectors in self.vectors:
            for weight in self.weights.T:
                rows += weight[:, None] * (vectors @ next(blocks))
        return rows


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """
    Raises:
        ValueError: if the tokenizer is not a fast one, does not put its special tokens around a text, or is not that
            of a model with `vocab_size` tokens.
    """
    if not 0 <= vocab_size - len(tokenizer) < LARGEST_PADDING:
        raise ValueError(
            f"The tokenizer has {len(tokenizer):,} tokens, and the model {vocab_size:,}: it is not the tokenizer of "
            "this model."
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is not a fast tokenizer, which a static table needs: load the fast one, or "
            "pass static=False for exits that read a layer's hidden state alone."
        )
    Frame.of(tokenizer)


def token_embeddings(
    encoder: Any,
    tokenizer: PreTrainedTokenizerBase,
    encode: Encode,
    settings: Mapping[str, str],
    cache_dir: str | Path | None = None,
    *,
    prompt: Sequence[int] = (),
    ignored: Sequence[int] = (),
    progress: bool = False,
) -> torch.Tensor:
    """
    The embedding of every token as a text of its own, between the tokenizer's special tokens. All processes of a
    machine share the work. An interrupted pass over a large vocabulary, or one with a `cache_dir`, continues: its
    parts are in a folder that is named after the encoder.

    Args:
        encoder ([`~transformers.PreTrainedModel`]): The encoder, for its name.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer, a fast one.
        encode (`Callable`): Token ids of texts, and layers -> layer -> pooled hidden states `(texts, width)`.
        settings (`dict`): What the embeddings depend on beside the encoder, as JSON values.
        cache_dir (`str` or `Path`, *optional*): Folder to keep the embeddings in. Default: the system's folder for
            temporary files, until the pass is complete.
        prompt (`Sequence[int]`, *optional*): Token ids in front of the token.
        ignored (`Sequence[int]`, *optional*): Tokens that get no embedding, such as special ones.
        progress (`bool`, *optional*, defaults to `False`): Whether to show a progress bar.

    Returns:
        `torch.Tensor` of shape `(vocab_size, width)`; 0 for rows without a token, and for those to ignore.

    Raises:
        ValueError: if an embedding is not finite. The message names the token.
    """
    frame, left_out = Frame.of(tokenizer), {*tokenizer.all_special_ids, *ignored}
    vocab_size, width, depth = (
        encoder.config.vocab_size,
        encoder.config.hidden_size,
        encoder.config.num_hidden_layers,
    )
    parts = [
        range(first, min(first + TOKENS_OF_A_PART, vocab_size)) for first in range(0, vocab_size, TOKENS_OF_A_PART)
    ]
    begin = [*frame.begin, *prompt]
    identity = {
        **settings,
        "encoder": _digest(encoder),
        "begin": begin,
        "end": frame.end,
        "tokens": len(tokenizer),
    }
    name = f"m3bert-vocabulary-{blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=8).hexdigest()}"
    if cache_dir is None and vocab_size <= LARGE_VOCABULARY:
        # Another run at the same time must not share a folder that this one removes. Ranks have one parent.
        name += f"-{os.getpid() if world_size() == 1 else os.getppid()}"
    folder = Path(cache_dir or tempfile.gettempdir()) / name
    with EmbeddingStore(folder, identity, {"embeddings": width}, parts) as store:
        missing = store.missing()
        if missing and vocab_size > LARGE_VOCABULARY and rank() == 0:
            logger.warning(
                f"Embedding each of the {vocab_size:,} tokens of the vocabulary once, in {len(missing)} parts. On a "
                f"CPU, this may take half an hour; when interrupted, it continues from {folder}."
            )
        with tqdm(
            total=sum(len(parts[part]) for part in missing),
            desc="Vocabulary",
            unit=" tokens",
            disable=not progress or rank() > 0,
            leave=False,
        ) as bar:
            for part in missing:
                vectors = torch.zeros(len(parts[part]), width)
                tokens = [token for token in parts[part] if token < len(tokenizer) and token not in left_out]
                if tokens:
                    ids = [[*begin, token, *frame.end] for token in tokens]
                    found = encode(ids, [depth])[depth].float().cpu()
                    wrong = (~torch.isfinite(found)).any(dim=1).nonzero()
                    if len(wrong):
                        token = tokens[int(wrong[0])]
                        name = tokenizer.convert_ids_to_tokens(token)
                        raise ValueError(f"The embedding of the token {name!r} (id {token}) is not finite.")
                    vectors[torch.tensor(tokens) - parts[part].start] = found
                store.write(part, {"embeddings": vectors})
                bar.update(len(parts[part]))
        embeddings = torch.from_numpy(np.array(store.read()["embeddings"]))
        wait_for_all_ranks()
        if cache_dir is None and rank() == 0:
            shutil.rmtree(folder)
    return embeddings


def _digest(encoder: Any) -> str:
    """Digest of the weights, without exits, paths, table, and a pooler, which many checkpoints leave to chance."""
    digest = blake2b(digest_size=16)
    for name, tensor in sorted(encoder.state_dict().items()):
        if not name.startswith(("elastic.", "pooler.")):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
