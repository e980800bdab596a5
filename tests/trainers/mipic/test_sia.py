"""SIA as its paper says, a text and a dim at a time, and its losses at the edges."""

import math

import pytest
import torch

from m3bert.trainers import SIA, NestedBatch
from m3bert.trainers.mipic.losses import (
    attention_divergence,
    nested_token_cka,
    nested_token_counts,
    prefix_attention_scores,
    token_importance,
)
from tests.trainers.naive import TOLERANCES, assert_computed_in_float32, assert_equal_with_gradients
from tests.trainers.token_texts import DIMS, GRID, MASKS, WIDTH, assert_same, make_batch


def centred_cka(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    student, teacher = student - student.mean(dim=0), teacher - teacher.mean(dim=0)
    norms = torch.linalg.matrix_norm(student.T @ student) * torch.linalg.matrix_norm(teacher.T @ teacher)
    return torch.linalg.matrix_norm(student.T @ teacher) ** 2 / norms


def naive_sia(objective: SIA, batch: NestedBatch, temperature: float, shares: list[float], smallest: int):
    """Eqs. 4 to 14 of MIPIC, a text, a layer and a dim at a time: sums over layers and dims, means over texts."""
    total, texts = 0, 0
    for text in batch.texts.values():
        for row, mask in enumerate(text.attention_mask):
            texts += 1
            real = mask.nonzero().flatten().tolist()
            anchor = real.pop(-1 if text.causal else 0)
            for layer in objective.layers:
                full = text.layers[layer][row]
                query, teacher = full[anchor].detach(), full[real].detach()
                importance = teacher @ query / math.sqrt(WIDTH)
                order = importance.argsort(descending=True).tolist()
                projections = objective.projections[str(layer)].split(list(DIMS))
                for dim, projection, share in zip(DIMS, projections, shares, strict=True):
                    if not real:
                        continue
                    student = full[real][:, :dim]
                    scores = torch.stack([query @ (projection.T @ token) for token in student]) / math.sqrt(WIDTH)
                    ours, theirs = (scores / temperature).softmax(0), (importance / temperature).softmax(0)
                    total = total + (ours * (ours.log() - theirs.log())).sum()
                    count = min(len(real), max(smallest, math.ceil(share * len(real) - 1e-9)))
                    if count > 1:
                        kept = order[:count]
                        total = total + 1 - centred_cka(student[kept], teacher[kept])
    return total / texts


@pytest.mark.parametrize(("causal", "left"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("shares", "smallest", "temperature"), [([0.3, 0.7], 2, 0.3), ([0.2, 0.5], 8, 5.0)])
def test_sia_equals_its_equations(shares, smallest, temperature, causal, left):
    objective = SIA(GRID, temperature=temperature, token_shares=shares, smallest_token_count=smallest).double()
    with torch.no_grad():
        for projection in objective.projections.values():
            projection += 0.1 * torch.randn_like(projection)
    batch = make_batch({name: mask.flip(1) if left else mask for name, mask in MASKS.items()}, causal)
    found = assert_same(objective, batch, naive_sia(objective, batch, temperature, shares, smallest))
    for name, gradient in found.items():
        if name.startswith("view"):
            assert not gradient[..., DIMS[-1] :].any(), "the full width is a teacher"
    for name, text in batch.texts.items():
        anchors = found[f"{name} 2"][torch.arange(3), text.anchor_token_positions()]
        assert not anchors.any(), "the anchor's own state is a reference, not a student"
        assert not found[f"{name} 2"][text.attention_mask == 0].any()


def test_sia_starts_with_the_first_rows_of_the_identity():
    projections = SIA(GRID).projections["3"].split(list(DIMS))
    for dim, projection in zip(DIMS, projections, strict=True):
        torch.testing.assert_close(projection, torch.eye(WIDTH)[:dim])


def test_sia_without_one_of_its_terms():
    batch = make_batch()
    both = SIA(GRID, temperature=1.0).double()
    parts = both(batch)
    attention = SIA(GRID, temperature=1.0, cka_weight=0.0).double()
    cka = SIA(GRID, attention_weight=0.0).double()
    assert not list(cka.parameters()), "no projection that nothing trains"
    assert set(attention(batch)) | set(cka(batch)) == set(parts)
    torch.testing.assert_close(attention.total(attention(batch)) + cka.total(cka(batch)), both.total(parts))


ODD_WIDTH, ODD_DIMS, LENGTHS = 13, (1, 5, 12), (7, 4, 2, 1, 0)
# Leading tokens of texts of seven tokens that each of three dims is aligned on.
COUNTS = torch.tensor([[2, 4, 7], [3, 3, 5], [1, 1, 4], [2, 2, 2], [1, 1, 1], [0, 0, 0]])


def masks(padding):
    """Real tokens of texts of LENGTHS, and which of them is the anchor: the first one, or with left padding the last.
    The other tokens, too."""
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    positions = torch.zeros(len(LENGTHS), dtype=torch.long)
    if padding == "left":
        mask, positions = mask.flip(1), positions + max(LENGTHS) - 1
    return mask, positions, mask.scatter(1, positions[:, None], False)


def attention_inputs():
    states = torch.randn(len(LENGTHS), max(LENGTHS), ODD_WIDTH, requires_grad=True)
    return states, *(torch.randn(dim, ODD_WIDTH).div(dim**0.5).requires_grad_() for dim in ODD_DIMS)


def naive_cka(states, counts, dims):
    """Of each text at each dim, with a full width that is detached; less than two tokens have none."""
    rows = []
    for text, row in zip(states, counts.tolist(), strict=True):
        losses = [
            1 - centred_cka(text[:count, :dim], text[:count].detach()) if count > 1 else text.new_zeros(())
            for dim, count in zip(dims, row, strict=True)
        ]
        rows.append(torch.stack(losses))
    return torch.stack(rows)


def token_states(rows, width, dtype=torch.float64):
    """Seven tokens whose first entries differ by so much that float32 can tell, where the prefix is only these."""
    states = torch.randn(rows, 7, width, dtype=dtype)
    states[:, :, 0] = 0.1 * states[:, :, 0] + torch.tensor([1.0, -1.0, 2.0, -2.0, 0.4, 1.5, -0.5])
    return states


def attention_losses(states, *projections, padding="right"):
    """The functions as they are used together: the anchors are some of the states."""
    _, positions, tokens = masks(padding)
    anchors = states[torch.arange(len(states)), positions]
    dims = [len(each) for each in projections]
    scores = prefix_attention_scores([states], [anchors], [torch.cat(projections)], dims)
    return attention_divergence(scores, token_importance(states, anchors), tokens, temperature=0.3)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("content", [0.0, -1e15, 1e30])
def test_padding_receives_no_attention(padding, content):
    mask = masks(padding)[0]
    states, *projections = attention_inputs()
    found = []
    for inputs in (states, states.detach().masked_fill(~mask[:, :, None], content).requires_grad_()):
        losses = attention_losses(inputs, *projections, padding=padding)
        upstream = torch.arange(1.0, 1 + losses.numel()).view_as(losses)
        found.append((losses, *torch.autograd.grad(losses, (inputs, *projections), upstream)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (found[1][1][~mask] == 0).all()


def test_one_hot_attention_has_a_finite_divergence_and_gradient():
    scores, importance = (1e4 * torch.randn(*shape) for shape in ((4, 2, 5), (4, 5)))
    scores.requires_grad_()
    losses = attention_divergence(scores, importance, torch.ones(4, 5), temperature=0.05)
    assert torch.isfinite(losses).all()
    assert torch.isfinite(torch.autograd.grad(losses.sum(), scores)[0]).all()


@pytest.mark.parametrize("smallest", [1, 3, 8])
def test_token_counts_are_exact_ascending_and_within_the_text(smallest):
    """A share of 0.14 of 50 tokens is 7 of them, though its product in floating point is above 7."""
    assert 0.14 * 50 > 7
    percents = range(1, 101)
    counts = nested_token_counts(torch.arange(300), [percent / 100 for percent in percents], smallest=smallest)
    for total, row in enumerate(counts.tolist()):
        assert row == [min(total, max(smallest, -(-percent * total // 100))) for percent in percents]
        assert row == sorted(row)


@pytest.mark.parametrize(
    ("counts", "width", "dims"),
    [
        (COUNTS, ODD_WIDTH, ODD_DIMS), (COUNTS[:3], ODD_WIDTH, (4, 12, 13)), (COUNTS[:3, 1:], 6, (2, 3)),
        (COUNTS[:3, 2:], 3, (1,)), (torch.tensor([[3, 6], [2, 4], [2, 2]]), ODD_WIDTH, (1, 12)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_nested_token_cka_equals_the_naive_loop(dtype, counts, width, dims):
    """In the naive gradient the full width is detached."""
    states = token_states(len(counts), width)
    gradient, *_ = assert_equal_with_gradients(
        lambda s: nested_token_cka(s, counts, dims), lambda s: naive_cka(s, counts, dims), [states], dtype
    )
    assert (gradient[:, :, dims[-1] :] == 0).all()
    assert (gradient[torch.arange(7) >= counts[:, -1:]] == 0).all()


@pytest.mark.parametrize(("dtype", "content"), [(torch.float64, 1e30), (torch.float32, -1e6), (torch.float32, 0.0)])
def test_tokens_behind_the_sets_do_not_matter(dtype, content):
    states = token_states(len(COUNTS), ODD_WIDTH, dtype)
    behind = torch.arange(7) >= COUNTS[:, -1:]
    found = []
    for inputs in (states, states.masked_fill(behind[:, :, None], content)):
        leaf = inputs.requires_grad_()
        losses = nested_token_cka(leaf, COUNTS, ODD_DIMS)
        upstream = torch.arange(1.0, 1 + losses.numel()).view_as(losses).to(dtype)
        found.append((losses, *torch.autograd.grad(losses, leaf, upstream)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert (found[1][1][behind] == 0).all()


def test_tokens_that_do_not_differ_have_no_cka_loss():
    states = torch.randn(3, 4, ODD_WIDTH)
    states[0] = torch.arange(ODD_WIDTH)
    states[1, :, :5] = torch.arange(5)
    states.requires_grad_()
    losses = nested_token_cka(states, torch.tensor([[2, 4, 4]]).repeat(3, 1), ODD_DIMS)
    assert torch.equal(losses[0], torch.zeros(3))
    assert torch.equal(losses[1, :2], torch.zeros(2))
    assert (losses[1:, 2] > 0).all()
    gradient = torch.autograd.grad(losses.sum(), states)[0]
    assert torch.isfinite(gradient).all()
    assert torch.equal(gradient[0], torch.zeros(4, ODD_WIDTH))


def test_tokens_that_do_not_differ_have_no_cka_loss_whatever_the_numbers():
    """Their Gram matrix rounds; what is left of it after centring is nothing that prefixes could be aligned to."""
    for count in range(2, 17):
        states = torch.randn(1, 1, 64).repeat(1, count, 1).requires_grad_()
        losses = nested_token_cka(states, torch.full((1, 2), count), (16, 32))
        assert torch.equal(losses, torch.zeros(1, 2))
        assert torch.equal(torch.autograd.grad(losses.sum(), states)[0], torch.zeros_like(states))


@pytest.mark.parametrize("offset", [0.3, 10, 30])
def test_what_tokens_share_costs_no_digits(offset):
    """Token states of an encoder have a common mean that is larger than what sets them apart."""
    counts = torch.full((2, 2), 20)
    states = torch.randn(2, 20, 64) + offset
    assert_equal_with_gradients(
        lambda s: nested_token_cka(s, counts, (8, 32)), lambda s: naive_cka(s, counts, (8, 32)), [states],
        torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0, 0)])
def test_without_tokens_or_texts_there_is_no_cka_loss(shape):
    states = torch.randn(*shape, ODD_WIDTH, requires_grad=True)
    losses = nested_token_cka(states, torch.zeros(shape[0], 2, dtype=torch.long), (4, 12))
    assert torch.equal(losses, torch.zeros(shape[0], 2))
    assert torch.autograd.grad(losses.sum(), states)[0].shape == states.shape


def test_half_precision_and_autocast_are_computed_in_float32():
    states, *projections = attention_inputs()
    counts = torch.tensor([[2, 4, 7], [2, 3, 4], [2, 2, 2], [1, 1, 1], [0, 0, 0]])
    assert token_importance(states.bfloat16(), states[:, 0].bfloat16()).dtype == torch.float32
    assert_computed_in_float32(attention_losses, [states, *projections])
    assert_computed_in_float32(lambda its: nested_token_cka(its, counts, ODD_DIMS), [states])
