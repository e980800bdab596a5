"""The fit of an encoder for late interaction: paths, which end in its last layers and so give its token vectors."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..encode.identity import encoder_parts
from ..modeling.files_elastic import source_of
from .install import store_record
from .kept import KeptParts
from .late import DOCUMENTS, MaxSim
from .passes import RawStates, TextPasses
from .plan import FitPlan
from .record import ExitFit
from .solve import choose_and_refit
from .tokenized_texts import TokenizedTexts


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
    choices, paths = choose_and_refit(plan, passes, parts, max_sim)
    measures = max_sim.measured({depth: (path.fit.layers, path.tensors) for depth, path in paths.items()})
    fit = ExitFit(
        layers={},
        state_only={},
        pooling=None,
        basis=options.basis,
        target="last layer",
        dim=plan.config.hidden_size,
        texts=len(texts),
        sources=texts.counts,
        fingerprint=texts.fingerprint,
        max_length=plan.max_length,
        prompts=plan.prompts,
        features=0,
        paths={depth: path.fit for depth, path in paths.items()},
        candidates={depth: choice.compared for depth, choice in choices.items()},
        retrieval={depth: measured.retrieval for depth, (measured, _) in measures.items()},
    )
    store_record(plan, encoder, fit)
    return fit
