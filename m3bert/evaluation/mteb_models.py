"""
MTEB at every granularity of a grid, with each list of texts encoded once. Needs the extra `mteb`.

```python
models = mteb_models(encoder)  # granularity -> a model that mteb can run
for granularity, model in models.items():
    mteb.evaluate(model, tasks)
```
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import mteb
import torch
from mteb.abstasks import AbsTask
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import OutputDType, PromptType

from ..encode.coding import Coder
from ..encode.embeddings import GridEmbeddings
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity
from ..encode.precisions import FLOAT, PRECISIONS
from ..encode.states import unwrap_encoder
from ..utils.columns import Role
from ..utils.hashing import fingerprint_of, key_of
from .results import GridResults, Score


# Precisions that MTEB has a name for, which is the same; it has none for QAMA's.
MTEB_PRECISIONS = {name: OutputDType(name) for name in PRECISIONS if name in [*OutputDType]}
UNNAMED = "local/encoder"  # what MTEB calls an encoder whose name does not have the form user/model


class EncodeOnce:
    """Embeddings of lists of texts at all granularities, in memory or in a folder, each encoded once per role."""

    def __init__(self, encoder: GridEncoder, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.seconds = 0.0  # spent on encoding
        self.texts: set[tuple[Role | None, str]] = set()
        self._folder = folder
        self._embeddings: dict[str, GridEmbeddings] = {}

    def __call__(self, texts: Sequence[str], role: Role | None, description: str | None = None) -> GridEmbeddings:
        """The embeddings of these texts, in this role. A ValueError says that one is not finite."""
        key = f"{role or 'text'}-{fingerprint_of(texts)}"
        if key not in self._embeddings:
            start = time.perf_counter()
            folder = None if self._folder is None else self._folder / key
            embeddings = self.encoder.encode(texts, role=role, folder=folder, description=description)
            self._embeddings[key] = embeddings.require_finite()
            self.texts.update((role, text) for text in texts)
            self.seconds += time.perf_counter() - start
        return self._embeddings[key]


class GranularityModel(AbsEncoder):
    """
    One granularity of a model as a model for MTEB, from [`mteb_models`]. With a precision, it gives the numbers that
    an index compares, see [`Coder.documents`] and [`Coder.queries`]. Ranges of `int8` and `int4` are
    fitted to the texts of one call.
    """

    def __init__(self, encode_once: EncodeOnce, granularity: Granularity, meta: ModelMeta) -> None:
        self.granularity = granularity
        self.mteb_model_meta = meta
        self._encode_once = encode_once

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, prompt_type: PromptType | None = None, **kwargs: object
    ) -> torch.Tensor:
        """
        Embeddings of batches of texts: `(texts, dim)` in float32, normalised if the model does that; of another number
        of dims for some precisions. Texts that are neither queries nor documents have no prompt, as in MTEB's wrapper
        of sentence-transformers, and are stored like documents. Other arguments of MTEB are ignored.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        role: Role | None = None if prompt_type is None else PromptType(prompt_type).value
        g = self.granularity
        embeddings = self._encode_once(texts, role, "Encoding the grid" if kwargs.get("show_progress_bar") else None)
        if g.code == FLOAT:
            return embeddings.at(g)
        vectors = embeddings.widest(g.layer)
        coder = Coder.fit(vectors, g.code, g.dim, self._encode_once.encoder.quantizer)
        return coder.queries(vectors) if role == "query" else coder.documents(coder.pack(vectors))


def revision_of(encoder: GridEncoder) -> str:
    """A digest of weights and settings, so that MTEB's cache gives no results of another encoder of this name."""
    more = {"prompts": dict(encoder.prompts), "max_lengths": dict(encoder.max_lengths), "batch_size": None}
    return key_of(encoder.manifest([]) | more | {"default": encoder.default_prompt_name})


def model_meta(encoder: GridEncoder, granularity: Granularity, name: str | None, revision: str) -> ModelMeta:
    """MTEB's metadata of one granularity. MTEB saves the results under its `experiment_kwargs`, which name layer, dim,
    and a precision other than float32. `output_dtypes` is the precision, if MTEB has a name for it."""
    g, config = granularity, unwrap_encoder(encoder.model).config
    similarity, code = ScoringFunction(encoder.similarity), {}
    if g.code != FLOAT:
        code = {"code": g.code}
        # An index of decoded documents, which differ a little in length, compares by dot product.
        similarity = ScoringFunction.COSINE if PRECISIONS[g.code].symmetric else ScoringFunction.DOT_PRODUCT
    described = {
        "name": name or config.name_or_path,
        "revision": revision,
        "max_tokens": max(encoder.max_length_of(role) for role in ("query", "document")),
        "embed_dim": g.dim,
        "framework": ["PyTorch", "Transformers"],
        "similarity_fn_name": similarity,
        "use_instructions": bool(encoder.prompts),
        "experiment_kwargs": {"output_layer": g.layer, "output_dim": g.dim} | code,
        "output_dtypes": MTEB_PRECISIONS.get(g.code),
    }
    return ModelMeta.model_validate({**ModelMeta.create_empty().model_dump(), **described})


def mteb_models(
    encoder: GridEncoder, *, name: str | None = None, folder: Path | None = None
) -> dict[Granularity, GranularityModel]:
    """One MTEB model per granularity of a grid. Together they encode each list of texts once per role. `name` has the
    form `user/model`, by default from the model's config; `folder` is for embeddings, see [`EncodeOnce`]."""
    encode_once, revision = EncodeOnce(encoder, folder), revision_of(encoder)
    return {g: GranularityModel(encode_once, g, model_meta(encoder, g, name, revision)) for g in encoder.grid}


def score_mteb(
    encoder: GridEncoder, task: AbsTask, results: GridResults, folder: Path | None = None, verbose: bool = False
) -> float:
    """Add the scores of a task of MTEB, by its own protocol, to the results. Returns the seconds of encoding."""
    name, encode_once = task.metadata.name, EncodeOnce(encoder, folder)
    task_type = "mteb_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task.metadata.type).lower()
    for g in encoder.grid:
        # Some tasks draw texts as they run: each granularity gets the draws of a new task.
        fresh = copy.copy(task)
        fresh.rng_state, fresh.np_rng = copy.deepcopy((task.rng_state, task.np_rng))
        model: Any = GranularityModel(encode_once, g, model_meta(encoder, g, UNNAMED, "no_revision"))
        outcome = mteb.evaluate(
            model,
            fresh,
            co2_tracker=False,
            encode_kwargs={"batch_size": encoder.batch_size, "show_progress_bar": verbose},
            cache=None,
            show_progress_bar=False,
        )
        (result,) = outcome.task_results
        metric = task.metadata.main_score
        value = float(result.get_score())
        results.add(Score(name, task_type, "+".join(result.scores), metric, True, str(g), value))
    results.texts[name] = {"texts": len(encode_once.texts)}
    return encode_once.seconds
