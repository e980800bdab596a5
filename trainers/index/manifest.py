"""What an index says of itself, in `index.json`: how it was built, and how its vectors are stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ..core.durable import replace_text
from ..core.granularity import is_elastic
from ..core.states import unwrap_encoder
from ..evaluation.encoding import GridEncoder
from .corpus import Corpus, Document, chunks, column_types
from .engine import find_engine
from .plan import Plan


SCHEMA_VERSION = 2
MANIFEST = "index.json"
CHUNK = 2048  # documents that are encoded, and then written, together
SAMPLE = 5  # chunks at the beginning that codes are fitted to


def embedded(encoder: GridEncoder, plan: Plan, chunk: Sequence[Document]) -> torch.Tensor:
    """Embeddings of documents at their layer, as wide as the plan needs. ValueError if one is not finite."""
    embeddings = encoder.encode([document.text for document in chunk], role="document")
    vectors = embeddings.widest(plan.documents.layer)
    finite = torch.isfinite(vectors).all(dim=1)
    if not finite.all():
        raise ValueError(f"{chunk[int((~finite).nonzero()[0])].place}: the embedding is not finite.")
    return vectors


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    What an index says of itself in `index.json`.

    Raises:
        ValueError: if the folder holds no index, or one of another version.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise ValueError(f"{folder} holds no index: it has no {MANIFEST}.")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}.") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise ValueError(
            f"{file} has schema version {found}; this version of m3bert reads {SCHEMA_VERSION}: build the index again."
        )
    return manifest


def begin(
    folder: Path, settings: Mapping[str, Any], plan: Plan, encoder: GridEncoder, corpus: Corpus, model: str | None
) -> None:
    """Write the manifest of a new index. Its layout needs the first documents."""
    engine = find_engine(settings["engine"])
    engine.library()
    found = folder.iterdir() if folder.is_dir() else ()
    if others := sorted(path.name for path in found if path.name != f"{MANIFEST}.draft"):
        raise ValueError(f"{folder} is not empty and holds no index ({others[0]}): choose another --output_dir.")
    first = list(islice(corpus.documents(), SAMPLE * CHUNK))
    if not first:
        raise ValueError(f"There is no document in {', '.join(corpus.files)}.")
    options = {"kind": settings["kind"], "url": settings["url"], "columns": column_types(first)}
    sample = torch.zeros(1, encoder.full_width)
    engine.require(plan.layout(encoder, sample, **options))
    if plan.needs_sample:
        parts: Iterator[list[Document]] = chunks(iter(first), CHUNK)
        sample = torch.cat([embedded(encoder, plan, part) for part in parts])
    config = unwrap_encoder(encoder.model).config
    manifest = {
        "schema_version": SCHEMA_VERSION,
        **settings,
        "model": model or config.name_or_path,
        "model_type": config.model_type,
        "elastic": is_elastic(config),
        "model_layers": config.num_hidden_layers,
        "layout": plan.layout(encoder, sample, **options).to_dict(),
        "corpus": {
            "text_column": corpus.text_column,
            "id_column": corpus.id_column,
            "metadata_columns": list(first[0].metadata),
            "separator": corpus.separator,
        },
        "created": date.today().isoformat(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
