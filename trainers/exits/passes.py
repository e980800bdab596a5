"""The passes of a fit of exits: over the vocabulary, over all texts, and over some texts at stitched depths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from modeling_m3bert import M3BertModel

from ..core.device import autocast
from ..core.encoding.chunking import PassCost, in_row_order
from ..core.parallel.ranks import rank
from ..core.projection import Projection
from ..core.states import Pooling, nested_states, truncate
from ..data.padded_batches import TOKENS_PER_TEXT, padded_chunks
from ..data.teacher import TeacherEmbeddings
from ..data.token_features import TokenFeatures, token_embeddings
from ..data.tokenized_texts import TokenizedText, TokenizedTexts
from .ridge import Name
from .sums import FEATURES, TARGET, ExitSums


logger = logging.getLogger(__name__)
STITCHED_TEXTS = 5000  # for the exits of stitched depths, which are encoded once more
States = dict[int, torch.Tensor]  # layer -> pooled states (texts, width)


@dataclass(frozen=True)
class RawStates:
    """
    The hidden states of an encoder before any exit. Options are those of [`fit_exits`].

    Args:
        encoder ([`M3BertModel`]): The encoder.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        pooling (`str`): Pooling of the hidden states of tokens.
        batch_size (`int`): Number of texts of 128 tokens to encode at a time.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products.
    """

    encoder: M3BertModel
    tokenizer: PreTrainedTokenizerBase
    pooling: Pooling
    batch_size: int
    compute_dtype: torch.dtype | None = None

    @contextmanager
    def without_exits(self, stitched: bool = False) -> Iterator[None]:
        """Evaluation mode without exits, and with stitches on request only; all is restored afterwards."""
        encoder, config = self.encoder, self.encoder.config
        exits, training = encoder.exits, encoder.training
        hidden = () if stitched else ("static_layers", "stitch_layers", "stitch_top_layers")
        kept = {name: getattr(config, name) for name in hidden}
        encoder.exits = torch.nn.ModuleDict()
        for name in hidden:
            setattr(config, name, [])
        encoder.eval()
        try:
            yield
        finally:
            encoder.exits = exits
            for name, value in kept.items():
                setattr(config, name, value)
            encoder.train(training)

    def batches(self, ids: list[list[int]]) -> Iterator[tuple[list[int], BatchEncoding]]:
        """Indices and inputs of texts, which are given by their token ids, in batches of similar length."""
        device = self.encoder.device
        cost = PassCost.on(device).limited(self.batch_size * TOKENS_PER_TEXT)
        for chunk, inputs in padded_chunks(self.tokenizer, ids, cost):
            yield chunk, inputs.to(device)

    def pooled(self, ids: list[list[int]], layers: Sequence[int]) -> States:
        """Layer -> pooled hidden states of texts `(texts, width)`, which are given by their token ids."""
        chunks: list[list[int]] = []
        vectors: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
        for chunk, inputs in self.batches(ids):
            with autocast(self.encoder.device, self.compute_dtype):
                states = nested_states(self.encoder, inputs, layers)
            chunks.append(chunk)
            for layer in layers:
                vectors[layer].append(states.pooled(layer, self.pooling))
        return {layer: in_row_order(parts, chunks) for layer, parts in vectors.items()}


def token_features(
    raw: RawStates, texts: TokenizedTexts, cache_dir: str | Path | None, *, progress: bool
) -> TokenFeatures:
    """The features of all tokens: embeddings at the last layer and in the embedding table, by frequency."""
    encoder, ignored = raw.encoder, sorted(set(raw.tokenizer.all_special_ids))
    identity = {"pooling": raw.pooling, "compute_dtype": str(raw.compute_dtype or encoder.dtype)}
    with raw.without_exits():
        deep = token_embeddings(encoder, raw.tokenizer, raw.pooled, identity, cache_dir, progress=progress)
    shares = texts.shares(encoder.config.vocab_size, ignored)
    features = TokenFeatures([deep, encoder.embed_tokens.weight.detach().float().cpu()], shares, ignored)
    if len(texts) < features.width:
        logger.warning(
            f"{len(texts):,} texts are fewer than the {features.width:,} features of a token that the static "
            "table is fitted from: it relies on its penalty, and more texts make it better."
        )
    return features


@dataclass(frozen=True)
class TextPasses:
    """
    The passes over the texts of a fit.

    Args:
        raw ([`RawStates`]): The encoder.
        texts ([`TokenizedTexts`]): The texts.
        tokens ([`TokenFeatures`], *optional*): Features of the tokens, for exits that read a static table.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
    """

    raw: RawStates
    texts: TokenizedTexts
    tokens: TokenFeatures | None
    description: str | None

    def sampling(self, most: int) -> slice:
        """Takes at most this number of texts, spread over all sources, from their groups or from the groups' rows."""
        return slice(None, None, max(1, -(-len(self.texts) // most)))

    def sums(
        self,
        layers: Sequence[int],
        projection: Projection | None,
        teacher: TeacherEmbeddings | None,
        on_states: Callable[[list[str], States], None] | None,
        *,
        stitched: bool,
    ) -> tuple[ExitSums, list[torch.Tensor]]:
        """
        What exits are fitted from, and on request the targets that [`~TextPasses.stitched_sums`] takes. With token
        features, layer 0 is the static table and needs no sums; with a teacher, the last layer has an exit, too.
        """
        config = self.raw.encoder.config
        depth, target_width = config.num_hidden_layers, config.hidden_size
        if projection is not None:
            target_width = projection.out_features
        if teacher is not None:
            target_width = teacher.width
        mapped = [layer for layer in layers if layer > 0 or self.tokens is None] + ([] if teacher is None else [depth])
        sums, sampled = self._no_sums(mapped, target_width), []
        with self.raw.without_exits():
            for group, pooled in self._encoded(self.texts, len(self.texts), [*layers, depth], self.description):
                targets = _targets(group, pooled[depth], projection, teacher)
                self._add(sums, group, pooled, targets)
                if stitched:
                    sampled.append(targets[self.sampling(STITCHED_TEXTS)].clone())  # a view would keep all rows
                if on_states is not None:
                    on_states([its.text for its in group], pooled)
        sums.over_ranks()
        return sums, sampled

    def stitched_sums(self, depths: Sequence[int], targets: Sequence[torch.Tensor]) -> ExitSums:
        """
        What the exits of stitched depths are fitted from, once the stitches are installed.

        Args:
            depths (`Sequence[int]`): The stitched depths.
            targets (`Sequence[torch.Tensor]`): The targets that [`~TextPasses.sums`] has kept.
        """
        sums = self._no_sums(depths, targets[0].shape[1])
        groups = [group[self.sampling(STITCHED_TEXTS)] for group in self.texts]
        label = self.description and f"{self.description} of stitched depths"
        with self.raw.without_exits(stitched=True):
            encoded = self._encoded(groups, sum(map(len, groups)), depths, label)
            for (group, pooled), target in zip(encoded, targets, strict=True):
                self._add(sums, group, pooled, target)
        sums.over_ranks()
        return sums

    def _no_sums(self, layers: Sequence[int], target_width: int) -> ExitSums:
        widths: dict[Name, int] = {**dict.fromkeys(layers, self.raw.encoder.config.hidden_size), TARGET: target_width}
        if self.tokens is not None:
            widths[FEATURES] = self.tokens.width
        # All texts count, also where some are read: held-out texts and folds are then those of the static table.
        return ExitSums(widths, len(self.texts))

    def _add(self, sums: ExitSums, group: list[TokenizedText], pooled: States, targets: torch.Tensor) -> None:
        vectors: dict[Name, torch.Tensor] = {**{layer: pooled[layer] for layer in sums.layers}, TARGET: targets}
        if self.tokens is not None:
            vectors[FEATURES] = self.tokens.means([its.ids for its in group]).to(targets.device)
        sums.add([its.text for its in group], vectors)

    def _encoded(
        self, groups: Iterable[list[TokenizedText]], total: int, layers: Sequence[int], description: str | None
    ) -> Iterator[tuple[list[TokenizedText], States]]:
        """Groups of texts with their pooled hidden states. Raises a ValueError if a hidden state is not finite."""
        quiet = description is None or rank() > 0
        with tqdm(total=total, desc=description, unit=" texts", disable=quiet, leave=False) as bar:
            for group in groups:
                pooled = self.raw.pooled([its.ids for its in group], layers)
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
    """What the exits predict, `(texts, target width)`, from the pooled hidden states of the last layer."""
    vectors = last.double()
    if projection is not None:
        vectors = vectors @ projection.weight.T.to(vectors)
    if teacher is not None:
        vectors = teacher.of([its.text for its in group]).to(vectors)
    return truncate(vectors, vectors.shape[1], normalize=True)
