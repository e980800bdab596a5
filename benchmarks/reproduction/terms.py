"""
Each term of MIPIC, MIC and IBKD alone, before training, as printed and in the variants that were tried: its value, the
norm of its gradient with respect to the encoder's weights relative to that of the contrastive loss, and the cosine of
the two gradients; means over 8 batches.

    python -m benchmarks.reproduction.terms     # writes results/terms.json, in a few minutes on one CPU core
    python -m benchmarks.reproduction.report    # writes the tables

The batches are those of the studies: 16 sentences in two dropout views for MIPIC and MIC, 128 texts with the teacher's
embeddings for IBKD.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer, set_seed

from benchmarks._measure import about
from benchmarks.reproduction.backbones import CACHE, backbone
from benchmarks.reproduction.training_data import regularizer_sentences, unlabelled_texts
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.trainers import (
    HSIC,
    PIC,
    SCR,
    SIA,
    SIR,
    Contrastive,
    Grid,
    NestedModel,
    Objective,
    Teacher,
    TeacherContrast,
    TextColumnsCollator as Collator,
)
from m3bert.trainers.mipic.pic import default_chain


RESULTS = Path(__file__).with_name("results") / "terms.json"
BATCHES = 8
Measured = dict[str, dict[str, float]]  # term -> value, gradient, cosine


def gradients(model: Any, objectives: Mapping[str, Objective], batches: Sequence[Mapping[str, Any]]) -> Measured:
    """
    Objectives before training, each a mean over the batches: the loss, the norm of its gradient with respect to the
    model's weights relative to that of the first objective, and the cosine of the two gradients.

    Args:
        model (`Any`): The model.
        objectives (`dict`): Name -> objective; the first is the reference.
        batches (`Sequence`): Inputs of the model.
    """
    rows_of: dict[str, list[tuple[float, float, float]]] = {name: [] for name in objectives}
    weights = list(model.parameters())
    for number, batch in enumerate(batches):
        reference: torch.Tensor | None = None
        for name, objective in objectives.items():
            torch.manual_seed(number)  # the same dropout for every objective
            loss = NestedModel(model, objective).train()(**batch)["loss"]
            parts = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
            gradient = torch.cat([part.flatten() for part in parts])
            reference = gradient if reference is None else reference
            cosine = nn.functional.cosine_similarity(gradient, reference, dim=0)
            rows_of[name].append((loss.item(), (gradient.norm() / reference.norm()).item(), cosine.item()))
    return {
        name: {
            key: float(f"{statistics.mean(column):.4g}")
            for key, column in zip(("value", "gradient", "cosine"), zip(*rows, strict=True), strict=True)
        }
        for name, rows in rows_of.items()
    }


def regularizer_terms(depth: int, layers: list[int]) -> dict[str, Objective]:
    """The terms of MIPIC and MIC, with the papers' settings and the variants that were tried."""
    grid = Grid.parse(f"{depth}x16,32,64,128,256,384")
    every, chain = Grid.product(range(1, depth + 1), grid.dims), default_chain(grid)
    return {
        "MRL (sum over dims)": Contrastive(grid),
        "SIA, attention, tau 0.05": SIA(every, cka_weight=0.0),
        "SIA, attention, tau 1": SIA(every, cka_weight=0.0, temperature=1.0),
        "SIA, CKA": SIA(every, attention_weight=0.0),
        "PIC": PIC(chain),
        "PIC, target detached": PIC(chain, detach_target=True),
        "PIC, mean pooling, target detached": PIC(chain, detach_target=True, pooling="mean"),
        "SCR": SCR(Grid.product(layers, grid.dims)),
        "SIR": SIR(Grid.product(layers, grid.dims)),
        "SIR at the last layer": SIR(grid),
    }


def distillation_terms(teacher_width: int) -> dict[str, Objective]:
    """InfoNCE and HSIC with the paper's kernels, on vectors as they are and L2-normalised."""
    grid = Grid.parse("3x384")
    terms: dict[str, Objective] = {"InfoNCE": TeacherContrast(grid, teacher_dim=teacher_width)}
    for kernel, normalize in itertools.product(("rbf", "imq", "linear"), (False, True)):
        if not (kernel == "linear" and normalize):  # the linear kernel always normalises
            name = f"HSIC, {kernel}{', normalised' if normalize else ''}"
            terms[name] = HSIC(grid, kernel=kernel, normalize=normalize)
    return terms


def batches_of(texts: list[str], size: int, collator: Collator) -> list[Any]:
    starts = range(0, BATCHES * size, size)
    return [collator([{"text": text} for text in texts[start : start + size]]) for start in starts]


def main(arguments: list[str]) -> None:
    argument_parser(__doc__).parse_args(arguments)
    data, tokenizer = data_folder(), AutoTokenizer.from_pretrained(default_base())
    measured: dict[str, Measured] = {}
    sentences = regularizer_sentences(data)
    views = Collator(tokenizer, ["text"], 32, views=2)
    for name, depth, layers in (("reinitialised", 4, [2, 3]), ("real", 6, [2, 4])):
        set_seed(0)
        terms = regularizer_terms(depth, layers)
        measured[name] = gradients(backbone(name)[0], terms, batches_of(sentences, 16, views))
    texts = unlabelled_texts(data)[: BATCHES * 128]
    teacher = Teacher(default_base(), max_length=64, batch_size=128).embed(texts, CACHE / "teachers")
    set_seed(0)
    taught = batches_of(texts, 128, Collator(tokenizer, ["text"], 64, teacher=teacher))
    measured["student"] = gradients(backbone("student")[0], distillation_terms(teacher.width), taught)
    RESULTS.write_text(json.dumps({**about(0, packages=("datasets",)), "terms": measured}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
