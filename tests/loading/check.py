"""
Load the folders of `write.py` without this project, and compare what they give: `python -I check.py OUT`. Prints a
line per load, and exits with 1 if one fails or differs.
"""

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
PROJECT = ("m3bert", "modeling_m3bert", "trainers")


def outputs_of(folder: Path, kind: str, remote: bool, keywords: dict[str, Any]) -> torch.Tensor:
    """What a folder gives for the texts: `kind` is `"SentenceTransformer"` or the auto class that loads it."""
    options = {"trust_remote_code": True} if remote else {}
    if kind == "SentenceTransformer":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", model_kwargs=keywords, **options)
        return model.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    inputs = transformers.AutoTokenizer.from_pretrained(folder, **options)(TEXTS, padding=True, return_tensors="pt")
    model = getattr(transformers, kind).from_pretrained(folder, **options, **keywords).eval()
    return model(**inputs)[0] * inputs["attention_mask"].unsqueeze(-1)


def verdict(folder: Path, lowest: str, load: list, expected: torch.Tensor) -> str:
    """The largest difference, `"refused"` as it should be, or what is wrong, which starts with `"FAILED"`."""
    supported = release(transformers.__version__) >= release(lowest)
    try:
        actual = outputs_of(folder, *load)
        difference = (actual - expected).abs().max().item() if actual.shape == expected.shape else float("inf")
    except Exception as error:
        if not supported and f"transformers {lowest} or later" in str(error) and "\n" not in str(error):
            return "refused"
        traceback.print_exc()
        return f"FAILED: {error!r}"
    return f"{'' if supported and difference <= TOLERANCE else 'FAILED: not refused, or differs by '}{difference:.1e}"


def release(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


def main(out: Path) -> bool:
    assert not any(importlib.util.find_spec(name) for name in PROJECT), "this project is installed here"
    transformers.logging.disable_progress_bar()
    expected, failed = load_file(out / "expected.safetensors"), False
    for number, (folder, lowest, *load) in enumerate(json.loads((out / "cases.json").read_text())):
        actual = verdict(out / folder, lowest, load, expected[str(number)])
        failed |= actual.startswith("FAILED")
        named = ", ".join([load[0], *(f"{name}={value}" for name, value in load[2].items())])
        print(f"{transformers.__version__:8} {folder:10} {named:50} {actual}", flush=True)
    return failed


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main(Path(sys.argv[1])))
