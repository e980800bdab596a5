"""Our method and its candidates against the papers' methods, fine-tuned on pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.reproduction.design import Claim, Method, Study
from benchmarks.reproduction.studies.settings import BASELINES, GRID, PAIRS


EXIT_DISTILLATION: dict[str, Any] = {
    "grid": GRID,
    "text_columns": ["anchor", "positive"],
    "state_only_weight": 0.0,  # native exports are not scored
}
EXITS_AND_MRL = Method("contrastive", {"grid": GRID}, exits=True)
FROM_ITSELF = Method("exit-distillation", EXIT_DISTILLATION, exits=True)
FROM_REAL = replace(FROM_ITSELF, settings={**EXIT_DISTILLATION, "full_size_weight": 1.0}, taught_by_real=True)
# The committed results with paths are of their earlier form, an affine map between the layers around a gap.
WITH_PATHS = replace(EXITS_AND_MRL, paths={2: [1, 6], 4: [1, 2, 5, 6]})
# As printed, ESE's alignment outweighs its contrastive loss and grows on the backbone `mlm`, whose vectors are long.
LIGHT_ESE = Method("espresso", {"grid": GRID, "alignment_weight": 0.01})
NESTED = Study(
    name="nested",
    title="Our method against MRL, ESE, MIPIC, MIC, Starbucks and 2DMSE, at three layers and six dims",
    source="MIPIC, MIC, ESE, Starbucks: the comparison that each makes with MRL",
    methods={
        **BASELINES,
        "ESE, alignment 0.01": LIGHT_ESE,
        "ours": FROM_ITSELF,
        "ours, taught by the real encoder": FROM_REAL,
    },
    # A masked language model's own embeddings are poor teachers.
    replacements={("ours", "mlm"): WITH_PATHS},
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
    frozen={"real": "717c0c47034b", "mlm": "2132466ef65e"},
    claims=(
        *(
            Claim("ours", name, sizes, "ours", family)
            for name in (*BASELINES, "ESE, alignment 0.01")
            for sizes, family in (("2,4,6x16,32,64", None), ("2,4x16,32,64,128,256,384", None))
        ),
        *(Claim("ours", name, "2,4,6x16,32,64", "ours", "retrieval") for name in (*BASELINES, "ESE, alignment 0.01")),
        *(Claim("ours", name, "6x384", "ours", margin=-0.3) for name in (*BASELINES, "ESE, alignment 0.01")),
        *(
            Claim(f"{paper} ({reading})", other, "6x16,32,64", paper)
            for paper, other_reading in (("MIPIC", "fair reading"), ("MIC", "layers 4, 5"))
            for reading in ("paper", other_reading)
            for other in ("MRL", "ESE")
        ),
        Claim("ESE", "2DMSE", "2,4x16,32,64,128,256,384", "ESE", "similarity"),
        Claim("Starbucks", "2DMSE", "2x32,4x128", "Starbucks", "similarity"),
    ),
)
# `mlm` of the other columns of `nested` was not kept, and making it on another processor gives other weights.
READINGS = replace(
    NESTED,
    name="readings",
    title="MIPIC and MIC as printed and in softer readings, against MRL and ESE, on one masked language model",
    source="MIPIC, MIC",
    methods={name: method for name, method in BASELINES.items() if name not in ("Starbucks", "2DMSE")},
    replacements={},
    backbones=("mlm",),
    frozen={"mlm": "b15fb9c131b7"},
    claims=tuple(
        claim for claim in NESTED.claims if claim.better.startswith(("MIPIC", "MIC")) and claim.worse in ("MRL", "ESE")
    ),
)
OURS = replace(
    NESTED,
    name="ours",
    title="Candidates for our method, on development sets",
    source="ours",
    methods={
        "MRL": BASELINES["MRL"],
        "exits + MRL": EXITS_AND_MRL,
        "exit distillation": FROM_ITSELF,
        "exits and paths + MRL": WITH_PATHS,
        "exit distillation, with the real encoder as a teacher": FROM_REAL,
    },
    replacements={},
    frozen={},
    development=("stsb-dev", "sick-dev", "scitail-dev", "tweeteval-emotion-dev", "msmarco-mini"),
    learning_rates=(3e-4,),
    families={},
    claims=(),
)
