"""
Affine maps from the embedding space of one encoder to that of another, fitted to rows that both have embedded. A few
rows give the rotation that brings the spaces closest, and more of them a ridge regression toward it, or toward 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from operator import add
from typing import NamedTuple

import torch
from torch.nn.functional import normalize

from .ridge import Regression, apply_affine, principal_axes
from .sums import share_of_nearest


FOLDS = 5
PENALTIES = tuple(10.0**exponent for exponent in range(-3, 3))
MOST_ROWS = 1000  # rows that searches are compared on


class Method(NamedTuple):
    """Whether the regression is toward a rotation, its penalty as a multiple of the number of rows, and whether the
    variances of its predictions are matched ([`Regression.match_variances`])."""

    rotation: bool
    penalty: float
    matched: bool


METHODS = [Method(*values) for values in product((True, False), PENALTIES, (False, True))]


class PairSums:
    """What maps need of rows: sums over `[1, input, target]` of parts of them, and the number of dims of an input."""

    def __init__(self, parts: Iterable[Regression], inputs: int) -> None:
        sums = reduce(add, parts)
        self.regression = Regression(*sums.products[: 1 + inputs].tensor_split([1 + inputs], dim=1))
        covariance = sums.covariance()[inputs:, inputs:]
        self.axes = principal_axes(covariance)
        self.variances = ((self.axes @ covariance) * self.axes).sum(dim=1)

    @cached_property
    def rotation(self) -> torch.Tensor:
        """Orthogonal Procrustes of the centred rows with one scale, as a map `(1 + inputs, targets)`. Directions that
        no row has are mapped to 0."""
        count, cross = self.regression.products[0, 0], self.regression.cross_products
        means, goal = self.regression.products[0, 1:] / count, cross[0] / count
        left, strengths, right = torch.linalg.svd(cross[1:] / count - torch.outer(means, goal), full_matrices=False)
        strengths = torch.where(strengths > 1e-9 * strengths[0], strengths, 0.0)
        turned = (left * strengths.sign()) @ right
        spread = (turned * (self.regression.covariance() @ turned)).sum()
        weight = turned * strengths.sum() / spread.clamp(min=1e-30)
        return torch.cat([(goal - means @ weight)[None], weight])

    def fit(self, method: Method) -> torch.Tensor:
        """The map `(1 + inputs, targets)` by a method."""
        sums, prior = self.regression, self.rotation * method.rotation
        rest = Regression(sums.products, sums.cross_products - sums.products @ prior)
        affine = prior + rest.ridge(method.penalty)
        return sums.match_variances(affine, self.axes, self.variances) if method.matched else affine


@dataclass(frozen=True)
class SpaceMap:
    """
    A map between two spaces, and what a search keeps with it.

    Args:
        affine (`torch.Tensor` of shape `(1 + inputs, targets)`): The map of `[1, input]`, in float64.
        shares (`dict[int, float]`): Number of rows of a fit -> share of the ten nearest rows that stay the nearest,
            on rows that were held out from it ([`share_of_nearest`]).
    """

    affine: torch.Tensor
    shares: dict[int, float]

    @classmethod
    def fit(cls, inputs: torch.Tensor, targets: torch.Tensor, *, maps_documents: bool = False) -> SpaceMap:
        """Fit a map of vectors `(rows, inputs)` to those of the same rows in another space, `(rows, targets)`. The
        method is the one that keeps most of a search in five folds, whose queries are mapped, or whose documents."""
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
        inputs, targets = inputs[order], targets[order]
        rows, width = torch.cat([inputs, targets], dim=1), inputs.shape[1]
        parts = [Regression.of(rows[fold::FOLDS], rows[fold::FOLDS, :0]) for fold in range(FOLDS)]
        tried, goal = inputs[:MOST_ROWS], normalize(targets[:MOST_ROWS], dim=1)

        def share(sums: list[PairSums], method: Method) -> float:
            mapped = torch.empty_like(goal)
            for fold, each in enumerate(sums):
                mapped[fold::FOLDS] = apply_affine(each.fit(method), tried[fold::FOLDS])
            mapped = normalize(mapped, dim=1)
            return share_of_nearest(*((goal, mapped) if maps_documents else (mapped, goal)), goal)

        shares: dict[int, float] = {}
        for count in (1, 2, FOLDS - 1):  # folds of the fit
            others = [[parts[(fold + 1 + other) % FOLDS] for other in range(count)] for fold in range(FOLDS)]
            sums = [PairSums(each, width) for each in others]
            compared = {method: share(sums, method) for method in METHODS}
            best = max(compared, key=compared.__getitem__)
            shares[len(rows) * count // FOLDS] = compared[best]
        return cls(PairSums(parts, width).fit(best), shares)

    @property
    def share(self) -> float:
        """The share with four fifths of the rows."""
        return self.shares[max(self.shares)]

    @property
    def gain(self) -> float:
        """About how much twice as many rows would add to the share, if gains shrink as they did before."""
        fifth, half, whole = (self.shares[rows] for rows in sorted(self.shares))
        last, before = max(0.0, whole - half), half - fifth
        return last * min(1.0, last / before) if before > 0 else last
