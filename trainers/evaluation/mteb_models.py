"""
MTEB at every granularity of a grid, with each list of texts encoded once. Needs the extra `mteb`.

```python
models = mteb_models(encoder)  # granularity -> a model that mteb can run
for granularity, model in models.items():
    mteb.evaluate(model, tasks)
```
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from torch import nn

from ..core.codes import CODES, FLOAT
from ..core.embedding import Role
from ..core.granularity import Granularity
from ..core.states import transformer_layers, unwrap_encoder
from ..data.embedding_store import fingerprint_of
from .coding import Coder
from .embeddings import GridEmbeddings
from .encoding import GridEncoder


class EncodeOnce:
    """
    Embeddings of lists of texts at all granularities of a grid. Each list is encoded at its first call.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        folder (`Path`, *optional*): Folder for memory-mapped embeddings, which later runs reuse; `None` keeps them in
            memory.
    """

    def __init__(self, encoder: GridEncoder, folder: Path | None = None) -> None:
        self.encoder = encoder
        self._folder = folder
        self._found: dict[str, GridEmbeddings] = {}

    def __call__(self, texts: list[str], role: Role, description: str | None = None) -> GridEmbeddings:
        """
        Embeddings of these texts, in this role.

        Raises:
            ValueError: if an embedding is not finite. The message names the granularities.
        """
        key = f"{role}-{fingerprint_of(texts)}"
        if key not in self._found:
            folder = None if self._folder is None else self._folder / key
            found = self.encoder.encode(texts, role=role, folder=folder, description=description)
            self._found[key] = found.require_finite()
        return self._found[key]


class GranularityModel(AbsEncoder):
    """
    One granularity of a model as a model for MTEB. With a precision, it gives the numbers that an index compares: what
    the stored bytes stand for. Queries are in float32, or coded as well where vectors are compared by Hamming
    distance. Ranges of `int8` and `int4` are those of the texts of one call.

    Args:
        encode_once ([`EncodeOnce`]): The embeddings, shared by all granularities of a grid.
        granularity ([`Granularity`]): The granularity.
        meta (`ModelMeta`): Metadata that MTEB saves with the results.
    """

    def __init__(self, encode_once: EncodeOnce, granularity: Granularity, meta: ModelMeta) -> None:
        self.granularity = granularity
        self.mteb_model_meta = meta
        self._encode_once = encode_once

    def encode(self, inputs: Iterable[dict[str, Any]], *, prompt_type: Any = None, **kwargs: Any) -> torch.Tensor:
        """
        Embeddings of batches of texts: `(texts, dim)` in float32, normalised if the model does that; of another number
        of dims for some precisions. Texts that MTEB does not call queries are stored. Other arguments of MTEB are
        ignored.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        role: Role = "document" if prompt_type == PromptType.document else "query"
        description = "Encoding the grid" if kwargs.get("show_progress_bar") else None
        found, g = self._encode_once(texts, role, description), self.granularity
        if g.code == FLOAT:
            return found.at(g)
        vectors = found.widest(g.layer)
        coder = Coder.fit(vectors, g.code, g.dim, self._encode_once.encoder.quantizer)
        return coder.queries(vectors) if prompt_type == PromptType.query else coder.documents(coder.pack(vectors))


def parameters_at(model: nn.Module, layer: int) -> int:
    """Number of parameters of an encoder without the layers after `layer`."""
    count = sum(parameter.numel() for parameter in unwrap_encoder(model).parameters())
    left_out = transformer_layers(model)[layer:]  # a stitched depth leaves out as many, of the same size
    return count - sum(parameter.numel() for cut in left_out for parameter in cut.parameters())


def model_meta(encoder: GridEncoder, granularity: Granularity, name: str | None = None) -> ModelMeta:
    """
    MTEB's metadata of one granularity. MTEB saves the results of each granularity under its `experiment_kwargs`, which
    name layer, dim, and a precision other than float32.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        granularity ([`Granularity`]): A granularity of the grid.
        name (`str`, *optional*): Name of the form `user/model`; `None` takes it from the model's config.

    Returns:
        `ModelMeta`

    Raises:
        ValueError: if the name does not have this form.
    """
    config = unwrap_encoder(encoder.model).config
    name = name or config.name_or_path
    if name.count("/") != 1:
        raise ValueError(f"name={name!r} must have the form user/model, which MTEB requires.")
    code = {} if granularity.code == FLOAT else {"code": granularity.code}
    # An index of decoded documents, which differ a little in length, compares by dot product.
    as_cosine = granularity.code == "sign" or CODES[granularity.code].learned
    if granularity.code == FLOAT:
        similarity = ScoringFunction(encoder.similarity)
    else:
        similarity = ScoringFunction.COSINE if as_cosine else ScoringFunction.DOT_PRODUCT
    return ModelMeta(
        loader=None,
        name=name,
        revision=getattr(config, "_commit_hash", None) or "no_revision",
        release_date=None,
        languages=None,
        n_parameters=parameters_at(encoder.model, granularity.layer),
        memory_usage_mb=None,
        max_tokens=max(encoder.max_length_of(role) for role in ("query", "document")),
        embed_dim=granularity.dim,
        license=None,
        open_weights=None,
        public_training_code=None,
        public_training_data=None,
        framework=["PyTorch", "Transformers"],
        similarity_fn_name=similarity,
        use_instructions=bool(encoder.prompts),
        training_datasets=None,
        experiment_kwargs={"output_layer": granularity.layer, "output_dim": granularity.dim, **code},
    )


def mteb_models(
    encoder: GridEncoder, *, name: str | None = None, folder: Path | None = None
) -> dict[Granularity, GranularityModel]:
    """
    One MTEB model per granularity of a grid. Together they encode each list of texts once.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        name (`str`, *optional*): Name of the form `user/model`; `None` takes it from the model's config.
        folder (`Path`, *optional*): Folder for embeddings; see [`EncodeOnce`].

    Returns:
        `dict[Granularity, GranularityModel]`

    Raises:
        ValueError: if the name does not have the form `user/model`.
    """
    encode_once = EncodeOnce(encoder, folder)
    return {g: GranularityModel(encode_once, g, model_meta(encoder, g, name)) for g in encoder.grid}
