"""False negatives that a guide finds, one pair at a time, and what the contrastive loss makes of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cosine_similarity

from tests.trainers.losses.test_contrastive import assert_equal_with_gradients, random_inputs
from trainers.losses import Guide, false_negatives, nested_info_nce


def naive_mask(anchors, candidates, targets, margin, relative):
    """One anchor and one candidate at a time."""
    mask = torch.zeros(len(anchors), len(candidates), dtype=torch.bool)
    for i, anchor in enumerate(anchors):
        own = cosine_similarity(anchor, candidates[targets[i]], dim=0)
        limit = own * (1 - margin) if relative else own - margin
        for j, candidate in enumerate(candidates):
            mask[i, j] = j != targets[i] and bool(cosine_similarity(anchor, candidate, dim=0) > limit)
    return mask


def guides(batch, num_candidates, width=5):
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(rows, width, generator=generator, dtype=torch.float64) for rows in (batch, num_candidates))


@pytest.mark.parametrize(("margin", "relative"), [(0.0, False), (0.3, False), (-0.2, False), (0.3, True), (0.0, True)])
def test_the_mask_is_that_of_each_pair(margin, relative):
    anchors, candidates = guides(7, 12)
    targets = torch.tensor([0, 3, 3, 5, 11, 2, 1])
    guide = Guide.of(anchors, candidates, targets, margin=margin, relative=relative)
    found = false_negatives(guide.anchors, guide.candidates, guide.limits, targets)
    expected = naive_mask(anchors, candidates, targets, margin, relative)
    assert torch.equal(found, expected)
    assert expected.any() and not expected.all(), "the case shows both"


def test_a_positive_is_never_a_false_negative_in_any_tile():
    anchors, candidates = guides(6, 9)
    targets = torch.tensor([0, 8, 4, 4, 1, 7])
    guide = Guide.of(anchors, candidates, targets, margin=3.0)  # all others are
    parts = [guide.tile(slice(2, 6), slice(start, start + 3), targets[2:6] - start) for start in (0, 3, 6)]
    whole = torch.cat(parts, dim=1)
    assert torch.equal(whole.logical_not().nonzero()[:, 1], targets[2:6])
    assert torch.equal(whole, guide.tile(slice(2, 6), slice(0, 9), targets[2:6]))


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("tile_size", [None, (2, 3), (4, 64)])
@pytest.mark.parametrize("dims", [(8,), (1, 3, 8)])
def test_the_loss_leaves_them_out(dims, tile_size, with_ids):
    anchors, candidates = random_inputs(6, 14, 8)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    targets, guiding = torch.tensor([0, 3, 5, 9, 13, 2]), tuple(guides(6, 14))
    mask = naive_mask(*guiding, targets, 0.2, False)
    ids = {}
    if with_ids:
        candidate_ids = torch.randint(6, (14, 1))
        ids = {"anchor_ids": candidate_ids[targets], "candidate_ids": candidate_ids}
        same = (ids["anchor_ids"] == candidate_ids.T).index_put((torch.arange(6), targets), torch.tensor(False))
        mask = mask | same
    guide = Guide.of(*guiding, targets, margin=0.2)
    arguments = {"dims": dims, "temperature": temperature, "targets": targets, "tile_size": tile_size, **ids}
    actual = nested_info_nce(anchors, candidates, guide=guide, **arguments)
    losses = []
    for dim in dims:
        scores = cosine_similarity(anchors[:, None, :dim], candidates[None, :, :dim], dim=2) / temperature
        scores = scores.masked_fill(mask, -torch.inf)
        losses.append(torch.nn.functional.cross_entropy(scores, targets, reduction="none"))
    expected = torch.stack(losses, dim=1)
    assert_equal_with_gradients(actual, expected, (anchors, candidates, temperature))
    assert (nested_info_nce(anchors, candidates, **arguments) > actual).any()
