"""What a checkpoint remembers of the run that made it, for its model card: no paths, no tokens."""

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

from modeling_m3bert.conversion_m3bert import hub_id


RECORD_FILE = "training.json"
PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft")
# Settings that say where and how a run was watched and kept, not what it computed.
BOOKKEEPING = re.compile(
    r"(output_dir|run_name|project|report_to|disable_tqdm|prediction_loss_only|resume_from_checkpoint|local_rank|debug"
    r"|ignore_data_skip|accelerator_config|parallelism_config|restore_callback_states.*|skip_memory.*|enable_jit_.*|grid|seed|use_cpu"
    r"|(hub|push|log|logging|save|eval|trackio|do|ddp|dataloader|label)_.*|.*_cache_dir|.*_on_each_node)$"
)
COUNTED = ("dataloader_drop_last", "label_smoothing_factor")  # which do change what is computed
ABSOLUTE_PATH = re.compile(r"(?<!\w)/\S*/")  # but for the last part
# What a reader looks for first, whether it is the default or not.
ALWAYS_SHOWN = ("learning_rate", "per_device_train_batch_size")


@dataclass
class TrainingRecord:
    """
    A training run, as its trainer saw it.

    Args:
        trainer (`str`): Class of the trainer.
        name (`str`): Of its objective.
        equation (`str`): Which equation of the paper it is.
        paper (`dict[str, str]`): `title`, `id` and `citation` of the paper it comes from.
        tags (`list[str]`): For the Hub.
        grid (`str`): Granularities that were trained.
        base_model (`str`, *optional*): Hub id that it all started from; `None` for random weights, or where no Hub id
            is known.
        earlier (`list[str]`): Objectives that the weights had been trained with before.
        settings (`dict`): Every setting that is not its default, and the few that are always asked for.
        columns (`list[str]`): Columns of the data that were read.
        rows (`int`, *optional*): Of the training data; `None` where it was a stream.
        datasets (`list[str]`): Hub ids of the training data, where it came from there.
        steps (`int`): Of the optimizer, so far.
        batch_size (`int`): Rows of one step, over all processes and accumulation.
        seed (`int`): Of the run.
        date (`str`): ISO 8601.
        machine (`str`): Its kind.
        versions (`dict[str, str]`): Package -> version.
    """

    trainer: str
    name: str
    equation: str
    paper: dict[str, str]
    tags: list[str]
    grid: str
    base_model: str | None
    earlier: list[str]
    settings: dict[str, Any]
    columns: list[str]
    rows: int | None
    datasets: list[str]
    steps: int
    batch_size: int
    seed: int
    date: str = field(default_factory=lambda: date.today().isoformat())
    machine: str = field(default_factory=lambda: machine_kind())
    versions: dict[str, str] = field(default_factory=lambda: {name: version(name) for name in PACKAGES})

    def save(self, folder: str | Path) -> None:
        """Write it beside the weights."""
        Path(folder, RECORD_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def find(cls, folder: str | Path) -> TrainingRecord | None:
        """
        The record beside the weights, if there is one.

        Raises:
            ValueError: if the file is not a record.
        """
        file = Path(folder, RECORD_FILE)
        if not file.is_file():
            return None
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{file} is not a training record: {error}.") from error


def origin_of(config: Any) -> tuple[str | None, list[str]]:
    """Hub id of the model that this config's weights come from, if one is known, and what they were trained with."""
    name = config.name_or_path
    before = TrainingRecord.find(name) if name and os.path.isdir(name) else None
    known = hub_id(name) or (before.base_model if before else None) or getattr(config, "converted_from", None)
    return known, [*before.earlier, before.name] if before else []


def machine_kind() -> str:
    """Processor and accelerators, and nothing that tells one machine of a kind from another."""
    gpus = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    count = torch.cuda.device_count()
    return f"{platform.machine()}, {os.cpu_count()} cores, " + (f"{count} x {', '.join(gpus)}" if gpus else "no GPU")


def changed_settings(args: TrainingArguments) -> dict[str, Any]:
    """Settings of a run that are not the defaults of their class; a path is named by its last part."""
    changed = {}
    for setting in fields(args):
        name, value = setting.name, plain(getattr(args, setting.name))
        default = plain(setting.default if setting.default_factory is MISSING else setting.default_factory())
        # What is off may be spelled in two ways: some arguments turn None into False.
        off = value in (None, False) and default in (None, False)
        counted = name in COUNTED or not BOOKKEEPING.match(name)
        if name in ALWAYS_SHOWN or (counted and not off and value != default):
            changed[name] = value
    return changed


def plain(value: Any) -> Any:
    """A setting as JSON holds it."""
    if isinstance(value, str):
        return Path(value).name if os.path.exists(value) else ABSOLUTE_PATH.sub("", value)
    if isinstance(value, list | tuple):
        return [plain(member) for member in value]
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def hub_datasets(datasets: Iterable[Any]) -> list[str]:
    """Hub ids of data sets that were loaded from there, by where their files came from."""
    found: dict[str, None] = {}
    for dataset in datasets:
        info = getattr(dataset, "info", None)  # data sets of torch have none
        for url in (info.download_checksums or {}) if info is not None else {}:
            if match := re.match(r"hf://datasets/([^@]+)@", url):
                found[match[1]] = None
    return list(found)
