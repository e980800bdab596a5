"""Maps between two spaces: against scipy and a solve with all rows, and shares that are of held-out rows."""

import numpy as np
import pytest
import torch
from scipy.linalg import orthogonal_procrustes

from m3bert.exits.ridge import Regression, apply_affine
from m3bert.exits.space_map import Method, PairSums, SpaceMap
from m3bert.exits.sums import share_of_nearest
from tests.exits.test_fit import naive_ridge


def pairs(count: int, inputs: int = 12, targets: int = 12, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and what a rotation, a scale and a shift make of them."""
    rows = torch.randn(count, inputs) + 2
    turn = torch.linalg.qr(torch.randn(max(inputs, targets), max(inputs, targets)))[0][:inputs, :targets]
    return rows, 3 * rows @ turn + torch.randn(targets) + noise * torch.randn(count, targets)


def sums_of(rows: torch.Tensor, goal: torch.Tensor) -> PairSums:
    both = torch.cat([rows, goal], dim=1)
    return PairSums((Regression.of(part, part[:, :0]) for part in both.tensor_split(3)), rows.shape[1])


def test_the_rotation_is_that_of_scipy():
    rows, goal = pairs(40, noise=1.0)
    x, y = ((part - part.mean(dim=0)).double().numpy() for part in (rows, goal))
    turn, strength = orthogonal_procrustes(x, y)
    expected = x @ turn * strength / np.square(x).sum() + goal.double().mean(dim=0).numpy()
    np.testing.assert_allclose(apply_affine(sums_of(rows, goal).rotation, rows.double()), expected, atol=1e-5)


@pytest.mark.parametrize("targets", [5, 12, 20])
def test_a_map_is_the_ridge_regression_of_what_the_rotation_leaves(targets):
    rows, goal = (part.double() for part in pairs(40, targets=targets, noise=1.0))
    sums = sums_of(rows, goal)
    turned = apply_affine(sums.rotation, rows)
    for prior in (turned, torch.zeros_like(turned)):
        affine = sums.fit(Method(rotation=prior is turned, penalty=0.3, matched=False))
        torch.testing.assert_close(apply_affine(affine, rows), prior + naive_ridge(rows, goal - prior, 0.3)(rows))
    matched = apply_affine(sums.fit(Method(rotation=True, penalty=0.3, matched=True)), rows)
    axes = torch.linalg.eigh(torch.cov(goal.T))[1]
    torch.testing.assert_close((matched @ axes).var(dim=0)[-5:], (goal @ axes).var(dim=0)[-5:])


def test_few_rows_are_enough_for_a_rotation():
    """In 64 dims, 50 rows do not give any other map."""
    rows, goal = pairs(1050, 64, 64, noise=0.3)
    mapped = torch.nn.functional.normalize(apply_affine(SpaceMap.fit(rows[:50], goal[:50]).affine, rows[50:]))
    ridge = apply_affine(sums_of(rows[:50], goal[:50]).fit(Method(False, 0.1, False)), rows[50:])
    goal = torch.nn.functional.normalize(goal[50:])
    ridge = torch.nn.functional.normalize(ridge)
    assert share_of_nearest(mapped, goal, goal) > share_of_nearest(ridge, goal, goal) + 0.02


def test_the_share_is_of_rows_that_the_map_has_not_seen():
    rows, goal = torch.randn(60, 80), torch.randn(60, 30)
    fitted = SpaceMap.fit(rows, goal)
    assert [*fitted.shares] == [12, 24, 48] and fitted.share == fitted.shares[48]
    assert fitted.share < 0.3  # ten of 59 by chance
    seen = [torch.nn.functional.normalize(part.double()) for part in (apply_affine(fitted.affine, rows), goal)]
    assert share_of_nearest(*seen, seen[1]) > 2 * fitted.share


@pytest.mark.parametrize("maps_documents", [False, True])
def test_a_map_that_loses_nothing_keeps_all(maps_documents):
    rows, goal = pairs(120)
    fitted = SpaceMap.fit(rows, goal, maps_documents=maps_documents)
    assert fitted.share == 1 and fitted.gain == 0
    torch.testing.assert_close(apply_affine(fitted.affine, rows), goal, atol=1e-2, rtol=1e-2)


def test_the_share_of_the_nearest_is_counted():
    queries, documents, targets = (torch.nn.functional.normalize(torch.randn(15, 6)) for _ in range(3))
    counts = []
    for row in range(15):
        others = [other for other in range(15) if other != row]
        near = sorted(others, key=lambda other: -float(queries[row] @ documents[other]))[:10]
        nearest = sorted(others, key=lambda other: -float(targets[row] @ targets[other]))[:10]
        counts.append(len({*near} & {*nearest}) / 10)
    assert share_of_nearest(queries, documents, targets) == pytest.approx(np.mean(counts))


@pytest.mark.parametrize(
    ("shares", "gain"),
    [((0.5, 0.7, 0.8), 0.05), ((0.5, 0.6, 0.8), 0.2), ((0.5, 0.6, 0.55), 0), ((0.5, 0.4, 0.6), 0.2)],
)
def test_gains_shrink_as_they_did(shares, gain):
    curve = dict(zip((20, 40, 80), shares, strict=True))
    assert SpaceMap(torch.zeros(1, 1), curve).gain == pytest.approx(gain)
