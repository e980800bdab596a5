"""The studies, as data. `run.py` runs them, `report.py` writes their tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.reproduction.ours import NestedSimilarityConfig
from benchmarks.reproduction.study import Run
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    EspressoConfig,
    EspressoTrainer,
    ExitDistillationConfig,
    ExitDistillationTrainer,
    Matryoshka2dConfig,
    Matryoshka2dTrainer,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
    StarbucksConfig,
    StarbucksTrainer,
)


@dataclass(frozen=True)
class Method(Run):
    """
    One column of a study's tables: a [`Run`], and what comes before it.

    Args:
        exits (`bool`, *optional*, defaults to `False`): Fit exits with a static table to the training texts first.
        taught_by_real (`bool`, *optional*, defaults to `False`): The real encoder is the teacher, also of the exits.
            Without, a method with a teacher learns from its own backbone.
        learning_rates (`tuple[float, ...]`, *optional*): Learning rates to search. Default: those of the study.
    """

    exits: bool = False
    taught_by_real: bool = False
    learning_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Claim:
    """
    A claimed difference between two methods: `better` is above `worse`.

    Args:
        better (`str`): A method.
        worse (`str`): A method.
        sizes (`str`): Granularities to average over, as a [`Grid`].
        source (`str`): The paper that claims it, or "ours".
        family (`str`, *optional*): Family of tasks. Default: the mean of all families.
        margin (`float`, *optional*, defaults to 0.0): The difference must be above this number of points.
    """

    better: str
    worse: str
    sizes: str
    source: str
    family: str | None = None
    margin: float = 0.0


@dataclass(frozen=True)
class Study:
    """
    A study: every method, on every backbone, with every seed.

    Args:
        name (`str`): Its name, and that of its folder of results.
        title (`str`): One sentence for the pages.
        source (`str`): The papers and their tables.
        methods (`dict[str, Method]`): Name -> method.
        backbones (`tuple[str, ...]`): Names of backbones.
        grid (`str`): Granularities to score.
        steps (`int`): Training steps.
        settings (`dict`): Settings that all methods share.
        learning_rates (`tuple[float, ...]`): Learning rates, of which the best for each method and backbone on the
            development tasks is taken. A single one is not searched.
        development (`tuple[str, ...]`): Development tasks; `NAME-dev` is the development set of a task.
        families (`dict[str, tuple[str, ...]]`, *optional*): Family -> its test tasks. Without, the study scores
            development tasks only.
        replacements (`dict[tuple[str, str], Method]`, *optional*): (method, backbone) -> what the method is there.
        seeds (`tuple[int, ...]`, *optional*): Seeds of the test runs. Development runs have the first one.
        claims (`tuple[Claim, ...]`, *optional*): Claimed differences.
        reported (`dict[str, dict[str, float]]`, *optional*): Method -> granularity -> the paper's mean, in percent.
        frozen (`dict[str, str]`, *optional*): Backbone -> commit at which its settings were frozen, with the
            development results that the learning rates are chosen by. Without, no test is scored.
    """

    name: str
    title: str
    source: str
    methods: Mapping[str, Method]
    backbones: tuple[str, ...]
    grid: str
    steps: int
    settings: Mapping[str, Any]
    learning_rates: tuple[float, ...]
    development: tuple[str, ...]
    families: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replacements: Mapping[tuple[str, str], Method] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    claims: tuple[Claim, ...] = ()
    reported: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    frozen: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> list[str]:
        """The test tasks of all families."""
        return [task for tasks in self.families.values() for task in tasks]

    def method(self, name: str, backbone: str) -> Method:
        """What a method is on a backbone."""
        return self.replacements.get((name, backbone), self.methods[name])

    def rates(self, name: str, backbone: str) -> tuple[float, ...]:
        """The learning rates to search for a method on a backbone."""
        return self.method(name, backbone).learning_rates or self.learning_rates


GRID = "2,4,6 x 16,32,64,128,256,384"
SIZES = "1x16,2x32,3x64,4x128,5x256,6x384"
# Temperature 1 and targets without gradient: with 0.05, the attention term outweighs all others (NOTES.md).
MIPIC: dict[str, Any] = {
    "grid": GRID,
    "unsupervised": False,
    "pooling": "mean",
    "sia": {"temperature": 1.0},
    "pic": {"detach_target": True},
}
EXIT_DISTILLATION: dict[str, Any] = {
    "grid": GRID,
    "text_columns": ["anchor", "positive"],
    "state_only_weight": 0.0,  # native exports are not scored
}
PAIRS: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "linear",
    "max_length": 64,
    "bf16": True,
    "use_cpu": True,
}
EXITS_AND_MRL = Method(ContrastiveConfig, ContrastiveTrainer, {"grid": GRID}, exits=True)
FROM_ITSELF = Method(
    ExitDistillationConfig, ExitDistillationTrainer, EXIT_DISTILLATION, exits=True, learning_rates=(1e-4, 3e-4)
)
FROM_REAL = Method(
    ExitDistillationConfig,
    ExitDistillationTrainer,
    {**EXIT_DISTILLATION, "full_size_weight": 1.0},
    exits=True,
    taught_by_real=True,
    learning_rates=(1e-4, 3e-4),
)
BASELINES = {
    "MRL": Method(ContrastiveConfig, ContrastiveTrainer, {"grid": GRID}),
    "ESE": Method(EspressoConfig, EspressoTrainer, {"grid": GRID}),
    "MIPIC": Method(MIPICConfig, MIPICTrainer, MIPIC),
    "MIC": Method(MICConfig, MICTrainer, {"grid": GRID, "unsupervised": False}),
    "Starbucks": Method(StarbucksConfig, StarbucksTrainer, {"grid": SIZES}),
    "2DMSE": Method(Matryoshka2dConfig, Matryoshka2dTrainer, {"grid": GRID}),
}
NESTED = Study(
    name="nested",
    title="Our method against MRL, ESE, MIPIC, MIC, Starbucks and 2DMSE, at three layers and six dims",
    source="MIPIC, MIC, ESE, Starbucks: the comparison that each makes with MRL",
    methods={**BASELINES, "ours": FROM_ITSELF},
    replacements={("ours", "mlm"): EXITS_AND_MRL},
    backbones=("real", "mlm"),
    grid=GRID,
    steps=100,
    settings=PAIRS,
    learning_rates=(1e-4, 3e-4),
    development=("stsb-dev",),
    families={
        "similarity": ("stsb", "sts12", "sts13", "sts16", "sick"),
        "pairs": ("wic", "scitail"),
        "classification": ("tweeteval-emotion",),
        "retrieval": ("cranfield", "cisi"),
    },
    claims=(
        *(
            Claim("ours", name, sizes, "ours", family)
            for name in BASELINES
            for sizes, family in (("2,4,6x16,32,64", None), ("2,4x16,32,64,128,256,384", None))
        ),
        *(Claim("ours", name, "2,4,6x16,32,64", "ours", "retrieval") for name in BASELINES),
        *(Claim("ours", name, "6x384", "ours", margin=-0.3) for name in BASELINES),
        Claim("MIPIC", "MRL", "6x16,32,64", "MIPIC"),
        Claim("MIPIC", "ESE", "6x16,32,64", "MIPIC"),
        Claim("MIC", "MRL", "6x16,32,64", "MIC"),
        Claim("MIC", "ESE", "6x16,32,64", "MIC"),
        Claim("ESE", "2DMSE", "2,4x16,32,64,128,256,384", "ESE", "similarity"),
        Claim("Starbucks", "2DMSE", "2x32,4x128", "Starbucks", "similarity"),
    ),
)
OURS = replace(
    NESTED,
    name="ours",
    title="Candidates for our method, on development sets",
    source="ours",
    methods={
        "exits + MRL": EXITS_AND_MRL,
        "exits + MRL + similarities of the full size": Method(
            NestedSimilarityConfig, StarbucksTrainer, {"grid": GRID}, exits=True
        ),
        "exit distillation": FROM_ITSELF,
        "exit distillation, with the real encoder as a teacher": FROM_REAL,
    },
    replacements={},
    development=("stsb-dev", "sick-dev", "scitail-dev", "msmarco-mini"),
    families={},
    claims=(),
)
STUDIES = {study.name: study for study in (NESTED, OURS)}
