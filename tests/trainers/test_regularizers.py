"""SIA, PIC, SCR and SIR as their papers say, from whole batches; teachers detached, token sets nested."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from trainers import PIC, SCR, SIA, SIR, Composition, Contrastive, Grid, NestedBatch, NestedStates, PooledStates
from trainers.regularizers import sia as sia_module


WIDTH, LAYERS, DIMS = 12, (1, 2, 3), (2, 5)
MASKS = {
    "view 1": torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0]]),
    "view 2": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),  # another length
}
GRID = Grid.product([2, 3], [*DIMS, WIDTH])


def make_batch(masks: dict[str, torch.Tensor] | None = None, causal: bool = False) -> NestedBatch:
    masks = masks or MASKS
    states = {
        name: {layer: torch.randn(*mask.shape, WIDTH, dtype=torch.float64, requires_grad=True) for layer in LAYERS}
        for name, mask in masks.items()
    }
    return NestedBatch({name: NestedStates(states[name], mask, causal) for name, mask in masks.items()})


def gradients(objective, batch: NestedBatch, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    leaves = {f"{name} {layer}": text.layers[layer] for name, text in batch.texts.items() for layer in LAYERS}
    leaves |= dict(objective.named_parameters())
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }


def assert_same(objective, batch: NestedBatch, expected: torch.Tensor) -> dict[str, torch.Tensor]:
    """Total and gradients are those of a naive loss; returns the gradients."""
    loss = objective.total(objective(batch))
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-9)
    ours, theirs = gradients(objective, batch, loss), gradients(objective, batch, expected)
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, atol=1e-9, rtol=1e-9, msg=lambda text, name=name: name + text)
    return ours


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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("shares", "smallest"), [([0.3, 0.7], 2), ([0.2, 0.5], 8)])
def test_sia_equals_its_equations(shares, smallest, causal):
    objective = SIA(GRID, temperature=0.7, token_shares=shares, smallest_token_count=smallest).double()
    with torch.no_grad():
        for projection in objective.projections.values():
            projection += 0.1 * torch.randn_like(projection)
    batch = make_batch(causal=causal)
    found = assert_same(objective, batch, naive_sia(objective, batch, 0.7, shares, smallest))
    for name, gradient in found.items():
        if name.startswith("view"):
            assert not gradient[..., DIMS[-1] :].any(), "the full width is a teacher"
    for name, text in batch.texts.items():
        anchors = found[f"{name} 2"][torch.arange(3), text.anchor_positions()]
        assert not anchors.any(), "the anchor's own state is a reference, not a student"
        assert not found[f"{name} 2"][text.attention_mask == 0].any()


def test_token_sets_of_sia_nest(monkeypatch):
    """What reaches the CKA loss is one order a text, with counts that only grow."""
    seen = []

    def spy(states, counts, dims):
        seen.append((states.detach(), counts))
        return states.new_zeros(len(states), len(dims)) + 0 * states.sum()

    monkeypatch.setattr(sia_module, "nested_token_cka", spy)
    batch = make_batch({"text": torch.ones(3, 30, dtype=torch.long)})
    SIA(GRID, token_shares=[0.3, 0.6])(batch)
    ((states, counts),) = seen
    assert counts.tolist() == [[9, 18]] * 6
    for index, layer in enumerate((2, 3)):
        full = batch.texts["text"].layers[layer].detach()
        scores = torch.einsum("bd,btd->bt", full[:, 0], full[:, 1:])
        for row in range(3):
            sets = [set(scores[row].topk(count).indices.tolist()) for count in counts[row].tolist()]
            assert sets[0] < sets[1]
            for chosen, count in zip(sets, counts[row].tolist(), strict=True):
                given = {tuple(token) for token in states[3 * index + row, :count].tolist()}
                assert given == {tuple(full[row, 1 + token].tolist()) for token in chosen}


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


def test_sir_without_one_of_its_terms():
    batch, both = make_batch(), SIR(GRID)
    variation, uniformity = SIR(GRID, uniformity_weight=0.0), SIR(GRID, variation_weight=0.0)
    assert set(variation(batch)) | set(uniformity(batch)) == set(both(batch))
    halves = variation.total(variation(batch)) + uniformity.total(uniformity(batch))
    torch.testing.assert_close(halves, both.total(both(batch)))


CHAIN = Grid.parse("1x2,2x5,3x12")


def naive_pic(objective: PIC, batch: NestedBatch, pooling: str, detach: bool) -> torch.Tensor:
    total = 0
    for text in batch.texts.values():
        for (lower, upper), project in zip(objective.links, objective.projectors, strict=True):
            pooled = []
            for granularity in (lower, upper):
                state, mask = text.layers[granularity.layer], text.attention_mask
                rows = []
                for tokens, real in zip(state, mask, strict=True):
                    kept = tokens[real.bool()]
                    rows.append(kept[-1 if text.causal else 0] if pooling == "anchor" else kept.mean(dim=0))
                pooled.append(torch.stack(rows)[:, : granularity.dim])
            source, target = project(pooled[0]), pooled[1].detach() if detach else pooled[1]
            cosines = functional.cosine_similarity(source[:, None], target[None], dim=2)
            total = total + functional.cross_entropy(cosines / 0.1, torch.arange(len(cosines)))
    return total / len(batch.texts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pooling", ["anchor", "mean"])
@pytest.mark.parametrize("detach", [False, True])
def test_pic_equals_its_equations(pooling, detach, causal):
    objective = PIC(CHAIN, temperature=0.1, pooling=pooling, detach_target=detach).double()
    batch = make_batch(causal=causal)
    found = assert_same(objective, batch, naive_pic(objective, batch, pooling, detach))
    assert found["projectors.0.0.weight"].any() and found["view 1 2"].any()
    assert found["view 1 3"].any() != detach, "the last checkpoint is only a target"


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


def naive_scr(batch: NestedBatch, threshold: float, weight: float) -> torch.Tensor:
    """Section 2.1 and 2.3 of MIC, a text and a pair of dims at a time."""
    total = 0
    for layer in (2, 3):
        standard, deviations = [], []
        for text in batch.texts.values():
            for tokens, real in zip(text.layers[layer], text.attention_mask, strict=True):
                kept = tokens[real.bool()]
                variance = (kept - kept.mean(dim=0)).square().mean(dim=0)
                # The root of 0 has no slope: a text of one token.
                deviation = variance.sqrt() if len(kept) > 1 else torch.zeros_like(variance)
                standard.append((kept - kept.mean(dim=0)) / (deviation + 1e-8))
                deviations.append(deviation)
        mean_deviation = torch.stack(deviations).mean(dim=0)
        for dim in DIMS:
            matrix = sum(x[:, :dim].T @ x[:, dim:] / len(x) for x in standard) / len(standard)
            excess = (matrix.abs() - threshold).clamp(min=0).square()
            total = total + excess.sum() / (dim * (WIDTH - dim))
            floors = [(1 - part.mean()).clamp(min=0) for part in (mean_deviation[:dim], mean_deviation[dim:])]
            total = total + weight * (floors[0] + 0.5 * floors[1])
    return total / (2 * (len(DIMS) + 1))


@pytest.mark.parametrize(("threshold", "weight"), [(0.1, 0.1), (0.0, 1.0), (0.4, 0.0)])
def test_scr_equals_its_equations(threshold, weight):
    objective, batch = SCR(GRID, threshold=threshold, variance_weight=weight), make_batch()
    found = assert_same(objective, batch, naive_scr(batch, threshold, weight))
    assert not found["view 1 2"][2].any(), "one token has no correlation"
    assert not found["view 1 1"].any()


def naive_sir(batch: NestedBatch, scale: float) -> torch.Tensor:
    total = 0
    for text in batch.texts.values():
        for layer in (2, 3):
            pooled = torch.stack(
                [t[r.bool()].mean(dim=0) for t, r in zip(text.layers[layer], text.attention_mask, strict=True)]
            )
            for dim in (*DIMS, WIDTH):
                short = pooled[:, :dim]
                variances = (short - short.mean(dim=0)).square().mean(dim=0)
                variation = (variances - variances.mean()).square().mean().sqrt() / (variances.mean() + 1e-8)
                unit = functional.normalize(short, dim=1)
                kernels = [
                    torch.exp(-2 * scale * (1 - unit[i] @ unit[j]))
                    for i in range(len(unit))
                    for j in range(len(unit))
                    if i != j
                ]
                total = total + 0.5 * (variation + torch.log(torch.stack(kernels).mean() + 1e-8))
    return total / (2 * 3 * len(batch.texts))


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_sir_equals_its_equations(scale):
    objective, batch = SIR(GRID, scale=scale), make_batch()
    assert_same(objective, batch, naive_sir(batch, scale))


@pytest.mark.parametrize("objective", [SIA(GRID), PIC(CHAIN), SCR(GRID), SIR(GRID)], ids=lambda part: part.name)
def test_empty_and_one_token_texts_do_no_harm(objective):
    batch = make_batch({"text": torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0, 0]])})
    objective = objective.double()
    loss = objective.total(objective(batch))
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients(objective, batch, loss).values())


@pytest.mark.parametrize("objective", [SIA(GRID), PIC(CHAIN), SCR(GRID), SIR(GRID)], ids=lambda part: part.name)
def test_half_precision_is_computed_in_single(objective):
    batch = make_batch()
    rounded = {
        name: {layer: state.detach().bfloat16() for layer, state in text.layers.items()}
        for name, text in batch.texts.items()
    }
    objective = objective.float()
    losses = []
    for dtype in (torch.bfloat16, torch.float32):
        texts = {
            name: NestedStates({layer: state.to(dtype) for layer, state in states.items()}, MASKS[name])
            for name, states in rounded.items()
        }
        losses.append(objective.total(objective(NestedBatch(texts))))
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("objective", [PIC(CHAIN), SIR(GRID)], ids=lambda part: part.name)
def test_a_batch_of_one_is_refused(objective):
    with pytest.raises(ValueError, match="batch of (one|1) has no"):
        objective.float()(
            NestedBatch({"text": PooledStates({layer: torch.randn(1, WIDTH) for layer in LAYERS}, objective.pooling)})
        )


@pytest.mark.parametrize("objective", [SIA, SCR])
def test_pooled_embeddings_are_refused_where_tokens_are_read(objective):
    pooled = PooledStates({layer: torch.randn(2, WIDTH) for layer in LAYERS}, "mean")
    with pytest.raises(ValueError, match="reads token states"):
        objective(GRID)(NestedBatch({"text": pooled}))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PIC(Grid.parse("1x5,2x2")), "deeper and not shorter .* 1x5, 2x2"),
        (lambda: PIC(Grid.parse("2x2,2x5")), "deeper and not shorter"),
        (lambda: PIC(Grid.parse("2x2")), "two or more"),
        (lambda: PIC(CHAIN, temperature=0.0), "temperature of PIC must be above 0"),
        (lambda: PIC(CHAIN, pooling="max"), "pooling='max' is unknown"),
        (lambda: SIA(GRID, token_shares=[0.2, 0.3, 0.4]), r"3 values for 2 dims below the full width: \[2, 5\]"),
        (lambda: SIA(GRID, token_shares=[0.7, 0.2]), "ascending"),
        (lambda: SIA(GRID, token_shares=[0.2, 1.2]), "at most 1"),
        (lambda: SIA(GRID, temperature=-1.0), "temperature of SIA must be above 0"),
        (lambda: SIA(GRID, attention_weight=0.0, cka_weight=0.0), "weight"),
        (lambda: SIA(GRID, smallest_token_count=0), "smallest_token_count=0"),
        (lambda: SIA(Grid.parse("2x12")), "a dim below it"),
        (lambda: SCR(Grid.parse("2x5,3x12")), "layers x dims"),
        (lambda: SCR(GRID, threshold=1.5), "correlation in 0..1"),
        (lambda: SIR(GRID, scale=0.0), "scale of SIR"),
        (lambda: SIR(GRID, pooling="max"), "pooling='max' is unknown"),
        (lambda: SIR(GRID, variation_weight=0.0, uniformity_weight=0.0), "SIR needs a weight above 0"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_composition_is_the_weighted_sum_of_its_parts():
    batch, contrastive, sir, pic = (
        make_batch(),
        Contrastive(Grid.parse("3x2,5,12")),
        SIR(Grid.parse("1x5")),
        PIC(CHAIN),
    )
    pic = pic.double()
    both = Composition({"mrl": (0.4, contrastive), "sir": (0.3, sir), "pic": (0.0, pic)})
    assert both.layers == [1, 3] and set(both.parts) == {"mrl", "sir"}, "what weighs nothing costs nothing"
    assert both.pooling == "mean" and Composition({"mrl": (1, contrastive), "sia": (1, SIA(GRID))}).pooling is None
    assert both.grid == contrastive.grid
    terms = both(batch)
    expected = 0.4 * contrastive.total(contrastive(batch)) + 0.3 * sir.total(sir(batch))
    torch.testing.assert_close(both.total(terms), expected)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"sir": (-1.0, SIR(GRID))}, "must not be negative: sir"),
        ({"sir": (0.0, SIR(GRID))}, "an objective with a weight above 0"),
        ({"one": (1.0, SIR(GRID)), "two": (1.0, SIR(GRID))}, "same name"),
    ],
)
def test_compositions_that_cannot_be(parts, message):
    with pytest.raises(ValueError, match=message):
        Composition(parts)
