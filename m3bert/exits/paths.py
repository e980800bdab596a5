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

Scale and penalty are those with the smallest error on the tokens of held-out texts, after the norm. That error does
not tell which layers, and fold or swap, search best: see [`m3bert.exits.choice`].
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers.activations import ACT2FN

from ..encode.device import autocast
from ..encode.ranks import rank, sum_over_ranks
from ..encode.tokenized_texts import TokenizedText
from ..modeling.anatomy_m3bert import FeedForward, Resumed, Tapped, anatomy_of, feed_forward_of, run_native
from ..modeling.modeling_elastic import Elasticity, layer_list, view, with_parameters
from .passes import RawStates
from .ridge import Moments, Name, Regression
from .sums import PathFit


HELD_OUT = 0.1  # share of the texts that choose penalty and scale
MOST_HELD_OUT = 2000  # tokens, which are kept as they are
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
SCALES = (1.0, 2.0, 4.0)
Tensors = dict[str, torch.Tensor]
Rows = dict[Name, torch.Tensor]


KINDS = ("fold", "swap")


class _Path:
    """A path on the way: its modules, of which those in front of `place` are final."""

    def __init__(self, layers: Sequence[int], kind: str, own: nn.ModuleList) -> None:
        self.layers, self.kind = list(layers), kind
        self.modules: list[nn.Module] = [own[layer - 1] for layer in layers]
        self.gaps = [place for place, layer in enumerate(layers[:-1]) if layers[place + 1] != layer + 1]
        self.kinds: list[str] = []
        self.explained: list[float] = []
        self.tensors: Tensors = {}

    @property
    def place(self) -> int:
        """Place of the layer to refit next."""
        return self.gaps[len(self.kinds)]

    @property
    def key(self) -> tuple[Any, ...]:
        """Paths with the same key have the same layers, with the same weights, up to the one to refit."""
        return (*self.layers[: self.place + 1], *((self.kind,) if self.kinds else ()))

    @property
    def wanted(self) -> int:
        """The source's layer whose output the next layer reads."""
        return self.layers[self.place + 1] - 1


@torch.no_grad()
def fit_paths(
    raw: RawStates,
    texts: Iterable[Sequence[TokenizedText]],
    paths: Iterable[Sequence[int]],
    kinds: Sequence[str] = KINDS,
    description: str | None = None,
) -> list[tuple[PathFit, Tensors]]:
    """
    Refit the layers of paths (counted from 1; the last one is the source's) before their gaps, from the bottom, each
    with the input that it has in the path. The first gaps of all paths are served by one pass over the texts.

    Args:
        raw ([`RawStates`]): The encoder.
        texts (`Iterable[Sequence[TokenizedText]]`): Groups of texts.
        paths (`Iterable[Sequence[int]]`): The layers of each path.
        kinds (`Sequence[str]`, *optional*, defaults to fold and swap): Each path is refitted in each of these ways
            that its layers allow.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

    Returns:
        `list[tuple[PathFit, dict[str, torch.Tensor]]]`: Each fit, and its refitted matrices by their names in the
        native model of these layers. Layers that cannot be refitted stay as they are.
    """
    encoder = raw.encoder
    name, own = layer_list(encoder, encoder.config.num_hidden_layers)
    try:
        ends: FeedForward | None = feed_forward_of(encoder)
    except ValueError:
        ends = None
    found = []
    for layers in paths:
        path = _Path(layers, "as it is", own)
        if ends is None or not path.gaps:
            found.append(path)
            path.kinds = ["as it is"] * len(path.gaps)
        else:
            swaps = ends.norm is not None and ends.inner is not None
            found += [_Path(layers, kind, own) for kind in kinds if kind == "fold" or swaps]
    while ends is not None and (open_paths := [path for path in found if len(path.kinds) < len(path.gaps)]):
        refits: dict[tuple[Any, ...], _Refit] = {}
        first = {path.key: path for path in reversed(open_paths)}
        for key, path in first.items():
            wanted = {its.wanted for its in open_paths if its.key == key}
            refits[key] = _Refit(ends, path.modules[path.place], {layer: own[layer - 1] for layer in wanted})
        for held_out, rows in _rows(raw, texts, first, {path.wanted for path in open_paths}, ends, description):
            for key, its in rows.items():
                refits[key].add(its, held_out)
        for refit in refits.values():
            refit.sum_over_ranks()
        for path in open_paths:
            kind, tensors, explained = refits[path.key].best(path.kind, path.wanted)
            place = path.place
            path.modules[place] = with_parameters(path.modules[place], tensors)
            path.tensors |= {f"{name}.{place}.{key}": tensor for key, tensor in tensors.items()}
            path.kinds.append(kind)
            path.explained.append(explained)
    return [(PathFit(path.layers, path.kinds, path.explained), path.tensors) for path in found]


def _rows(
    raw: RawStates,
    texts: Iterable[Sequence[TokenizedText]],
    paths: Mapping[tuple[Any, ...], _Path],
    wanted: Iterable[int],
    ends: FeedForward,
    description: str | None = None,
) -> Iterator[tuple[bool, dict[tuple[Any, ...], Rows]]]:
    """Batches of texts: whether they are held out, and for each path g and y of each token, and the wanted hidden
    states of the source by their layers."""
    encoder, anatomy = raw.encoder, anatomy_of(raw.encoder)
    wanted, groups = sorted(wanted), list(texts)
    own = layer_list(encoder, encoder.config.num_hidden_layers)[1]
    starts = dict.fromkeys(paths, 0)
    if anatomy.resumes:
        prefixes = {
            key: Elasticity({len(its.layers): its.layers}).shared_prefix(len(its.layers)) for key, its in paths.items()
        }
        starts = {key: min(prefixes[key], its.place) for key, its in paths.items()}
    quiet = description is None or rank() > 0
    with tqdm(total=sum(map(len, groups)), desc=description, unit=" texts", disable=quiet, leave=False) as bar:
        for group in groups:
            held = [blake2b(its.text.encode(), digest_size=1).digest()[0] < HELD_OUT * 256 for its in group]
            for held_out in (True, False):
                ids = [its.ids for its, own_part in zip(group, held, strict=True) if own_part == held_out]
                for _, inputs in raw.batches(ids) if ids else ():
                    states: dict[int, torch.Tensor] = {}
                    tapped = [Tapped(own[number - 1], number, states) for number in range(1, wanted[-1] + 1)]
                    real = inputs["attention_mask"].bool()
                    if anatomy.causal:  # a sink of attention, whose norm is huge
                        real = real & (real.cumsum(1) > 1)
                    seen = {}
                    with autocast(encoder.device, raw.compute_dtype):
                        run_native(view(encoder, range(1, wanted[-1] + 1), tapped), **inputs)
                        for key, path in paths.items():
                            places = slice(starts[key], path.place + 1)
                            part = list(path.modules[places])
                            if starts[key]:
                                part[0] = Resumed(part[0], states[starts[key]])
                            layer = path.modules[path.place]
                            seen[key] = _ends_of(encoder, path.layers[places], part, layer, ends, inputs)
                    targets: Rows = {number: states[number][real].float() for number in wanted}
                    yield (
                        held_out,
                        {
                            key: {**{name: its[real].float() for name, its in found.items()}, **targets}
                            for key, found in seen.items()
                        },
                    )
                    bar.update(len(real))


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
    """Sums over tokens for the refit of one layer, and some tokens of held-out texts. `before` are the source's layers
    whose output the next layer of a path may read, by their numbers."""

    def __init__(self, ends: FeedForward, layer: nn.Module, before: Mapping[int, nn.Module]) -> None:
        self.ends, self.layer, self.before = ends, layer, before
        self.output: nn.Linear = layer.get_submodule(ends.output)  # type: ignore[assignment]
        inputs, width = self.output.in_features, self.output.out_features
        pairs: list[tuple[Name, Name]] = [("g", "g"), ("g", "y"), ("y", "y")]
        pairs += [(name, target) for target in before for name in ("g", "y")]
        self.sums = Moments({"g": inputs, "y": width, **dict.fromkeys(before, width)}, pairs, exact=False)
        self.held: list[Rows] = []
        self.has_bias = self.output.bias is not None

    def norm_of(self, target: int) -> Any:
        """The closing norm of the layer that makes a target; `None` for a pre-norm encoder."""
        return None if self.ends.norm is None else self.before[target].get_submodule(self.ends.norm)

    def add(self, rows: Mapping[Name, torch.Tensor], held_out: bool) -> None:
        """Add the tokens of some texts: g, y, and the hidden states by their layers."""
        names: list[Name] = ["g", "y", *self.before]
        rows = {name: rows[name] for name in names}
        if held_out:
            if sum(len(its["g"]) for its in self.held) < MOST_HELD_OUT:
                self.held.append(rows)
            return
        self.sums.add(rows | {target: self.unnormed(rows, target) for target in self.before})

    def unnormed(self, rows: Mapping[Name, torch.Tensor], target: int) -> torch.Tensor:
        """What W is to give: t - y, or for a post-norm layer t without the weight and bias of its norm."""
        norm = self.norm_of(target)
        if norm is None:
            return rows[target] - rows["y"]
        weight, bias = norm.weight.float(), getattr(norm, "bias", None)
        small = weight.abs() < 1e-4  # a dim that is almost constant
        return (rows[target] - (0 if bias is None else bias.float())) / torch.where(small, 1.0, weight)

    def sum_over_ranks(self) -> None:
        """Add the sums of all ranks."""
        self.sums.sum_over_ranks()

    def best(self, kind: str, target: int) -> tuple[str, Tensors, float]:
        """Kind, new matrices by their names in the layer, and explained variance of the best refit of a kind."""
        own = {f"{self.ends.output}.{name}": its.detach() for name, its in self.output.named_parameters()}
        found = [("as it is", own), *self.folds(target)] if kind == "fold" else [*self.swaps(target)]
        if not found:  # too few hidden units for a swap
            return self.best("fold", target)
        squares = torch.zeros(len(found) + 1, dtype=torch.float64)
        sums = torch.zeros(1 + self.output.out_features, dtype=torch.float64)  # of 1 and t
        for held in self.held:
            wanted = held[target]
            errors = [self.result(its, tensors, held, target) - wanted for its, tensors in found]
            squares += torch.stack([its.double().square().sum().cpu() for its in (*errors, wanted)])
            sums += nn.functional.pad(wanted.double(), (1, 0), value=1.0).sum(dim=0).cpu()
        squares, sums = sum_over_ranks(squares), sum_over_ranks(sums)
        squares[-1] -= sums[1:].square().sum() / sums[0].clamp(min=1)
        best = int(squares[:-1].argmin())
        chosen, tensors = found[best]
        return chosen, tensors | self.norm_tensors(target), float(1 - squares[best] / squares[-1].clamp(min=1e-30))

    @cached_property
    def ridges(self) -> list[dict[Name, torch.Tensor]]:
        """For each penalty, the maps from g to what W is to give for each target, and to y."""
        names: list[Name] = [*self.before, "y"]
        each = [self.sums.regression(["g"], name) for name in names]
        every = Regression(each[0].products, torch.cat([its.cross_products for its in each], dim=1))
        maps = [every.ridge(its) if self.has_bias else every.ridge_through_origin(its) for its in PENALTIES]
        width = self.output.out_features
        return [dict(zip(names, its.split(width, dim=1), strict=True)) for its in maps]

    def folds(self, target: int) -> Iterator[tuple[str, Tensors]]:
        """Refits of W alone."""
        for maps in self.ridges:
            if self.ends.norm is None:
                yield "fold", self.of_output(maps[target])
                continue
            for scale in SCALES:
                yield "fold", self.of_output(scale * self.deviation() * maps[target] - maps["y"])

    def swaps(self, target: int) -> Iterator[tuple[str, Tensors]]:
        """Refits with a free factor of the residual."""
        inner: Any = self.layer.get_submodule(str(self.ends.inner))
        inputs, width = self.output.in_features, self.output.out_features
        regression, kept = self.sums.regression(["g", "y"], target), inputs - 2 * width
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

    def of_output(self, affine: torch.Tensor) -> Tensors:
        """A map as weight and bias of the output matrix."""
        bias = {f"{self.ends.output}.bias": affine[0].float()} if self.has_bias else {}
        return {f"{self.ends.output}.weight": affine[1:].T.float(), **bias}

    def deviation(self) -> float:
        """Standard deviation of the residual."""
        count = self.sums.products["one", "one"].item()
        return float((self.sums.products["y", "y"].trace() / count / self.output.out_features).sqrt())

    def norm_tensors(self, target: int) -> Tensors:
        """Weight and bias of the closing norm, which become those of the layer that makes the target."""
        norm = self.norm_of(target)
        if norm is None or norm is self.layer.get_submodule(str(self.ends.norm)):
            return {}
        return {f"{self.ends.norm}.{key}": its.detach().clone() for key, its in norm.named_parameters()}

    def result(self, kind: str, tensors: Tensors, held: Mapping[Name, torch.Tensor], target: int) -> torch.Tensor:
        """The layer's output with new matrices."""
        gate = held["g"]
        if kind == "swap":
            raise_by = tensors[f"{self.ends.inner}.weight"]
            hidden = nn.functional.linear(held["y"], raise_by, tensors[f"{self.ends.inner}.bias"])
            gate = ACT2FN[str(self.ends.activation)](hidden)
        weight, bias = tensors[f"{self.ends.output}.weight"], tensors.get(f"{self.ends.output}.bias")
        total = held["y"] + nn.functional.linear(gate, weight.to(gate), None if bias is None else bias.to(gate))
        norm = self.norm_of(target)
        return total if norm is None else copy.deepcopy(norm).float()(total)
