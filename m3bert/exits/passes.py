"""The passes of a fit of exits: over the vocabulary, over all texts, and over spans of some."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from ..data.teacher import TeacherEmbeddings
from ..encode.device import autocast
from ..encode.padded_batches import TOKENS_PER_TEXT, PassCost, in_row_order, padded_chunks
from ..encode.projection import Projection
from ..encode.ranks import rank
from ..encode.states import Pooling, StateKey, nested_states, truncate
from .kept import KeptParts
from .ridge import Name
from .spans import is_query, span_of
from .sums import FEATURES, TARGET, ExitSums
from .token_features import TokenFeatures, token_embeddings
from .tokenized_texts import TokenizedText, TokenizedTexts


logger = logging.getLogger(__name__)
PATH_TEXTS = 5000  # the passages of the comparison of paths, and the texts that spans are taken from
REFIT_TEXTS = 3000  # for the refits of paths: about 200,000 tokens
LONGEST_PROMPTS = 8  # tokens of all prompts that are left out of static vectors
States = dict[int, torch.Tensor]  # layer -> pooled states (texts, width)
Key = TypeVar("Key", int, StateKey)


@dataclass(frozen=True)
class RawStates:
    """The hidden states of an encoder before any exit. The options are those of [`fit_exits`]."""

    encoder: Any
    tokenizer: PreTrainedTokenizerBase
    pooling: Pooling
    batch_size: int
    compute_dtype: torch.dtype | None = None

    def batches(self, ids: list[list[int]]) -> Iterator[tuple[list[int], BatchEncoding]]:
        """Indices and inputs of texts, which are given by their token ids, in batches of similar length."""
        device = self.encoder.device
        cost = PassCost.on(device).limited(self.batch_size * TOKENS_PER_TEXT)
        for chunk, inputs in padded_chunks(self.tokenizer, ids, cost):
            yield chunk, inputs.to(device)

    def pooled(self, ids: list[list[int]], layers: Sequence[Key], *, exits: bool = False) -> dict[Key, torch.Tensor]:
        """Layer -> pooled hidden states of texts `(texts, width)`, which are given by their token ids: before the
        exits, or after them."""
        if not ids:  # a rank without queries
            like = torch.promote_types(self.encoder.dtype, torch.float32)
            empty = torch.zeros(0, self.encoder.config.hidden_size, dtype=like, device=self.encoder.device)
            return dict.fromkeys(layers, empty)
        chunks: list[list[int]] = []
        vectors: dict[Key, list[torch.Tensor]] = {layer: [] for layer in layers}
        for chunk, inputs in self.batches(ids):
            with autocast(self.encoder.device, self.compute_dtype):
                states = nested_states(self.encoder, inputs, layers, exits=exits)
            chunks.append(chunk)
            for layer in layers:
                vectors[layer].append(states.pooled(layer, self.pooling))
        return {layer: in_row_order(parts, chunks) for layer, parts in vectors.items()}


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
        lambda: token_embeddings(encoder, tokenizer, raw.pooled, prompt=prompt, ignored=ignored, progress=progress),
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


@dataclass(frozen=True)
class TextPasses:
    """The passes over the texts of a fit. `tokens` are the features of the tokens, for exits that read a static table,
    and `description` is the text before the progress bar; `None` shows no bar."""

    raw: RawStates
    texts: TokenizedTexts
    tokens: TokenFeatures | None
    description: str | None

    def sampling(self, most: int) -> slice:
        """The stride that keeps at most `most` texts, spread over all sources."""
        return slice(None, None, max(1, -(-len(self.texts) // most)))

    def sums(
        self, layers: Sequence[int], projection: Projection | None, teacher: TeacherEmbeddings | None
    ) -> tuple[ExitSums, list[torch.Tensor]]:
        """The sums that exits are fitted from, and the targets of the sampled texts, group by group. With token
        features, layer 0 is the static table and needs no sums; with a teacher, the last layer has an exit, and the
        texts that are queries are left out."""
        config = self.raw.encoder.config
        depth, target_width = config.num_hidden_layers, config.hidden_size
        if projection is not None:
            target_width = projection.out_features
        if teacher is not None:
            target_width = teacher.width
        mapped = [layer for layer in layers if layer > 0 or self.tokens is None] + ([] if teacher is None else [depth])
        widths: dict[Name, int] = {**dict.fromkeys(mapped, config.hidden_size), TARGET: target_width}
        if self.tokens is not None:
            widths[FEATURES] = self.tokens.width
        sums, sampled = ExitSums(widths, len(self.texts)), []
        for group, pooled in self._encoded(self.texts, len(self.texts), [*layers, depth], self.description):
            targets = _targets(group, pooled[depth], projection, teacher)
            sampled.append(targets[self.sampling(PATH_TEXTS)].clone())  # a view would keep all rows
            if teacher is not None:
                rows = [row for row, text in enumerate(group) if not is_query(text.text)]
                group, targets = [group[row] for row in rows], targets[rows]
                pooled = {layer: vectors[rows] for layer, vectors in pooled.items()}
            vectors: dict[Name, torch.Tensor] = {**{layer: pooled[layer] for layer in mapped}, TARGET: targets}
            if self.tokens is not None:
                vectors[FEATURES] = self.tokens.means([text.ids for text in group]).to(targets.device)
            sums.add([text.text for text in group], vectors)
        sums.over_ranks()
        return sums, sampled

    def sampled(self, most: int) -> list[list[TokenizedText]]:
        """At most `most` texts in groups, spread over all sources."""
        return [group[self.sampling(most)] for group in self.texts]

    def spans(self, prompt: str, max_length: int) -> list[list[TokenizedText]]:
        """Spans of sampled texts behind a prompt, in place of queries, in groups. The `text` is the whole text."""
        tokenizer, groups = self.raw.tokenizer, []
        for sampled in self.sampled(PATH_TEXTS):
            group = [text for text in sampled if is_query(text.text)]
            if not group:
                continue
            spans = [prompt + span_of(text.text) for text in group]
            rows = tokenizer(spans, truncation=True, max_length=max_length, return_attention_mask=False)["input_ids"]
            groups.append([text._replace(ids=ids) for text, ids in zip(group, rows, strict=True)])
        return groups

    def targets(self, groups: Sequence[list[TokenizedText]], projection: Projection | None) -> list[torch.Tensor]:
        """The targets of spans, group by group."""
        depth = self.raw.encoder.config.num_hidden_layers
        label = self.description and f"{self.description}: queries"
        encoded = self._encoded(groups, sum(map(len, groups)), [depth], label)
        return [_targets(group, pooled[depth], projection, None) for group, pooled in encoded]

    def _encoded(
        self, groups: Iterable[list[TokenizedText]], total: int, layers: Sequence[int], description: str | None
    ) -> Iterator[tuple[list[TokenizedText], States]]:
        """Groups of texts with their pooled hidden states. Raises a ValueError if a hidden state is not finite."""
        quiet = description is None or rank() > 0
        with tqdm(total=total, desc=description, unit=" texts", disable=quiet, leave=False) as bar:
            for group in groups:
                pooled = self.raw.pooled([text.ids for text in group], layers)
                for layer, vectors in pooled.items():
                    wrong = (~torch.isfinite(vectors)).any(dim=1).nonzero()
                    if len(wrong):
                        text = group[int(wrong[0])].text
                        raise ValueError(
                            f"Hidden states of layer {layer} are not finite, for example of {text[:80]!r}."
                        )
                yield group, pooled
                bar.update(len(group))


def _targets(
    group: Sequence[TokenizedText],
    last: torch.Tensor,
    projection: Projection | None,
    teacher: TeacherEmbeddings | None,
) -> torch.Tensor:
    """Targets of the exits, `(texts, target width)`, from the pooled hidden states of the last layer."""
    vectors = last.double()
    if projection is not None:
        vectors = vectors @ projection.weight.T.to(vectors)
        vectors = vectors if projection.bias is None else vectors + projection.bias.to(vectors)
    if teacher is not None:
        vectors = teacher.of([text.text for text in group]).to(vectors)
    return truncate(vectors, vectors.shape[1], normalize=True)
