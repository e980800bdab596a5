"""What draws a student's embeddings to a teacher's, beside InfoNCE."""

from __future__ import annotations

import math

import torch
from torch import nn

from ._blocks import no_autocast, precise


def critic_scores(first: torch.Tensor, second: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Cosines over temperature of every row with every row, `(rows, rows)`, in float32 at least."""
    first, second = (nn.functional.normalize(precise(vectors), dim=1) for vectors in (first, second))
    with no_autocast(first):
        return first @ second.T / temperature


def critic_loss(
    scores: torch.Tensor,
    targets: torch.Tensor,
    *,
    log_normalizer: torch.Tensor,
    left_out: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Noise-contrastive loss of CRD's critic (Tian et al., [1910.10699](https://huggingface.co/papers/1910.10699), Eqs.
    17 to 19): with `x = exp(score) / Z`, Z such that x is 1 on average, and N negatives, the critic says "pair" with
    the chance `h = x / (x + N)`; the loss of an anchor is `-log h(positive) - sum_negatives log(1 - h(negative))`. The
    size of the data set, which the paper's Eq. 19 has in it, cancels once x is normalised, as its released code does.

    Args:
        scores (`torch.Tensor` of shape `(anchors, candidates)`): From [`critic_scores`]. Carry gradient.
        targets (`torch.LongTensor` of shape `(anchors,)`): Candidate that is each anchor's positive.
        log_normalizer (scalar `torch.Tensor`): log Z.
        left_out (`torch.Tensor` of shape `(anchors, candidates)`, *optional*): Candidates that are no negatives.

    Returns:
        `torch.Tensor` of shape `(anchors,)`
    """
    logits = scores - log_normalizer - math.log(max(1, scores.shape[1] - 1))
    refused = nn.functional.softplus(logits)
    if left_out is not None:
        refused = refused.masked_fill(left_out, 0)
    positives = logits.gather(1, targets[:, None])[:, 0]
    own = nn.functional.softplus(positives)
    # log h = -softplus(-logit); the positive's own share of the sum over candidates goes out again.
    return nn.functional.softplus(-positives) + refused.sum(dim=1) - own
