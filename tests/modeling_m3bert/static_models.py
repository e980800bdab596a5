"""Tiny models with a static table, and what its states should be."""

from collections.abc import Mapping

import torch

from m3bert.modeling import M3BertModel
from tests.conftest import tiny_config


WIDTH, VOCABULARY = 32, 99
IGNORED = (0, 2, 7)


def affine(inputs: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """A random map to the width of the model."""
    return torch.randn(WIDTH, inputs) / inputs**0.5, torch.randn(WIDTH)


def halves(*shape: int) -> torch.Tensor:
    """Random numbers that float16 represents exactly, so that saving does not change them."""
    return torch.randn(*shape).half().float()


def random_paths(encoder: M3BertModel, paths: Mapping[int, list[int]]) -> dict[int, tuple[list[int], dict]]:
    """Paths with random output matrices of the feed-forward before each gap, and of the last layer."""
    actual = {}
    for depth, layers in paths.items():
        gaps = [place for place in range(depth) if layers[place : place + 2] != [layers[place], layers[place] + 1]]
        like = encoder.layers[0].mlp.down_proj.weight
        actual[depth] = layers, {f"layers.{place}.mlp.down_proj.weight": torch.randn_like(like) / 6 for place in gaps}
    return actual


def give_table(
    encoder: M3BertModel,
    layers: tuple[int, ...] = (0, 2, 4),
    ignored: tuple[int, ...] = IGNORED,
    paths: Mapping[int, list[int]] | None = None,
) -> None:
    """Give an encoder random exits at some depths, all of which read a random static table, and some of which are
    random paths."""
    above = [layer for layer in layers if layer > 0]
    encoder.set_depths(
        exits={layer: affine() for layer in above}, joints={layer: affine(2 * WIDTH) for layer in above},
        paths=random_paths(encoder, paths or {}), table=halves(VOCABULARY, WIDTH), ignored_ids=ignored,
    )  # fmt: skip


def with_table(
    model_class: type = M3BertModel,
    layers: tuple[int, ...] = (0, 2, 4),
    paths: Mapping[int, list[int]] | None = None,
    **changes,
):
    """A tiny model with a static table, which depths 0, 2 and 4 read."""
    model = model_class(tiny_config(**changes)).eval()
    give_table(model.base_model, layers, paths=paths)
    return model


def static_mean(table: torch.Tensor, tokens: list[int], ignored: tuple[int, ...] = IGNORED) -> torch.Tensor:
    """The static state of one text, token by token."""
    total, count = torch.zeros(table.shape[1], dtype=table.dtype), 0
    for token in tokens:
        if token not in ignored:
            total, count = total + table[token], count + 1
    return total / max(count, 1)
