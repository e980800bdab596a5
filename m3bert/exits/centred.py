"""Moves the mean of a path's vectors to the mean at full depth, by a bias that the last layer has already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from ..encode.ranks import sum_over_ranks
from ..models.anatomy import anatomy_of
from .layer_rows import LayerReader
from .passes import RawStates
from .queries import Queries
from .record import RefittedPath


CLEARLY = 0.9  # share of the divergence that is left at most; an error that all texts share leaves about half


@torch.no_grad()
def centred(
    raw: RawStates,
    paths: Mapping[int, RefittedPath],
    queries: Queries,
    after: Callable[[torch.Tensor], torch.Tensor],
) -> dict[int, RefittedPath]:
    """
    Add the mean pooled hidden state at full depth, minus that of the path, to the bias of the norm that closes the
    last layer: where all vectors point in about one direction, the layers after a gap leave an error that is the same
    for all texts. Pooling averages tokens or takes one, so the bias moves a vector as it is.
    Paths whose queries do not come clearly closer to the whole model stay as they are, and so do encoders whose last
    layer does not close with a norm that has a bias. The depths of the encoder are changed.

    Args:
        raw ([`RawStates`]): The encoder.
        paths (`Mapping[int, RefittedPath]`): Depth -> its path.
        queries ([`Queries`]): Whose means are compared, and what shows whether it helps ([`divergence`]).
        after (`Callable`): What follows the last layer: a map of pooled hidden states.
    """
    reader = LayerReader.of(raw)
    if reader is None or reader.ends.norm is None or anatomy_of(raw.encoder).final_norm is not None:
        return dict(paths)
    bias = getattr(reader.layers[-1].get_submodule(reader.ends.norm), "bias", None)
    if bias is None or not paths:
        return dict(paths)
    raw.encoder.set_depths(paths={depth: (path.fit.layers, path.tensors) for depth, path in paths.items()})
    last = raw.encoder.config.num_hidden_layers
    pooled = raw.pooled(queries.ids, [*paths, last])
    count = sum_over_ranks(torch.tensor(float(len(queries.ids))))
    full, results = sum_over_ranks(pooled[last].double().sum(dim=0)) / count, {}
    for depth, path in paths.items():
        vectors = pooled[depth]
        shift = (full - sum_over_ranks(vectors.double().sum(dim=0)) / count).to(vectors)
        moved, unmoved = (queries.measured(after(states)).divergence for states in (vectors + shift, vectors))
        if moved < CLEARLY * unmoved:
            name = f"{reader.name}.{depth - 1}.{reader.ends.norm}.bias"
            path = replace(path, tensors={**path.tensors, name: bias + shift.to(bias)})
        results[depth] = path
    return results
