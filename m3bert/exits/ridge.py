"""
Ridge regression from running sums: its memory does not depend on the number of rows.

Inputs are centred and standardised, so that one penalty means the same for inputs of any scale; targets are centred.
An affine map is one matrix `(1 + inputs, targets)` that acts on `[1, x]`: its first row is the constant part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..encode.ranks import sum_over_ranks


Name = int | str
ONE = "one"  # the input that is 1 in every row


class Moments:
    """
    Sums over rows of the products of named vectors, in float64: all that regressions between them need of the rows.

    Args:
        widths (`Mapping[Name, int]`): Name -> dims of its vectors. `ONE` is added.
        pairs (`Iterable[tuple[Name, Name]]`): Pairs whose products are summed. Every vector is also paired with `ONE`.
    """

    def __init__(self, widths: Mapping[Name, int], pairs: Iterable[tuple[Name, Name]]) -> None:
        sizes = {ONE: 1, **widths}
        with_one = [(ONE, name) for name in sizes]
        self.products = {
            (one, other): torch.zeros(sizes[one], sizes[other], dtype=torch.float64)
            for one, other in (*with_one, *pairs)
        }

    def add(self, vectors: Mapping[Name, torch.Tensor]) -> None:
        """Add rows: name -> vectors `(rows, width)`."""
        rows = {name: matrix.double() for name, matrix in vectors.items()}
        any_rows = next(iter(rows.values()))
        rows[ONE] = any_rows.new_ones(len(any_rows), 1)
        for (one, other), total in self.products.items():
            total = total.to(any_rows.device)
            self.products[one, other] = total.add_(rows[one].T @ rows[other])

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks."""
        self.products = {pair: sum_over_ranks(total) for pair, total in self.products.items()}

    def regression(self, inputs: Sequence[Name], target: Name) -> Regression:
        """The regression of a target on the concatenation of some inputs."""
        names = (ONE, *inputs)
        rows = [torch.cat([self._product(one, other) for other in names], dim=1) for one in names]
        cross = torch.cat([self._product(name, target) for name in names])
        return Regression(torch.cat(rows), cross)

    def _product(self, one: Name, other: Name) -> torch.Tensor:
        return self.products[one, other] if (one, other) in self.products else self.products[other, one].T


@dataclass(frozen=True)
class Regression:
    """
    Sums over rows that a linear regression needs, in float64. The sums of two sets of rows add up.

    Args:
        products (`torch.Tensor` of shape `(1 + inputs, 1 + inputs)`): Sum of `[1, x] [1, x]'`.
        cross_products (`torch.Tensor` of shape `(1 + inputs, targets)`): Sum of `[1, x] y'`.
    """

    products: torch.Tensor
    cross_products: torch.Tensor

    @classmethod
    def of(cls, inputs: torch.Tensor, targets: torch.Tensor) -> Regression:
        """The sums of rows: inputs `(rows, inputs)` and targets `(rows, targets)`."""
        x = torch.nn.functional.pad(inputs.double(), (1, 0), value=1.0)
        return cls(x.T @ x, x.T @ targets.double())

    def __add__(self, other: Regression) -> Regression:
        return Regression(self.products + other.products, self.cross_products + other.cross_products)

    def through(self, maps: torch.Tensor) -> Regression:
        """The regression on `[1, x] maps`, for maps `(1 + inputs, 1 + new inputs)` whose first column keeps the 1."""
        return Regression(maps.T @ self.products @ maps, maps.T @ self.cross_products)

    def covariance(self) -> torch.Tensor:
        """Covariance of the inputs over all rows, `(inputs, inputs)`."""
        count, means = self.products[0, 0], self.products[0, 1:] / self.products[0, 0]
        return self.products[1:, 1:] / count - torch.outer(means, means)

    def ridge(self, penalty: float) -> torch.Tensor:
        """The map W `(1 + inputs, targets)` that minimises `mean |y - W' x|^2 + penalty |W|^2` for centred targets and
        standardised inputs. A constant input has the weight 0."""
        count, covariance = self.products[0, 0], self.covariance()
        means, target_means = self.products[0, 1:] / count, self.cross_products[0] / count
        deviations = covariance.diagonal().clamp(min=0).sqrt()
        # Below the first limit, differences of float64 sums do not tell a deviation from 0. Below the second, the map
        # would multiply the rounding of the inputs where it runs: some encoders have dims that never vary.
        varies = deviations > 1e-7 * (self.products.diagonal()[1:] / count).sqrt()
        varies &= deviations > 1e-6 * deviations.max()
        scales = torch.where(varies, 1 / deviations, 0.0)
        correlation = covariance * torch.outer(scales, scales)
        correlation.diagonal().add_(penalty)
        cross = (self.cross_products[1:] / count - torch.outer(means, target_means)) * scales[:, None]
        weight = torch.cholesky_solve(cross, torch.linalg.cholesky(correlation)) * scales[:, None]
        return torch.cat([(target_means - means @ weight)[None], weight])

    def match_variances(self, affine: torch.Tensor, axes: torch.Tensor, variances: torch.Tensor) -> torch.Tensor:
        """
        Undo the shrinkage of a regression. The predictions of a ridge regression vary less than the targets, most of
        all along axes that are hard to predict, which count too little in a cosine. Along each of the orthogonal axes
        `(targets, targets)` in rows, the centred predictions of a map `(1 + inputs, targets)` are scaled to the
        variances `(targets,)` of the targets.
        """
        means = self.products[0, 1:] / self.products[0, 0]
        weight = affine[1:] @ axes.T
        predicted = (weight * (self.covariance() @ weight)).sum(dim=0)
        varies = predicted > 1e-9 * variances.max()
        scales = torch.where(varies, variances / predicted.clamp(min=1e-30), 1.0).clamp(min=0).sqrt()
        weight = (weight * scales) @ axes
        return torch.cat([(affine[0] + means @ (affine[1:] - weight))[None], weight])


def apply_affine(affine: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Map inputs `(..., inputs)` to `(..., targets)`."""
    return inputs @ affine[1:].to(inputs) + affine[0].to(inputs)


def weight_and_bias(affine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight `(targets, inputs)` and the bias `(targets,)` of a map, as a linear layer has them."""
    return affine[1:].T, affine[0]


def principal_axes(covariance: torch.Tensor) -> torch.Tensor:
    """
    The eigenvectors of a covariance matrix `(width, width)` as the rows of an orthogonal matrix `(width, width)`, by
    descending variance. The largest entry of each row is positive, so that every machine gets the same signs.
    """
    axes = torch.linalg.eigh(covariance)[1].flip(1).T
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    return axes * largest.sign()
