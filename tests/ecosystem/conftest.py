"""What the tests of other libraries share: a real encoder as it is published, and copies of it."""

import os
import shutil
from pathlib import Path

import pytest

from m3bert.commands.convert import convert


LONGEST = 256  # what all-MiniLM-L6-v2 was published with


@pytest.fixture(scope="session")
def published(minilm, tmp_path_factory) -> Path:
    """The real encoder as an m3BERT, with everything that it was published with."""
    folder = tmp_path_factory.mktemp("published") / "minilm"
    convert(minilm, str(folder))
    return folder


def linked(folder: Path, copy: Path) -> Path:
    """The same checkpoint in another folder, without its modules, and without a copy of its weights."""
    shutil.copytree(folder, copy, copy_function=os.link)
    shutil.rmtree(copy / "1_Pooling")
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        (copy / name).unlink()
    return copy
