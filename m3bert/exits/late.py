"""
The fit of an encoder for late interaction: paths, which end in its last layers and so give its token vectors. They are
measured by how close the scores of a smaller size come to those of the whole encoder.

Queries are short spans of texts, embedded by the smaller size; documents are texts, embedded by the whole encoder.
sentence-transformers tokenises, puts the modules of the model behind the encoder, masks and scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..encode.device import autocast
from ..encode.identity import encoder_parts
from ..encode.ranks import sum_over_ranks, world_size
from ..modeling.files_elastic import source_of
from ..utils.extras import require_sentence_transformers
from .install import store_record
from .kept import KeptParts
from .passes import TextPasses
from .plan import FitPlan
from .queries import Measured, span_of
from .raw_states import RawStates
from .record import ExitFit, Paths, installed
from .solve import choose_and_refit
from .tokenized_texts import TokenizedTexts


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

    def measured(self, paths: Paths) -> dict[int, Measured]:
        """Depth -> the measures of its path."""
        encoder = self.raw.encoder
        results = {}
        encoder.set_depths(paths=paths)
        for depth in paths:
            encoder.config.output_layer = depth
            try:
                scores = self.scores()
            finally:
                encoder.config.output_layer = None
            measures = torch.tensor(Measured.of(scores, self.full)[:2]).double()
            results[depth] = Measured(*(sum_over_ranks(measures) / world_size()).tolist())
        return results


def fit_late(
    plan: FitPlan, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: TokenizedTexts
) -> ExitFit:
    """
    Fit the paths of an encoder for late interaction and put them into it. Layers are chosen by the scores of queries
    against documents at full depth ([`MaxSim`]), and refitted on all real tokens, which the layers above read, also
    those that the mask of the model leaves out of the scores. Arguments as in [`fit_exits`].
    """
    options, encoder = plan.options, model.base_model
    raw = RawStates(encoder, tokenizer, plan.pooling, options.batch_size, options.compute_dtype)
    passes = TextPasses(raw, texts, None, options.description)
    identity: dict[str, Any] = {
        **encoder_parts(model, tokenizer, without=("elastic", "pooler")),
        "modules": {name: sha256(content).hexdigest() for name, content in source_of(encoder).settings.items()},
        "compute_dtype": str(options.compute_dtype or encoder.dtype),
        "settled": [plan.paths, plan.chosen, plan.max_length, plan.prompts],
        "data": [texts.fingerprint, texts.counts],
    }
    parts = KeptParts(options.cache_dir, identity, encoder.device)
    max_sim = MaxSim.of(raw, [text.text for group in passes.sampled(DOCUMENTS) for text in group])
    choices, paths = choose_and_refit(plan, passes, parts, max_sim.measured)
    retrieval = {depth: measured.retrieval for depth, measured in max_sim.measured(installed(paths)).items()}
    return store_record(plan, encoder, texts, paths, choices, retrieval, dim=plan.config.hidden_size)
