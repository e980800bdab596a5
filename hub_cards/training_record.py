"""The record of a training run that a checkpoint keeps for its model card. It holds no paths and no tokens."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ..encode.granularity import EncoderConfig
from ..models.settings import hub_id
from ..utils.durable import replace_text
from ..utils.papers import Identity
from ..utils.typed import read_json, typed


RECORD_FILE = "training.json"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")
# Settings of logging, saving and hardware, which do not change what a run computes.
BOOKKEEPING = re.compile(
    "output_dir|run_name|project|report_to|disable_tqdm|prediction_loss_only|resume_from_checkpoint|local_rank|debug|"
    "ignore_data_skip|accelerator_config|parallelism_config|grid|seed|use_cpu|(hub|push|log|logging|save|eval|trackio|"
    "do|ddp|dataloader(?!_drop_last)|label(?!_smoothing)|restore_callback_states|skip_memory|enable_jit)_.*|"
    ".*_cache_dir|.*_on_each_node"
)
ABSOLUTE_PATH = re.compile(r"(?<!\w)/\S*/")  # without its last part
# Settings that are recorded even at their defaults.
ALWAYS_SHOWN = ("learning_rate", "per_device_train_batch_size")


@dataclass
class TrainingRecord:
    """A record of a training run."""

    trainer: str  # class of the trainer
    objective: str  # its name
    # Of the objective: `name`, `equation`, `weight` and `papers` (`title`, `id`, `link` and `citation`). A simple
    # objective has one part.
    parts: list[dict[str, Any]]
    tags: list[str]  # of the objective for the Hub
    grid: str  # the trained granularities
    base_model: str | None  # Hub id of the first model that the weights come from; `None` if unknown or random
    earlier: list[str]  # objectives of earlier training runs of these weights
    settings: dict[str, Any]  # those that differ from their defaults, learning rate and batch size
    columns: list[str]  # of the data, as far as they were read
    rows: int | None  # of the training data; `None` for a stream
    datasets: list[str]  # Hub ids of the training data, as far as it came from the Hub
    steps: int  # of the optimizer, so far
    batch_size: int  # rows per step, over all processes and accumulated batches
    seed: int
    date: str = field(default_factory=lambda: date.today().isoformat())
    machine: str = field(default_factory=lambda: machine_kind())
    versions: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in PACKAGES})
    files: list[str] = field(default_factory=list)  # names of local files of the training data, as far as known
    sets: dict[str, int] = field(default_factory=dict)  # of several data sets: name -> number of rows

    def save(self, folder: str | Path) -> None:
        """Write the record into the folder of a checkpoint."""
        replace_text(Path(folder, RECORD_FILE), json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def find(cls, folder: str | Path) -> TrainingRecord | None:
        """The record in the folder of a checkpoint, if there is one."""
        file = Path(folder, RECORD_FILE)
        if not file.is_file():
            return None
        try:
            return typed(cls, read_json(file))
        except ValueError as error:
            raise ValueError(f"{file} is not a training record: {error}") from error


def parts_of(identity: Identity) -> list[dict[str, Any]]:
    """The parts of an objective in the form of a record."""
    parts = []
    for part in identity.parts or (identity,):
        papers = [
            {name: getattr(paper, name) for name in ("title", "id", "link", "citation")} for paper in part.papers
        ]
        parts.append({"name": part.name, "equation": part.equation, "weight": part.weight, "papers": papers})
    return parts


def origin_of(config: EncoderConfig) -> tuple[str | None, list[str]]:
    """Hub id of the model that the weights of this config come from (if known), and their earlier objectives."""
    name = config.name_or_path
    before = TrainingRecord.find(name) if name and os.path.isdir(name) else None
    known = hub_id(name) or (before.base_model if before else None) or getattr(config, "converted_from", None)
    return known, [*before.earlier, before.objective] if before else []


def machine_kind() -> str:
    """Processor and accelerators, without anything that identifies the machine."""
    gpus = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    count = torch.cuda.device_count()
    return f"{platform.machine()}, {os.cpu_count()} cores, " + (f"{count} x {', '.join(gpus)}" if gpus else "no GPU")


def changed_settings(args: TrainingArguments) -> dict[str, Any]:
    """Settings of a run that differ from the defaults of their class. Paths are reduced to their last part."""
    changed = {}
    for setting in fields(args):
        name, value = setting.name, plain(getattr(args, setting.name))
        default = plain(setting.default if setting.default_factory is MISSING else setting.default_factory())
        # Some arguments turn None into False or an empty mapping; all of them mean off.
        off = value in (None, False, {}) and default in (None, False)
        if name in ALWAYS_SHOWN or not (BOOKKEEPING.fullmatch(name) or off or value == default):
            changed[name] = value
    return changed


def plain(value: Any) -> Any:
    """A setting as a JSON value, without absolute paths."""
    if isinstance(value, str):
        return Path(value).name if os.path.exists(value) else ABSOLUTE_PATH.sub("", value)
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def hub_datasets(datasets: Iterable[Any]) -> list[str]:
    """Hub ids of those data sets that were loaded from the Hub, by the origin of their files."""
    names: dict[str, None] = {}
    for dataset in datasets:
        info = getattr(dataset, "info", None)  # not every data set has one
        for url in (info.download_checksums or {}) if info is not None else {}:
            if match := re.match(r"hf://datasets/([^@]+)@", url):
                names[match[1]] = None
    return list(names)
