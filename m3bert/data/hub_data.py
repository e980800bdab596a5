"""Read data sets from the Hub, or from a folder in the form of one."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import datasets

from .files import load_files, load_split, reading_data
from .formats import FORMATS, is_url, suffix_of


def load_hub(
    name: str, config: str | None = None, *, split: str = "train", streaming: bool = False
) -> datasets.Dataset | datasets.IterableDataset:
    """
    Read a split of a data set from the Hub, also in part: `train[:1000]`. No code of the data set runs. The files of a
    folder, which are named after their splits (`train.csv`), are read by [`load_files`], as texts; a repository by the
    library datasets, which guesses the types of CSV files.

    Raises:
        ValueError: if it has no such configuration or split, its files cannot be read, or its card names a file of
            this machine that is outside of it.
        OSError: if there is no such data set, or the Hub cannot be reached.
    """
    with reading_data(name):
        folder = f"{os.path.abspath(name)}{os.sep}" if Path(name).is_dir() else None
        files = datasets.load_dataset_builder(name, config).config.data_files or {}
        for file in chain.from_iterable(files.values()):
            if not is_url(str(file)) and not (folder and os.path.abspath(file).startswith(folder)):
                raise ValueError(f"its files include {file}, which is outside of the data set.")
        if folder and all(suffix_of(str(file)) in FORMATS for file in chain.from_iterable(files.values())):
            if split.partition("[")[0] not in files:
                raise ValueError(f"it has no split {split!r}; it has {', '.join(map(str, files))}")
            if streaming and split not in files:
                raise ValueError(f"a part of a split, {split}, cannot be streamed")
            return load_files(files[split], streaming=True) if streaming else load_split(files, split)
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
