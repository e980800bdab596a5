"""
MTEB at every granularity of a grid, with each text encoded once. Needs the extra `mteb`.

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
from mteb import TaskResult
from mteb.abstasks import AbsTask
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import OutputDType, PromptType
from torch import nn

from modeling_m3bert.modeling_elastic import Elasticity

from ..core.codes import CODES, FLOAT
from ..core.columns import Role
from ..core.granularity import Granularity
from ..core.hashing import fingerprint_of
from ..core.states import transformer_layers, unwrap_encoder
from .coding import Coder
from .embeddings import GridEmbeddings
from .encoding import GridEncoder


# Code -> MTEB's name of it. MTEB has no names for the codes of QAMA.
PRECISIONS = {
    FLOAT: OutputDType.FLOAT32,
    "float16": OutputDType.FLOAT16,
    "int8": OutputDType.INT8,
    "int4": OutputDType.INT4,
    "binary": OutputDType.BINARY,
}
UNNAMED = "local/encoder"  # what MTEB calls an encoder whose name does not have the form user/model


class EncodeOnce:
    """
    Embeddings of texts at all granularities of a grid. Each text is encoded at its first call, once per role.

    Args:
        encoder ([`GridEncoder`]): Encoder and grid.
        folder (`Path`, *optional*): Folder for memory-mapped embeddings, which later runs reuse; `None` keeps them in
            memory.
    """

    def __init__(self, encoder: GridEncoder, folder: Path | None = None) -> None:
        self.encoder = encoder
        self.seconds = 0.0  # spent on encoding
        self._folder = folder
        self._chunks: list[GridEmbeddings] = []
        self._places: dict[tuple[Role | None, str], tuple[int, int]] = {}  # chunk, and row in it

    @property
    def count(self) -> int:
        """Number of encoded texts."""
        return len(self._places)

    def __call__(
        self, texts: Sequence[str], role: Role | None, size: Granularity, description: str | None = None
    ) -> torch.Tensor:
        """
        Embeddings of these texts, in this role, at one encoded size: `(texts, dim)`.

        Raises:
            ValueError: if an embedding is not finite. The message names the granularities.
        """
        if new := [text for text in dict.fromkeys(texts) if (role, text) not in self._places]:
            start = time.perf_counter()
            folder = None if self._folder is None else self._folder / f"{role or 'text'}-{fingerprint_of(new)}"
            found = self.encoder.encode(new, role=role, folder=folder, description=description)
            self._places |= {(role, text): (len(self._chunks), row) for row, text in enumerate(new)}
            self._chunks.append(found.require_finite())
            self.seconds += time.perf_counter() - start
        chunk, row = torch.tensor([self._places[role, text] for text in texts]).T
        vectors = torch.empty(len(texts), size.dim)
        for number in chunk.unique().tolist():
            here = chunk == number
            vectors[here] = self._chunks[number].at(size, row[here])
        return vectors


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
        of dims for some precisions. Texts that are neither queries nor documents have no prompt, as in MTEB's own
        wrapper of sentence-transformers; they are stored like documents. Other arguments of MTEB are ignored.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        role: Role | None = None if prompt_type is None else PromptType(prompt_type).value
        description = "Encoding the grid" if kwargs.get("show_progress_bar") else None
        g, encoder = self.granularity, self._encode_once.encoder
        if g.code == FLOAT:
            return self._encode_once(texts, role, g.size, description)
        widest = Granularity(g.layer, encoder.encoded_grid.dims_of(g.layer)[-1])
        vectors = self._encode_once(texts, role, widest, description)
        coder = Coder.fit(vectors, g.code, g.dim, encoder.quantizer)
        return coder.queries(vectors) if role == "query" else coder.documents(coder.pack(vectors))


def parameters_at(model: nn.Module, layer: int) -> int:
    """Number of parameters of an encoder without the layers that a depth does not run."""
    encoder = unwrap_encoder(model)
    count, runs = sum(its.numel() for its in encoder.parameters()), Elasticity.of(encoder.config).layers_of(layer)
    left_out = [its for number, its in enumerate(transformer_layers(model), start=1) if number not in runs]
    return count - sum(parameter.numel() for cut in left_out for parameter in cut.parameters())


def model_meta(encoder: GridEncoder, granularity: Granularity, name: str | None = None) -> ModelMeta:
    """
    MTEB's metadata of one granularity. MTEB saves the results of each granularity under its `experiment_kwargs`, which
    name layer, dim, and a precision other than float32. `output_dtypes` is the precision, if MTEB has a name for it.

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
    as_cosine = granularity.code == "binary" or CODES[granularity.code].learned
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
        output_dtypes=PRECISIONS.get(granularity.code),
    )


def mteb_models(
    encoder: GridEncoder, *, name: str | None = None, folder: Path | None = None
) -> dict[Granularity, GranularityModel]:
    """
    One MTEB model per granularity of a grid. Together they encode each text once per role.

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


def find_mteb_tasks(names: Iterable[str]) -> list[AbsTask]:
    """
    MTEB's tasks of these names, without duplicates.

    Raises:
        ValueError: if MTEB has no such task. The message may name a similar one.
    """
    try:
        return [mteb.get_task(name) for name in dict.fromkeys(names)]
    except KeyError as error:
        raise ValueError(f"MTEB has no such task: {str(error.args[0]).removeprefix('KeyError: ')}") from error


def load_mteb_data(task: AbsTask) -> None:
    """
    Read the data of a task, as MTEB does: from the Hub, or from the cache of the library datasets.

    Raises:
        ValueError: if it cannot be read, or the task is a mean of others. The message names task and data set.
    """
    if task.is_aggregate:
        others = ", ".join(other.metadata.name for other in task.tasks)  # type: ignore[attr-defined]
        raise ValueError(f"Task {task.metadata.name!r} is the mean of other tasks: name these, {others}.")
    try:
        task.load_data()
    except OSError as error:  # offline, or the data set does not exist
        where = task.metadata.dataset["path"]
        raise ValueError(
            f"Task {task.metadata.name!r}: {where} could not be read from the Hub ({type(error).__name__})."
        ) from error


def score_mteb(encode_once: EncodeOnce, task: AbsTask, verbose: bool = False) -> dict[Granularity, TaskResult]:
    """
    Run a task of MTEB by MTEB's own protocol at every granularity of a grid, also in other precisions.

    Args:
        encode_once ([`EncodeOnce`]): Encoder and grid.
        task (`AbsTask`): The task, with its data.
        verbose (`bool`, *optional*, defaults to `False`): Whether to show progress.

    Returns:
        `dict[Granularity, TaskResult]`

    Raises:
        ValueError: if an embedding is not finite. The message names the granularities.
    """
    found, encoder = {}, encode_once.encoder
    for g in encoder.grid:
        # Some tasks draw texts as they run: each granularity gets the draws of a new task.
        fresh = copy.copy(task)
        fresh.rng_state, fresh.np_rng = copy.deepcopy((task.rng_state, task.np_rng))
        model: Any = GranularityModel(encode_once, g, model_meta(encoder, g, UNNAMED))
        result = mteb.evaluate(
            model,
            fresh,
            co2_tracker=False,
            encode_kwargs={"batch_size": encoder.batch_size, "show_progress_bar": verbose},
            cache=None,
            show_progress_bar=False,
        )
        (found[g],) = result.task_results
    return found


def task_type_of(task: AbsTask) -> str:
    """The type of a task of MTEB in results: `mteb_pair_classification`."""
    return "mteb_" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", task.metadata.type).lower()
