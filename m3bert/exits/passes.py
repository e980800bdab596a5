"""The passes of a fit of exits over its texts, and over spans of some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from tqdm.auto import tqdm

from ..data.teacher import TeacherEmbeddings
from ..encode.projection import Projection
from ..encode.ranks import rank
from ..encode.states import truncate
from .queries import is_query, span_of
from .raw_states import RawStates
from .ridge import Name
from .sums import FEATURES, TARGET, ExitSums
from .token_features import TokenFeatures
from .tokenized_texts import TokenizedText, TokenizedTexts


PATH_TEXTS = 5000  # the passages of the comparison of paths, and the texts that spans are taken from
REFIT_TEXTS = 3000  # for the refits of paths: about 200,000 tokens
States = dict[int, torch.Tensor]  # layer -> pooled states (texts, width)


@dataclass(frozen=True)
class TextPasses:
    """The passes over the texts of a fit. `tokens` are the features of the tokens, for exits that read a static table,
    and `description` is the text before the progress bar; `None` shows no bar."""

    raw: RawStates
    texts: TokenizedTexts
    tokens: TokenFeatures | None
    description: str | None

    def sampling(self, most: int) -> slice:
        """The stride that keeps about `most` texts, spread over all sources."""
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
        sums.sum_over_ranks()
        return sums, sampled

    def sampled(self, most: int) -> list[list[TokenizedText]]:
        """About `most` texts in groups, spread over all sources."""
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
