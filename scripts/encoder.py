"""The encoder of a command: options, loading, and grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .. import evaluation
from ..encode.device import ComputeArguments
from ..encode.granularity import Grid
from ..encode.precisions import PRECISIONS
from ..models.repository import loading_from
from ..utils.help_texts import option
from .sources import default_base


@dataclass
class EncoderArguments(ComputeArguments):
    """Which encoder, how it reads texts, and how it computes."""

    model_name_or_path: str | None = option(None, "Folder or Hub id. Default: all-MiniLM-L6-v2.", aliases=["--model"])
    revision: str | None = option(None, "Branch, tag or commit on the Hub.")
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    grid: str | None = option(
        None,
        "Layers x dims (4,12x64,768), or a list of granularities (4x64,12x768). Default: all layers x 16, "
        "32, 64, ... and the hidden size. An evaluation also takes codes of stored embeddings: "
        "6x384@float32,int8,qama-2 or 6x64@int8,6x384@binary; legal values: " + ", ".join(PRECISIONS) + ".",
    )
    pooling: str | None = option(None, "mean, cls (the first token) or lasttoken. Default: as published, else mean.")
    batch_size: int = option(64, "Texts of 128 tokens per batch; more of shorter ones.")
    max_length: int | None = option(None, "Longest text in tokens; longer ones are truncated. Default: as published.")
    query_prompt: str | None = option(None, 'Prompt for queries and sentences: "query: ". Default: as published.')
    document_prompt: str | None = option(None, 'Prompt for documents: "passage: ". Default: as published.')
    similarity: str | None = option(None, "cosine: compare by cosine a model that was published for something else.")
    query_max_length: int | None = option(None, "Longest query or single sentence. Default: as --max_length.")
    document_max_length: int | None = option(None, "Longest document in tokens. Default: as --max_length.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grid:
            Grid.parse(self.grid)


def load_encoder(arguments: EncoderArguments, dtype: Any = None) -> evaluation.GridEncoder:
    """Load the encoder that the options name, onto its device. Embeddings have the type `dtype`, else float32."""
    names = ("grid", "revision", "trust_remote_code", "batch_size", "pooling", "max_length", "similarity")
    given = {
        **{name: getattr(arguments, name) for name in names},
        "compute": arguments,
        "dtype": dtype,
        "prompts": without_none({"query": arguments.query_prompt, "document": arguments.document_prompt}),
        "max_lengths": without_none({"query": arguments.query_max_length, "document": arguments.document_max_length}),
    }
    source = arguments.model_name_or_path or default_base()
    with loading_from(source):
        return evaluation.GridEncoder.from_pretrained(source, **without_none(given))


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def load_as(arguments: EncoderArguments, reading: Mapping[str, Any], grid: Grid) -> evaluation.GridEncoder:
    """[`load_encoder`] with the grid of a plan, and with what was recorded of pooling, prompts and lengths (as
    [`~index.plan.encoder_identity`]). Options that were given count more. ValueError if they have a grid."""
    if arguments.grid:
        raise ValueError("--grid: an index has the granularity of its plan.")
    prompts, lengths = reading.get("prompts"), reading.get("max_lengths") or {}
    recorded = {"pooling": reading.get("pooling"), "max_length": reading.get("max_length")}
    for role in ("query", "document"):
        recorded[f"{role}_prompt"] = None if prompts is None else prompts.get(role, "")
        recorded[f"{role}_max_length"] = lengths.get(role)
    missing: dict[str, Any] = {name: value for name, value in recorded.items() if getattr(arguments, name) is None}
    return load_encoder(replace(arguments, **missing, grid=str(grid)))
