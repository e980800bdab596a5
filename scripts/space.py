"""A folder that is a Space of the Hub: the page of `scripts.demo`, with all the code that it needs."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from huggingface_hub import SpaceCard, SpaceCardData
from huggingface_hub.utils import validate_repo_id

from scripts._encoder import EncoderArguments


PACKAGES = ("modeling_m3bert", "trainers")
SCRIPTS = ("__init__", "_command", "_encoder", "_sources", "_space", "demo", "stdlib_docs")
# What they import when they are loaded; a Space installs the versions that it was written with.
REQUIREMENTS = (
    "torch transformers accelerate datasets evaluate faiss-cpu gradio huggingface-hub numpy pyyaml safetensors "
    "scikit-learn scipy sentence-transformers threadpoolctl tqdm"
).split()
APP = '''"""The page of this Space: `python app.py` serves it anywhere."""

import sys

from scripts.demo import main


main([*{arguments!r}, *sys.argv[1:]])
'''
SPACE_CARD = """---
{card_data}
---

# One encoder, many sizes

A page to try [{model}](https://huggingface.co/{model}) at the depths and widths that it was trained for, with 32, 8 or
1 bits a number, beside its full size. It encodes the documentation of Python's standard library when it starts.

Written by `python -m scripts.demo --space`; `modeling_m3bert`, `trainers` and `scripts` are copies from m3BERT.
"""


def write_space(folder: Path, encoding: EncoderArguments) -> None:
    """
    Write a folder that is a Space of the Hub as it stands: app, requirements, card, and copies of this project's code,
    which no package index has.

    Args:
        folder (`Path`): New, or empty.
        encoding ([`EncoderArguments`]): The published model, and how it reads texts.

    Raises:
        ValueError: if the model is not named by its id on the Hub, or the folder holds something.
    """
    model = encoding.model_name_or_path
    if model is None or Path(model).exists():
        raise ValueError("A Space reads its model from the Hub: name it, --model_name_or_path user/model.")
    validate_repo_id(model)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; a Space is written to a new folder.")
    project = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        shutil.copytree(project / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    for name in SCRIPTS:
        shutil.copy(project / "scripts" / f"{name}.py", folder / "scripts")
    defaults = asdict(EncoderArguments())
    arguments = [f"--{name}={value}" for name, value in asdict(encoding).items() if value != defaults[name]]
    (folder / "app.py").write_text(APP.format(arguments=[*arguments, "--host=0.0.0.0"]), encoding="utf-8")
    # A local build of torch says so behind a +, which no index knows.
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
