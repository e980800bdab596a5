"""SIA as its paper says: the full width teaches, token sets are nested."""

import math

import pytest
import torch

from m3bert.trainers import SIA, NestedBatch
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
