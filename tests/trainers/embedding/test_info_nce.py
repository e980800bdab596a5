"""The tiled contrastive loss against the similarity matrices written out here, in value and gradient."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from m3bert.trainers.embedding.info_nce import nested_info_nce, with_own_negatives
from tests.trainers.naive import assert_computed_in_float32


def naive(anchors, candidates, *, dims, temperature, targets, anchor_ids=None, candidate_ids=None):
    """The formula, an anchor and a prefix at a time; what is no negative is skipped."""
    losses = []
    for i, anchor in enumerate(anchors):
        row = []
        for dim in dims:
            scores = {}
            for j, candidate in enumerate(candidates):
                same = anchor_ids is not None and bool((anchor_ids[i] == candidate_ids[j]).any())
                if j == targets[i] or not same:
                    product = (anchor[:dim] * candidate[:dim]).sum()
                    scores[j] = product / (anchor[:dim].norm() * candidate[:dim].norm()) / temperature
            row.append(torch.log(sum(score.exp() for score in scores.values())) - scores[int(targets[i])])
        losses.append(torch.stack(row))
    return torch.stack(losses)


def random_inputs(batch, num_candidates, width, dtype=torch.float64):
    anchors = torch.randn(batch, width, dtype=dtype, requires_grad=True)
    candidates = torch.randn(num_candidates, width, dtype=dtype, requires_grad=True)
    return anchors, candidates


def assert_equal_with_gradients(actual, expected, inputs, atol=1e-10):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=atol)
    upstream = torch.randn_like(expected)  # of both signs, and different for every row and dim
    upstream[0, 0] = 0
    for ours, theirs in zip(
        torch.autograd.grad(actual, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tile_size", [None, (1, 1), (2, 3)])
@pytest.mark.parametrize(
    ("batch", "num_candidates", "width", "dims"),
    [(5, 9, 13, (1, 4, 13)), (7, 7, 6, (2, 5)), (1, 2, 3, (3,)), (3, 2, 5, (1, 2, 3, 4, 5)), (8, 24, 4, (1,))],
)
def test_equals_the_matrices(batch, num_candidates, width, dims, tile_size, masked):
    """The first candidates are the positives by default."""
    anchors, candidates = random_inputs(batch, num_candidates, width)
    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    targets = torch.arange(batch) if batch == 7 else torch.randint(num_candidates, (batch,))
    ids = {}
    if masked:
        candidate_ids = torch.randint(5, (num_candidates, 2))
        anchor_ids = candidate_ids[targets].clone()
        anchor_ids[:, 1] = torch.randint(5, (batch,))
        ids = {"anchor_ids": anchor_ids, "candidate_ids": candidate_ids}
    arguments = {"dims": dims, "temperature": temperature, **ids}
    given = {} if batch == 7 else {"targets": targets}
    actual = nested_info_nce(anchors, candidates, tile_size=tile_size, **given, **arguments)
    assert actual.shape == (batch, len(dims))
    expected = naive(anchors, candidates, targets=targets, **arguments)
    assert_equal_with_gradients(actual, expected, (anchors, candidates, temperature))


@pytest.mark.parametrize("masked", [False, True])
def test_own_negatives_are_added_to_the_denominator_of_their_anchor(masked):
    """IBKD, Eq. 10, an anchor at a time. All negatives of an anchor may be left out."""
    (anchors, positives), dims, tau = random_inputs(4, 4, 7), (1, 3, 7), 0.2
    negatives = torch.randn(4, 2, 7, dtype=torch.float64, requires_grad=True)
    left_out = torch.tensor([[False, True], [False, False], [True, True], [True, False]]) if masked else None
    losses = []
    for i in range(4):
        used = [negative for k, negative in enumerate(negatives[i]) if not (masked and left_out[i, k])]
        candidates = torch.stack([*positives, *used])
        options = {"dims": dims, "temperature": tau, "targets": torch.tensor([i])}
        losses.append(naive(anchors[i : i + 1], candidates, **options)[0])
    without = nested_info_nce(anchors, positives, dims=dims, temperature=tau)
    found = with_own_negatives(without, anchors, positives, negatives, dims=dims, temperature=tau, left_out=left_out)
    assert_equal_with_gradients(found, torch.stack(losses), [anchors, positives, negatives])
    options = {"dims": dims, "temperature": tau, "left_out": left_out}
    assert_computed_in_float32(
        lambda *vectors: with_own_negatives(without.detach().float(), *vectors, **options),
        [anchors, positives, negatives],
    )


def test_an_anchor_whose_negatives_are_all_left_out_has_no_loss():
    anchors, candidates = random_inputs(4, 6, 3)
    ids = torch.zeros(6, 1, dtype=torch.long)
    losses = nested_info_nce(
        anchors, candidates, dims=(1, 3), temperature=0.1, anchor_ids=ids[:4], candidate_ids=ids, tile_size=(3, 2)
    )
    torch.testing.assert_close(losses, torch.zeros_like(losses))
    for gradient in torch.autograd.grad(losses.sum(), (anchors, candidates)):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient))


def test_a_low_temperature_neither_overflows_nor_underflows():
    anchors, candidates = random_inputs(6, 40, 16, dtype=torch.float32)
    arguments = {"dims": (2, 16), "temperature": 0.002, "targets": torch.arange(6)}
    losses = nested_info_nce(anchors, candidates, tile_size=(4, 8), **arguments)
    targets = arguments.pop("targets")
    scores = [
        torch.nn.functional.cosine_similarity(anchors[:, None, :d].double(), candidates[None, :, :d].double(), dim=2)
        for d in arguments["dims"]
    ]
    expected = [torch.nn.functional.cross_entropy(s / 0.002, targets, reduction="none") for s in scores]
    torch.testing.assert_close(losses.double(), torch.stack(expected, dim=1), atol=1e-3, rtol=1e-5)
    for gradient in torch.autograd.grad(losses.sum(), (anchors, candidates)):
        assert torch.isfinite(gradient).all()


def test_a_zero_vector_has_no_similarity_and_finite_gradients():
    anchors, candidates = random_inputs(3, 5, 4, dtype=torch.float32)
    with torch.no_grad():
        anchors[0], candidates[1] = 0, 0
    losses = nested_info_nce(anchors, candidates, dims=(2, 4), temperature=0.05)
    torch.testing.assert_close(losses[0], torch.full((2,), math.log(5)))
    for gradient in torch.autograd.grad(losses.sum(), (anchors, candidates)):
        assert torch.isfinite(gradient).all()


def test_half_precision_embeddings_and_autocast_are_computed_in_float32():
    assert_computed_in_float32(
        lambda *inputs: nested_info_nce(*inputs, dims=(4, 16), temperature=0.05), random_inputs(9, 20, 16)
    )


class LargestTensor(TorchDispatchMode):
    """Remembers the most entries that any result had."""

    entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries = max(self.entries, result.numel())
        return result


def test_no_similarity_matrix_ever_exists():
    anchors, candidates = random_inputs(400, 500, 4, dtype=torch.float32)
    ids = torch.arange(500)[:, None] // 2
    with LargestTensor() as largest:
        losses = nested_info_nce(
            anchors, candidates, dims=(2, 4), temperature=0.1, tile_size=(16, 32), anchor_ids=ids[:400],
            candidate_ids=ids,
        )  # fmt: skip
        torch.autograd.grad(losses.sum(), (anchors, candidates))
    assert 0 < largest.entries <= 4 * 16 * 32 + 500 * 4


def test_gradients_that_nobody_wants_are_not_computed():
    anchors, candidates = random_inputs(4, 6, 3)
    for inputs, wanted in (((anchors, candidates.detach()), anchors), ((anchors.detach(), candidates), candidates)):
        both = torch.autograd.grad(nested_info_nce(anchors, candidates, dims=(1, 3), temperature=0.1).sum(), wanted)
        one = torch.autograd.grad(nested_info_nce(*inputs, dims=(1, 3), temperature=0.1).sum(), wanted)
        torch.testing.assert_close(one, both)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least two candidates"):
        nested_info_nce(torch.randn(1, 3), torch.randn(1, 3), dims=(3,), temperature=0.05)
    with pytest.raises(ValueError, match="3 anchors need targets among 2 candidates"):
        nested_info_nce(torch.randn(3, 3), torch.randn(2, 3), dims=(3,), temperature=0.05)
    for dims in ((), (0, 2), (2, 1), (2, 4)):
        with pytest.raises(ValueError, match=r"must be ascending and within 1\.\.3"):
            nested_info_nce(torch.randn(3, 3), torch.randn(3, 3), dims=dims, temperature=0.05)
