"""
Stitches in closed form: a ridge regression over tokens from the hidden state after a model's first layers, and the
token's row of the static table, to the hidden state that its last layers read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch

from modeling_m3bert import M3BertModel
from modeling_m3bert.configuration_m3bert import default_top_layers

from ..core.device import autocast
from ..data.tokenized_texts import TokenizedText
from .passes import RawStates, TextPasses
from .ridge import Moments, Name, explained_variance, weight_and_bias


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


def fit_stitches(
    passes: TextPasses, tops: Mapping[int, int], table: torch.Tensor | None
) -> dict[int, tuple[StitchFit, torch.Tensor]]:
    """
    Fit stitches. Some texts are encoded once, up to the first layer on top of the deepest stitch.

    Args:
        passes ([`TextPasses`]): The texts and the encoder.
        tops (`Mapping[int, int]`): Depth -> its number of last layers.
        table (`torch.Tensor` of shape `(vocab_size, hidden_size)`, *optional*): The static table, if there is one.

    Returns:
        `dict[int, tuple[StitchFit, torch.Tensor]]`: depth -> its fit, and the map `(1 + inputs, hidden_size)`.
    """
    config = passes.raw.encoder.config
    depth, width = config.num_hidden_layers, config.hidden_size
    ends = {layer: (layer - top, depth - top) for layer, top in tops.items()}  # the states that a stitch maps
    layers = sorted({state for states in ends.values() for state in states})
    rows: list[Name] = [] if table is None else [ROW]
    names: list[Name] = [*layers, *rows]
    pairs = [(name, name) for name in names]
    for first, last in ends.values():
        pairs += [(name, last) for name in (first, *rows)] + [(first, row) for row in rows]
    sums = [Moments(dict.fromkeys(names, width), dict.fromkeys(pairs)) for _ in range(2)]
    texts = (group[passes.sampling(MOST_TEXTS)] for group in passes.texts)
    with passes.raw.without_exits():
        for held_out, states in _token_states(passes.raw, texts, layers, table):
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


def install_stitches(
    encoder: M3BertModel,
    found: Mapping[int, tuple[StitchFit, torch.Tensor]],
    static_table: torch.Tensor | None = None,
    static_ignored_ids: Sequence[int] = (),
) -> None:
    """Replace all exits of an encoder with stitches and identities as their exits, for a pass at stitched depths."""
    width = encoder.config.hidden_size
    joint = torch.eye(width, 2 * width), torch.zeros(width)
    encoder.set_exits(
        dict.fromkeys(found, (torch.eye(width), torch.zeros(width))),
        joints=None if static_table is None else dict.fromkeys(found, joint),
        static_table=static_table,
        static_ignored_ids=static_ignored_ids,
        stitches=stitch_weights(found),
    )


def stitch_weights(
    found: Mapping[int, tuple[StitchFit, torch.Tensor]],
) -> dict[int, tuple[int, torch.Tensor, torch.Tensor]]:
    """Depth -> number of last layers, weight and bias of its stitch ([`~M3BertModel.set_exits`])."""
    return {layer: (its.top_layers, *weight_and_bias(affine)) for layer, (its, affine) in found.items()}


@contextmanager
def restored_on_error(encoder: M3BertModel) -> Iterator[None]:
    """Give an encoder back the exits, stitches and static table that it had if the block fails or is interrupted."""
    config, modules = encoder.config, (encoder.exits, encoder.stitches, encoder.static_table)
    names = ("exit_layers", "static_layers", "static_ignored_ids", "stitch_layers", "stitch_top_layers")
    kept = {name: getattr(config, name) for name in (*names, "matryoshka_layers")}
    try:
        yield
    except BaseException:
        encoder.exits, encoder.stitches, encoder.static_table = modules
        for name, value in kept.items():
            setattr(config, name, value)
        raise


def _token_states(
    raw: RawStates, texts: Iterable[Sequence[TokenizedText]], layers: Sequence[int], table: torch.Tensor | None
) -> Iterator[tuple[bool, dict[Name, torch.Tensor]]]:
    """Whether some texts are held out, and the hidden states of their tokens by layer `(tokens, width)`."""
    for group in texts:
        chosen = [blake2b(its.text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256 for its in group]
        for held in (True, False):
            ids = [its.ids for its, own in zip(group, chosen, strict=True) if own == held]
            for _, inputs in raw.batches(ids) if ids else ():
                with autocast(raw.encoder.device, raw.compute_dtype):
                    # One layer more than is read: the last of the hidden states is normalised.
                    states = raw.encoder(**inputs, nested_layers=[layers[-1] + 1], output_hidden_states=list(layers))
                real = inputs["attention_mask"].bool()
                found: dict[Name, torch.Tensor] = {layer: states.hidden_states[layer][real] for layer in layers}
                if table is not None:
                    found[ROW] = table[inputs["input_ids"][real].to(table.device)].to(raw.encoder.device)
                yield held, found
