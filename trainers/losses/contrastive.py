"""Contrastive losses."""

from __future__ import annotations

import torch
from torch import nn


def info_nce(anchors: torch.Tensor, candidates: torch.Tensor, *, temperature: float) -> torch.Tensor:
    r"""
    InfoNCE on cosines (m3BERT, [2605.19568](https://huggingface.co/papers/2605.19568), Eq. 1):
    `mean_i -log( exp(cos(a_i, c_i) / tau) / sum_j exp(cos(a_i, c_j) / tau) )`.

    Args:
        anchors (`torch.Tensor` of shape `(batch, dim)`): Need not be normalised. Carries gradient.
        candidates (`torch.Tensor` of shape `(num_candidates, dim)`): The first `batch` rows are the positives, in the
            order of the anchors; every other row is a negative of every anchor. Carries gradient.
        temperature (`float`): tau.

    Returns:
        `torch.Tensor`: scalar, the mean over anchors.

    Raises:
        ValueError: if there is nothing to contrast with (one candidate), or fewer candidates than anchors.
    """
    if len(candidates) < 2:
        raise ValueError(
            "A contrastive loss needs at least two candidates; a batch of one pair without hard negatives has one."
        )
    if len(candidates) < len(anchors):
        raise ValueError(f"{len(anchors)} anchors need as many positives, but there are {len(candidates)} candidates.")
    anchors = nn.functional.normalize(anchors, dim=-1)
    candidates = nn.functional.normalize(candidates, dim=-1)
    positives = torch.arange(len(anchors), device=anchors.device)
    return nn.functional.cross_entropy(anchors @ candidates.T / temperature, positives)
