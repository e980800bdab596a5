"""
List the launcher files for training on one GPU, several GPUs, several nodes and SLURM, or copy them into a folder:

    m3bert launchers
    m3bert launchers launch

Each file is a short shell script that takes what `m3bert train` takes. Its first lines say how to call it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from ..command import argument_parser


FOLDER = Path(__file__).parent


def launcher_files() -> list[Path]:
    """The launchers, and the files that they read."""
    return sorted(file for file in FOLDER.iterdir() if file.suffix in (".sh", ".yaml"))


def title_of(file: Path) -> str:
    """The first comment line of a launcher: what it is for."""
    lines = (line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return next(lines).removeprefix("# ").rstrip(".")


def copy_launchers(folder: Path) -> list[Path]:
    """
    Copy all launchers into a folder.

    Raises:
        ValueError: if a file of this name with another content is there; nothing is written then.
    """
    copies = {folder / file.name: file for file in launcher_files()}
    for copy, file in copies.items():
        if copy.exists() and copy.read_bytes() != file.read_bytes():
            raise ValueError(f"{copy} exists and was changed: name another folder, or remove it.")
    folder.mkdir(parents=True, exist_ok=True)
    for copy, file in copies.items():
        shutil.copyfile(file, copy)
    return list(copies)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="copy the files into this folder")
    options = parser.parse_args(arguments)
    files = launcher_files() if options.folder is None else copy_launchers(options.folder)
    names = [file.name if options.folder is None else str(file) for file in files]
    width = max(map(len, names))
    for name, file in zip(names, files, strict=True):
        print(f"{name:<{width}}  {title_of(file)}")
