"""
Ridge regression from running sums: its memory does not depend on the number of rows.

Inputs are centred and standardised, so that one penalty means the same for inputs of any scale; targets are centred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from .distributed import sum_over_ranks


@dataclass(frozen=True)
class RegressionSums:
    """
    Sums over rows that a linear regression needs, in float64. Sums of two sets of rows add up to those of both.

    Args:
        count (scalar `torch.Tensor`): Number of rows n.
        inputs (`torch.Tensor` of shape `(width,)`): Sum of the inputs x.
        targets (`torch.Tensor` of shape `(target width,)`): Sum of the targets y.
        products (`torch.Tensor` of shape `(width, width)`): Sum of x x'.
        cross_products (`torch.Tensor` of shape `(width, target width)`): Sum of x y'.
        target_squares (scalar `torch.Tensor`): Sum of the squared norms of y.
    """

    count: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor
    products: torch.Tensor
    cross_products: torch.Tensor
    target_squares: torch.Tensor

    @classmethod
    def of(cls, inputs: torch.Tensor, targets: torch.Tensor) -> RegressionSums:
        """The sums of a batch: inputs `(rows, width)` and targets `(rows, target width)`."""
        x, y = inputs.double(), targets.double()
        count = torch.tensor(float(len(x)), dtype=torch.float64, device=x.device)
        return cls(count, x.sum(dim=0), y.sum(dim=0), x.T @ x, x.T @ y, y.square().sum())

    @classmethod
    def zero(cls, width: int, target_width: int) -> RegressionSums:
        """The sums of no rows."""
        empty = torch.zeros(0, width, dtype=torch.float64)
        return cls.of(empty, empty.new_zeros(0, target_width))

    def __add__(self, other: RegressionSums) -> RegressionSums:
        like = other.inputs.device
        return RegressionSums(*(getattr(self, name).to(like) + getattr(other, name) for name in _names()))

    def __sub__(self, other: RegressionSums) -> RegressionSums:
        return RegressionSums(*(getattr(self, name) - getattr(other, name) for name in _names()))

    def over_ranks(self) -> RegressionSums:
        """The sums over the rows of all ranks."""
        return RegressionSums(*(sum_over_ranks(getattr(self, name)) for name in _names()))

    def input_covariance(self) -> torch.Tensor:
        """Covariance of the inputs over all rows, `(width, width)`."""
        return self.products / self.count - torch.outer(self.inputs, self.inputs) / self.count**2

    def solve(self, penalties: Sequence[float]) -> list[AffineMap]:
        """
        The ridge regression of each penalty, from one eigendecomposition. With centred targets and standardised
        inputs, a map W minimises `mean |y - W x|^2 + penalty |W|^2`. A constant input has the weight 0.

        Args:
            penalties (`Sequence[float]`): Penalties above 0, as multiples of the number of rows.

        Returns:
            `list[AffineMap]`: one map per penalty.
        """
        means, target_means = self.inputs / self.count, self.targets / self.count
        covariance = self.input_covariance()
        deviations = covariance.diagonal().clamp(min=0).sqrt()
        # The smallest deviation that differences of float64 sums can tell from 0.
        varies = deviations > 1e-7 * (self.products.diagonal() / self.count).sqrt()
        scales = torch.where(varies, 1 / deviations, 0.0)
        correlation = covariance * torch.outer(scales, scales)
        values, vectors = torch.linalg.eigh(correlation)
        cross = (self.cross_products / self.count - torch.outer(means, target_means)) * scales[:, None]
        rotated = vectors.T @ cross
        maps = []
        for penalty in penalties:
            weight = (vectors @ (rotated / (values.clamp(min=0) + penalty)[:, None]) * scales[:, None]).T
            maps.append(AffineMap(weight, target_means - weight @ means))
        return maps

    def match_variances(
        self, affine: AffineMap, axes: torch.Tensor, variances: torch.Tensor, strength: float
    ) -> AffineMap:
        """
        Undo some of the shrinkage of a regression. The predictions of a ridge regression vary less than the targets,
        most of all along axes that are hard to predict, which count too little in a cosine. Along each axis, the
        centred predictions are multiplied by `(target variance / predicted variance)^(strength / 2)`.

        Args:
            affine ([`AffineMap`]): The regression.
            axes (`torch.Tensor` of shape `(target width, target width)`): Orthogonal axes of the targets, as rows.
            variances (`torch.Tensor` of shape `(target width,)`): Variance of the targets along each axis.
            strength (`float`): 0 changes nothing; with 1 the predictions vary like the targets.

        Returns:
            [`AffineMap`]: a map with the same mean prediction on these rows.
        """
        means, target_means = self.inputs / self.count, self.targets / self.count
        weight = axes @ affine.weight
        predicted = ((weight @ self.input_covariance()) * weight).sum(dim=1)
        varies = predicted > 1e-9 * variances.max()
        scales = torch.where(varies, variances / predicted.clamp(min=1e-30), 1.0) ** (strength / 2)
        weight = axes.T @ (scales[:, None] * weight)
        return AffineMap(weight, target_means - weight @ means)

    def r_squared(self, affine: AffineMap) -> float:
        """
        Share of the targets' variance that a map explains on these rows, `1 - sum |y - W x - b|^2 / sum |y - mean|^2`.
        """
        weight, bias = affine.weight, affine.bias
        explained = (weight * self.cross_products.T).sum() + bias @ self.targets
        predicted = (
            ((weight @ self.products) * weight).sum()
            + 2 * (weight @ self.inputs) @ bias
            + self.count * bias.square().sum()
        )
        error = self.target_squares - 2 * explained + predicted
        variance = self.target_squares - self.targets.square().sum() / self.count
        return float(1 - error / variance)


@dataclass(frozen=True)
class AffineMap:
    """
    `x -> weight x + bias`.

    Args:
        weight (`torch.Tensor` of shape `(target width, width)`): Linear part.
        bias (`torch.Tensor` of shape `(target width,)`): Constant part.
    """

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map `(..., width)` to `(..., target width)`."""
        return inputs @ self.weight.T.to(inputs) + self.bias.to(inputs)

    def followed_by(self, matrix: torch.Tensor) -> AffineMap:
        """The map `x -> matrix (weight x + bias)`."""
        return AffineMap(matrix @ self.weight, matrix @ self.bias)


def principal_axes(covariance: torch.Tensor) -> torch.Tensor:
    """
    The eigenvectors of a covariance matrix `(width, width)` as the rows of an orthogonal matrix `(width, width)`, by
    descending variance. The largest entry of each row is positive, so that every machine gets the same signs.
    """
    axes = torch.linalg.eigh(covariance)[1].flip(1).T
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    return axes * largest.sign()


def _names() -> list[str]:
    return [part.name for part in fields(RegressionSums)]
