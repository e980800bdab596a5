"""An adapter as a repository of peft: its config and weights, and a card that names the base model."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open

import modeling_m3bert
from modeling_m3bert import EmbeddingSettings
from modeling_m3bert.settings_m3bert import MODULES_FILE, check_weights, hub_id, read_json
from trainers.core import papers
from trainers.core.durable import replace_text
from trainers.core.granularity import Grid
from trainers.hub.training_record import TrainingRecord

from .card import PIPELINES, POOLING_CODE, TEMPLATE, link_to, merged_card, papers_of, training_data
from .checkpoint import files_of, head_of
from .metadata import Statements
from .tables import parts_table, settings_table
from .upload import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD


ADAPTER_TEMPLATE = Path(__file__).with_name("adapter.md")
SHARED = "<!-- section: training -->"  # from here on, an adapter has the sections of other cards


def is_adapter(folder: Path) -> bool:
    """Whether a folder has an adapter, and not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


@dataclass(frozen=True)
class Adapter:
    """
    An adapter of peft in a folder.

    Args:
        folder (`Path`): The folder.
        base_model (`str`, *optional*): Hub id of its base model. Default: that of its config.

    Raises:
        ValueError: if the weights are missing or cannot be read, or the base model is not on the Hub.
    """

    folder: Path
    base_model: str | None = None

    def __post_init__(self) -> None:
        if not (self.folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{self.folder} lacks {ADAPTER_WEIGHTS}.")
        check_weights(self.folder / ADAPTER_WEIGHTS)
        if not self.base:
            raise ValueError(
                f"The base model of {self.folder} is {self.config['base_model_name_or_path']!r}, which is not on the "
                "Hub: push the base model first, and name it with --base_model."
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """The config of peft."""
        return read_json(self.folder / ADAPTER_CONFIG, dict)

    @property
    def base(self) -> str:
        """Hub id of the base model; empty if unknown."""
        return self.base_model or hub_id(self.config["base_model_name_or_path"]) or ""

    @property
    def base_class(self) -> str:
        """Name of the class of the base model, as far as the config knows it."""
        return (self.config.get("auto_mapping") or {}).get("base_model_class", "")

    @property
    def elastic(self) -> bool:
        """Whether the base model is an m3BERT."""
        return self.base_class in modeling_m3bert.__all__

    @property
    def head(self) -> str:
        """Name of the Auto class that loads the base model."""
        return head_of(self.base_class) or "AutoModel"

    @cached_property
    def parameters(self) -> int:
        """Number of its parameters."""
        with safe_open(self.folder / ADAPTER_WEIGHTS, "pt") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())

    @cached_property
    def record(self) -> TrainingRecord | None:
        """The record of its training, if there is one."""
        return TrainingRecord.find(self.folder)

    @property
    def grid(self) -> Grid | None:
        """The granularities that it was trained at; `None` if unknown."""
        return Grid.parse(self.record.grid) if self.record is not None else None

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
    """
    Write the files of an adapter to publish, and its card.

    Args:
        adapter ([`Adapter`]): The adapter.
        folder (`Path`): An empty folder for the files.
        repo_id (`str`): The repository, `user/model`.
        said ([`Statements`]): What a person adds to the card.
        previous (`str`, *optional*): The card on the Hub, whose edits are kept. The README in the adapter's folder is
            one that peft wrote.
    """
    for name in files_of(adapter.folder, more=(ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(adapter.folder / name, folder / name)
    config = json.dumps(adapter.published_config(), indent=2) + "\n"
    (folder / ADAPTER_CONFIG).write_text(config, encoding="utf-8")
    write_adapter_card(adapter, folder, repo_id, said, previous)


def write_adapter_card(
    adapter: Adapter, folder: Path, repo_id: str, said: Statements, previous: str | None = None
) -> None:
    """Write the card of an adapter into a folder. The arguments are those of [`export_adapter`]."""
    name = repo_id.split("/")[-1]
    template = ADAPTER_TEMPLATE.read_text(encoding="utf-8")
    shared = TEMPLATE.read_text(encoding="utf-8").partition(SHARED)
    values = {"name": name, "repo": repo_id, **context(adapter, said)}
    card = merged_card(template + shared[1] + shared[2], values, metadata(adapter, said), name, previous=previous)
    replace_text(folder / CARD, str(card))


def datasets_of(adapter: Adapter, said: Statements) -> list[str]:
    """Hub ids of the training data."""
    return list(dict.fromkeys([*(adapter.record.datasets if adapter.record else ()), *said.datasets]))


def metadata(adapter: Adapter, said: Statements) -> dict[str, Any]:
    """The metadata of the card by the keys of the Hub."""
    record, grid = adapter.record, adapter.grid
    tags = [f"base_model:adapter:{adapter.base}", adapter.config["peft_type"].lower(), "transformers"]
    tags += [tag for tag in (record.tags if record else ()) if tag != "matryoshka"]
    tags += ["sentence-transformers", "feature-extraction"] if adapter.embeds else []
    tags += ["matryoshka"] if grid is not None and len(grid.granularities) > 1 else []
    tags += ["generated_from_trainer"] if record else []
    similar = record is not None and "sentence-similarity" in record.tags
    return {
        "language": list(said.languages),
        "license": said.license,
        "library_name": "peft",
        "pipeline_tag": "sentence-similarity" if similar else PIPELINES[adapter.head],
        "tags": list(dict.fromkeys([*tags, *said.tags])),
        "base_model": adapter.base,
        "base_model_relation": "adapter",
        "datasets": datasets_of(adapter, said),
    }


def context(adapter: Adapter, said: Statements) -> dict[str, Any]:
    """The variables of the template."""
    record, grid, settings = adapter.record, adapter.grid, EmbeddingSettings.read(adapter.folder)
    plain = adapter.embeds and settings.projection is None  # `AutoModel` returns what precedes a projection
    roles: Collection[str] = ("query", "document")
    limits = [f"Only these granularities were trained: `{grid}`."] if grid is not None else []
    limits += (
        [f"It was trained on texts of up to {record.settings['max_length']} tokens."]
        if (record is not None and "max_length" in record.settings)
        else []
    )
    return {
        "kind": {"LORA": "LoRA"}.get(adapter.config["peft_type"], adapter.config["peft_type"]),
        "base": adapter.base,
        "parameters": adapter.parameters,
        "grid": str(grid) if grid is not None else None,
        "small": grid.granularities[0] if grid is not None and adapter.elastic and plain else None,
        "layers": grid.layers if grid is not None else None,
        "dims": grid.dims if grid is not None else None,
        "head": adapter.head,
        "trust": ", trust_remote_code=True" if adapter.elastic else "",
        "embeds": adapter.embeds,
        "pooling_code": POOLING_CODE[settings.pooling].strip("\n") if plain else None,
        "prompts": {role: settings.prompts[role] for role in roles if settings.prompts.get(role)},
        "record": record,
        "parts": parts_table(record.parts) if record else None,
        "several": record is not None and len(record.parts) > 1,
        "data": training_data(record, datasets_of(adapter, said)) if record else None,
        "origin": link_to(adapter.base),
        "settings": settings_table(record.settings) if record else None,
        "limits": [*limits, "It was not evaluated, as far as this card knows."],
        "gaps": ["quality, at any granularity", "speed", "bias, and harm that its use may cause"],
        "citations": papers_of(record, [papers.M3BERT.citation] if adapter.elastic else []),
    }
