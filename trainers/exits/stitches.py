"""
Stitches in closed form: a ridge regression over tokens from the hidden state after a model's first layers, and the
token's row of the static table, to the hidden state that its last layers read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from transformers import PreTrainedTokenizerBase

from modeling_m3bert import M3BertModel
from modeling_m3bert.configuration_m3bert import default_top_layers

from ..core.device import autocast
from ..core.encoding.chunking import PassCost
from ..data.padded_batches import padded_chunks
from ..data.tokenized_texts import TokenizedText
from .ridge import Moments, Name, explained_variance


ROW = "row"  # of the static table
MOST_TEXTS = 2500  # about 200,000 tokens, for a map of twice the width
HELD_OUT = 0.1  # share of the texts that choose the penalty
PENALTIES = tuple(10 ** (exponent / 2) for exponent in range(-12, 1))  # 1e-6, 3.2e-6, ..., 1
Stitches = Sequence[int] | Mapping[int, int]


@dataclass(frozen=True)
class StitchFit:
    """
    The fit of one stitch.

    Args:
        top_layers (`int`): Number of last layers that run after it.
        penalty (`float`): The chosen penalty, as a multiple of the number of tokens.
        r_squared (`float`): Share of the variance of the last layers' input that it explains on held-out texts.
    """

    top_layers: int
    penalty: float
    r_squared: float


def top_layers_of(stitches: Stitches, depth: int) -> dict[int, int]:
    """
    Stitched depth -> its number of last layers.

    Raises:
        ValueError: if a depth is not below the last layer, or has not 1 to all of its layers on top.
    """
    given = stitches if isinstance(stitches, Mapping) else {layer: default_top_layers(layer) for layer in stitches}
    chosen = {layer: given[layer] for layer in sorted(given)}
    for layer, top in chosen.items():
        if not 1 <= layer < depth:
            raise ValueError(
                f"stitches={list(chosen)} must be within 1..{depth - 1}: a stitched depth runs at least one layer, "
                "and fewer than all."
            )
        if not 1 <= top <= layer:
            raise ValueError(f"A stitched depth of {layer} layers cannot end in the last {top}: take 1 to {layer}.")
    return chosen


@torch.no_grad()
def fit_stitches(
    encoder: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Sequence[TokenizedText]],
    tops: Mapping[int, int],
    table: torch.Tensor | None,
    *,
    cost: PassCost,
    compute_dtype: torch.dtype | None = None,
) -> dict[int, tuple[StitchFit, torch.Tensor]]:
    """
    Fit stitches. All texts are encoded once, up to the first layer on top of the deepest stitch.

    Args:
        encoder ([`M3BertModel`]): The encoder, without exits and stitches.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        texts (`Iterable[Sequence[TokenizedText]]`): Groups of texts of this rank.
        tops (`Mapping[int, int]`): Depth -> its number of last layers.
        table (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): The static table, if there is one.
        cost ([`PassCost`]): Cost of a pass of the encoder.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products.

    Returns:
        `dict[int, tuple[StitchFit, torch.Tensor]]`: depth -> its fit, and the map `(1 + inputs, hidden_size)`.
    """
    depth, width = encoder.config.num_hidden_layers, encoder.config.hidden_size
    ends = {layer: (layer - top, depth - top) for layer, top in tops.items()}  # the states that a stitch maps
    layers = sorted({state for states in ends.values() for state in states})
    rows: list[Name] = [] if table is None else [ROW]
    names: list[Name] = [*layers, *rows]
    pairs = [(name, name) for name in names]
    for first, last in ends.values():
        pairs += [(name, last) for name in (first, *rows)] + [(first, row) for row in rows]
    sums = [Moments(dict.fromkeys(names, width), dict.fromkeys(pairs)) for _ in range(2)]
    for held_out, states in _token_states(encoder, tokenizer, texts, layers, table, cost, compute_dtype):
        sums[held_out].add(states)
    for its in sums:
        its.sum_over_ranks()

    found = {}
    for layer, (first, last) in ends.items():
        inputs: list[Name] = [first, *rows]
        fitted, held = (its.regression(inputs, last) for its in sums)
        targets = sums[1].regression([last], last)
        reports = [
            StitchFit(tops[layer], penalty, explained_variance(fitted.ridge(penalty), held, targets))
            for penalty in PENALTIES
        ]
        best = max(reports, key=lambda its: its.r_squared)
        found[layer] = best, (fitted + held).ridge(best.penalty)
    return found


def _token_states(
    encoder: M3BertModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[Sequence[TokenizedText]],
    layers: Sequence[int],
    table: torch.Tensor | None,
    cost: PassCost,
    compute_dtype: torch.dtype | None,
) -> Iterator[tuple[bool, dict[Name, torch.Tensor]]]:
    """Whether some texts are held out, and the hidden states of their tokens by layer `(tokens, width)`."""
    for group in texts:
        chosen = [blake2b(its.text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256 for its in group]
        for held in (True, False):
            ids = [its.ids for its, own in zip(group, chosen, strict=True) if own == held]
            for _, inputs in padded_chunks(tokenizer, ids, cost) if ids else ():
                inputs = inputs.to(encoder.device)
                with autocast(encoder.device, compute_dtype):
                    # One layer more than is read: the last of the hidden states is normalised.
                    states = encoder(**inputs, nested_layers=[layers[-1] + 1], output_hidden_states=list(layers))
                real = inputs["attention_mask"].bool()
                found: dict[Name, torch.Tensor] = {layer: states.hidden_states[layer][real] for layer in layers}
                if table is not None:
                    found[ROW] = table[inputs["input_ids"][real].to(table.device)].to(encoder.device)
                yield held, found
