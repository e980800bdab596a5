"""The plan of an index: what [`~evaluation.choose`] chose, as a file that an index is built from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..encode.coding import Coder
from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid
from ..encode.precisions import FLOAT
from ..evaluation.choice import Choice
from ..evaluation.results import GridResults
from ..utils.durable import replace_text
from ..utils.typed import read_json, typed
from .engine import Layout


SCHEMA_VERSION = 1
# How an encoder reads texts, as far as vectors depend on it.
READING = ("config", "tokenizer", "pooling", "prompts", "max_length", "max_lengths")


@dataclass(frozen=True)
class Plan:
    """
    What to store per document, and how to search. Only `documents` is needed; the other defaults are an exact search.

    Args:
        documents ([`Granularity`]): Granularity of the documents, with their precision. Queries have its dim, too.
        query_layer (`int`, *optional*): Layer of the queries. Default: as the documents.
        first_dim (`int`, *optional*): Dim of the first stage of a two-stage search in float32.
        rescore (`str`, *optional*): Precision that rescores the shortlist, or `codes` for the searched codes, decoded.
        shortlist (`int`, *optional*): Length of the shortlist; needed with `first_dim` or `rescore`.
        model (`str`, *optional*): Hub id or folder of the evaluated model.
        revision (`str`, *optional*): Its commit on the Hub.
        encoder (`dict`, *optional*): Its weights and settings, as [`encoder_identity`]. Another encoder is refused.
        quality (`float`, *optional*): Mean of the main metrics of `tasks`, as measured.
        latency_ms (`float`, *optional*): Milliseconds per query, as measured.
        vectors (`int`, *optional*): Number of documents it was chosen for.
        memory_gb (`float`, *optional*): Their gigabytes.
        measured (`dict[str, str]`, *optional*): Date and machine of the evaluation.
        explanation (`str`, *optional*): The choice and its reasons.

    Raises:
        ValueError: if there is a shortlist without something that rescores it, or the reverse.
    """

    documents: Granularity
    query_layer: int | None = None
    first_dim: int | None = None
    rescore: str | None = None
    shortlist: int | None = None
    model: str | None = None
    revision: str | None = None
    encoder: Mapping[str, Any] = field(default_factory=dict)
    quality: float | None = None
    tasks: tuple[str, ...] = ()
    latency_ms: float | None = None
    vectors: int | None = None
    memory_gb: float | None = None
    measured: Mapping[str, str] = field(default_factory=dict)
    explanation: str = ""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.query_layer is None:
            object.__setattr__(self, "query_layer", self.documents.layer)
        if (self.first_dim is not None) + (self.rescore is not None) != (self.shortlist is not None):
            raise ValueError("A plan has a shortlist if it has first_dim or rescore, but not both, and only then.")

    @classmethod
    def of(cls, choice: Choice, results: GridResults, tasks: Sequence[str], vectors: int) -> Plan:
        """The plan of what [`choose`] chose from results, by some tasks and for a number of documents."""
        stages: dict[str, Any] = {}
        if choice.plan is not None:
            stages = {"first_dim": choice.plan.first_dim, "shortlist": choice.plan.shortlist}
        elif choice.rescoring is not None:
            stages = {"rescore": choice.rescoring.by, "shortlist": choice.rescoring.shortlist}
        encoder = {name: results.settings.get(name) for name in (*READING, "quantizer")}
        return cls(
            choice.granularity,
            choice.query_layer,
            **stages,
            model=results.model,
            revision=results.revision,
            encoder={"weights": results.weights, **encoder},
            quality=choice.plan.quality if choice.plan is not None else choice.quality,
            tasks=tuple(tasks),
            latency_ms=choice.latency_ms,
            vectors=vectors,
            memory_gb=choice.memory_gb,
            measured={"date": results.date, "machine": results.machine},
            explanation=choice.explanation,
        )

    @property
    def query(self) -> Granularity:
        """Granularity of the queries."""
        assert self.query_layer is not None  # set by __post_init__
        return replace(self.documents, layer=self.query_layer)

    def grid(self) -> Grid:
        """The granularities to encode, of documents and queries."""
        return Grid(tuple({self.documents, self.query}))

    def layout(self, encoder: GridEncoder, sample: torch.Tensor, **options: Any) -> Layout:
        """What the index stores per document: precisions that are fitted to embeddings `(documents, width)` of the
        first ones (see [`~Plan.needs_sample`]), and other fields of the [`Layout`]. Later numbers out of the ranges of
        `int8` and `int4` are clipped. ValueError if a precision cannot be made from these embeddings."""
        codes = [(self.documents.code, self.first_dim or self.documents.dim)]
        if self.first_dim is not None:
            codes.append((FLOAT, self.documents.dim))
        elif self.rescore is not None and self.rescore != "codes":
            codes.append((self.rescore, self.documents.dim))
        first, *rest = (Coder.fit(sample, code, dim, encoder.quantizer) for code, dim in codes)
        # Only bits on both sides gain from rescoring by their own codes: others meet a float query already.
        shortlist = self.shortlist if rest or first.symmetric else None
        return Layout(first, rest[0] if rest else None, shortlist, **options)

    @property
    def needs_sample(self) -> bool:
        """Whether a precision is fitted to documents."""
        return bool({self.documents.code, self.rescore} & {"int8", "int4"})

    def save(self, file: Path) -> None:
        """Write the plan to a JSON file."""
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON can hold it."""
        return {**asdict(self), "documents": str(self.documents)}

    @classmethod
    def load(cls, file: Path) -> Plan:
        """Read a plan from a JSON file. ValueError if it is not a plan: names the file and the reason."""
        content = read_json(file)
        try:
            return cls.from_dict(content)
        except (ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{file} is not a plan of `m3bert choose`: {error}") from error

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Plan:
        """The plan that [`~Plan.to_dict`] wrote. ValueError if a field is unknown or wrong."""
        if (version := content.get("schema_version", SCHEMA_VERSION)) != SCHEMA_VERSION:
            raise ValueError(f"it has schema version {version}; this version of m3bert reads {SCHEMA_VERSION}.")
        return typed(cls, {**content, "documents": Granularity.parse(content["documents"])})


def encoder_identity(encoder: GridEncoder) -> dict[str, Any]:
    """Everything that the vectors of queries and documents depend on ([`GridEncoder.identity`]), and the fingerprint
    of the quantizer. Whether they are normalised does not matter to a cosine. Raises as
    [`~GridEncoder.require_cosine`]."""
    encoder.require_cosine()
    identity = encoder.identity()
    return {
        "quantizer": encoder.quantizer.fingerprint if encoder.quantizer is not None else None,
        **{name: identity[name] for name in ("weights", *READING)},
        "prompts": {role: text for role, text in identity["prompts"].items() if role in ("query", "document")},
    }


def require_same_encoder(expected: Mapping[str, object], actual: Mapping[str, object], whose: str) -> None:
    """Raise a ValueError about `whose` encoder, if it differs from the recorded [`encoder_identity`] as far as
    known."""
    for name, value in actual.items():
        if expected.get(name) not in (None, value):
            raise ValueError(f"{whose} is of another encoder: {name} {expected[name]!r}, not {value!r}.")
