"""Queries of one encoder for the index of another: a plain model that embeds into its space, and the map back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import normalize

from ..data.teacher import TeacherEmbeddings
from ..encode.device import ComputeArguments
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid, is_elastic
from ..encode.projection import Projection
from ..modeling.files_elastic import source_of
from ..models.auto import load_config
from ..models.repository import MODEL_FILES, copy_source, loading_from
from ..models.settings import EmbeddingSettings
from ..utils.columns import Role
from ..utils.durable import remove_files, replacing_files
from ..utils.hashing import fingerprint_of
from .ridge import weight_and_bias
from .space_map import SpaceMap


FEWEST_ROWS = 50
QUERY_TOKENS, FEW_QUERIES = 32, 0.05  # queries are shorter than this; a smaller share of such rows is a warning
FROM_INDEX = "from_index.npy"
MODULES = ("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[1-9]_*")


@dataclass(frozen=True)
class Joined:
    """
    An encoder for the queries of an index that another model has made.

    Args:
        encoder ([`GridEncoder`]): The encoder, without its projection and normalisation.
        settings ([`EmbeddingSettings`]): What it was published with.
        to_index ([`SpaceMap`]): From its pooled hidden state, behind the prompt of queries, to the space of the index.
        from_index ([`SpaceMap`]): From the space of the index to that of the encoder's documents.
        unit (`bool`): Whether the vectors of the index have unit length.
        short (`float`): Share of the rows with fewer than 32 tokens, as queries have.
    """

    encoder: GridEncoder
    settings: EmbeddingSettings
    to_index: SpaceMap
    from_index: SpaceMap
    unit: bool
    short: float

    def report(self) -> str:
        """What is kept of the search, how much more rows would bring, and what is unusual about the rows."""
        there, back = self.to_index, self.from_index
        curve = ", ".join(f"{rows:,} {share:.1%}" for rows, share in there.shares.items())
        lines = [
            f"Queries of the model keep {there.share:.1%} of the ten nearest rows (held-out rows as queries).",
            f"By rows of a fit: {curve}. Twice as many rows may add {100 * there.gain:.1f} points.",
            f"Vectors of the index in the space of the model keep {back.share:.1%} of the ten nearest rows there.",
        ]
        if self.short < FEW_QUERIES:
            lines.append(
                f"Warning: {self.short:.1%} of the rows have fewer than {QUERY_TOKENS} tokens, as queries have. Add "
                "rows of short texts, embedded by the model of the index: what such queries keep is not known."
            )
        if not self.unit:
            lines.append("Warning: the vectors of the index do not have unit length; the search is by cosine here.")
        return "\n".join(lines)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """
        Write the encoder as it is, with modules of sentence-transformers, of which a Dense is the map to the index.
        `from_index.npy` is the map back, `(1 + dims of the index, dims of the model)`: `vectors @ back[1:] + back[0]`.

        Raises:
            ValueError: if the folder holds a model, without `overwrite`.
            OSError: if it cannot be written.
        """
        if not overwrite and Path(folder, "config.json").is_file():
            raise ValueError(f"folder={str(folder)!r} holds a model: pass overwrite=True, or name another folder.")
        weight, bias = weight_and_bias(self.to_index.affine.float())
        dense = nn.Linear(weight.shape[1], weight.shape[0])
        dense.load_state_dict({"weight": weight, "bias": bias})
        settings = replace(self.settings, projection=dense, normalize=self.unit, max_length=self.encoder.max_length)
        source = source_of(self.encoder.model)
        with replacing_files(Path(folder), stale=MODEL_FILES if overwrite else ()) as draft:
            copy_source(source.name, draft, source.revision)
            remove_files(draft, MODULES)
            settings.write(draft, width=weight.shape[1])
            np.save(draft / FROM_INDEX, self.from_index.affine.float().numpy())


@torch.no_grad()
def join(
    source: str | Path,
    texts: Sequence[str],
    vectors: TeacherEmbeddings,
    *,
    compute: ComputeArguments | None = None,
    cache_dir: str | Path | None = None,
    description: str | None = None,
    **hub: Any,
) -> Joined:
    """
    Map the embeddings of an encoder into the space of an index, and back. [`Joined.save`] writes the result.

    Args:
        source (`str`): Folder or Hub id of a plain encoder.
        texts (`Sequence[str]`): Texts of the index, or others that its model has embedded: at least 50.
        vectors ([`TeacherEmbeddings`]): Their vectors by that model: `TeacherEmbeddings(texts, vectors)`.
        compute ([`ComputeArguments`], *optional*): Where and how the encoder computes.
        cache_dir (`str`, *optional*): Folder of the embeddings of the texts, for when an interrupted call continues.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
        hub (*optional*): `revision` and `trust_remote_code` of the source.

    Raises:
        ValueError: if a text has no vector, or it is zero or not finite; or if the source is elastic.
        OSError: if the source is not there.
    """
    texts = list(dict.fromkeys(texts))
    if len(texts) < FEWEST_ROWS:
        raise ValueError(f"{len(texts)} texts are too few to join an index: {FEWEST_ROWS} are the minimum.")
    index = vectors.checked(texts)
    with loading_from(source), torch.random.fork_rng():
        torch.manual_seed(0)  # a pooler that the checkpoint lacks; the cache knows the encoder by all weights
        config = load_config(source, **hub)
        if is_elastic(config):
            raise ValueError(f"{source} is elastic: join a plain model of it (m3bert export --format native).")
        full = Granularity(config.num_hidden_layers, config.hidden_size)
        bare: dict[str, Any] = {"grid": Grid((full,)), "projection": None, "normalize": False}
        encoder = GridEncoder.from_pretrained(source, compute=compute, **bare, **hub)
    key = fingerprint_of([str(source), *texts])

    def pooled(role: Role) -> torch.Tensor:
        folder = None if cache_dir is None else Path(cache_dir, f"{role}-{key[:12]}")
        return encoder.encode(texts, role=role, folder=folder, description=description).require_finite().at(full)

    queries, settings = pooled("query"), EmbeddingSettings.of(encoder.model) or EmbeddingSettings()
    same = encoder.prompt_of("query") == encoder.prompt_of("document")
    documents, projection = queries if same else pooled("document"), Projection.of(settings.projection)
    documents = documents if projection is None else projection(documents)
    documents = normalize(documents, dim=1) if settings.normalize else documents
    lengths = map(len, encoder.tokenizer(texts, truncation=True, max_length=QUERY_TOKENS)["input_ids"])
    return Joined(
        encoder,
        settings,
        SpaceMap.fit(queries, index),
        SpaceMap.fit(index, documents, maps_documents=True),
        unit=bool(((index.norm(dim=1) - 1).abs() < 0.01).all()),
        short=sum(length < QUERY_TOKENS for length in lengths) / len(texts),
    )
