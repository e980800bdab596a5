"""Rows that were written, and are not in a table of LanceDB yet."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree

import pyarrow as pa


class Pending:
    """
    Rows that wait until there are enough for one file of a table: many small files make a search slow, and joining
    them takes as much memory as the table is large. Every batch is a file of its own.

    Args:
        folder (`Path`): Folder of the files. It exists only while there are such rows.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self._files())

    def append(self, rows: pa.Table) -> None:
        """Store rows. They survive a killed process once this returns."""
        self.folder.mkdir(exist_ok=True)
        draft = self.folder / "draft"
        with pa.OSFile(str(draft), "wb") as file, pa.ipc.new_file(file, rows.schema) as writer:
            writer.write_table(rows)
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, self.folder / f"{len(self._files()):08}.arrow")

    def rows(self) -> pa.Table | None:
        """All rows, memory-mapped; `None` if there are none."""
        tables = [pa.ipc.open_file(pa.memory_map(str(file))).read_all() for file in self._files()]
        return pa.concat_tables(tables) if tables else None

    def clear(self) -> None:
        """Remove all rows. The last ones go first, so that what a killed process leaves is in order."""
        for file in reversed(self._files()):
            file.unlink()
        if self.folder.is_dir():
            rmtree(self.folder)

    def _files(self) -> list[Path]:
        return sorted(self.folder.glob("*.arrow"))
