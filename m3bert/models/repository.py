"""The files of a model, in a folder or on the Hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..utils.help_texts import one_line


# What is copied of a source, beside the folders of its sentence-transformers modules.
SOURCE_FILES = (
    "*.json", "*.txt", "*.model", "*.jinja", "model*.safetensors", "*.py", "LICENSE*", "NOTICE*"
)  # fmt: skip


@contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Name a model in the error if it cannot be loaded: the libraries' message says that there is no connection."""
    try:
        yield
    except RuntimeError as error:  # how transformers refuses tensors of another shape
        raise ValueError(f"{source} cannot be loaded: {one_line(error)}") from error
    except OSError as error:
        if Path(source).is_dir():
            raise
        raise OSError(f"{source} is not a folder, and could not be loaded from the Hub: {one_line(error)}") from error


def copy_source(source: str, folder: Path, revision: str | None = None, others: Sequence[str] = ()) -> None:
    """Copy what makes a model of a repository: its weights byte for byte, its tokenizer, the modules of
    sentence-transformers, its code and its licence; and `others` of its folders, where it has them."""
    from huggingface_hub import snapshot_download

    from ..modeling.files_elastic import FOLDER, Source, weight_files

    origin = Path(source)
    if not origin.is_dir():
        origin = Path(snapshot_download(source, revision=revision, allow_patterns=[*SOURCE_FILES, "*/config.json"]))
    modules = origin / "modules.json"
    folders = [module["path"] for module in json.loads(modules.read_text("utf-8"))] if modules.is_file() else []
    folders = [*(name for name in folders if re.fullmatch(FOLDER, name)), *others]
    if folders and not Path(source).is_dir():
        snapshot_download(source, revision=revision, allow_patterns=[f"{name}/*" for name in folders])
    weights = {Path(file).name for file in weight_files(Source(str(origin)))}  # not of other variants
    root = [file for pattern in SOURCE_FILES for file in origin.glob(pattern) if file.is_file()]
    root = [file for file in root if file.suffix != ".safetensors" or file.name in weights]
    for file in [*root, *(file for name in folders for file in (origin / name).glob("*") if file.is_file())]:
        if file.suffix not in (".bin", ".md"):
            target = folder / file.relative_to(origin)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
