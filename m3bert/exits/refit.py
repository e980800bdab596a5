"""
The refit of a layer before a gap, in closed form: its feed-forward network gets other hidden units and another output
matrix, so that it hands over the hidden state that the next layer of the path was trained to read.

A layer ends in `y + W g`, or in a norm of it: y is the residual, g are the hidden units. With z, what the closing norm
of the last skipped layer reads in the source (without a closing norm: what that layer returns), the refit is a ridge
regression from [1, g] to `z - y` over tokens. Rows are divided by the standard deviation of z over its dims, so that
the squared error is that after the norm.

Hidden units are picked among those of the layer and of all skipped layers, which read the same hidden state here.
First come the units of the layer, and as many others that reduce its error most ([`shortlist`]). Then units are
removed in rounds, until as many are left as the layer has ([`eliminate`]).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..encode.ranks import sum_over_ranks
from ..models.feed_forward import FeedForward, Inner
from .layer_rows import Rows


MOST_HELD_OUT = 2000  # tokens
PENALTY, PENALTIES = 1e-3, (1e-4, 1e-3, 1e-2, 1e-1)
KEPT_IN_A_ROUND = 0.8
COLUMNS = 512  # of the Gram matrix at a time
Tensors = dict[str, torch.Tensor]


class Refitted(NamedTuple):
    """The tensors of a refitted layer by their names in it; the share of the variance of what the next layer reads
    that they explain on held-out tokens, `None` without any; and how many of its hidden units are another layer's."""

    tensors: Tensors
    explained: float | None
    borrowed: int


def ridge_through_origin(gram: torch.Tensor, cross: torch.Tensor, penalty: float) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The ridge regression B through the origin that minimises `|t - x B|^2 + penalty sum_j |x_j|^2 |B_j|^2`.

    Args:
        gram (`torch.Tensor` of shape `(inputs, inputs)`): Sum of `x' x` over rows.
        cross (`torch.Tensor` of shape `(inputs, targets)`): Sum of `x' t`.
        penalty (`float`): The penalty.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: B `(inputs, targets)`, and for each input the rise of the squared error
        when it is removed and the others are solved again, `|B_j|^2 / [(gram + penalty diag)^-1]_jj`.
    """
    energy = gram.diagonal()
    scales = torch.where(energy > 1e-12 * energy.max(), energy.rsqrt(), 0.0)
    correlation = gram * torch.outer(scales, scales)
    correlation.diagonal().add_(penalty)
    factor = torch.linalg.cholesky(correlation)
    scaled = torch.cholesky_solve(cross * scales[:, None], factor)
    rises = scaled.square().sum(dim=1) / torch.cholesky_inverse(factor).diagonal()
    return scaled * scales[:, None], rises


def shortlist(gram: torch.Tensor, cross: torch.Tensor, energies: torch.Tensor, count: int) -> torch.Tensor:
    """
    The numbers of the first inputs and of `count` others that, each alone, reduce the error of the first ones most.

    Args:
        gram (`torch.Tensor` of shape `(inputs, first)`): Sum of `x' x` with the first inputs.
        cross (`torch.Tensor` of shape `(inputs, targets)`): Sum of `x' t`.
        energies (`torch.Tensor` of shape `(inputs,)`): Sum of `x_j^2`.
        count (`int`): Number of other inputs.
    """
    first = gram.shape[1]
    weights, _ = ridge_through_origin(gram[:first], cross[:first], PENALTY)
    gains = (cross - gram @ weights).square().sum(dim=1) / energies.clamp(min=1e-30)
    others = gains[first:].topk(min(count, len(gains) - first)).indices.sort().values + first
    return torch.cat([torch.arange(first, device=gram.device), others])


def eliminate(gram: torch.Tensor, cross: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the first input and of `count` others: backward elimination in rounds, in which those inputs go
    whose removal raises the error least (as in the optimal brain surgeon)."""
    numbers = torch.arange(len(gram), device=gram.device)
    while len(numbers) > 1 + count:
        _, rises = ridge_through_origin(gram[numbers][:, numbers], cross[numbers], PENALTY)
        rises[0] = torch.inf
        most = max(1 + count, int(KEPT_IN_A_ROUND * len(numbers)))
        numbers = numbers[rises.topk(most).indices.sort().values]
    return numbers


class Units:
    """The hidden units of some layers' feed-forward networks, which all read the same hidden state."""

    def __init__(self, inner: Inner, layers: Sequence[nn.Module], count: int) -> None:
        self.inner = inner
        self.weights = self._rows(layers, "weight", count)
        self.biases = self._rows(layers, "bias", count)

    def _rows(self, layers: Sequence[nn.Module], name: str, count: int) -> list[torch.Tensor]:
        """The rows of all layers, for each part of a unit; none without a bias."""
        if getattr(layers[0].get_submodule(self.inner.names[0]), name) is None:
            return []
        of_layers = []
        for layer in layers:
            rows = [getattr(layer.get_submodule(path), name).detach() for path in self.inner.names]
            of_layers.append(self.inner.parts(rows, count, 0))
        return [torch.cat(parts).float() for parts in zip(*of_layers, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden units `(tokens, units)` of what the networks read, `(tokens, width)`."""
        biases = self.biases or [weight.new_zeros(len(weight)) for weight in self.weights]
        return self.inner.units([nn.functional.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)])

    def keep(self, numbers: torch.Tensor) -> None:
        """Keep the units with these numbers."""
        self.weights = [weight[numbers.to(weight.device)] for weight in self.weights]
        self.biases = [bias[numbers.to(bias.device)] for bias in self.biases]

    def tensors(self) -> Tensors:
        """The weights and biases of the layer's linear layers."""
        return {
            f"{name}.{kind}": tensor
            for kind, parts in (("weight", self.weights), ("bias", self.biases))
            if parts
            for name, tensor in zip(self.inner.names, self.inner.joined(parts), strict=True)
        }


class Refit:
    """
    Sums over tokens for the refit of one layer, and some tokens of held-out texts. Memory does not grow with the
    number of texts.

    Args:
        ends ([`FeedForward`]): The end of the layer.
        layer (`nn.Module`): The layer.
        targets (`Mapping[int, nn.Module]`): The source's layers whose output the next layer may read, by their
            numbers.
        skipped (`Sequence[nn.Module]`): The skipped layers whose hidden units the layer may take.
    """

    def __init__(
        self, ends: FeedForward, layer: nn.Module, targets: Mapping[int, nn.Module], skipped: Sequence[nn.Module] = ()
    ) -> None:
        self.ends, self.layer, self.targets = ends, layer, targets
        output = layer.get_submodule(ends.output)
        assert isinstance(output, nn.Linear)
        self.output, self.size = output, output.in_features
        self.units = Units(ends.inner, [layer, *skipped], self.size) if ends.inner is not None and skipped else None
        inputs = 1 + self.size * (1 if self.units is None else 1 + len(skipped))
        self.held_out: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # inputs, y, z of the first target
        self.is_long = inputs > 1 + 2 * self.size  # others are compared with the units of the layer first
        self._clear(inputs, columns=1 + self.size if self.is_long else inputs)

    def _clear(self, inputs: int, columns: int) -> None:
        width, device = self.output.out_features, self.output.weight.device
        self.gram = torch.zeros(inputs, columns, dtype=torch.float64, device=device)
        self.energies = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.cross = {key: torch.zeros(inputs, width, dtype=torch.float64, device=device) for key in self.targets}
        self.squares = {key: torch.zeros(1 + width, dtype=torch.float64, device=device) for key in self.targets}

    def inputs(self, rows: Rows) -> torch.Tensor:
        """1 and the hidden units, `(tokens, inputs)`. The 1 is 0 where the output matrix has no bias."""
        units = rows.g if self.units is None else self.units(rows.x)
        return nn.functional.pad(units, (1, 0), value=float(self.output.bias is not None))

    def add(self, rows: Rows, z: Mapping[int, torch.Tensor], *, held_out: bool) -> None:
        """
        Add the tokens of some texts.

        Args:
            rows ([`Rows`]): What the end of the layer reads and gives.
            z (`Mapping[int, torch.Tensor]`): For each target, what its closing norm reads, `(tokens, width)`.
            held_out (`bool`): Whether the texts are held out.
        """
        first = z[min(self.targets)]
        if held_out:
            if not self.is_long and sum(len(y) for _, y, _ in self.held_out) < MOST_HELD_OUT:
                self.held_out.append((self.inputs(rows), rows.y, first))
            return
        deviation = first.std(dim=1, keepdim=True).clamp(min=1e-6)
        inputs = self.inputs(rows) / deviation
        for start in range(0, self.gram.shape[1], COLUMNS):  # above the diagonal, the matrix is symmetric
            block = self.gram[start:, start : start + COLUMNS]
            block += inputs[:, start:].T @ inputs[:, start : start + block.shape[1]]
        self.energies += inputs.square().sum(dim=0)
        for key in self.targets:
            residual = (z[key] - rows.y) / deviation
            self.cross[key] += inputs.T @ residual
            self.squares[key] += torch.cat([1 / deviation, residual], dim=1).square().sum(dim=0)

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks, once all texts are added."""
        square = self.gram[: self.gram.shape[1]]
        square.copy_(square.tril() + square.tril(-1).T)
        self.gram, self.energies = sum_over_ranks(self.gram), sum_over_ranks(self.energies)
        for totals in (self.cross, self.squares):
            totals.update({key: sum_over_ranks(total) for key, total in totals.items()})

    def shorten(self) -> None:
        """Keep the units of the [`shortlist`], and forget the sums."""
        (cross,) = self.cross.values()
        numbers = shortlist(self.gram, cross, self.energies, self.size)
        assert self.units is not None
        self.units.keep(numbers[1:] - 1)
        self.is_long = False
        self._clear(len(numbers), len(numbers))

    def quick(self, target: int) -> Tensors:
        """The tensors of a refit of the output matrix alone, by their names in the layer."""
        return self._named(target, ridge_through_origin(self.gram, self.cross[target], PENALTY)[0])

    def best(self) -> Refitted:
        """The refit to the only target, with the units that it needs most and the penalty that has the smallest error
        on the held-out tokens."""
        ((target, cross),) = self.cross.items()
        numbers = eliminate(self.gram, cross, self.size)
        gram, cross = self.gram[numbers][:, numbers], cross[numbers]
        maps = [ridge_through_origin(gram, cross, penalty)[0] for penalty in PENALTIES]
        errors, variance = sum_over_ranks(self._errors(target, maps, numbers)).split([len(maps), 1])
        best = int(errors.argmin()) if variance > 0 else PENALTIES.index(PENALTY)
        tensors = self._named(target, maps[best])
        if self.units is not None:
            self.units.keep(numbers[1:] - 1)
            tensors |= self.units.tensors()
        explained = float(1 - errors[best] / variance) if variance > 0 else None
        return Refitted(tensors, explained, int((numbers > self.size).sum()))

    def _errors(self, target: int, maps: Sequence[torch.Tensor], numbers: torch.Tensor) -> torch.Tensor:
        """The squared error of each map of some inputs on the held-out tokens, and then the variance there."""
        sums = torch.zeros(len(maps) + 1, dtype=torch.float64)
        if self.held_out:
            inputs, y, z = map(torch.cat, zip(*self.held_out, strict=True))
            expected = self._after_norm(target, z, z)
            sums[-1] = (expected - expected.mean(dim=0)).square().sum()
            for place, weights in enumerate(maps):
                total = y + self._behind(target, inputs[:, numbers] @ weights.to(inputs))
                sums[place] = (self._after_norm(target, total, z) - expected).square().sum()
        return sums

    def _scale(self, target: int) -> torch.Tensor:
        """The root mean square of each dim of `z - y`, the scale of the norm behind the output matrix."""
        count, squares = self.squares[target].split([1, self.output.out_features])
        return (squares / count.clamp(min=1e-30)).sqrt().clamp(min=1e-6)

    def _behind(self, target: int, product: torch.Tensor) -> torch.Tensor:
        """A prediction of `z - y` after the norm behind the output matrix, if there is one."""
        if self.ends.behind is None:
            return product
        scaled = product / self._scale(target).to(product)
        return product / scaled.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)

    def _after_norm(self, target: int, total: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The output of the closing norm; without one, in units of the deviation of z."""
        if self.ends.norm is None:
            return total / z.std(dim=1, keepdim=True).clamp(min=1e-6)
        return copy.deepcopy(self.targets[target].get_submodule(self.ends.norm)).float()(total)

    def _named(self, target: int, weights: torch.Tensor) -> Tensors:
        """A map `(1 + units, width)` as the output matrix, with the norms around it, by their names in the layer."""
        tensors: Tensors = {}
        if self.ends.behind is not None:
            norm, scale = self.layer.get_submodule(self.ends.behind), self._scale(target)
            gain = norm.get_parameter("weight").detach()
            ones = torch.ones_like(gain)
            ones[::2] = -1
            factors = norm(ones).detach().abs()  # 1 + weight in some norms
            tensors[f"{self.ends.behind}.weight"] = gain + scale.to(factors) - factors
            weights = weights / scale
        if self.ends.norm is not None and self.targets[target] is not self.layer:
            closing = self.targets[target].get_submodule(self.ends.norm)
            for name, parameter in closing.named_parameters():
                tensors[f"{self.ends.norm}.{name}"] = parameter.detach().clone()
        tensors[f"{self.ends.output}.weight"] = weights[1:].T.float()
        if self.output.bias is not None:
            tensors[f"{self.ends.output}.bias"] = weights[0].float()
        return tensors
