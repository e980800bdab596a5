"""The files of a folder to publish: copied, rebuilt, completed, and searched for tokens of the Hub."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import get_token
from transformers import TorchAoConfig

import modeling_m3bert
from modeling_m3bert import EmbeddingSettings
from modeling_m3bert.modeling_elastic import EXTRAS_FOLDER
from modeling_m3bert.settings_m3bert import MODULES_FILE
from trainers.core.extras import require_extra
from trainers.core.granularity import Granularity
from trainers.evaluation.results import GridResults

from .checkpoint import Checkpoint


TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
BINARY_FILES = (".safetensors", ".onnx", ".png", ".model")


def rebuild(
    checkpoint: Checkpoint,
    folder: Path,
    published: Iterable[str],
    *,
    granularity: Granularity | None,
    quantize: bool,
) -> None:
    """Save a checkpoint reduced to a granularity or in 8 bits, and copy all other files that belong to it, by name. An
    elastic model writes its own code, exits and settings."""
    if checkpoint.quantized:
        raise ValueError(
            f"The weights in {checkpoint.folder} are already quantised: publish them without granularity and quantize."
        )
    if granularity is not None and not checkpoint.elastic:
        raise ValueError(f"granularity={granularity} needs an elastic model: fit exits first (m3bert fit).")
    if granularity is not None and checkpoint.projection is not None:
        raise ValueError(f"granularity={granularity} needs a model without a projection.")
    sizes = {"output_layer": granularity.layer, "output_dim": granularity.dim} if granularity is not None else {}
    loading = {}
    if quantize:  # on any device
        torchao = require_extra("torchao.quantization", "quantization", "Quantization to 8 bits")
        loading["quantization_config"] = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    checkpoint.load(**sizes, **loading).save_pretrained(folder)
    for name in published:
        if not (folder / name).exists() and not name.startswith(("model", EXTRAS_FOLDER)):
            link_or_copy(checkpoint.folder / name, folder / name)


def complete(checkpoint: Checkpoint, folder: Path, results: GridResults | None) -> None:
    """Add code and modules of sentence-transformers where they are missing; require a tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{checkpoint.folder} has no tokenizer: save it there as well.")
    staged = Checkpoint(folder)
    while missing := sorted(staged.required_code() - staged.code()):
        for name in missing:
            own = Path(modeling_m3bert.__file__).with_name(name)
            if not own.is_file():
                raise ValueError(f"The config of {checkpoint.folder} needs {name}: put it into the folder.")
            shutil.copyfile(own, folder / name)
    if staged.head == "AutoModel" and not (folder / MODULES_FILE).is_file():
        settings = results.settings if results is not None else {}
        EmbeddingSettings(
            pooling=settings.get("pooling", "mean"),
            prompts=settings.get("prompts", {}),
            max_length=staged.max_length,
        ).write(folder, width=staged.full.dim)


def link_or_copy(source: Path, target: Path) -> None:
    """Put a file into another folder: weights as a hard link where possible, everything else as a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".safetensors":
        try:
            target.hardlink_to(source.resolve())
            return
        except OSError:  # another disk
            pass
    shutil.copyfile(source, target)


def refuse_tokens(folder: Path, token: str | None = None) -> None:
    """
    Check that no text file holds a token of the Hub.

    Args:
        folder (`Path`): The folder to upload.
        token (`str`, *optional*): A token to look for, in addition to that of the environment.

    Raises:
        ValueError: names the file.
    """
    tokens = [known for known in (token, get_token()) if known]
    for file in (file for file in folder.rglob("*") if file.is_file()):
        if file.suffix not in BINARY_FILES:
            text = file.read_text(encoding="utf-8", errors="replace")
            if TOKEN.search(text) or any(token in text for token in tokens):
                raise ValueError(
                    f"{file.relative_to(folder)} holds a token of the Hub: remove it, and revoke the token."
                )
