"""
How close the token vectors of a smaller size come to those of the whole encoder, by the scores of late interaction.

Queries are short spans of texts, embedded by the smaller size; documents are texts, embedded by the whole encoder.
sentence-transformers tokenises, puts the modules of the model behind the encoder, masks and scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..encode.device import autocast
from ..encode.ranks import sum_over_ranks, world_size
from ..modeling.files_elastic import source_of
from ..utils.extras import require_sentence_transformers
from .passes import RawStates
from .queries import Measured, divergence_of, kept_of
from .refit import Tensors
from .spans import span_of


if TYPE_CHECKING:
    from sentence_transformers import MultiVectorEncoder

DOCUMENTS, TEXTS_PER_QUERY = 1000, 4  # a score costs as much as all tokens of both texts together


@dataclass(frozen=True)
class MaxSim:
    """
    Measures paths by their scores.

    Args:
        raw ([`RawStates`]): The encoder. Its depths are changed.
        model ([`~sentence_transformers.MultiVectorEncoder`]): The modules behind the encoder, which is its first one.
        queries (`Sequence[str]`): This rank's queries.
        documents (`list[torch.Tensor]`): Token vectors of this rank's documents at full depth.
        full (`torch.Tensor` of shape `(queries, documents)`): The scores at full depth.
    """

    raw: RawStates
    model: MultiVectorEncoder
    queries: Sequence[str]
    documents: list[torch.Tensor]
    full: torch.Tensor

    @classmethod
    def of(cls, raw: RawStates, texts: Sequence[str]) -> MaxSim:
        """The measure on some texts. ValueError if sentence-transformers is not there, or a score is not finite."""
        library = require_sentence_transformers("An encoder for late interaction")
        source = source_of(raw.encoder)
        names = ("revision", "token", "trust_remote_code", "local_files_only")
        options: dict[str, Any] = {name: getattr(source, name) for name in names} | {"cache_folder": source.cache_dir}
        model = library.MultiVectorEncoder(source.name, device=str(raw.encoder.device), **options)
        model[0].model = raw.encoder
        queries = [span_of(text) for text in texts[::TEXTS_PER_QUERY]]
        with autocast(raw.encoder.device, raw.compute_dtype):
            documents = model.encode_document([*texts], batch_size=raw.batch_size)
        full = cls(raw, model, queries, documents, torch.empty(0)).scores()
        if not torch.isfinite(full).all():
            raise ValueError(f"Scores at full depth are not finite, for example for {queries[0][:80]!r}.")
        return cls(raw, model, queries, documents, full)

    def scores(self) -> torch.Tensor:
        """The scores of the queries at the size that the config of the encoder names, `(queries, documents)`."""
        with autocast(self.raw.encoder.device, self.raw.compute_dtype):
            queries = self.model.encode_query([*self.queries], batch_size=self.raw.batch_size)
        return self.model.similarity(queries, self.documents).float()

    def measured(self, paths: Mapping[int, tuple[list[int], Tensors]]) -> dict[int, tuple[Measured, None]]:
        """Depth -> the measures of its path, given by its layers and refitted matrices; and no shift."""
        encoder = self.raw.encoder
        results: dict[int, tuple[Measured, None]] = {}
        encoder.set_depths(paths=paths)
        for depth in paths:
            encoder.config.output_layer = depth
            try:
                scores = self.scores()
            finally:
                encoder.config.output_layer = None
            measures = torch.tensor([divergence_of(scores, self.full), kept_of(scores, self.full)]).double()
            results[depth] = Measured(*(sum_over_ranks(measures) / world_size()).tolist()), None
        return results
