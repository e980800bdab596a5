"""Tiny models with a static table, and what its states should be."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from modeling_m3bert import M3BertModel
from tests.conftest import tiny_config


WIDTH, VOCABULARY = 32, 99
IGNORED = (0, 2, 7)


def affine(inputs: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A random map to the width of the model."""
    return torch.randn(WIDTH, inputs) / inputs**0.5, torch.randn(WIDTH)


def halves(*shape: int) -> torch.Tensor:
    """Random numbers that float16 represents exactly, so that saving does not change them."""
    return torch.randn(*shape).half().float()


def assert_refused(request: Callable[[], object], message: str) -> None:
    """A request raises a ValueError of one line."""
    with pytest.raises(ValueError, match=message) as error:
        request()
    assert "\n" not in str(error.value)


def give_table(
    encoder: M3BertModel,
    layers: tuple[int, ...] = (0, 2, 4),
    ignored: tuple[int, ...] = IGNORED,
    stitches: Mapping[int, int] | None = None,
) -> None:
    """Give an encoder random exits at some layers, all of which read a random static table, as do random stitches of
    some of these depths (depth -> number of last layers)."""
    above = [layer for layer in layers if layer > 0]
    encoder.set_exits(
        {layer: affine() for layer in above} | ({} if 0 in layers else {0: affine()}),
        joints={layer: affine(2 * WIDTH) for layer in above},
        static_table=halves(VOCABULARY, WIDTH),
        static_ignored_ids=ignored,
        stitches={layer: (top, *affine(2 * WIDTH)) for layer, top in (stitches or {}).items()},
    )


def with_table(
    model_class: type = M3BertModel,
    layers: tuple[int, ...] = (0, 2, 4),
    stitches: Mapping[int, int] | None = None,
    **changes,
):
    """A tiny model with a static table; layers 2 and 4, and by default 0, read it."""
    model = model_class(tiny_config(**changes)).eval()
    give_table(model.base_model, layers, stitches=stitches)
    return model


def static_mean(table: torch.Tensor, tokens: list[int], ignored: tuple[int, ...] = IGNORED) -> torch.Tensor:
    """The static state of one text, token by token."""
    total, count = torch.zeros(table.shape[1], dtype=table.dtype), 0
    for token in tokens:
        if token not in ignored:
            total, count = total + table[token], count + 1
    return total / max(count, 1)
