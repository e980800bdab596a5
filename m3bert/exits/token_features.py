"""Token features for the static table, from which texts are predicted without running the encoder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..data.packing import Frame
from ..encode.ranks import rank, sum_over_ranks, world_size
from .kept import KeptParts
from .raw_states import RawStates
from .tokenized_texts import TokenizedTexts


logger = logging.getLogger(__name__)
SMOOTHING = (1e-3, 1e-4)  # a of the weights a / (a + share of the token)
TOKENS_AT_ONCE = 1024
LARGEST_PADDING = 128  # rows of an embedding matrix beyond the tokenizer's tokens
LONGEST_PROMPTS = 8  # tokens of all prompts that are left out of static vectors


class TokenFeatures:
    """
    Features of tokens: some vectors of each token, as they are and weighted by `a / (a + share of the token)` for each
    a of `SMOOTHING` (smooth inverse frequency), so that frequent tokens count less. The features of a text are the
    mean of its tokens' features. They are never stored for all tokens together.

    Args:
        vectors (`Sequence[torch.Tensor]`): Vectors of all tokens, `(vocabulary, width)` each.
        shares (`torch.Tensor` of shape `(vocabulary,)`): Share of each token in the texts.
        ignored (`Sequence[int]`): Tokens that do not count, such as special tokens.
    """

    def __init__(self, vectors: Sequence[torch.Tensor], shares: torch.Tensor, ignored: Sequence[int]) -> None:
        self.vectors, self.ignored = list(vectors), list(ignored)
        self.weights = torch.stack([torch.ones_like(shares), *(a / (a + shares) for a in SMOOTHING)], dim=1)
        self.weights[self.ignored] = 0.0
        self.width = self.weights.shape[1] * sum(vectors.shape[1] for vectors in self.vectors)

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
        blocks = iter(affine[1:].split([vectors.shape[1] for vectors in self.vectors for _ in self.weights.T]))
        rows = affine[0] * (self.weights[:, :1] > 0)
        for vectors in self.vectors:
            for weight in self.weights.T:
                rows += weight[:, None] * (vectors @ next(blocks))
        return rows


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
    """
    Raises:
        ValueError: if the tokenizer does not put its special tokens around a text, or does not fit a model with
            `vocab_size` tokens.
    """
    if not 0 <= vocab_size - len(tokenizer) < LARGEST_PADDING:
        raise ValueError(
            f"The tokenizer has {len(tokenizer):,} tokens, and the model {vocab_size:,}: it is not the tokenizer of "
            "this model."
        )
    Frame.of(tokenizer)


def token_embeddings(
    raw: RawStates, *, prompt: Sequence[int] = (), ignored: Sequence[int] = (), progress: bool = False
) -> torch.Tensor:
    """The embedding of every token as a text of its own, between the tokenizer's special tokens and behind token ids
    of a prompt: `(vocab_size, width)`; 0 for rows without a token, and for `ignored` and special tokens. All
    processes share the work. ValueError, which names the token, if an embedding is not finite."""
    tokenizer, config = raw.tokenizer, raw.encoder.config
    frame = Frame.of(tokenizer)
    begin, end = [*frame.begin, *prompt], [*frame.end]
    tokens = sorted(set(range(len(tokenizer))).difference(tokenizer.all_special_ids, ignored))
    tokens = tokens[rank() :: world_size()]
    vectors = torch.zeros(config.vocab_size, config.hidden_size)
    quiet = not progress or rank() > 0
    for first in tqdm(range(0, len(tokens), TOKENS_AT_ONCE), "Vocabulary", unit=" parts", disable=quiet, leave=False):
        part = tokens[first : first + TOKENS_AT_ONCE]
        depth = config.num_hidden_layers
        vectors[part] = raw.pooled([[*begin, token, *end] for token in part], [depth])[depth].float().cpu()
    vectors = sum_over_ranks(vectors)
    if len(wrong := (~torch.isfinite(vectors)).any(dim=1).nonzero()):
        token = int(wrong[0])
        named = tokenizer.convert_ids_to_tokens(token)
        raise ValueError(f"The embedding of the token {named!r} (id {token}) is not finite.")
    return vectors


def token_features(
    raw: RawStates,
    texts: TokenizedTexts,
    prompts: Sequence[str],
    cache_dir: str | Path | None,
    identity: Mapping[str, Any],
    *,
    progress: bool,
) -> TokenFeatures:
    """
    The features of all tokens: embeddings at the last layer and in the embedding table, by frequency. Special tokens
    are ignored. Short prompts are ignored, too; tokens are embedded after the first one. `cache_dir` keeps the
    embeddings at the last layer for the next fit; `identity` is what they depend on beside the prompts.
    """
    encoder, tokenizer = raw.encoder, raw.tokenizer
    prompted = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    if sum(map(len, prompted)) > LONGEST_PROMPTS:
        prompted = []
    ignored = sorted({*tokenizer.all_special_ids, *chain(*prompted)})
    prompt = prompted[0] if prompted else []
    parts = KeptParts(cache_dir, {**identity, "prompt": prompt, "ignored": ignored}, torch.device("cpu"))
    deep = parts(
        "vocabulary",
        lambda: token_embeddings(raw, prompt=prompt, ignored=ignored, progress=progress),
        of_all_ranks=True,
    )
    shares = texts.shares(encoder.config.vocab_size, ignored)
    embedded = encoder.get_input_embeddings().weight.detach().float().cpu()
    features = TokenFeatures([deep, embedded], shares, ignored)
    if len(texts) < features.width:
        logger.warning(
            f"{len(texts):,} texts are fewer than the {features.width:,} features of a token that the static "
            "table is fitted from: it relies on its penalty, and more texts make it better."
        )
    return features
