"""
The refit of a layer before a gap, in closed form: its feed-forward network gets other hidden units and another output
matrix, so that it hands over the hidden state that the next layer of the path was trained to read.

A layer ends in `y + W g`, or in a norm of it: y is the residual, g are the hidden units. With z, what the closing norm
of the last skipped layer reads in the source (without a closing norm: what that layer returns), the refit is a ridge
regression from [1, g] to `z - y` over tokens. Rows are divided by the standard deviation of z over its dims, so that
the squared error is that after the norm.

Hidden units are picked among those of the layer and of all skipped layers, which read the same hidden state here.
First come the layer's own, and as many others that reduce its error most ([`shortlist`]). Then units are removed in
rounds, until as many are left as the layer has ([`eliminate`]).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..encode.ranks import sum_over_ranks
from ..models.anatomy import FeedForward, Inner


MOST_HELD_OUT = 2000  # tokens, which are kept as they are
PENALTY, PENALTIES = 1e-3, (1e-4, 1e-3, 1e-2, 1e-1)
KEPT_IN_A_ROUND = 0.8
Tensors = dict[str, torch.Tensor]


def solve(gram: torch.Tensor, cross: torch.Tensor, penalty: float) -> tuple[torch.Tensor, torch.Tensor]:
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
    weights, _ = solve(gram[:first], cross[:first], PENALTY)
    gains = (cross - gram @ weights).square().sum(dim=1) / energies.clamp(min=1e-30)
    others = gains[first:].topk(min(count, len(gains) - first)).indices.sort().values + first
    return torch.cat([torch.arange(first, device=gram.device), others])


def eliminate(gram: torch.Tensor, cross: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the first input and of `count` others: backward elimination in rounds, in which those inputs go
    whose removal raises the error least (as in the optimal brain surgeon)."""
    kept = torch.arange(len(gram), device=gram.device)
    while len(kept) > 1 + count:
        _, rises = solve(gram[kept][:, kept], cross[kept], PENALTY)
        rises[0] = torch.inf
        kept = kept[rises.topk(max(1 + count, int(KEPT_IN_A_ROUND * len(kept)))).indices.sort().values]
    return kept


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
        of_layers = [
            self.inner.parts([getattr(layer.get_submodule(its), name).detach() for its in self.inner.names], count, 0)
            for layer in layers
        ]
        return [torch.cat(parts).float() for parts in zip(*of_layers, strict=True)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The hidden units `(tokens, units)` of what the networks read, `(tokens, width)`."""
        biases = self.biases or [its.new_zeros(len(its)) for its in self.weights]
        return self.inner.units([nn.functional.linear(x, w, b) for w, b in zip(self.weights, biases, strict=True)])

    def keep(self, numbers: torch.Tensor) -> None:
        """Keep the units with these numbers."""
        self.weights = [its[numbers.to(its.device)] for its in self.weights]
        self.biases = [its[numbers.to(its.device)] for its in self.biases]

    def tensors(self) -> Tensors:
        """The weights and biases of the layer's linear layers."""
        return {
            f"{name}.{kind}": its
            for kind, parts in (("weight", self.weights), ("bias", self.biases))
            if parts
            for name, its in zip(self.inner.names, self.inner.joined(parts), strict=True)
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
        self.output: nn.Linear = layer.get_submodule(ends.output)  # type: ignore[assignment]
        self.own = self.output.in_features
        self.units = Units(ends.inner, [layer, *skipped], self.own) if ends.inner is not None and skipped else None
        inputs = 1 + self.own * (1 if self.units is None else 1 + len(skipped))
        self.held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # inputs, y and z of the first target
        long = inputs > 1 + 2 * self.own  # compared with the layer's own at first
        self._clear(inputs, columns=1 + self.own if long else inputs)

    def _clear(self, inputs: int, columns: int) -> None:
        width, device = self.output.out_features, self.output.weight.device
        self.gram = torch.zeros(inputs, columns, dtype=torch.float64, device=device)
        self.energies = torch.zeros(inputs, dtype=torch.float64, device=device)
        self.cross = {it: torch.zeros(inputs, width, dtype=torch.float64, device=device) for it in self.targets}
        self.squares = {it: torch.zeros(1 + width, dtype=torch.float64, device=device) for it in self.targets}

    @property
    def is_long(self) -> bool:
        """Whether there are more units than the Gram matrix has columns, so that a shortlist comes first."""
        return len(self.gram) > self.gram.shape[1]

    def inputs(self, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """1 and the hidden units, `(tokens, inputs)`. The 1 is 0 where the output matrix has no bias."""
        units = g if self.units is None else self.units(x)
        return nn.functional.pad(units, (1, 0), value=float(self.output.bias is not None))

    def add(
        self, x: torch.Tensor, g: torch.Tensor, y: torch.Tensor, z: Mapping[int, torch.Tensor], held_out: bool
    ) -> None:
        """
        Add the tokens of some texts.

        Args:
            x (`torch.Tensor` of shape `(tokens, width)`): What the feed-forward network reads.
            g (`torch.Tensor` of shape `(tokens, units)`): The layer's hidden units.
            y (`torch.Tensor` of shape `(tokens, width)`): The residual.
            z (`Mapping[int, torch.Tensor]`): For each target, what its closing norm reads, `(tokens, width)`.
            held_out (`bool`): Whether the texts are held out.
        """
        if held_out:
            if not self.is_long and sum(len(its) for _, its, _ in self.held) < MOST_HELD_OUT:
                self.held.append((self.inputs(x, g), y, z[min(self.targets)]))
            return
        deviation = z[min(self.targets)].std(dim=1, keepdim=True).clamp(min=1e-6)
        rows = self.inputs(x, g) / deviation
        self.gram += rows.T @ rows[:, : self.gram.shape[1]]
        self.energies += rows.square().sum(dim=0)
        for it in self.targets:
            wanted = (z[it] - y) / deviation
            self.cross[it] += rows.T @ wanted
            self.squares[it] += torch.cat([1 / deviation, wanted], dim=1).square().sum(dim=0)

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks."""
        self.gram, self.energies = sum_over_ranks(self.gram), sum_over_ranks(self.energies)
        for totals in (self.cross, self.squares):
            totals.update({it: sum_over_ranks(total) for it, total in totals.items()})

    def shorten(self) -> None:
        """Keep the units of the [`shortlist`], and forget the sums."""
        (cross,) = self.cross.values()
        kept = shortlist(self.gram, cross, self.energies, self.own)
        assert self.units is not None
        self.units.keep(kept[1:] - 1)
        self._clear(len(kept), len(kept))

    def quick(self, target: int) -> Tensors:
        """The tensors of a refit of the output matrix alone, by their names in the layer."""
        return self._named(target, solve(self.gram, self.cross[target], PENALTY)[0])

    def best(self) -> tuple[Tensors, float, int]:
        """The tensors of the refit to the only target by their names in the layer, with the penalty that has the
        smallest error on the held-out tokens; the share of the variance that it explains there; and how many hidden
        units are another layer's."""
        ((target, cross),) = self.cross.items()
        kept = eliminate(self.gram, cross, self.own)
        gram, cross = self.gram[kept][:, kept], cross[kept]
        maps = [solve(gram, cross, penalty)[0] for penalty in PENALTIES]
        sums = torch.zeros(len(PENALTIES) + 1, dtype=torch.float64)
        if self.held:
            inputs, y, z = map(torch.cat, zip(*self.held, strict=True))
            wanted = self._after_norm(target, z, z)
            sums[-1] = (wanted - wanted.mean(dim=0)).square().sum()
            for number, map_ in enumerate(maps):
                total = y + self._behind(target, inputs[:, kept] @ map_.to(inputs))
                sums[number] = (self._after_norm(target, total, z) - wanted).square().sum()
        sums = sum_over_ranks(sums)
        number = int(sums[:-1].argmin())
        if self.units is not None:
            self.units.keep(kept[1:] - 1)
        tensors = self._named(target, maps[number]) | (self.units.tensors() if self.units is not None else {})
        return tensors, float(1 - sums[number] / sums[-1].clamp(min=1e-30)), int((kept > self.own).sum())

    def _scale(self, target: int) -> torch.Tensor:
        """The root mean square of each dim of `z - y`, the scale of the norm behind the output matrix."""
        count, *squares = self.squares[target].split([1, self.output.out_features])
        return (squares[0] / count.clamp(min=1e-30)).sqrt().clamp(min=1e-6)

    def _behind(self, target: int, product: torch.Tensor) -> torch.Tensor:
        """What a prediction of `z - y` becomes in the norm behind the output matrix, if there is one."""
        if self.ends.behind is None:
            return product
        scaled = product / self._scale(target).to(product)
        return product / scaled.square().mean(dim=1, keepdim=True).sqrt().clamp(min=1e-6)

    def _after_norm(self, target: int, total: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """The output of the closing norm; without one, in units of the deviation of z."""
        if self.ends.norm is None:
            return total / z.std(dim=1, keepdim=True).clamp(min=1e-6)
        return copy.deepcopy(self.targets[target].get_submodule(self.ends.norm)).float()(total)

    def _named(self, target: int, map_: torch.Tensor) -> Tensors:
        """A map `(1 + units, width)` as the output matrix, with the norms around it."""
        found: Tensors = {}
        if self.ends.behind is not None:
            norm: Any = self.layer.get_submodule(self.ends.behind)
            scale, ones = self._scale(target), torch.ones_like(norm.weight)
            ones[::2] = -1
            factors = norm(ones).detach().abs()  # 1 + weight in some norms
            found[f"{self.ends.behind}.weight"] = norm.weight.detach() + scale.to(factors) - factors
            map_ = map_ / scale
        if self.ends.norm is not None and self.targets[target] is not self.layer:
            closing = self.targets[target].get_submodule(self.ends.norm)
            found |= {f"{self.ends.norm}.{name}": its.detach().clone() for name, its in closing.named_parameters()}
        found[f"{self.ends.output}.weight"] = map_[1:].T.float()
        if self.output.bias is not None:
            found[f"{self.ends.output}.bias"] = map_[0].float()
        return found
