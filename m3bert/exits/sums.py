"""Sums over the texts of a fit of exits, and the regressions that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple

import torch

from ..encode.ranks import rank, sum_over_ranks, world_size
from .record import LayerFit
from .ridge import Moments, Name, Regression, apply_affine, principal_axes


TARGET, FEATURES = "target", "features"
PENALTIES = tuple(10 ** (exponent / 2) for exponent in range(-8, 3))  # 1e-4, 3.2e-4, ..., 10
MOST_ROWS = 2000  # held-out rows
HELD_OUT = 0.1  # share of the texts that choose penalties
NEAREST = 10


class Fit(NamedTuple):
    """A map `(1 + inputs, targets)` and its quality."""

    report: LayerFit
    affine: torch.Tensor


class ExitSums:
    """
    Sums over two folds of texts, and some held-out texts that choose penalties. Memory does not grow with the number
    of texts.

    Args:
        widths (`Mapping[Name, int]`): Dims of the hidden states of each layer, of the targets (`TARGET`) and, with a
            static table, of the texts' features (`FEATURES`).
        texts (`int`): Number of texts that will be added on all ranks.

    Attributes:
        layers (`list[int]`): The layers that have hidden states.
    """

    def __init__(self, widths: Mapping[Name, int], texts: int) -> None:
        self.layers = [name for name in widths if isinstance(name, int)]
        pairs = [(name, name) for name in widths] + [(name, TARGET) for name in widths]
        if FEATURES in widths:
            pairs += [(name, FEATURES) for name in widths if name != TARGET]
        self.folds = Moments(widths, pairs), Moments(widths, pairs)
        self.share = min(HELD_OUT, MOST_ROWS / max(1, texts))
        self.rows = {name: torch.zeros(0, width, dtype=torch.float64) for name, width in widths.items()}

    def add(self, texts: Sequence[str], vectors: Mapping[Name, torch.Tensor]) -> None:
        """Add texts: name -> vectors `(texts, width)`. Equal texts are in the same fold."""
        digests = [blake2b(text.encode(), digest_size=5).digest() for text in texts]
        held = torch.tensor([int.from_bytes(digest[:4], "big") < self.share * 2**32 for digest in digests])
        fold = torch.tensor([digest[4] % 2 for digest in digests])
        held, fold = held.to(vectors[TARGET].device), fold.to(vectors[TARGET].device)
        for number, sums in enumerate(self.folds):
            rows = ~held & (fold == number)
            sums.add({name: matrix[rows] for name, matrix in vectors.items()})
        self.rows = {name: torch.cat([rows.to(held.device), vectors[name][held]]) for name, rows in self.rows.items()}

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks, and gather the held-out rows. ValueError if there are none."""
        for fold in self.folds:
            fold.sum_over_ranks()
        self.rows = {name: on_all_ranks(rows) for name, rows in self.rows.items()}
        if not len(self.rows[TARGET]):
            raise ValueError(
                "These texts are too few, or too often equal, to hold out some for the penalties: fit to more."
            )

    def fit(self, inputs: Sequence[Name]) -> Fit:
        """The map from some inputs to the target."""
        first, other = (fold.regression(inputs, TARGET) for fold in self.folds)
        return self._solve(first + other, torch.cat([self.rows[name] for name in inputs], dim=1))

    def tables(self, report: LayerFit) -> list[torch.Tensor]:
        """The maps from the features to the target with the penalty of a fit: fitted to the other fold, to the first
        fold, and to both."""
        first, other = (fold.regression([FEATURES], TARGET) for fold in self.folds)
        return [self.matched(sums, report.penalty) for sums in (other, first, first + other)]

    def fit_with_table(self, layer: int, tables: Sequence[torch.Tensor]) -> Fit:
        """
        The map from the hidden state h of a layer and the static vector t of the text to the target. A table knows the
        texts that it was fitted to better than others, so each fold reads a table (of [`tables`]) that was fitted to
        the other one. With the table's map t = b + phi W of the features phi,

                                     | 1  0  b |
            [1, h, t] = [1, h, phi]  | 0  I  0 |
                                     | 0  0  W |
        """
        width = self.rows[layer].shape[1]
        folds = []
        for fold, table in zip(self.folds, tables, strict=False):
            reader = torch.block_diag(torch.eye(1 + width).to(table), table[1:])
            reader[0, 1 + width :] = table[0]
            folds.append(fold.regression([layer, FEATURES], TARGET).through(reader))
        static = apply_affine(tables[2], self.rows[FEATURES])
        return self._solve(folds[0] + folds[1], torch.cat([self.rows[layer], static], dim=1))

    def _solve(self, fitted: Regression, rows: torch.Tensor) -> Fit:
        """The map with the best penalty on the held-out rows `(rows, inputs)`, fitted to them, too."""
        reports = [
            LayerFit(penalty, *_quality(apply_affine(self.matched(fitted, penalty), rows), self.rows[TARGET]))
            for penalty in PENALTIES
        ]
        best = max(reports, key=lambda report: report.agreement)
        return Fit(best, self.matched(fitted + Regression.of(rows, self.rows[TARGET]), best.penalty))

    def matched(self, fitted: Regression, penalty: float) -> torch.Tensor:
        """The ridge regression, with the variances of its predictions matched to those of the targets."""
        return fitted.match_variances(fitted.ridge(penalty), *self.target_spread)

    @cached_property
    def target_spread(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Principal axes of the targets of all texts, as rows, and the variance of the targets along each."""
        one, other = (fold.regression([TARGET], TARGET) for fold in self.folds)
        covariance = (one + other + Regression.of(self.rows[TARGET], self.rows[TARGET])).covariance()
        axes = principal_axes(covariance)
        return axes, ((axes @ covariance) * axes).sum(dim=1)


def _quality(predicted: torch.Tensor, targets: torch.Tensor) -> tuple[float, float, float]:
    """R^2, mean cosine, and agreement of the nearest texts of predictions and targets, `(texts, width)` each."""
    error, variance = (predicted - targets).square().sum(), (targets - targets.mean(dim=0)).square().sum()
    predicted = torch.nn.functional.normalize(predicted.float())
    targets = torch.nn.functional.normalize(targets.float())
    agreement = share_of_nearest(predicted, targets, targets)
    return float(1 - error / variance), float((predicted * targets).sum(dim=1).mean()), agreement


def share_of_nearest(queries: torch.Tensor, documents: torch.Tensor, targets: torch.Tensor) -> float:
    """Share of the ten rows that are nearest to each row by its target, the row itself excepted, that are the nearest
    documents of its query, too; `(rows, dims)` each, of unit length."""
    count = min(NEAREST, len(targets) - 1)
    if count < 1:
        return 0.0
    near, nearest = (
        (one @ other.T).fill_diagonal_(-torch.inf).topk(count, dim=1).indices
        for one, other in ((queries, documents), (targets, targets))
    )
    return float((near[:, :, None] == nearest[:, None, :]).any(dim=2).float().mean())


def on_all_ranks(rows: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, concatenated by rank."""
    counts = torch.zeros(world_size(), dtype=torch.float64)
    counts[rank()] = len(rows)
    ends = sum_over_ranks(counts).cumsum(0).long().tolist()
    gathered = rows.new_zeros(ends[-1], rows.shape[1])
    gathered[ends[rank()] - len(rows) : ends[rank()]] = rows
    return sum_over_ranks(gathered)
