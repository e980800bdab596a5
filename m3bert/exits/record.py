"""Records of a fit: what it was made from, and how good it is on held-out texts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class LayerFit:
    """
    The fit of one map, with its quality on held-out texts.

    Args:
        penalty (`float`): The chosen penalty, as a multiple of the number of texts.
        r_squared (`float`): Share of the target's variance that the map explains.
        cosine (`float`): Mean cosine of the map's output and its target.
        agreement (`float`): Share of the nearest ten texts of a text that stay when its target is replaced with the
            map's output.
    """

    penalty: float
    r_squared: float
    cosine: float
    agreement: float


@dataclass(frozen=True)
class PathFit:
    """
    The fit of one path.

    Args:
        layers (`list[int]`): The layers that run, counted from 1.
        borrowed (`list[int]`): For each layer before a gap, how many of its hidden units are a skipped layer's.
        r_squared (`list[float]`): Share of the variance of what the next layer reads that each of them gives on
            held-out texts; `None` if no text was held out.
        shifted (`bool`): Whether the bias of the last norm moves the mean of its vectors to that at full depth.
    """

    layers: list[int]
    borrowed: list[int]
    r_squared: list[float | None]
    shifted: bool = False


@dataclass(frozen=True)
class ChosenLayers:
    """
    The layers that were chosen for a depth.

    Args:
        layers (`list[int]`): The layers, counted from 1.
        compared (`dict[str, float]`): Lists of layers, such as `"1,2,6"` -> the share of the retrieval that they keep,
            in the order of their [`divergence`].
    """

    layers: list[int]
    compared: dict[str, float]


@dataclass(frozen=True)
class RefittedPath:
    """A path: its record, and its refitted matrices by their names in the native model of its layers."""

    fit: PathFit
    tensors: dict[str, torch.Tensor]


Paths = Mapping[int, tuple[list[int], dict[str, torch.Tensor]]]  # depth -> its layers and refitted matrices


def installed(paths: Mapping[int, RefittedPath]) -> Paths:
    """Paths as an elastic encoder takes them (`set_depths`)."""
    return {depth: (path.fit.layers, path.tensors) for depth, path in paths.items()}


@dataclass(frozen=True, kw_only=True)
class ExitFit:
    """
    Record of the fit of a model's depths, which is saved in its config under `elastic`.

    Args:
        layers (`dict[int, LayerFit]`): Layer -> the fit of its exit, for prefixes and the table; with a teacher, for
            the last layer, too.
        state_only (`dict[int, LayerFit]`): Layer -> the fit of the map that reads the hidden state without the static
            table, for layers that have both.
        pooling (`str`, *optional*): Pooling of the hidden states of tokens; `None` for late interaction, which has a
            vector per token.
        basis (`str`): `"last_layer"` or `"principal"`.
        target (`str`): What the exits predict: `"last layer"`, or the name of a teacher.
        dim (`int`): Dims of the target's space, at most the model's hidden size.
        texts (`int`): Number of texts, without empty ones.
        sources (`dict[str, int]`): Source -> its number of texts.
        fingerprint (`str`): Digest of the texts in their order.
        max_length (`int`): Maximum length of a text in tokens.
        prompts (`list[str]`): Prompts that were put before the texts in turn.
        features (`int`): Number of features of a token that the static table was fitted from; 0 without a table. With
            fewer texts than features, a fit relies on its penalty.
        paths (`dict[int, PathFit]`): Depth -> the fit of its path.
        candidates (`dict[int, dict[str, float]]`): Depth -> lists of layers that were compared for it -> the share of
            the retrieval that they keep after a quick refit ([`retrieval_kept`]), the chosen one first.
        retrieval (`dict[int, float]`): Depth -> the share of the retrieval that it keeps; `-l` is depth l without the
            table.
        to_target (`torch.Tensor` of shape `(dim, target dims)`, *optional*): With a teacher that is wider than the
            model, or the principal basis: `vectors @ to_target` are in the teacher's space. It is not in the config.
    """

    layers: Mapping[int, LayerFit] = field(default_factory=dict)
    state_only: Mapping[int, LayerFit] = field(default_factory=dict)
    pooling: str | None = None
    basis: str
    target: str = "last layer"
    dim: int
    texts: int
    sources: Mapping[str, int]
    fingerprint: str
    max_length: int
    prompts: Sequence[str]
    features: int = 0
    paths: Mapping[int, PathFit]
    candidates: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    retrieval: Mapping[int, float] = field(default_factory=dict)
    to_target: torch.Tensor | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The fit as JSON values, with four digits of each number."""
        values = asdict(self)
        del values["to_target"]
        return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.4g}"))
