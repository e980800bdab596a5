"""An adapter as a repository of peft: its config and weights, and a card that names the base model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from m3bert import modeling as modeling_m3bert

from ..encode.granularity import Grid
from ..models.settings import MODULES_FILE, EmbeddingSettings, check_weights, hub_id
from ..utils import papers
from ..utils.typed import read_json
from .card_source import TRUST, Training
from .checkpoint import head_of
from .files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from .metadata import Statements
from .training_record import TrainingRecord


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter, and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclass(frozen=True)
class Adapter:
    """An adapter of peft in a folder. ValueError if its weights cannot be read or its base model is not on the Hub."""

    folder: Path
    base_model: str | None = None

    def __post_init__(self) -> None:
        check_weights(self.folder / ADAPTER_WEIGHTS)
        if not self.base:
            raise ValueError(
                f"The base model of {self.folder} is {self.config['base_model_name_or_path']!r}, which is not on the "
                "Hub: push the base model first, and name it with --base_model."
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        return read_json(self.folder / ADAPTER_CONFIG)

    @property
    def base(self) -> str:
        """Hub id of the base model; empty if unknown."""
        return self.base_model or hub_id(self.config["base_model_name_or_path"]) or ""

    @property
    def base_class(self) -> str:
        """Name of the class of the base model; empty if unknown."""
        return (self.config.get("auto_mapping") or {}).get("base_model_class", "")

    @property
    def elastic(self) -> bool:
        """Whether the base model is an m3BERT."""
        return self.base_class in modeling_m3bert.__all__

    @property
    def head(self) -> str:
        """Name of the Auto class that loads the base model."""
        return head_of(self.base_class) or "AutoModel"

    @property
    def embeds(self) -> bool:
        """Whether sentence-transformers can load it."""
        return (self.folder / MODULES_FILE).is_file()

    def published_config(self) -> dict[str, Any]:
        """The config as users need it: with the Hub id of the base model. The module of an m3BERT's class has another
        name on their machines, so `AutoPeftModelForFeatureExtraction` finds the class by the task."""
        changes: dict[str, Any] = {"base_model_name_or_path": self.base}
        if self.elastic:
            task = "FEATURE_EXTRACTION" if self.head == "AutoModel" else None
            changes |= {"auto_mapping": None, "task_type": self.config.get("task_type") or task}
        return {**self.config, **changes}


@dataclass(frozen=True)
class AdapterCard:
    """Everything that the card of an adapter is generated from, and what its template reads."""

    template: ClassVar[str] = "adapter.md"

    repo_id: str
    adapter: Adapter
    statements: Statements

    @property
    def training(self) -> Training:
        return Training(TrainingRecord.find(self.adapter.folder), self.statements)

    @cached_property
    def settings(self) -> EmbeddingSettings:
        return EmbeddingSettings.read(self.adapter.folder)

    @property
    def base_model(self) -> str:
        return self.adapter.base

    @property
    def grid(self) -> Grid | None:
        """The granularities that it was trained at; `None` if unknown."""
        record = self.training.record
        return Grid.parse(record.grid) if record is not None else None

    @property
    def pools(self) -> bool:
        """Whether `AutoModel` returns all that an embedding is pooled from: a projection is not in it."""
        return self.adapter.embeds and self.settings.projection is None

    @property
    def trust(self) -> str:
        """The argument that runs the code of the base model, if it needs it."""
        return TRUST if self.adapter.elastic else ""

    @property
    def citations(self) -> list[str]:
        """BibTeX entries of the architecture and of the training."""
        return self.training.citations(*([papers.M3BERT] if self.adapter.elastic else []))

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the card by the keys of the Hub."""
        adapter = self.adapter
        tags = ["sentence-transformers", "feature-extraction"] if adapter.embeds else []
        tags += ["matryoshka"] if self.grid is not None and len(self.grid) > 1 else []
        tags += [f"base_model:adapter:{adapter.base}", adapter.config["peft_type"].lower(), "transformers"]
        base = {"library_name": "peft", "base_model": adapter.base, "base_model_relation": "adapter"}
        return self.training.metadata(adapter.head, tags) | base
