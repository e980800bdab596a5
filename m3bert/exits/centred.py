"""Moves the mean of a path's vectors to the mean at full depth, by a bias that the last layer has already."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..encode.ranks import sum_over_ranks
from ..models.anatomy import anatomy_of
from .layer_rows import LayerReader
from .queries import Measured, Queries
from .raw_states import RawStates
from .record import Paths, RefittedPath, installed


CLEARLY = 0.9  # share of the divergence that is left at most; an error that all texts share leaves about half


@dataclass(frozen=True)
class Centring:
    """
    Measures paths with the shift that they are installed with: the mean pooled hidden state at full depth, minus that
    of the path. Where all vectors point in about one direction, the layers after a gap leave an error that is the same
    for all texts. Pooling averages tokens or takes one, so the bias of the norm that closes the last layer moves a
    vector as it is. Paths whose queries do not come clearly closer to the whole model stay as they are, and so do
    encoders whose last layer does not close with a norm that has a bias.

    Args:
        raw ([`RawStates`]): The encoder. Its depths are changed.
        queries ([`Queries`]): Whose means are compared, and what shows whether it helps ([`divergence`]).
        after (`Callable`): What follows the last layer: a map of pooled hidden states of the queries.
        reader ([`LayerReader`], *optional*): The layers of the encoder, if the last one has the bias.
        mean (`torch.Tensor` of shape `(hidden_size,)`, *optional*): Mean of the queries at full depth, with a reader.
    """

    raw: RawStates
    queries: Queries
    after: Callable[[torch.Tensor], torch.Tensor]
    reader: LayerReader | None
    mean: torch.Tensor | None

    @classmethod
    def of(cls, raw: RawStates, queries: Queries, after: Callable[[torch.Tensor], torch.Tensor]) -> Centring:
        """The centring of an encoder, which embeds the queries at full depth once."""
        reader = LayerReader.of(raw)
        if reader is None or reader.ends.norm is None or anatomy_of(raw.encoder).final_norm is not None:
            return cls(raw, queries, after, None, None)
        if getattr(reader.layers[-1].get_submodule(reader.ends.norm), "bias", None) is None:
            return cls(raw, queries, after, None, None)
        last = raw.encoder.config.num_hidden_layers
        return cls(raw, queries, after, reader, _mean(raw.pooled(queries.ids, [last])[last]))

    @torch.no_grad()
    def measured(self, paths: Paths) -> dict[int, Measured]:
        """Depth -> the measures of its path, with the shift if it helps."""
        self.raw.encoder.set_depths(paths=paths)
        results = {}
        for depth, states in self.raw.pooled(self.queries.ids, [*paths]).items():
            results[depth] = self.queries.measured(self.after(states))
            if self.mean is not None:
                shift = (self.mean - _mean(states)).to(states)
                moved = self.queries.measured(self.after(states + shift))
                if moved.divergence < CLEARLY * results[depth].divergence:
                    results[depth] = moved._replace(shift=shift)
        return results

    def centred(self, paths: Mapping[int, RefittedPath]) -> dict[int, RefittedPath]:
        """Depth -> its path, with the shift if it helps."""
        results = dict(paths)
        if self.reader is None:
            return results
        for depth, (_, _, shift) in self.measured(installed(paths)).items():
            if shift is not None:
                bias = self.reader.layers[-1].get_submodule(f"{self.reader.ends.norm}").get_parameter("bias")
                name = f"{self.reader.name}.{depth - 1}.{self.reader.ends.norm}.bias"
                fit, tensors = paths[depth].fit, paths[depth].tensors
                moved = {**tensors, name: bias + shift.to(bias)}
                results[depth] = RefittedPath(replace(fit, shifted=True), moved)
        return results


def _mean(states: torch.Tensor) -> torch.Tensor:
    """The mean over the texts of all ranks."""
    count = sum_over_ranks(torch.tensor(float(len(states))))
    return sum_over_ranks(states.double().sum(dim=0)) / count
