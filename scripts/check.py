"""
Check an objective of your own, on a tiny random model and random texts:

    m3bert check path/to/mine.py:MyConfig
    m3bert check path/to/mine.py:MyConfig --margin 0.3

It builds the objective as `m3bert train path/to/mine.py:MyConfig` does, with the options of the config, and prints one
line per check:

    card        the objective has a title and an equation for the model card
    terms       every term of the loss is a finite scalar
    encoder     gradients reach the encoder, and are finite
    teacher     the embeddings of a teacher get no gradient
    processes   two processes, with half of the batch each, have the gradient of one with the whole batch

The exit status is 1 if a check fails. Without terms or gradients, it stops there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .command import argument_parser, read_options, run_command
from .train import method_of


if TYPE_CHECKING:
    import torch

    from trainers.core.model import NestedModel
    from trainers.core.objective import Identity, Terms

# Of the tiny model, and of its batch: the last two texts of a column are equal to the first two.
LAYERS, DIMS, HEADS, VOCABULARY, ROWS, LENGTH = [2, 4], [8, 32], 4, 50, 8, 6
LARGEST_DIFFERENCE = 1e-4  # of two gradients, as a share of their norm: losses may compute in float32


def build(arguments: list[str], folder: str) -> NestedModel:
    """A tiny model with the objective of a config class, without dropout and in float64."""
    import torch
    from transformers import HfArgumentParser

    from modeling_m3bert import M3BertConfig, M3BertForMaskedLM
    from trainers import NestedModel, TextTrainingArguments

    config_class, _ = method_of(arguments[0])
    quiet = ["--output_dir", folder, "--use_cpu", "--report_to", "none"]
    (args,) = read_options(HfArgumentParser(config_class), [*quiet, *arguments[1:]])
    config = M3BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIMS[-1],
        intermediate_size=DIMS[-1],
        num_hidden_layers=LAYERS[-1],
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        matryoshka_layers=LAYERS,
        matryoshka_dims=DIMS,
    )
    torch.manual_seed(0)
    model: Any = M3BertForMaskedLM(config)
    if isinstance(args, TextTrainingArguments):
        model, args = model.model, args.with_settings(None, LENGTH)
    objective = args.build_objective(args.grid_for(config))
    objective.validate(config)
    nested = NestedModel(model, objective).double().train()
    model.eval()
    return nested


def run_step(nested: NestedModel, rows: slice) -> tuple[Terms, dict[str, torch.Tensor]]:
    """
    The terms of some rows of the batch (three columns of texts, or one with labels for a masked language model), and
    the embeddings of its teacher.
    """
    import torch

    from trainers import NestedBatch
    from trainers.core.parallel.ranks import rank

    generator = torch.Generator().manual_seed(1)
    masked_lm = nested.backbone.get_output_embeddings() is not None
    columns: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("text",) if masked_lm else ("anchor", "positive", "negative"):
        ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        ids[-2:] = ids[:2]
        mask = torch.arange(LENGTH) < torch.randint(2, LENGTH + 1, (ROWS, 1), generator=generator)
        mask[-2:] = mask[:2]
        columns[name] = {"input_ids": ids[rows], "attention_mask": mask.long()[rows]}
    text_ids = torch.arange(ROWS).remainder(ROWS - 2)[rows]
    teacher = {
        name: torch.randn(ROWS, DIMS[-1], dtype=torch.float64, generator=generator)[rows].requires_grad_()
        for name in columns
    }
    scores = torch.rand(ROWS, dtype=torch.float64, generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    torch.manual_seed(rank())  # draws that differ, unless the objective makes them equal on all processes
    batch = NestedBatch(
        texts=nested.encode(columns),
        text_ids=dict.fromkeys(columns, text_ids),
        teacher=teacher,
        labels=labels[rows] if masked_lm else scores[rows],
        output_embeddings=nested.backbone.get_output_embeddings(),
        num_items_in_batch=labels.numel() if masked_lm else None,
    )
    return nested.objective(batch), teacher


def gradients(nested: NestedModel) -> dict[str, torch.Tensor]:
    """Name of a parameter -> its gradient, for those that have one."""
    return {name: weight.grad for name, weight in nested.named_parameters() if weight.grad is not None}


def run_rank(rank: int, arguments: list[str], folder: str) -> None:
    """The gradients of one of two processes, written to a file."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    nested = build(arguments, folder)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    half = ROWS // 2
    terms, _ = run_step(nested, slice(rank * half, (rank + 1) * half))
    nested.objective.total(terms).backward()
    torch.save(gradients(nested), Path(folder, f"{rank}.pt"))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # the interpreter's own teardown races with gloo's threads


def gradients_of_two(nested: NestedModel, arguments: list[str], folder: str) -> dict[str, torch.Tensor]:
    """What two processes with half of the batch each have together: the mean of their gradients, or the sum for losses
    that are already divided by the tokens of the whole batch."""
    import torch

    torch.multiprocessing.spawn(run_rank, (arguments, folder), nprocs=2)
    first, second = (torch.load(Path(folder, f"{rank}.pt")) for rank in (0, 1))
    share = 1.0 if nested.objective.normalizes_by_num_items else 0.5
    zero = torch.zeros(())
    return {name: share * (first.get(name, zero) + second.get(name, zero)) for name in first | second}


def without_text(identity: Identity) -> list[str]:
    """The objectives of an identity that have no title or no equation."""
    if identity.parts:
        return [name for part in identity.parts for name in without_text(part)]
    return [] if identity.name.strip() and identity.equation.strip() else [identity.name]


def checks(arguments: list[str], folder: str) -> Iterator[tuple[str, str]]:
    """Names of the checks, each with what is wrong, or an empty text."""
    nested = build(arguments, folder)
    silent = without_text(nested.objective.identity)
    yield "card", f"no title or equation: {', '.join(silent)}" if silent else ""
    terms, teacher = run_step(nested, slice(None))
    broken = [str(term) for term, value in terms.items() if value.ndim > 0 or not value.isfinite()]
    yield "terms", f"not finite scalars: {', '.join(broken)}" if broken else "" if terms else "there are none"
    if broken or not terms:
        return
    loss = nested.objective.total(terms)
    if loss.requires_grad:
        loss.backward()
    found = gradients(nested)
    encoder = [grad for name, grad in found.items() if name.startswith("backbone.")]
    reached = any(grad.any() for grad in encoder)
    finite = all(grad.isfinite().all() for grad in encoder)
    yield "encoder", "" if reached and finite else "gradients are not finite" if reached else "no gradient reaches it"
    if not reached or not finite:
        return
    taught = [name for name, value in teacher.items() if value.grad is not None and value.grad.any()]
    yield "teacher", f"gradients reach the embeddings of {', '.join(taught)}: detach them" if taught else ""
    apart = distance(found, gradients_of_two(nested, arguments, folder))
    gather = "gather what a row is compared with (RankRows.gather), and average with RankRows.mean"
    yield "processes", "" if apart <= LARGEST_DIFFERENCE else f"gradients differ by {apart:.1%}: {gather}"


def distance(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> float:
    """The norm of the difference of gradients, as a share of the norm of the expected ones."""
    import torch

    zero = torch.zeros((), dtype=torch.float64)
    differences = [(found.get(name, zero) - expected.get(name, zero)).norm() for name in expected | found]
    return float(torch.stack(differences).norm() / torch.stack([each.norm() for each in expected.values()]).norm())


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("method", metavar="METHOD", help="path/to/mine.py:MyConfig, or a method of `m3bert train`")
    options, rest = parser.parse_known_args(arguments)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, problem in checks([options.method, *rest], folder):
            print(f"{'FAILED' if problem else 'ok':<7} {name}{': ' * bool(problem)}{problem}", flush=True)
            failed |= bool(problem)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    run_command(main)
