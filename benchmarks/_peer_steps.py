"""Training steps of ours and of sentence-transformers on the same pairs, and the comparison of their losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any
from unittest import mock

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import losses
from torch import nn
from transformers import AutoModel, AutoTokenizer

from benchmarks._pairs import COLUMNS, MAX_LENGTH
from m3bert.commands.sources import default_base
from m3bert.trainers import Contrastive, Grid, NestedModel, TextColumnsCollator


LAST_LAYER = Grid.parse("6 x 32,64,128,256,384")
GRID = Grid.parse("2,4,6 x 32,64,128,384")
TOLERANCE = 1e-4
Pairs = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Side:
    """
    One side of a comparison of training steps.

    Args:
        module ([`~torch.nn.Module`]): What is trained.
        loss (`Callable`): The loss of a batch.
        batches (`list`): The batches.
    """

    module: nn.Module
    loss: Callable[[Any], torch.Tensor]
    batches: list[Any]

    def step(self) -> Callable[[], None]:
        """A training step on the next batch."""
        self.module.train()
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=2e-5)
        turn = cycle(self.batches)

        def run() -> None:
            self.loss(next(turn)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return run


def ours(pairs: Pairs, batch: int, grid: Grid, mini_batch_size: int | None = None) -> Side:
    """Our objective over a grid."""
    nested = NestedModel(AutoModel.from_pretrained(default_base()), Contrastive(grid), mini_batch_size)
    collator = TextColumnsCollator(AutoTokenizer.from_pretrained(default_base()), COLUMNS, MAX_LENGTH)
    batches = [collator(pairs[start : start + batch]) for start in range(0, len(pairs), batch)]
    return Side(nested, lambda columns: nested(**columns)["loss"], batches)


def theirs(pairs: Pairs, batch: int, make_loss: Callable[[SentenceTransformer], nn.Module]) -> Side:
    """A loss of sentence-transformers."""
    model = whole_encoder()
    loss = make_loss(model)
    batches = [
        [model.preprocess([pair[column] for pair in pairs[start : start + batch]]) for column in COLUMNS]
        for start in range(0, len(pairs), batch)
    ]
    # A copy of each column, because the model adds its outputs to what it is given.
    return Side(model, lambda columns: loss([dict(column) for column in columns], None), batches)


def whole_encoder() -> SentenceTransformer:
    model = SentenceTransformer(default_base(), device="cpu")
    model.max_seq_length = MAX_LENGTH
    return model


def matryoshka(model: SentenceTransformer) -> nn.Module:
    return losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), LAST_LAYER.dims)


def matryoshka_2d(model: SentenceTransformer) -> nn.Module:
    """The weight of the sampled layers turns their mean into a sum, as in our objective."""
    sampled = len(GRID.layers) - 1
    return losses.Matryoshka2dLoss(
        model,
        losses.MultipleNegativesRankingLoss(model),
        list(GRID.dims),
        n_layers_per_step=sampled,
        n_dims_per_step=-1,
        prior_layers_weight=sampled,
        kl_temperature=0,
    )


def cached_matryoshka(model: SentenceTransformer, mini_batch_size: int) -> nn.Module:
    cached = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=mini_batch_size)
    return losses.MatryoshkaLoss(model, cached, LAST_LAYER.dims)


def cached_side(name: str, pairs: Pairs, mini_batch_size: int) -> Side:
    """One side of a step of all pairs with cached gradients: `"ours"`, or that of sentence-transformers."""
    if name == "ours":
        return ours(pairs, len(pairs), LAST_LAYER, mini_batch_size)
    return theirs(pairs, len(pairs), partial(cached_matryoshka, mini_batch_size=mini_batch_size))


def check(what: str, difference: float) -> None:
    """
    Print a relative difference between two sides.

    Raises:
        ValueError: if it is above `TOLERANCE`.
    """
    print(f"{what}: the sides differ by {difference:.1e}", flush=True)
    if not difference <= TOLERANCE:  # also where it is NaN
        raise ValueError(f"{what}: the sides differ by {difference:.1e}, more than {TOLERANCE}.")


@torch.no_grad()
def check_losses(what: str, our: Side, their: Side) -> None:
    """Compare the losses of the first batch, with the same layers, without dropout and without text ids."""
    our.module.eval(), their.module.eval()
    columns = {
        name: {key: value for key, value in column.items() if key != "text_ids"}
        for name, column in our.batches[0].items()
    }
    with mock.patch.object(random, "sample", lambda layers, count: list(GRID.layers[:-1])):
        expected = their.loss(their.batches[0]).item()
    check(f"loss of the {what}", abs(our.loss(columns).item() - expected) / abs(expected))
