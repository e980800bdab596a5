"""
Paths in closed form: a depth that skips layers, in which the layer before a gap hands over the hidden state that the
next layer was trained to read, because the output matrix of its feed-forward network is refitted by ridge regression.

A layer ends in `y + W g + b`, or in a norm of it: y is the residual, g what the output matrix W reads. With t, the
source's hidden state that the next layer of the path reads, and the closing norm (gamma, beta) of the source's layer
that makes t:

- pre-norm: W from g to t - y;
- post-norm (**fold**): with n = (t - beta) / gamma, `[W, b] = s B_n - B_y`, where B_n and B_y map [g, 1] to n and y,
  and s is a scale, which the norm removes from n but not from y;
- **swap**, of a post-norm layer without a gate: 2 * hidden_size hidden units become act(y) and act(-y), whose
  difference is y, so that the factor of the residual is free, too: a map from [g of the units that stay, y, 1] to n.

Scale and penalty are those with the smallest error on the tokens of held-out texts, after the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from ..encode.device import autocast
from ..encode.ranks import sum_over_ranks
from ..encode.tokenized_texts import TokenizedText
from ..modeling.anatomy_m3bert import FeedForward, Resumed, Tapped, anatomy_of, feed_forward_of, run_native
from ..modeling.modeling_elastic import Elasticity, layer_list, view, with_parameters
from .passes import RawStates
from .ridge import Moments, Regression


HELD_OUT = 0.1  # share of the texts that choose penalty and scale
MOST_HELD_OUT = 4000  # tokens, which are kept as they are
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
SCALES = (1.0, 2.0, 4.0)
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PathFit:
    """
    The fit of one path.

    Args:
        layers (`list[int]`): The layers that run, counted from 1.
        kinds (`list[str]`): How each layer before a gap was refitted: `"fold"`, `"swap"`, or `"as it is"`.
        r_squared (`list[float]`): Share of the variance of what the next layer reads that each of them gives on
            held-out texts.
    """

    layers: list[int]
    kinds: list[str]
    r_squared: list[float]


def default_path(depth: int, last: int) -> list[int]:
    """The layers of a depth of a model with `last` layers: half of them from the bottom and half from the top."""
    top = depth // 2
    return [*range(1, depth - top + 1), *range(last - top + 1, last + 1)]


@torch.no_grad()
def fit_path(
    raw: RawStates, texts: Sequence[Sequence[TokenizedText]], layers: Sequence[int]
) -> tuple[PathFit, Tensors]:
    """Refit the layers of a path (counted from 1; the last one is the source's) before its gaps, from the bottom, each
    with the input that it has in the path. Returns the fit, and the refitted matrices by their names in the native
    model of these layers."""
    encoder, depth = raw.encoder, raw.encoder.config.num_hidden_layers
    name, own = layer_list(encoder, depth)
    modules: list[nn.Module] = [own[layer - 1] for layer in layers]
    gaps = [place for place, layer in enumerate(layers[:-1]) if layers[place + 1] != layer + 1]
    try:
        ends = feed_forward_of(encoder)
    except ValueError:
        return PathFit([*layers], ["as it is"] * len(gaps), []), {}
    tensors: Tensors = {}
    kinds, explained = [], []
    for place in gaps:
        refit = _Refit(ends, own[layers[place] - 1], own[layers[place + 1] - 2])
        for held_out, rows in _rows(raw, texts, layers, modules, place, ends):
            refit.add(rows, held_out)
        kind, found, r_squared = refit.best()
        kinds.append(kind)
        explained.append(r_squared)
        modules[place] = with_parameters(modules[place], found)
        tensors |= {f"{name}.{place}.{key}": tensor for key, tensor in found.items()}
    return PathFit([*layers], kinds, explained), tensors


def _rows(
    raw: RawStates,
    texts: Iterable[Sequence[TokenizedText]],
    layers: Sequence[int],
    modules: Sequence[nn.Module],
    place: int,
    ends: FeedForward,
) -> Iterator[tuple[bool, Tensors]]:
    """Batches of texts: whether they are held out, and g, y and the wanted hidden state t of each token."""
    encoder, anatomy = raw.encoder, anatomy_of(raw.encoder)
    wanted = layers[place + 1] - 1
    own = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    start = min(Elasticity({len(layers): [*layers]}).shared_prefix(len(layers)), place) if anatomy.resumes else 0
    for group in texts:
        held = [blake2b(its.text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256 for its in group]
        for held_out in (True, False):
            ids = [its.ids for its, own_part in zip(group, held, strict=True) if own_part == held_out]
            for _, inputs in raw.batches(ids) if ids else ():
                states: dict[int, torch.Tensor] = {}
                tapped = [Tapped(own[number - 1], number, states) for number in range(1, wanted + 1)]
                part = list(modules[start : place + 1])
                with autocast(encoder.device, raw.compute_dtype):
                    run_native(view(encoder, range(1, wanted + 1), tapped), **inputs)
                    if start:
                        part[0] = Resumed(part[0], states[start])
                    seen = _ends_of(encoder, layers[start : place + 1], part, modules[place], ends, inputs)
                real = inputs["attention_mask"].bool()
                if anatomy.causal:  # a sink of attention, whose norm is huge
                    real = real & (real.cumsum(1) > 1)
                yield held_out, {key: its[real].float() for key, its in {**seen, "t": states[wanted]}.items()}


def _ends_of(
    encoder: Any, layers: Sequence[int], modules: list[nn.Module], layer: nn.Module, ends: FeedForward, inputs: Any
) -> Tensors:
    """The input of the output matrix of the last of these layers (g), and the residual (y)."""
    seen: Tensors = {}

    def of_output(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen["g"], seen["o"] = args[0], output

    def of_norm(module: nn.Module, args: Any) -> None:
        seen["z"] = args[0]

    states: dict[int, torch.Tensor] = {}
    modules = [*modules[:-1], Tapped(modules[-1], -1, states)]
    handles = [layer.get_submodule(ends.output).register_forward_hook(of_output)]
    if ends.norm is not None:
        handles.append(layer.get_submodule(ends.norm).register_forward_pre_hook(of_norm))
    try:
        run_native(view(encoder, layers, modules), **inputs)
    finally:
        for handle in handles:
            handle.remove()
    return {"g": seen["g"], "y": seen.get("z", states[-1]) - seen["o"]}


class _Refit:
    """Sums over tokens for the refit of one layer, and some tokens of held-out texts. `before` is the source's layer
    in front of the next one of the path."""

    def __init__(self, ends: FeedForward, layer: nn.Module, before: nn.Module) -> None:
        self.ends, self.layer = ends, layer
        self.output: nn.Linear = layer.get_submodule(ends.output)  # type: ignore[assignment]
        inputs, width = self.output.in_features, self.output.out_features
        self.norm: Any = before.get_submodule(ends.norm) if ends.norm is not None else None
        pairs = [("g", "g"), ("g", "n"), ("g", "y"), ("y", "y"), ("y", "n")]
        self.sums = Moments({"g": inputs, "y": width, "n": width}, pairs, exact=False)
        self.held: list[Tensors] = []
        self.has_bias = self.output.bias is not None

    def add(self, rows: Tensors, held_out: bool) -> None:
        """Add the tokens of some texts."""
        if held_out:
            if sum(len(its["g"]) for its in self.held) < MOST_HELD_OUT:
                self.held.append(rows)
            return
        self.sums.add({"g": rows["g"], "y": rows["y"], "n": self.unnormed(rows)})

    def unnormed(self, rows: Tensors) -> torch.Tensor:
        """Targets of W: t - y, or for a post-norm layer t without the weight and bias of its norm."""
        if self.norm is None:
            return rows["t"] - rows["y"]
        weight, bias = self.norm.weight.float(), getattr(self.norm, "bias", None)
        small = weight.abs() < 1e-4  # a dim that is almost constant
        return (rows["t"] - (0 if bias is None else bias.float())) / torch.where(small, 1.0, weight)

    def best(self) -> tuple[str, Tensors, float]:
        """Kind, new matrices by their names in the layer, and explained variance of the best refit."""
        self.sums.sum_over_ranks()
        own = {f"{self.ends.output}.{name}": its.detach() for name, its in self.output.named_parameters()}
        found = [("as it is", own), *self.folds()]
        if self.norm is not None and self.ends.inner is not None:
            found += [*self.swaps()]
        squares = torch.zeros(len(found) + 1, dtype=torch.float64)
        sums = torch.zeros(1 + self.output.out_features, dtype=torch.float64)  # of 1 and t
        for held in self.held:
            errors = [self.result(kind, tensors, held) - held["t"] for kind, tensors in found]
            squares += torch.stack([its.double().square().sum().cpu() for its in (*errors, held["t"])])
            sums += nn.functional.pad(held["t"].double(), (1, 0), value=1.0).sum(dim=0).cpu()
        squares, sums = sum_over_ranks(squares), sum_over_ranks(sums)
        squares[-1] -= sums[1:].square().sum() / sums[0].clamp(min=1)
        best = int(squares[:-1].argmin())
        kind, tensors = found[best]
        return kind, tensors | self.norm_tensors(), float(1 - squares[best] / squares[-1].clamp(min=1e-30))

    def folds(self) -> Iterator[tuple[str, Tensors]]:
        """Refits of W alone."""
        for penalty in PENALTIES:
            to_n = self.ridge(self.sums.regression(["g"], "n"), penalty)
            if self.norm is None:
                yield "fold", self.of_output(to_n)
                continue
            to_y = self.ridge(self.sums.regression(["g"], "y"), penalty)
            for scale in SCALES:
                yield "fold", self.of_output(scale * self.deviation() * to_n - to_y)

    def swaps(self) -> Iterator[tuple[str, Tensors]]:
        """Refits with a free factor of the residual."""
        inner: Any = self.layer.get_submodule(str(self.ends.inner))
        inputs, width = self.output.in_features, self.output.out_features
        regression, kept = self.sums.regression(["g", "y"], "n"), inputs - 2 * width
        if kept <= 0:
            return
        whole = regression.ridge(1e-2)[1 : 1 + inputs]
        energy = self.sums.products["g", "g"].diagonal()
        units = (whole.square().sum(dim=1) * energy).topk(kept).indices.sort().values
        own = torch.arange(1 + inputs, 1 + inputs + width)
        columns = torch.cat([torch.zeros(1, dtype=torch.long), 1 + units.cpu(), own])
        smaller = Regression(regression.products[columns][:, columns], regression.cross_products[columns])
        eye = torch.eye(width)
        for penalty in PENALTIES:
            map_ = (self.deviation() * smaller.ridge(penalty)).float()
            of_residual = map_[1 + kept :] - eye.to(map_)
            weight = torch.cat([map_[1 : 1 + kept], of_residual, -of_residual]).T
            rows = inner.weight.detach()[units.to(inner.weight.device)].float()
            bias = inner.bias.detach()[units.to(inner.weight.device)].float()
            yield (
                "swap",
                {
                    f"{self.ends.output}.weight": weight,
                    f"{self.ends.output}.bias": map_[0],
                    f"{self.ends.inner}.weight": torch.cat([rows, eye.to(rows), -eye.to(rows)]),
                    f"{self.ends.inner}.bias": torch.cat([bias, bias.new_zeros(2 * width)]),
                },
            )

    def ridge(self, regression: Regression, penalty: float) -> torch.Tensor:
        """The map `(1 + inputs, width)`; its first row is 0 if the matrix has no bias."""
        if self.has_bias:
            return regression.ridge(penalty)
        return regression.ridge_through_origin(penalty)

    def of_output(self, affine: torch.Tensor) -> Tensors:
        """A map as weight and bias of the output matrix."""
        bias = {f"{self.ends.output}.bias": affine[0].float()} if self.has_bias else {}
        return {f"{self.ends.output}.weight": affine[1:].T.float(), **bias}

    def deviation(self) -> float:
        """Standard deviation of the residual."""
        count = self.sums.products["one", "one"].item()
        return float((self.sums.products["y", "y"].trace() / count / self.output.out_features).sqrt())

    def norm_tensors(self) -> Tensors:
        """Weight and bias of the closing norm, which become those of the layer that makes t."""
        if self.norm is None or self.norm is self.layer.get_submodule(str(self.ends.norm)):
            return {}
        return {f"{self.ends.norm}.{key}": its.detach().clone() for key, its in self.norm.named_parameters()}

    def result(self, kind: str, tensors: Tensors, held: Tensors) -> torch.Tensor:
        """The layer's output with new matrices."""
        gate = held["g"]
        if kind == "swap":
            raise_by = tensors[f"{self.ends.inner}.weight"]
            hidden = nn.functional.linear(held["y"], raise_by, tensors[f"{self.ends.inner}.bias"])
            gate = ACT2FN[str(self.ends.activation)](hidden)
        weight, bias = tensors[f"{self.ends.output}.weight"], tensors.get(f"{self.ends.output}.bias")
        total = held["y"] + nn.functional.linear(gate, weight.to(gate), None if bias is None else bias.to(gate))
        return total if self.norm is None else self.norm.float()(total)
