"""Ridge regression from sums: against a solve with all rows, sums that add up, and inputs that do not vary."""

import pytest
import torch

from m3bert.exits.ridge import Moments, Regression, apply_affine, principal_axes
from tests.exits.test_fit import naive_ridge


def rows(count: int = 60, width: int = 7, targets: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(count, width, dtype=torch.float64) * torch.logspace(-2, 3, width, dtype=torch.float64) + 5
    return inputs, torch.randn(count, targets, dtype=torch.float64) + inputs[:, :targets].tanh()


@pytest.mark.parametrize("penalty", [1e-4, 0.03, 1.0])
def test_the_solution_equals_a_solve_with_all_rows(penalty):
    inputs, targets = rows()
    sums = Regression.of(inputs[:17], targets[:17]) + Regression.of(inputs[17:], targets[17:])
    expected = naive_ridge(inputs, targets, penalty)(inputs)
    torch.testing.assert_close(apply_affine(sums.ridge(penalty), inputs), expected, atol=1e-8, rtol=1e-7)


def test_moments_give_the_regression_on_any_of_their_vectors():
    inputs, targets = rows()
    vectors = {2: inputs[:, :3], "features": inputs[:, 3:], "target": targets}
    widths = {name: matrix.shape[1] for name, matrix in vectors.items()}
    pairs = [(name, name) for name in vectors] + [(2, "features"), ("features", "target"), ("target", 2)]
    moments = Moments(widths, pairs)
    for part in (slice(None, 17), slice(17, None)):
        moments.add({name: matrix[part] for name, matrix in vectors.items()})
    for names in ([2], ["features"], [2, "features"], ["features", 2]):
        regression = moments.regression(names, "target")
        expected = Regression.of(torch.cat([vectors[name] for name in names], dim=1), targets)
        torch.testing.assert_close(regression.products, expected.products)
        torch.testing.assert_close(regression.cross_products, expected.cross_products)


def test_a_regression_through_a_map_is_one_on_the_output():
    inputs, targets = rows()
    reader = torch.nn.functional.pad(torch.randn(8, 3, dtype=torch.float64), (1, 0))
    reader[0, 0] = 1.0
    regression = Regression.of(inputs, targets).through(reader)
    expected = Regression.of(apply_affine(reader[:, 1:], inputs), targets)
    torch.testing.assert_close(regression.products, expected.products)
    torch.testing.assert_close(regression.cross_products, expected.cross_products)


def test_a_constant_input_has_no_weight():
    inputs, targets = rows()
    inputs[:, 2] = 1e6 + 1 / 3  # float64 sums do not cancel exactly
    affine = Regression.of(inputs, targets).ridge(0.01)
    assert not affine[3].any() and torch.isfinite(affine).all()
    others = inputs[:, [0, 1, 3, 4, 5, 6]]
    expected = apply_affine(Regression.of(others, targets).ridge(0.01), others)
    torch.testing.assert_close(apply_affine(affine, inputs), expected, atol=1e-8, rtol=1e-7)


def test_variances_are_matched_along_axes_and_the_mean_stays():
    inputs, targets = rows()
    sums = Regression.of(inputs, targets)
    affine = sums.ridge(0.5)
    axes = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    variances = (targets @ axes.T).var(dim=0, correction=0)
    matched = apply_affine(sums.match_variances(affine, axes, variances), inputs)
    torch.testing.assert_close((matched @ axes.T).var(dim=0, correction=0), variances)
    torch.testing.assert_close(matched.mean(dim=0), targets.mean(dim=0))
    constant = Regression.of(inputs, torch.ones(60, 4, dtype=torch.float64))
    assert constant.match_variances(constant.ridge(0.5), axes, variances).isfinite().all()


def test_principal_axes_are_a_rotation_by_descending_variance_with_fixed_signs():
    vectors = torch.randn(500, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    axes = principal_axes(torch.cov(vectors.T))
    torch.testing.assert_close(axes @ axes.T, torch.eye(6, dtype=torch.float64))
    variances = (vectors @ axes.T).var(dim=0)
    assert (variances.diff() <= 0).all()
    assert (axes.gather(1, axes.abs().argmax(dim=1, keepdim=True)) > 0).all()
