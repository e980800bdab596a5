"""The losses of QAMA against loops over texts, candidates and dims, in value and gradient."""

import math

import pytest
import torch

from m3bert.trainers.qama import losses
from m3bert.utils.numerics import cosine_matrix


TEXTS, CANDIDATES, WIDTH = 5, 7, 11


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def cosines(*shape: int) -> torch.Tensor:
    return (torch.rand(*shape, dtype=torch.float64) * 2 - 1).requires_grad_()


def naive_similarity(found, wanted):
    return [
        sum((s - t) ** 2 for s, t in zip(*rows, strict=True)) / len(rows[0])
        for rows in zip(found, wanted, strict=True)
    ]


def naive_divergence(found, wanted, temperature=0.1):
    values = []
    for student, teacher in zip(found, wanted, strict=True):
        p, q = ((side / temperature).exp() / (side / temperature).exp().sum() for side in (student, teacher))
        values.append(0.5 * sum(a * (a / b).log() + b * (b / a).log() for a, b in zip(p, q, strict=True)))
    return values


def naive_rank_error(found, wanted, scale=10.0):
    values = []
    for student, teacher in zip(found, wanted, strict=True):
        pairs = [(j, k) for j in range(len(student)) for k in range(len(student))]
        orders = [[1 / (1 + (-scale * (side[j] - side[k])).exp()) for j, k in pairs] for side in (student, teacher)]
        values.append(sum((s - t) ** 2 for s, t in zip(*orders, strict=True)) / len(pairs))
    return values


def naive_overlap(vectors, dims):
    def unit_rows(part):
        return torch.stack([row / row.norm() for row in part])

    total = torch.zeros((), dtype=vectors.dtype)
    for level in range(1, len(dims)):
        added = unit_rows(vectors[:, dims[level - 1] : dims[level]])
        for earlier in range(level):
            before = unit_rows(vectors[:, : dims[earlier]])
            squares = [(column @ other) ** 2 for column in added.T for other in before.T]
            total = total + sum(squares).sqrt() / len(vectors)
    return total


def naive_bottleneck(vectors, offset=0.1, exponent=0.3):
    n = vectors.shape[1]
    return [
        sum((i + 1) / n * (x**2 / (offset + x.abs())) ** exponent for i, x in enumerate(vector)) for vector in vectors
    ]


def naive_variance_control(vectors):
    total = 0
    for dim in vectors.T:
        mean = sum(dim) / len(dim)
        total = total + (-(sum((x - mean) ** 2 for x in dim) / len(dim)).sqrt()).exp()
    return total


def naive_repulsion(numbers, thresholds):
    return [
        sum((-min((x - t).abs() for t in thresholds[:, dim])).exp() for dim, x in enumerate(row)) / len(row)
        for row in numbers
    ]


def naive_range(numbers, low, high):
    values = []
    for row in numbers:
        outside = [(a - x) if x < a else (x - b) if x > b else 0 * x for x, a, b in zip(row, low, high, strict=True)]
        values.append(sum(x**2 for x in outside) / len(row))
    return values


def thresholds() -> torch.Tensor:
    return draw(3, WIDTH).detach().sort(dim=0).values


# Name -> function, naive form, and its inputs: the first carries gradient.
CASES = {
    "similarity": (losses.similarity_error, naive_similarity, lambda: [cosines(TEXTS, CANDIDATES) for _ in "st"]),
    "divergence": (losses.similarity_divergence, naive_divergence, lambda: [cosines(TEXTS, CANDIDATES) for _ in "st"]),
    "rank error": (losses.rank_error, naive_rank_error, lambda: [cosines(3, CANDIDATES) for _ in "st"]),
    "overlap": (losses.added_dims_overlap, naive_overlap, lambda: [draw(TEXTS, WIDTH), [2, 5, WIDTH]]),
    "bottleneck": (losses.information_bottleneck, naive_bottleneck, lambda: [draw(TEXTS, WIDTH)]),
    "variance": (losses.variance_control, naive_variance_control, lambda: [draw(TEXTS, WIDTH)]),
    "repulsion": (losses.threshold_repulsion, naive_repulsion, lambda: [draw(TEXTS, WIDTH), thresholds()]),
    "range": (
        losses.range_penalty, naive_range,
        lambda: [draw(TEXTS, WIDTH), *(torch.full((WIDTH,), at, dtype=torch.float64) for at in (-0.5, 0.4))],
    ),
}  # fmt: skip
WITH_TEACHER = ["similarity", "divergence", "rank error"]
PRECISE = ["overlap", "bottleneck", "variance"]  # those that widen half precision themselves


def as_tensor(values) -> torch.Tensor:
    return values if isinstance(values, torch.Tensor) else torch.stack(values)


@pytest.mark.parametrize("name", list(CASES))
def test_values_and_gradients_are_those_of_a_loop(name):
    function, naive, inputs = CASES[name]
    inputs = inputs()
    found, expected = function(*inputs), as_tensor(naive(*inputs))
    assert found.shape == expected.shape and found.dtype == torch.float64
    torch.testing.assert_close(found, expected)
    weights = torch.rand_like(found)
    gradients = [torch.autograd.grad((value * weights).sum(), inputs[0])[0] for value in (found, expected)]
    assert gradients[1].abs().sum() > 0
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-6)


def test_cosines_are_those_of_a_loop():
    vectors, candidates = draw(3, WIDTH), draw(4, WIDTH)
    expected = torch.stack([torch.cosine_similarity(v[None], candidates) for v in vectors])
    torch.testing.assert_close(cosine_matrix(vectors, candidates), expected)
    inputs = (vectors, candidates)
    for found, wanted in zip(
        *(torch.autograd.grad(x.square().sum(), inputs) for x in (cosine_matrix(*inputs), expected)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", WITH_TEACHER)
def test_a_teacher_gets_no_gradient_and_its_own_similarities_have_no_loss(name):
    function, _, inputs = CASES[name]
    student, teacher = inputs()
    function(student, teacher).sum().backward()
    assert student.grad.any() and teacher.grad is None
    same = teacher.detach().clone().requires_grad_()
    loss = function(same, teacher)
    torch.testing.assert_close(loss, torch.zeros_like(loss))
    loss.sum().backward()
    torch.testing.assert_close(same.grad, torch.zeros_like(same))
    assert (function(student, teacher) > 0).all()


@pytest.mark.parametrize("name", ["repulsion", "range"])
def test_thresholds_get_no_gradient(name):
    function, _, inputs = CASES[name]
    numbers, *others = inputs()
    others = [other.requires_grad_() for other in others]
    function(numbers, *others).sum().backward()
    assert numbers.grad.any() and all(other.grad is None for other in others)


def test_temperature_and_scale_are_used():
    student, teacher = (cosines(TEXTS, CANDIDATES) for _ in "st")
    expected = as_tensor(naive_divergence(student, teacher, 0.5))
    torch.testing.assert_close(losses.similarity_divergence(student, teacher, temperature=0.5), expected)
    torch.testing.assert_close(
        losses.rank_error(student, teacher, scale=2.0), as_tensor(naive_rank_error(student, teacher, 2.0))
    )
    vectors = draw(TEXTS, WIDTH)
    found = losses.information_bottleneck(vectors, offset=0.4, exponent=0.7)
    torch.testing.assert_close(found, as_tensor(naive_bottleneck(vectors, 0.4, 0.7)))


@pytest.mark.parametrize("dims", [[WIDTH], [1]])
def test_one_nested_dim_adds_no_dims(dims):
    overlap = losses.added_dims_overlap(draw(TEXTS, dims[0]), dims)
    assert overlap.shape == () and overlap == 0


def test_the_bottleneck_and_the_variance_are_finite_at_zero():
    vectors = torch.zeros(TEXTS, WIDTH, requires_grad=True)
    (losses.information_bottleneck(vectors).sum() + losses.variance_control(vectors)).backward()
    assert torch.isfinite(vectors.grad).all()
    assert torch.isfinite(losses.variance_control(torch.randn(1, WIDTH)))


def test_bits_are_exact_and_have_the_gradient_of_a_soft_step():
    for dtype in (torch.float32, torch.float64):
        margins = draw(200, WIDTH, dtype=dtype)
        assert set(losses.soft_bits(margins).unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(losses.soft_bits(margins) > 0, margins > 0)
    assert losses.soft_bits(torch.zeros(3, 2)).eq(-1).all(), "a number on a threshold is not above it"
    weights = torch.randn(200, WIDTH, dtype=torch.float64)
    (found,) = torch.autograd.grad((losses.soft_bits(margins) * weights).sum(), margins)
    spread = torch.tensor([dim.detach().std(correction=0) / 2 for dim in margins.T], dtype=torch.float64)
    (expected,) = torch.autograd.grad(((2 * torch.sigmoid(margins / spread) - 1) * weights).sum(), margins)
    torch.testing.assert_close(found, expected)
    equal = torch.ones(4, 2, requires_grad=True)
    losses.soft_bits(equal).sum().backward()
    assert torch.isfinite(equal.grad).all()


@pytest.mark.parametrize("name", PRECISE)
def test_half_precision_is_computed_in_float32(name):
    function, _, inputs = CASES[name]
    vectors, *others = inputs()
    vectors = vectors.detach().bfloat16()
    found = function(vectors, *others)
    assert found.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(function(vectors.float(), *others), found)
    torch.testing.assert_close(found, function(vectors.double(), *others).float())


def test_cosines_of_half_precision_are_in_float32_and_have_finite_losses():
    vectors, candidates = (torch.randn(rows, WIDTH).bfloat16() for rows in (3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = cosine_matrix(vectors, candidates)
    torch.testing.assert_close(found, cosine_matrix(vectors.double(), candidates.double()).float())
    student, teacher = (cosines(TEXTS, CANDIDATES).detach().bfloat16() for _ in "st")
    for function in (losses.similarity_error, losses.similarity_divergence, losses.rank_error):
        found = function(student, teacher).float()
        torch.testing.assert_close(found, function(student.float(), teacher.float()), atol=0.02, rtol=0.05)


def test_the_ramp_goes_from_a_fifth_to_one():
    assert losses.ramp(0.0) == losses.ramp(0.1) == 0.2 and losses.ramp(1.0) == pytest.approx(1.0)
    assert losses.ramp(0.6) == pytest.approx((math.e**0.6 - 1) / (math.e - 1))
    steps = [losses.ramp(step / 20) for step in range(21)]
    assert steps == sorted(steps)
