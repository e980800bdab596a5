"""
Search an index of one encoder with queries of another: maps between the spaces, from pairs of text and vector.

    python -m benchmarks.reproduction.join --e5 FOLDER --mpnet FOLDER      # see benchmarks.reproduction.encoders
    python -m benchmarks.reproduction.report                               # write the table

all-MiniLM-L6-v2 (extra `quickstart`), multilingual-e5-small and all-mpnet-base-v2 in all six directions. The index has
the documents of the collections, embedded by its own model; pairs are random rows of it, the first of one order, so
that more pairs are the same ones and more. Queries and judgements are not read. Scores are of queries that the other
model embeds and a map takes to the space of the index: nDCG@10, and the share of the first ten documents that the
index's own model has among its first ten. Each collection is searched alone. 64 tokens per text, for speed.

The maps: orthogonal Procrustes, a low-rank affine map (rank 64) and a residual MLP (256 hidden units, GELU, with a
diagonal scale), the three of Drift-Adapter (2509.23471), and that of `m3bert join`. The two in the middle are trained
on the mean squared error by AdamW, with our settings: at most 200 epochs of batches of 64, until 10 epochs bring
nothing on a tenth of the pairs. They read embeddings of unit length, and ours the pooled hidden state.

Texts are encoded once, into runs/join. Interrupted, call again to continue. `--collections cranfield cisi` is shorter.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss, normalize

from benchmarks.reproduction.study import add_results, finished, tests_there
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.evaluation import GridEncoder
from m3bert.exits.ridge import apply_affine
from m3bert.exits.space_map import SpaceMap
from m3bert.models.auto import load_config
from m3bert.trainers import Granularity, Grid


FOLDER = Path("runs/join")
MAX_LENGTH = 64
PAIRS = (100, 500, 1000, 2000, 5000)
COLLECTIONS = ("cranfield", "cisi", "npl")
RANK, HIDDEN = 64, 256
EPOCHS, PATIENCE, BATCH, RATE = 200, 10, 64, 1e-3
Map = Callable[[torch.Tensor], torch.Tensor]  # vectors of one encoder -> the space of the other


class Encoder:
    """An encoder whose pooled hidden states of texts are kept on disk, by its name."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder

    @cached_property
    def encoder(self) -> GridEncoder:
        config = load_config(self.folder)
        torch.manual_seed(0)  # for the weights of a pooler that the checkpoint lacks
        grid = Grid((Granularity(config.num_hidden_layers, config.hidden_size),))
        return GridEncoder.from_pretrained(self.folder, grid=grid, normalize=False, max_length=MAX_LENGTH)

    def states(self, collection: str, texts: Sequence[str], role: Any) -> torch.Tensor:
        """Pooled hidden states `(texts, dims)` of documents or queries, behind the prompt of a role."""
        same = self.encoder.prompt_of("query") == self.encoder.prompt_of("document")
        folder = FOLDER / f"{self.name}-{collection}-{'any' if same else role}"
        encoded = self.encoder.encode(list(texts), role=role, folder=folder, description=folder.name)
        return encoded.at(self.encoder.grid.granularities[0])


def procrustes(inputs: torch.Tensor, targets: torch.Tensor) -> Map:
    """The rotation that brings the pairs closest."""
    left, _, right = torch.linalg.svd(normalize(inputs).T @ targets, full_matrices=False)
    return lambda vectors: normalize(vectors) @ (left @ right)


class LowRank(nn.Module):
    """`U V x + t`."""

    def __init__(self, inputs: int, targets: int) -> None:
        super().__init__()
        self.map = nn.Sequential(nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, targets))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.map(vectors)


class ResidualMLP(nn.Module):
    """`s * (x + W gelu(V x))`; a linear map of x where the spaces have other dims."""

    def __init__(self, inputs: int, targets: int) -> None:
        super().__init__()
        self.skip = nn.Identity() if inputs == targets else nn.Linear(inputs, targets, bias=False)
        self.inner = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, targets))
        self.scale = nn.Parameter(torch.ones(targets))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.skip(vectors) + self.inner(vectors))


def trained(kind: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Map:
    """A module of a kind, trained on pairs."""
    torch.manual_seed(0)
    rows = normalize(inputs)
    held, module = len(rows) // 10, kind(inputs.shape[1], targets.shape[1])
    optimizer = torch.optim.AdamW(module.parameters(), RATE, weight_decay=0.01)
    best, least, since = deepcopy(module), torch.inf, 0
    for _ in range(EPOCHS):
        for batch in (held + torch.randperm(len(rows) - held)).split(BATCH):
            optimizer.zero_grad()
            mse_loss(module(rows[batch]), targets[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(mse_loss(module(rows[:held]), targets[:held]))
        since = 0 if loss < least else since + 1
        if loss < least:
            best, least = deepcopy(module), loss
        if since == PATIENCE:
            break
    return torch.no_grad()(lambda vectors: best(normalize(vectors)))


def ours(inputs: torch.Tensor, targets: torch.Tensor) -> Map:
    affine = SpaceMap.fit(inputs, targets).affine
    return lambda vectors: apply_affine(affine, vectors)


METHODS: dict[str, Callable[[torch.Tensor, torch.Tensor], Map]] = {
    "Procrustes": procrustes,
    "low-rank affine": lambda *pairs: trained(LowRank, *pairs),
    "residual MLP": lambda *pairs: trained(ResidualMLP, *pairs),
    "m3bert join": ours,
}


def direction(queries: Encoder, index: Encoder, tests: dict[str, Any], about: dict[str, Any]) -> None:
    """The scores of all maps from one encoder to another, and of the index's own queries."""
    documents, states, of_index = {}, {}, {}
    for name, test in tests.items():
        documents[name] = normalize(index.states(name, test.texts["documents"], "document"))
        states[name] = queries.states(f"{name}-queries", test.texts["queries"], "query")
        of_index[name] = normalize(index.states(f"{name}-queries", test.texts["queries"], "query"))

    def scores(mapped: dict[str, torch.Tensor]) -> dict[str, dict[Any, float]]:
        scored: dict[str, dict[Any, float]] = {}
        for name, test in tests.items():
            sides, best = (
                {"documents": documents[name], "queries": normalize(each[name])} for each in (mapped, of_index)
            )
            near, nearest = (test.nearest(each, 10).rows for each in (sides, best))
            same = np.mean([len({*a} & {*b}) / 10 for a, b in zip(near, nearest, strict=True)])
            scored[name] = {"ndcg@10": test.score(sides)["ndcg@10"], "top ten": float(same)}
        return scored

    add_results("join", {index.name: {"0": scores(of_index)}}, about)
    inputs = torch.cat([queries.states(name, test.texts["documents"], "query") for name, test in tests.items()])
    order = list(range(len(inputs)))
    random.Random(0).shuffle(order)
    inputs, targets = inputs[order], torch.cat([*documents.values()])[order]
    for pairs in PAIRS:
        for method, fit in METHODS.items() if pairs <= len(inputs) else ():
            run = f"{queries.name} to {index.name}, {pairs} pairs, {method}"
            if run not in finished("join", about):
                fitted = fit(inputs[:pairs], targets[:pairs])
                run_scores = scores({name: fitted(rows) for name, rows in states.items()})
                print(run, run_scores, flush=True)
                add_results("join", {run: {"0": run_scores}}, about)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--e5", required=True, help="folder of e5, also trimmed to the texts")
    parser.add_argument("--mpnet", help="folder of MPNet; default: without it")
    parser.add_argument("--collections", nargs="+", default=COLLECTIONS, choices=COLLECTIONS, help="default: all")
    options = parser.parse_args(arguments)
    folders = {"MiniLM": default_base(), "e5": options.e5, "MPNet": options.mpnet}
    encoders = [Encoder(name, folder) for name, folder in folders.items() if folder is not None]
    tests = tests_there(options.collections, data_folder())
    about = {
        "command": "python -m benchmarks.reproduction.join",
        "settings": {"collections": [*tests], "max_length": MAX_LENGTH, "pairs": [*PAIRS]},
        "seed": "0: the order of the pairs, and the trained maps",
        "metric": "run -> seed -> collection -> metric",
    }
    for queries in encoders:
        for index in encoders:
            if queries is not index:
                direction(queries, index, tests, about)


if __name__ == "__main__":
    run_command(main)
