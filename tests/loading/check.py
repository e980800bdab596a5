"""
Load the folders of `write.py` in an environment without this project, and compare what they give. Prints a line per
load; exits with 1 if one fails or differs.

    python -I check.py OUT
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file


TEXTS = ["read the name of a list", "text", "if one file is open then do not remove it and read from the to by has"]
TOLERANCE = 1e-5


def outputs_of(folder: Path, kind: str, remote: bool, keywords: dict[str, Any]) -> torch.Tensor:
    """
    What a folder gives for the texts.

    Args:
        folder (`Path`): Folder.
        kind (`str`): `"SentenceTransformer"`, or the auto class that loads it.
        remote (`bool`): Whether it needs the code in the folder.
        keywords (`dict[str, Any]`): Of the model.
    """
    options = {"trust_remote_code": True} if remote else {}
    if kind == "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", model_kwargs=keywords, **options)
        return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    inputs = transformers.AutoTokenizer.from_pretrained(folder, **options)(TEXTS, padding=True, return_tensors="pt")
    model = getattr(transformers, kind).from_pretrained(folder, **options, **keywords).eval()
    return model(**inputs)[0] * inputs["attention_mask"].unsqueeze(-1)


def verdict(folder: Path, lowest: str, load: list, expected: torch.Tensor) -> str:
    """`"refused"`, or the largest difference; what is wrong starts with `"FAILED"`."""
    supported = release(transformers.__version__) >= release(lowest)
    try:
        found = outputs_of(folder, *load)
    except Exception as error:
        if not supported and f"transformers {lowest} or later" in str(error) and "\n" not in str(error):
            return "refused"
        traceback.print_exc()
        return f"FAILED: {error!r}"
    if not supported or found.shape != expected.shape:
        return f"FAILED: {tuple(found.shape)} instead of {tuple(expected.shape) if supported else 'a refusal'}"
    difference = (found - expected).abs().max().item()
    return f"{difference:.1e}" if difference <= TOLERANCE else f"FAILED: differs by {difference:.1e}"


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def main(out: Path) -> int:
    assert not any(importlib.util.find_spec(name) for name in ("m3bert", "modeling_m3bert", "trainers"))
    transformers.logging.disable_progress_bar()
    expected, verdicts = load_file(out / "expected.safetensors"), []
    for number, (folder, lowest, *load) in enumerate(json.loads((out / "cases.json").read_text())):
        verdicts.append(verdict(out / folder, lowest, load, expected[str(number)]))
        kind, _, keywords = load
        named = ", ".join([kind, *(f"{name}={value}" for name, value in keywords.items())])
        print(f"{transformers.__version__:8} {folder:10} {named:50} {verdicts[-1]}", flush=True)
    return int(any(each.startswith("FAILED") for each in verdicts))


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main(Path(sys.argv[1])))
