"""Methods and settings that several studies share."""

from __future__ import annotations

from typing import Any

from benchmarks.reproduction.design import Method


GRID = "2,4,6 x 16,32,64,128,256,384"
SIZES = "1x16,2x32,3x64,4x128,5x256,6x384"
DIMS = "16,32,64,128,256,384"
MIPIC_ON_PAIRS: dict[str, Any] = {"grid": GRID, "unsupervised": False, "pooling": "mean"}
# As printed, the attention term outweighs all others (NOTES.md). Where the paper is silent, this reading is softer.
FAIR_MIPIC = {**MIPIC_ON_PAIRS, "sia": {"temperature": 1.0}, "pic": {"detach_target": True}}
MIC_ON_PAIRS: dict[str, Any] = {"grid": GRID, "unsupervised": False}
# MIC, appendix D: layers 2 and 4 of TinyBERT's 6. The default, for any depth, is 4 and 5.
MIC_LAYERS = {"scr": {"layers": [2, 4]}, "sir": {"layers": [2, 4]}}
PAIRS: dict[str, Any] = {
    "per_device_train_batch_size": 64,
    "warmup_steps": 0.1,
    "lr_scheduler_type": "linear",
    "max_length": 64,
    "bf16": True,
}
SENTENCES: dict[str, Any] = {
    "unsupervised": True,
    "per_device_train_batch_size": 16,
    "lr_scheduler_type": "cosine",
    "max_length": 32,
    "bf16": True,
}
UNTOUCHED = Method("simcse", untouched=True)
BASELINES = {
    "MRL": Method("contrastive", {"grid": GRID}),
    "ESE": Method("espresso", {"grid": GRID}),
    "MIPIC (paper)": Method("mipic", {**MIPIC_ON_PAIRS, "pic": {"pooling": "cls"}}),
    "MIPIC (fair reading)": Method("mipic", FAIR_MIPIC),
    "MIC (paper)": Method("mic", {**MIC_ON_PAIRS, **MIC_LAYERS}),
    "MIC (layers 4, 5)": Method("mic", MIC_ON_PAIRS),
    "Starbucks": Method("starbucks", {"grid": SIZES}),
    "2DMSE": Method("2dmse", {"grid": GRID}),
}
