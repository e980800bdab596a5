"""A Space of the Hub: a folder with the page of `m3bert demo`, and all the code that it needs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from huggingface_hub.utils import validate_repo_id

from .encoder import EncoderArguments


PACKAGES = ("m3bert", "modeling_m3bert", "trainers")
# The page, and the commands' modules that it imports.
COMMANDS = ("__init__", "command", "demo", "encoder", "sources", "space")
# What pip installs for m3bert[demo]. A Space gets the versions that are installed where it was written.
REQUIREMENTS = (
    "torch transformers accelerate datasets evaluate huggingface-hub numpy peft pyyaml safetensors tokenizers "
    "tqdm gradio sentence-transformers faiss-cpu scikit-learn scipy threadpoolctl"
).split()
APP = '''"""The page of this Space. `python app.py` serves it anywhere."""

import sys

from m3bert.commands.demo import main


main([*{arguments!r}, *sys.argv[1:]])
'''
SPACE_CARD = """---
{card_data}
---

# One encoder, many sizes

Try [{model}](https://huggingface.co/{model}) at every trained depth and number of dims, stored with 32 bits per
dim or fewer, side by side with its full size. At startup, the Space encodes the documentation of Python's standard
library.

Written by `m3bert demo --space`. The folders `m3bert`, `modeling_m3bert` and `trainers` are copies from m3BERT.
"""


def write_space(folder: Path, encoding: EncoderArguments) -> None:
    """
    Write a complete Space of the Hub: app, requirements, card, and a copy of this project's code.

    Args:
        folder (`Path`): A new or empty folder.
        encoding ([`EncoderArguments`]): The published model, and how it reads texts.

    Raises:
        ValueError: if the model is not given by its Hub id, or the folder is not empty.
    """
    model = encoding.model_name_or_path
    if model is None or Path(model).exists():
        raise ValueError("A Space loads its model from the Hub: pass --model_name_or_path user/model.")
    validate_repo_id(model)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"--space {folder} is not empty; a Space needs a new folder.")
    copy_code(folder)
    defaults = asdict(EncoderArguments())
    arguments = [f"--{name}={value}" for name, value in asdict(encoding).items() if value != defaults[name]]
    (folder / "app.py").write_text(APP.format(arguments=[*arguments, "--host=0.0.0.0"]), encoding="utf-8")
    # The version of a local build of torch has a suffix after +, which no package index has.
    pins = [f"{name}=={version(name).partition('+')[0]}\n" for name in REQUIREMENTS]
    (folder / "requirements.txt").write_text("".join(pins), encoding="utf-8")
    card_data = SpaceCardData(
        title="One encoder, many sizes",
        sdk="gradio",
        sdk_version=version("gradio"),
        python_version=f"{sys.version_info.major}.{sys.version_info.minor}",
        app_file="app.py",
        license="apache-2.0",
        models=[model],
    )
    SpaceCard(SPACE_CARD.format(card_data=card_data, model=model)).save(folder / "README.md")


def copy_code(folder: Path) -> None:
    """Copy the packages that the page imports, from wherever they are: a checkout or an installation."""
    for package in PACKAGES:
        source = Path(str(import_module(package).__file__)).parent
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__", "commands"))
    commands = folder / "m3bert" / "commands"
    commands.mkdir()
    for name in COMMANDS:
        shutil.copyfile(Path(__file__).with_name(f"{name}.py"), commands / f"{name}.py")
