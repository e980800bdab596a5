"""The loss of CRD between a student's and a teacher's embeddings."""

from __future__ import annotations

import math

import torch
from torch import nn


def critic_loss(
    scores: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_normalizer: torch.Tensor,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Noise-contrastive loss of CRD's critic (Tian et al., [1910.10699](https://huggingface.co/papers/1910.10699), Eqs.
    17 to 19). With `x = exp(score) / Z`, where Z makes x 1 on average, and N negatives, the critic predicts "pair"
    with probability `h = x / (x + N)`. The loss of an anchor is `-log h(positive) - sum_negatives log(1 -
    h(negative))`. The size of the data set in the paper's Eq. 19 cancels because x is normalised, as in the released
    code.

    Args:
        scores (`torch.Tensor` of shape `(anchors, candidates)`): Cosines divided by the temperature. Carries
            gradient.
        targets (`torch.LongTensor` of shape `(anchors,)`): Index of each anchor's positive among the candidates.
        log_normalizer (scalar `torch.Tensor`): log Z.
        left_out (`torch.Tensor` of shape `(anchors, candidates)`, *optional*): Mask of candidates that are not used as
            negatives.

    Returns:
        `torch.Tensor` of shape `(anchors,)`
    """
    logits = scores - log_normalizer - math.log(max(1, scores.shape[1] - 1))
    negative_losses = nn.functional.softplus(logits)
    if left_out is not None:
        negative_losses = negative_losses.masked_fill(left_out, 0)
    positives = logits.gather(1, targets[:, None])[:, 0]
    positive_as_negative = nn.functional.softplus(positives)
    # log h = -softplus(-logit). The sum over candidates includes the positive, which is subtracted.
    return nn.functional.softplus(-positives) + negative_losses.sum(dim=1) - positive_as_negative
