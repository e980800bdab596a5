"""PIC as its paper says."""

import pytest
import torch
from torch.nn import functional

from m3bert.trainers import PIC, Grid, NestedBatch
from m3bert.trainers.mipic.pic import default_chain
from tests.trainers.token_texts import CHAIN, assert_same, make_batch


def test_a_chain_that_is_not_given_has_the_dims_of_the_deepest_layer():
    assert str(default_chain(Grid.parse("6x16,32,64,128,256,384"))) == "1x16,2x32,3x64,4x128,5x256,6x384"
    assert str(default_chain(Grid.parse("2x8,16,32"))) == "1x8,2x32"
    assert str(default_chain(Grid.parse("2x4,4x8,4x32"))) == "2x8,4x32"
    for depth in (1, 2, 3, 5, 28):
        for count in (1, 2, 7):
            dims = [2**power for power in range(3, 3 + count)]
            steps = list(default_chain(Grid.product([depth], dims)))
            assert len(steps) == min(depth, count) and steps[-1].layer == depth


def test_a_chain_may_be_given_as_text_or_as_a_grid():
    grid = Grid.parse("3x2,5,12")
    for chain in ("1x2,3x12", Grid.parse("1x2,3x12")):
        assert str(PIC.for_grid(grid, chain=chain, temperature=0.1).grid) == "1x2,3x12"
    assert str(PIC.for_grid(grid).grid) == "1x2,2x5,3x12"


def naive_pic(objective: PIC, batch: NestedBatch, pooling: str, detach: bool) -> torch.Tensor:
    """Eqs. 16 and 17 of MIPIC, a text and a link at a time: sums over links, means over columns."""
    total = 0
    for text in batch.texts.values():
        for (lower, upper), project in zip(objective.links, objective.projectors, strict=True):
            pooled = []
            for granularity in (lower, upper):
                state, mask = text.layers[granularity.layer], text.attention_mask
                rows = []
                for tokens, real in zip(state, mask, strict=True):
                    kept = tokens[real.bool()]
                    rows.append({"cls": kept[0], "lasttoken": kept[-1], "mean": kept.mean(dim=0)}[pooling])
                pooled.append(torch.stack(rows)[:, : granularity.dim])
            source, target = project(pooled[0]), pooled[1].detach() if detach else pooled[1]
            cosines = functional.cosine_similarity(source[:, None], target[None], dim=2)
            total = total + functional.cross_entropy(cosines / 0.1, torch.arange(len(cosines)))
    return total / len(batch.texts)


@pytest.mark.parametrize(
    ("pooling", "causal", "detach"),
    [("cls", False, False), ("cls", False, True), ("lasttoken", False, False), ("lasttoken", True, True)]
    + [("mean", False, True), ("mean", True, False)],
)
def test_pic_equals_its_equations(pooling, detach, causal):
    objective = PIC(CHAIN, temperature=0.1, pooling=pooling, detach_target=detach).double()
    batch = make_batch(causal=causal)
    found = assert_same(objective, batch, naive_pic(objective, batch, pooling, detach))
    assert found["projectors.0.0.weight"].any() and found["view 1 2"].any()
    assert found["view 1 3"].any() != detach, "the last of the chain is only a target"


def test_pic_leaves_equal_texts_out_of_the_negatives():
    batch = make_batch({"text": torch.ones(4, 3, dtype=torch.long)})
    objective = PIC(Grid.parse("1x2,3x12"), temperature=0.1).double()
    ids = {"text": torch.tensor([5, 6, 5, 7])}
    source = objective.projectors[0](batch.texts["text"].layers[1][:, 0, :2])
    target = batch.texts["text"].layers[3][:, 0]
    scores = functional.cosine_similarity(source[:, None], target[None], dim=2) / 0.1
    scores = scores.masked_fill(torch.tensor([[0, 0, 1, 0], [0] * 4, [1, 0, 0, 0], [0] * 4]).bool(), -torch.inf)
    marked = NestedBatch(batch.texts, text_ids=ids)
    torch.testing.assert_close(
        objective.total(objective(marked)), functional.cross_entropy(scores, torch.arange(4)), atol=1e-9, rtol=1e-9
    )
