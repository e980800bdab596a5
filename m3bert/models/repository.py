"""Repositories of models on this machine: reading, copying, and writing elastic ones."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Files of a model. A model that replaces another one removes all of them.
MODEL_FILES = (
    "config.json", "model*.safetensors", "model.safetensors.index.json", "*_m3bert.py", "*_elastic.py",
    "elastic", "tokenizer*.json", "special_tokens_map.json", "vocab.txt", "modules.json", "sentence_*_config.json",
    "config_sentence_transformers.json", "1_Pooling", "[1-9]_Dense", "[2-9]_Normalize", "[2-9]_MultiVectorMask",
    "quantizer", "training.json",
)  # fmt: skip
# What is copied of a source, beside the folders of its sentence-transformers modules.
SOURCE_FILES = (
    "*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors", "*.py", "LICENSE*", "NOTICE*"
)  # fmt: skip


@contextmanager
def loading_from(source: str | Path) -> Iterator[None]:
    """Name a model in the error if it cannot be loaded: the libraries' message says that there is no connection."""
    try:
        yield
    except RuntimeError as error:  # how transformers refuses tensors of another shape
        raise ValueError(f"{source} cannot be loaded: {one_line(error)}") from error
    except OSError as error:
        if Path(source).is_dir():
            raise
        raise OSError(f"{source} is not a folder, and could not be loaded from the Hub: {one_line(error)}") from error


def one_line(error: Exception) -> str:
    """The first line of an error, since some libraries add a page of advice. For files: name and reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def copy_source(source: str, folder: Path, revision: str | None = None, others: Sequence[str] = ()) -> None:
    """Copy what makes a model of a repository: its weights byte for byte, its tokenizer, the modules of
    sentence-transformers, its code and its licence; and `others` of its folders, where it has them."""
    from huggingface_hub import snapshot_download

    from ..modeling.files_elastic import FOLDER, Source, weight_files

    root = Path(source)
    if not root.is_dir():
        root = Path(snapshot_download(source, revision=revision, allow_patterns=[*SOURCE_FILES, "*/config.json"]))
    modules = root / "modules.json"
    paths = [module["path"] for module in json.loads(modules.read_text("utf-8"))] if modules.is_file() else []
    folders = [*(path for path in paths if re.fullmatch(FOLDER, path)), *others]
    if folders and not Path(source).is_dir():
        snapshot_download(source, revision=revision, allow_patterns=[f"{name}/*" for name in folders])
    weights = {Path(file).name for file in weight_files(Source(str(root)))}  # not of other variants
    files = [file for pattern in SOURCE_FILES for file in root.glob(pattern)]
    files = [file for file in files if file.suffix != ".safetensors" or file.name in weights]
    files += [file for name in folders for file in (root / name).glob("*")]
    for file in files:
        if file.is_file() and file.suffix not in (".bin", ".md"):
            target = folder / file.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def write_repository(model: PreTrainedModel, folder: Path) -> None:
    """Write the elastic repository of a fitted encoder: the source that it was loaded from, and beside it the depths
    and the code that runs them."""
    from ..modeling.files_elastic import add_code, source_of, write_parts
    from ..utils.hashing import sha256_of
    from .settings import hub_id

    encoder = model.base_model
    source = source_of(encoder)
    copy_source(source.name, folder, source.revision)
    digests = {file.name: sha256_of(file) for file in sorted(folder.glob("model*.safetensors"))}
    fit = {**encoder.config.elastic["fit"], **({} if hub_id(source.name) is None else {"source": source.name})}
    fit["source_sha256"] = digests.get("model.safetensors") or digests
    write_parts(folder, encoder.elastic.state_dict())
    file = folder / "config.json"
    values = json.loads(file.read_text("utf-8"))
    code = {name: path for name, path in values.get("auto_map", {}).items() if "modeling_elastic" not in path}
    values["elastic"] = {**encoder.config.elastic, "fit": fit, **({"source_auto_map": code} if code else {})}
    values.pop("output_dim", None)
    if getattr(encoder.config, "output_dim", None) is not None:  # the target is narrower than the model
        values["output_dim"] = encoder.config.output_dim
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    add_code(folder, native=True)
