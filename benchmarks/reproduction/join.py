"""
Join an index: a small encoder is fitted into the space of another one, whose index it then searches.

    python -m benchmarks.reproduction.join --model FOLDER     # of multilingual-e5-small
    python -m benchmarks.reproduction.report                  # write the table

all-MiniLM-L6-v2 (extra `quickstart`) into the space of e5, and e5 into that of MiniLM, as `m3bert fit
--target_vectors` does it, with 1,000 to 20,000 pairs of text and vector. The texts are those of
benchmarks.reproduction.exits, none of which is of a test, in one random order: more pairs are the same ones and more.
The vectors are passages of e5; MiniLM has no prompts. Documents are then embedded by the target alone, and queries by
the other encoder at full depth, through its exit, or by its static table (nDCG@10, 128 tokens per text). Runs "e5" and
"minilm": the target's own queries.

"5000 pairs and the index" adds all documents of the collection with their vectors, which is what an export of a small
index has; queries and judgements are not read.

Each text is encoded once by each encoder, into runs/join. Interrupted, call again to continue.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tqdm.auto import tqdm
from transformers import AutoModel, AutoTokenizer

from benchmarks.reproduction.exits import MAX_LENGTH, RESULTS, sources
from benchmarks.reproduction.study import add_results, tests_there
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder, default_base
from m3bert.exits.passes import RawStates
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity, TeacherEmbeddings, fit_exits, nested_states, truncate


FOLDER = Path("runs/join")
FILE = RESULTS / "join.json"
PAIRS = (1000, 2500, 5000, 10_000, 20_000)
TESTS = ("cranfield", "cisi", "msmarco-mini")
OWN = "5000 pairs and the index"
AT_ONCE = 500  # texts that an interruption loses


class Encoder:
    """An encoder whose pooled hidden states of texts are kept on disk, by its name."""

    def __init__(self, name: str, folder: str) -> None:
        self.name, self.folder = name, folder
        self.prompts = (EmbeddingSettings.find(folder) or EmbeddingSettings()).prompts
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.kept = FOLDER / name
        self.known: dict[str, torch.Tensor] = {}
        for file in self.kept.glob("*.pt"):
            self.known |= torch.load(file)

    @cached_property
    def model(self) -> Any:
        return AutoModel.from_pretrained(self.folder).eval()

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = self.tokenizer(list(texts), truncation=True, max_length=MAX_LENGTH)["input_ids"]
        return found

    @torch.no_grad()
    def states(self, texts: Sequence[str], role: str | None = None) -> torch.Tensor:
        """Pooled states `(texts, width)` of texts behind the prompt of a role."""
        prompted = [self.prompts.get(role or "", "") + text for text in texts]
        missing = list(dict.fromkeys(text for text in prompted if text not in self.known))
        for start in tqdm(range(0, len(missing), AT_ONCE), f"{self.name} {role or ''}", leave=False):
            part = missing[start : start + AT_ONCE]
            raw, depth = RawStates(self.model, self.tokenizer, "mean", 64), self.model.config.num_hidden_layers
            self.known |= (found := dict(zip(part, raw.pooled(self.ids(part), [depth])[depth], strict=True)))
            self.kept.mkdir(parents=True, exist_ok=True)
            torch.save({text: its.clone() for text, its in found.items()}, self.kept / f"{len(self.known)}.pt")
        return torch.stack([self.known[text] for text in prompted])

    def vectors(self, texts: Sequence[str], role: str) -> torch.Tensor:
        """Normalised embeddings `(texts, width)`."""
        states = self.states(texts, role)
        return truncate(states, states.shape[1], normalize=True)


def pairs_of(data: Path) -> list[str]:
    """The texts of all pairs, in a random order."""
    texts = [text for its in sources(data).values() for text in its]
    random.Random(0).shuffle(texts)
    return list(dict.fromkeys(texts))


@torch.no_grad()
def fitted(student: Encoder, target: Encoder, texts: Sequence[str]) -> Any:
    """The student, with its table and its full depth in the target's space. Its states of texts are those that were
    kept; the vocabulary is encoded once for all fits."""
    model = AutoModel.from_pretrained(student.folder).eval()
    encode = RawStates.pooled
    prompts = list(dict.fromkeys(student.prompts.values())) or [""]
    known: dict[tuple[int, ...], torch.Tensor] = {}
    for turn, prompt in enumerate(prompts):  # prompts take turns
        own = texts[turn :: len(prompts)]
        role = next((role for role, its in student.prompts.items() if its == prompt), None)
        ids = student.ids([prompt + text for text in own])
        known |= dict(zip(map(tuple, ids), student.states(own, role), strict=True))

    def remembered(raw: RawStates, ids: list[list[int]], layers: Sequence[int]) -> dict[int, torch.Tensor]:
        if tuple(ids[0]) not in known:  # the vocabulary
            return encode(raw, ids, layers)
        return {layer: torch.stack([known[tuple(its)] for its in ids]) for layer in layers}

    with patch.object(RawStates, "pooled", remembered):
        fit_exits(
            model,
            student.tokenizer,
            texts,
            layers=[0],
            teacher=TeacherEmbeddings(texts, target.vectors(texts, "document").numpy()),
            teacher_name=target.name,
            prompts=prompts,
            max_length=MAX_LENGTH,
            cache_dir=FOLDER,
            description="Fit",
        )
    return model


@torch.no_grad()
def queries_of(model: Any, student: Encoder, texts: Sequence[str], depth: int) -> torch.Tensor:
    """Embeddings of queries at a depth of a fitted model."""
    found = []
    prompted = [student.prompts.get("query", "") + text for text in texts]
    for start in range(0, len(texts), 64):
        ids = student.ids(prompted[start : start + 64])
        inputs = student.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        found.append(nested_states(model, inputs, [depth]).pooled(depth, "mean"))
    vectors = torch.cat(found)
    return truncate(vectors, vectors.shape[1], normalize=True)


def finished() -> set[str]:
    """The runs that have scores."""
    return {*json.loads(FILE.read_text(encoding="utf-8"))["scores"]} if FILE.is_file() else set()


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", required=True, help="folder of e5, also trimmed to the texts")
    parser.add_argument("--only", choices=["e5", "minilm"], help="the target of the fits; default: both in turn")
    options = parser.parse_args(arguments)
    data = data_folder()
    encoders = Encoder("minilm", default_base()), Encoder("e5", options.model)
    tests = tests_there(TESTS, data)
    texts = pairs_of(data)
    about = {
        "command": "python -m benchmarks.reproduction.join",
        "settings": {"pairs": PAIRS, "texts": len(texts), "max_length": MAX_LENGTH},
        "seed": "0: the order of the texts",
        "metric": "nDCG@10; run -> seed -> test -> granularity of the queries",
    }
    about = json.loads(json.dumps(about))
    for student, target in (encoders, encoders[::-1]):
        if options.only not in (None, target.name):
            continue
        documents = {name: target.vectors(list(its.texts["documents"]), "document") for name, its in tests.items()}

        def scored(name: str, queries: torch.Tensor, documents: Any = documents) -> float:
            evaluator = tests[name]
            return evaluator.score({"queries": queries, "documents": documents[name]})[evaluator.main_metric]

        if target.name not in finished():
            size = Granularity(target.model.config.num_hidden_layers, target.model.config.hidden_size)
            own = {
                name: {size: scored(name, target.vectors(list(its.texts["queries"]), "query"))}
                for name, its in tests.items()
            }
            print(target.name, own, flush=True)
            add_results(FILE, {target.name: {"0": own}}, about)
        plans = {f"{number} pairs": dict.fromkeys(tests, texts[:number]) for number in PAIRS}
        plans[OWN] = {
            name: [text for text in dict.fromkeys([*its.texts["documents"], *texts[:5000]]) if text.strip()]
            for name, its in tests.items()
        }
        for plan, of_tests in sorted(plans.items(), key=lambda its: int(its[0].split()[0])):
            run, before = f"{student.name} into {target.name}, {plan}", None
            model: Any = None
            if run in finished():
                continue
            scores: dict[str, dict[Granularity, float]] = {}
            for name, of_fit in of_tests.items():
                if of_fit is not before:
                    model, before = fitted(student, target, of_fit), of_fit
                last, width = model.config.num_hidden_layers, model.config.hidden_size
                queries = list(tests[name].texts["queries"])
                scores[name] = {
                    Granularity(depth, width): scored(name, queries_of(model, student, queries, depth))
                    for depth in (0, last)
                }
            print(run, scores, flush=True)
            add_results(FILE, {run: {"0": scores}}, about)


if __name__ == "__main__":
    run_command(main)
