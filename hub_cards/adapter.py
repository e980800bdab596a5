"""An adapter as a repository of peft: its config and weights, and a card that names the base model."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from m3bert import modeling as modeling_m3bert

from ..encode.granularity import Grid
from ..models.settings import MODULES_FILE, EmbeddingSettings, check_weights, hub_id
from ..utils import papers
from ..utils.durable import replace_text
from ..utils.typed import read_json
from .card import TRUST, described, merged_card, training_variables
from .checkpoint import head_of
from .files import files_of
from .metadata import Statements
from .training_record import TrainingRecord
from .upload import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD


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


def export_adapter(
    adapter: Adapter, folder: Path, repo_id: str, said: Statements, previous: str | None = None
) -> None:
    """Write the files of an adapter into an empty folder, with a card that keeps the edits of the previous one."""
    for name in files_of(adapter.folder, more=(ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(adapter.folder / name, folder / name)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(adapter.published_config(), indent=2) + "\n", encoding="utf-8")
    write_adapter_card(adapter, folder, repo_id, said, previous)


def write_adapter_card(
    adapter: Adapter, folder: Path, repo_id: str, said: Statements, previous: str | None = None
) -> None:
    """Write the card of an adapter into a folder; see [`export_adapter`]."""
    record, settings = TrainingRecord.find(adapter.folder), EmbeddingSettings.read(adapter.folder)
    grid = Grid.parse(record.grid) if record is not None else None
    values = training_variables(record, said, settings, *([papers.M3BERT] if adapter.elastic else []))
    values |= {
        "adapter": adapter,
        "grid": grid,
        "plain": adapter.embeds and settings.projection is None,  # `AutoModel` returns what precedes a projection
        "trust": TRUST if adapter.elastic else "",
        "origin": f"[{adapter.base}](https://huggingface.co/{adapter.base})",
        "length": record.settings.get("max_length") if record else None,
    }
    tags = ["sentence-transformers", "feature-extraction"] if adapter.embeds else []
    tags += ["matryoshka"] if grid is not None and len(grid) > 1 else []
    tags += [f"base_model:adapter:{adapter.base}", adapter.config["peft_type"].lower(), "transformers"]
    data = described(record, said, adapter.head, tags)
    data |= {"library_name": "peft", "base_model": adapter.base, "base_model_relation": "adapter"}
    card = merged_card("adapter.md", repo_id, values, data, previous=previous)
    replace_text(folder / CARD, str(card))
