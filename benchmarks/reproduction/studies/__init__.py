"""The studies, as data: one file for each family. `run.py` runs them, `report.py` writes their tables."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.reproduction.design import Study
from benchmarks.reproduction.studies.distillation import IBKD, MATRYOSHKA_DISTILLATION
from benchmarks.reproduction.studies.finetuning import STS_FINETUNING, STS_FINETUNING_LONGER
from benchmarks.reproduction.studies.nested import NESTED, OURS, READINGS
from benchmarks.reproduction.studies.regularizers import (
    ELIMINATION,
    REGULARIZERS,
    REGULARIZERS_CLS,
    REGULARIZERS_REAL,
)


def at_paper_steps(study: Study, steps: int, later_steps: int | None = None) -> Study:
    """
    The same study for as many steps as in the paper, for a GPU.

    Args:
        study ([`Study`]): The study.
        steps (`int`): Steps of the first stage.
        later_steps (`int`, *optional*): Steps of the second stage, where there is one.
    """
    methods = {}
    for name, method in study.methods.items():
        if method.then is not None and later_steps is not None:
            method = replace(
                method, then=replace(method.then, settings={**method.then.settings, "max_steps": later_steps})
            )
        methods[name] = method
    return replace(
        study,
        name=f"{study.name}-paper-steps",
        title=f"{study.title}, for as many steps as in the paper",
        methods=methods,
        steps=steps,
    )


SMALL = (
    NESTED,
    READINGS,
    OURS,
    REGULARIZERS,
    REGULARIZERS_CLS,
    REGULARIZERS_REAL,
    ELIMINATION,
    STS_FINETUNING,
    STS_FINETUNING_LONGER,
    MATRYOSHKA_DISTILLATION,
    IBKD,
)
PAPER_STEPS = (
    *(
        at_paper_steps(study, 7500) for study in (REGULARIZERS, REGULARIZERS_CLS, REGULARIZERS_REAL)
    ),  # 5 epochs of 24,000
    at_paper_steps(MATRYOSHKA_DISTILLATION, 50_000),
    at_paper_steps(IBKD, 4635, 213),  # 10 and 3 epochs of the texts that are here
)
STUDIES = {study.name: study for study in (*SMALL, *PAPER_STEPS)}
