"""Ridge regression from sums: against a solve with all rows, sums that add up, and inputs that do not vary."""

from __future__ import annotations

import pytest
import torch

from trainers.core.ridge import AffineMap, RegressionSums, principal_axes


def rows(count: int = 60, width: int = 7, targets: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, width, dtype=torch.float64) * torch.logspace(-2, 3, width, dtype=torch.float64) + 5
    return inputs, torch.randn(count, targets, dtype=torch.float64) + inputs[:, :targets].tanh()


def naive_ridge(inputs: torch.Tensor, targets: torch.Tensor, penalty: float) -> AffineMap:
    """With all rows in memory, as the docstring says it."""
    mean, deviation = inputs.mean(dim=0), inputs.std(dim=0, correction=0)
    x, y = (inputs - mean) / deviation, targets - targets.mean(dim=0)
    weight = torch.linalg.solve(x.T @ x / len(x) + penalty * torch.eye(x.shape[1]), x.T @ y / len(x)).T / deviation
    return AffineMap(weight, targets.mean(dim=0) - weight @ mean)


@pytest.mark.parametrize("penalty", [1e-4, 0.03, 1.0])
def test_the_solution_is_that_of_a_solve_with_all_rows(penalty):
    inputs, targets = rows()
    sums = RegressionSums.of(inputs[:17], targets[:17]) + RegressionSums.of(inputs[17:], targets[17:])
    (found,) = sums.solve([penalty])
    expected = naive_ridge(inputs, targets, penalty)
    torch.testing.assert_close(found(inputs), expected(inputs), atol=1e-8, rtol=1e-7)


def test_a_map_that_exists_is_found():
    inputs, _ = rows()
    true = AffineMap(torch.randn(3, 7, dtype=torch.float64), torch.randn(3, dtype=torch.float64))
    sums = RegressionSums.of(inputs, true(inputs))
    (found,) = sums.solve([1e-12])
    torch.testing.assert_close(found(inputs), true(inputs), atol=1e-5, rtol=1e-5)
    assert sums.r_squared(found) == pytest.approx(1, abs=1e-9)


def test_r_squared_is_that_of_the_residuals():
    inputs, targets = rows()
    held_inputs, held_targets = rows()
    (found,) = RegressionSums.of(inputs, targets).solve([0.1])
    residual = (held_targets - found(held_inputs)).square().sum()
    variance = (held_targets - held_targets.mean(dim=0)).square().sum()
    sums = RegressionSums.of(held_inputs, held_targets)
    assert sums.r_squared(found) == pytest.approx(float(1 - residual / variance), abs=1e-9)


def test_sums_can_be_taken_apart_again():
    inputs, targets = rows()
    every, some = RegressionSums.of(inputs, targets), RegressionSums.of(inputs[:20], targets[:20])
    (found,), (expected,) = (every - some).solve([0.1]), RegressionSums.of(inputs[20:], targets[20:]).solve([0.1])
    torch.testing.assert_close(found(inputs), expected(inputs), atol=1e-7, rtol=1e-7)


def test_a_constant_input_has_no_weight():
    inputs, targets = rows()
    inputs[:, 2] = 1e6 + 1 / 3  # its float64 sums do not cancel exactly
    (found,) = RegressionSums.of(inputs, targets).solve([0.01])
    assert not found.weight[:, 2].any()
    assert torch.isfinite(found(inputs)).all()
    others = [0, 1, 3, 4, 5, 6]
    (expected,) = RegressionSums.of(inputs[:, others], targets).solve([0.01])
    torch.testing.assert_close(found(inputs), expected(inputs[:, others]), atol=1e-8, rtol=1e-7)


def test_float32_rows_are_summed_in_float64():
    inputs, targets = rows(4000)
    sums = RegressionSums.of(inputs.float(), targets.float())
    assert sums.products.dtype == torch.float64
    exact = inputs.float().double()
    torch.testing.assert_close(sums.products, exact.T @ exact, rtol=1e-12, atol=0)


def test_variances_are_matched_along_axes_and_the_mean_stays():
    inputs, targets = rows()
    sums = RegressionSums.of(inputs, targets)
    (affine,) = sums.solve([0.5])
    axes = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    wanted = (targets @ axes.T).var(dim=0, correction=0)
    torch.testing.assert_close(sums.match_variances(affine, axes, wanted, 0.0)(inputs), affine(inputs))
    matched = sums.match_variances(affine, axes, wanted, 1.0)(inputs)
    torch.testing.assert_close((matched @ axes.T).var(dim=0, correction=0), wanted)
    torch.testing.assert_close(matched.mean(dim=0), targets.mean(dim=0))
    constant = RegressionSums.of(inputs, torch.ones(60, 4, dtype=torch.float64))
    (flat,) = constant.solve([0.5])
    assert constant.match_variances(flat, axes, wanted, 1.0)(inputs).isfinite().all()


def test_principal_axes_are_a_rotation_by_descending_variance_with_fixed_signs():
    vectors = torch.randn(500, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    axes = principal_axes(torch.cov(vectors.T))
    torch.testing.assert_close(axes @ axes.T, torch.eye(6, dtype=torch.float64))
    variances = (vectors @ axes.T).var(dim=0)
    assert (variances.diff() <= 0).all()
    assert (axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)) > 0).all()
