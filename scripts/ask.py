"""
Answer questions from the folder that the quickstart wrote, as a user would who got the checkpoint from the Hub: with
transformers alone. The packages of this project are hidden from the process.

    python scripts/ask.py runs/quickstart "How do I join two paths?"

There is one index, of the last layer. Questions at any depth search it, because exits put all depths into one space.
"""

from __future__ import annotations

import argparse
import importlib.abc
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any


class HiddenProject(importlib.abc.MetaPathFinder):
    """Makes this project's packages impossible to import, so that the checkpoint must bring its own code."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts"):
            raise ModuleNotFoundError(f"No module named {name!r} (hidden on purpose)")


GRANULARITIES = ((0, 384), (2, 384), (6, 384))  # of the questions; layer 0 is a table look-up
RESULTS = 3
COLUMN = 40


def search(folder: Path, layer: int, dim: int, questions: list[str], device: str) -> list[list[int]]:
    """For each question, the rows of the nearest documents, with the questions embedded at one granularity."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", trust_remote_code=True)
    model = AutoModel.from_pretrained(folder / "model", trust_remote_code=True, output_layer=layer, output_dim=dim)
    inputs = tokenizer(questions, padding=True, truncation=True, return_tensors="pt").to(device)
    with torch.no_grad():
        states = model.to(device)(**inputs).last_hidden_state
    weights = inputs["attention_mask"].unsqueeze(-1)
    queries = torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=1)
    (documents,) = load_file(
        folder / "index.safetensors", device=device
    ).values()  # at the last layer, whatever the question's
    scores = queries @ torch.nn.functional.normalize(documents[:, :dim], dim=1).T
    return scores.topk(RESULTS, dim=1).indices.tolist()


def fit(text: str) -> str:
    """The text, shortened or padded to the size of a column."""
    return (text if len(text) <= COLUMN - 2 else f"{text[: COLUMN - 3]}\u2026").ljust(COLUMN)


def answer(folder: Path, questions: list[str], device: str = "cpu") -> None:
    """
    Print the nearest documents to each question, embedded at several granularities, side by side.

    Raises:
        ValueError: if the folder holds no finished run.
    """
    if not (folder / "index.safetensors").is_file():
        raise ValueError(f"{folder} holds no finished run: run `m3bert quickstart` first.")
    with open(folder / "documents.jsonl", encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    found = [search(folder, layer, dim, questions, device) for layer, dim in GRANULARITIES]
    for number, question in enumerate(questions):
        print(f"\n{question}")
        print("  " + "".join(fit(f"{layer} layers x {dim} dims") for layer, dim in GRANULARITIES))
        for rank in range(RESULTS):
            cells = [documents[rows[number][rank]] for rows in found]
            print(f"{rank + 1} " + "".join(fit(cell["name"]) for cell in cells))
            print("  " + "".join(fit(f"  {cell['summary']}") for cell in cells))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the quickstart's run")
    parser.add_argument("questions", nargs="+", help="questions to answer")
    parser.add_argument("--device", default="cpu", help="device, such as cuda, mps or cpu (default: cpu)")
    options = parser.parse_args(arguments)
    sys.meta_path.insert(0, HiddenProject())
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    answer(options.folder, options.questions, options.device)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"error: {error}")
