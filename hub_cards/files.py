"""The files of a checkpoint that are published."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from ..encode.quantizer import QUANTIZER_FOLDER
from ..modeling.files_elastic import PARTS_FILE, PARTS_FOLDER
from ..models.settings import ENCODER_FILES, MODULES_FILE, SIMILARITY_FILE
from ..utils.typed import read_json
from .training_record import RECORD_FILE


CARD, RESULTS = "README.md", "results.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
EVAL_RESULTS = ".eval_results/m3bert.yaml"  # other files of this folder belong to other people
LICENSES = ("LICENSE*", "NOTICE*")
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
    *("vocab.json", "merges.txt", "*.model", "*.jinja"),
)
# What is published of a checkpoint beside its code and modules: no pickles, no optimizer state, no data.
PUBLISHED = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "model.safetensors"),
    *("model-*-of-*.safetensors", PARTS_FILE, f"{PARTS_FOLDER}/to_target.npy", RECORD_FILE),
    *(MODULES_FILE, *ENCODER_FILES, SIMILARITY_FILE),
    *(f"{QUANTIZER_FOLDER}/{name}" for name in ("config.json", "model.safetensors", RECORD_FILE)),
    *(*TOKENIZER_FILES, *LICENSES),
)


def copy_files(source: Path, folder: Path, *patterns: str) -> None:
    """Copy the files of a folder that match a pattern into another folder."""
    for pattern in patterns:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)


def files_of(folder: Path, more: Iterable[str] = ()) -> list[str]:
    """The files of a folder that are published: [`PUBLISHED`], those of its modules for sentence-transformers, and
    `more`. ValueError if one is a link to a file outside of the folder."""
    names = {path.relative_to(folder).as_posix() for pattern in PUBLISHED for path in folder.glob(pattern)}
    modules = read_json(folder / MODULES_FILE, list) if (folder / MODULES_FILE).is_file() else []
    for module in modules:
        if module["path"] not in ("", "."):
            names |= {f"{module['path']}/{name}" for name in ("config.json", "model.safetensors")}
    files = sorted(name for name in names.union(more) if (folder / name).is_file())
    for name in files:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is a link out of {folder}: put the file there, or remove it.")
    return files


def bytes_by_file(folder: Path) -> dict[str, int]:
    """File of a folder -> bytes."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def code_named_by(config: Path) -> set[str]:
    """Python files of its folder that a config file names, for the model or for the source that was made elastic.
    Raises a ValueError if one is outside of it."""
    values = read_json(config)
    maps = [values.get("auto_map") or {}, (values.get("elastic") or {}).get("source_auto_map") or {}]
    named = [value for auto_map in maps for value in auto_map.values()]
    entries = [entry for value in named for entry in (value if isinstance(value, list) else [value])]
    modules = [(str(entry), str(entry).split("--")[-1].split(".")[0]) for entry in entries if entry]
    if outside := [module for _, module in modules if not module.isidentifier()]:
        raise ValueError(f"{config} names the code {outside[0]!r}, which is not a Python file of its folder.")
    return {f"{module}.py" for entry, module in modules if "--" not in entry}  # others are of another repository
