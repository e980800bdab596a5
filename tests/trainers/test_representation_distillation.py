"""IBKD's objectives and its baselines against loops over texts, and what they leave alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.trainers.tiny_run import quiet_model
from trainers import (
    CRD,
    HPD,
    HSIC,
    Grid,
    NestedBatch,
    NestedModel,
    Objective,
    PooledStates,
    Projection,
    RepresentationDistillation,
    TeacherContrast,
    TeacherMSE,
)


GRID = Grid.parse("2x4,3x8")
WIDTH, TEACHER, ROWS = 8, 6, 7
COLUMNS = ("first", "second")


def make_batch(dtype: torch.dtype = torch.float64, repeats: bool = False, rows: int = ROWS) -> NestedBatch:
    """Two columns of pooled texts at three layers and the embedding layer, with a teacher's embeddings of each."""
    torch.manual_seed(11)
    texts = {
        name: PooledStates(
            {layer: torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True) for layer in range(4)}, "mean"
        )
        for name in COLUMNS
    }
    teacher = {name: torch.randn(rows, TEACHER, dtype=dtype, requires_grad=True) for name in COLUMNS}
    ids = torch.arange(2 * rows).view(2, rows)
    if repeats:
        ids[1, 0], ids[0, 4] = ids[0, 2], ids[0, 3]
    return NestedBatch(texts=texts, text_ids=dict(zip(COLUMNS, ids, strict=True)), teacher=teacher)


def students_and_teachers(batch: NestedBatch, layer: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    students = torch.cat([batch.texts[name].layers[layer] for name in COLUMNS])
    teachers = torch.cat([batch.teacher[name] for name in COLUMNS]).detach()
    return students, teachers, torch.cat([batch.text_ids[name] for name in COLUMNS]).tolist()


def cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.dot(x, y) / (x.norm() * y.norm())


def naive_contrast(objective, batch, layer, dim):
    students, teachers, ids = students_and_teachers(batch, layer)
    weight = objective.maps[str(layer)].weight[:, :dim]
    losses = []
    for i, student in enumerate(students):
        scores = [cosine(weight @ student[:dim], teacher) / objective.temperature for teacher in teachers]
        kept = [s for j, s in enumerate(scores) if j == i or not objective.mask_duplicates or ids[j] != ids[i]]
        losses.append(torch.stack(kept).logsumexp(dim=0) - scores[i])
    return torch.stack(losses).mean()


def naive_mse(objective, batch, layer, dim):
    students, teachers, _ = students_and_teachers(batch, layer)
    weight = objective.maps[str(layer)].weight[:, :dim]
    losses = []
    for s, t in zip(students, teachers, strict=True):
        s = weight @ s[:dim]
        if objective.normalize:
            s, t = s / s.norm(), t / t.norm()
        losses.append(((s - t) ** 2).mean())
    return torch.stack(losses).mean()


def naive_crd(objective, batch, layer, dim):
    students, teachers, ids = students_and_teachers(batch, layer)
    mapped = [objective.maps[str(layer)].weight[:, :dim] @ s[:dim] for s in students]
    targets = [objective.teacher_map.weight @ t for t in teachers]
    scores = torch.stack([torch.stack([cosine(s, t) for t in targets]) for s in mapped]) / objective.temperature
    z = scores.exp().mean().detach()
    negatives = len(students) - 1
    losses = []
    for matrix in (scores, scores.T):
        for i, row in enumerate(matrix):
            chances = (row.exp() / z) / (row.exp() / z + negatives)
            others = [j for j in range(len(row)) if j != i and ids[j] != ids[i]]
            losses.append(-chances[i].log() - (1 - chances[others]).log().sum())
    return torch.stack(losses).sum() / len(students)


def naive_hsic(objective, batch, layer, dim):
    values = []
    for name in COLUMNS:
        x, s = batch.texts[name].layers[objective.input_layer], batch.texts[name].layers[layer][:, :dim]
        if objective.detach_input:
            x = x.detach()
        if objective.normalize:
            x, s = nn.functional.normalize(x, dim=1), nn.functional.normalize(s, dim=1)
        n = len(x)
        h = torch.eye(n, dtype=x.dtype) - 1 / n
        grams = [
            torch.stack([torch.stack([torch.exp(-objective.gamma * (a - b).square().sum()) for b in v]) for a in v])
            for v in (x, s)
        ]
        values.append(torch.trace(grams[0] @ h @ grams[1] @ h) / n**2)
    return torch.stack(values).mean()


OBJECTIVES = {
    "infonce": (lambda: TeacherContrast(GRID, teacher_dim=TEACHER), naive_contrast),
    "infonce, repeats": (lambda: TeacherContrast(GRID, teacher_dim=TEACHER, mask_duplicates=False), naive_contrast),
    "mse": (lambda: TeacherMSE(GRID, teacher_dim=TEACHER), naive_mse),
    "mse, normalised": (lambda: TeacherMSE(GRID, teacher_dim=TEACHER, normalize=True), naive_mse),
    "crd": (lambda: CRD(GRID, teacher_dim=TEACHER, critic_dim=5), naive_crd),
    "hsic": (lambda: HSIC(GRID, gamma=0.1), naive_hsic),
    "hsic, of an input without gradient": (lambda: HSIC(GRID, gamma=0.1, detach_input=True), naive_hsic),
    "hsic, normalised, of layer 1": (lambda: HSIC(GRID, normalize=True, input_layer=1), naive_hsic),
}


def gradients(values: dict[str, torch.Tensor], objective: Objective, batch: NestedBatch) -> list[torch.Tensor | None]:
    leaves = [vectors for text in batch.texts.values() for vectors in text.layers.values()]
    leaves += list(objective.parameters())
    return list(torch.autograd.grad(sum(values.values()), leaves, allow_unused=True))


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_terms_and_gradients_are_those_of_a_loop_over_texts(name, repeats):
    make, naive = OBJECTIVES[name]
    torch.manual_seed(0)
    objective, batch = make().double(), make_batch(repeats=repeats)
    terms = objective(batch)
    assert list(terms) == [f"{objective.name}_2x4", f"{objective.name}_3x8"]
    expected = {key: naive(objective, batch, g.layer, g.dim) for key, g in zip(terms, GRID, strict=True)}
    for key, value in expected.items():
        torch.testing.assert_close(terms[key], value, msg=lambda text, key=key: f"{key}: {text}")
    torch.testing.assert_close(objective.total(terms), sum(expected.values()))
    for actual, value in zip(gradients(terms, objective, batch), gradients(expected, objective, batch), strict=True):
        assert (actual is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(actual, value, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_a_teacher_gets_no_gradient(name):
    objective, batch = OBJECTIVES[name][0]().double(), make_batch()
    objective.total(objective(batch)).backward()
    assert all(vectors.grad is None for vectors in batch.teacher.values())
    assert any(vectors.grad is not None for text in batch.texts.values() for vectors in text.layers.values())


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_bfloat16_and_autocast_stay_close(name):
    make, _ = OBJECTIVES[name]
    torch.manual_seed(0)
    objective = make()
    expected = objective(make_batch(torch.float32))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = make()(make_batch(torch.float32))
    for key, value in expected.items():
        torch.testing.assert_close(cast[key], value, atol=1e-4, rtol=1e-3)
        assert cast[key].dtype == torch.float32


def test_a_prefix_gets_gradient_from_its_own_dims_only():
    for name in ("infonce", "mse", "crd", "hsic"):
        objective, batch = OBJECTIVES[name][0]().double(), make_batch()
        (gradient,) = torch.autograd.grad(objective(batch)[f"{objective.name}_2x4"], batch.texts["first"].layers[2])
        assert gradient[:, :4].any(), name
        assert not gradient[:, 4:].any(), name


def test_maps_start_as_the_identity_or_keep_angles():
    same = TeacherContrast(Grid.parse("3x6"), teacher_dim=6).maps["3"].weight
    torch.testing.assert_close(same, torch.eye(6))
    wider = TeacherMSE(Grid.parse("3x4"), teacher_dim=6).maps["3"].weight
    torch.testing.assert_close(wider.T @ wider, torch.eye(4), atol=1e-5, rtol=0)


def test_a_student_that_is_its_teacher_has_the_smallest_losses():
    grid = Grid.parse("3x6")
    teacher = torch.randn(20, 6)
    for student, better in ((teacher, True), (torch.randn(20, 6), False)):
        batch = NestedBatch(texts={"text": PooledStates({3: student}, "mean")}, teacher={"text": teacher})
        assert (TeacherMSE(grid, teacher_dim=6)(batch)["mse_3x6"] < 1e-6) == better
        assert (TeacherContrast(grid, teacher_dim=6)(batch)["infonce_3x6"] < 0.2) == better


def test_the_normaliser_of_crd_is_that_of_the_first_batch():
    objective = CRD(Grid.parse("3x8"), teacher_dim=TEACHER, critic_dim=5)
    objective(make_batch(torch.float32))
    first = objective.state_dict()["log_normalizer_3x8"].clone()
    assert torch.isfinite(first)
    objective(make_batch(torch.float32, rows=3))
    assert objective.state_dict()["log_normalizer_3x8"].equal(first)


def test_hpd_is_the_distance_to_the_teachers_components():
    components = torch.linalg.qr(torch.randn(TEACHER, 3)).Q.T.contiguous()
    objective = HPD(Grid.parse("3x3"), components=components, teacher_dim=TEACHER)
    assert not list(objective.parameters())
    batch = make_batch(torch.float32)
    students, teachers, _ = students_and_teachers(batch, 3)
    expected = (students[:, :3] - teachers @ components.T).square().mean()
    torch.testing.assert_close(objective(batch)["hpd_3x3"], expected)
    sides = (nn.functional.normalize(vectors, dim=1) for vectors in (students[:, :3], teachers @ components.T))
    normalized = HPD(Grid.parse("3x3"), components=components, teacher_dim=TEACHER, normalize=True)(batch)
    torch.testing.assert_close(normalized["hpd_3x3"], nn.functional.mse_loss(*sides))
    with pytest.raises(ValueError, match="HPD trains one granularity of 3 dims; the grid is 3x4"):
        HPD(Grid.parse("3x4"), components=components, teacher_dim=TEACHER)


def test_hsic_reads_the_embedding_layer_and_a_mean(tiny_tokenizer):
    """X is the mean over real tokens of what goes into the first layer."""
    model = quiet_model().model.eval()
    batch = tiny_tokenizer(
        ["open the file", "read a list of text or name", "a name"], padding=True, return_tensors="pt"
    )
    objective = HSIC(Grid.parse("6x8"), gamma=0.1, pooling="anchor")
    nested = NestedModel(model, objective)
    loss = nested(**batch)["loss"]
    outputs = model(**batch, output_hidden_states=True)
    mask = batch["attention_mask"][:, :, None]
    x = (outputs.hidden_states[0] * mask).sum(dim=1) / mask.sum(dim=1)
    s = outputs.last_hidden_state[:, 0, :8]
    texts = {"text": PooledStates({0: x, 6: s}, "mean")}
    expected = HSIC(Grid.parse("6x8"), gamma=0.1)(NestedBatch(texts=texts))["hsic_6x8"]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert model.embed_tokens.weight.grad.any()
    with pytest.raises(ValueError, match="HSIC reads token states: its gradients cannot be cached"):
        NestedModel(model, objective, mini_batch_size=2)


def test_hsic_with_cached_gradients_is_that_of_the_whole_batch(tiny_tokenizer):
    texts = ["open the file", "read a list of text or name", "a name", "not for the file"]
    batch = tiny_tokenizer(texts, padding=True, return_tensors="pt")
    found = []
    for mini_batch_size in (None, 1, 3):
        model = quiet_model().model
        NestedModel(model, HSIC(Grid.parse("4,6x8,32"), gamma=0.1), mini_batch_size)(**batch)["loss"].backward()
        found.append(model.embed_tokens.weight.grad)
    for gradient in found[1:]:
        torch.testing.assert_close(gradient, found[0], atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TeacherContrast(GRID, teacher_dim=6, temperature=0), "temperature=0 must be above 0"),
        (lambda: TeacherMSE(GRID, teacher_dim=6, pooling="max"), "pooling='max' is unknown"),
        (lambda: CRD(GRID, teacher_dim=6, critic_dim=0), "CRD needs values above 0: critic_dim=0"),
        (lambda: HSIC(GRID, kernel="cubic"), "hsic_kernel='cubic' is unknown; legal values: rbf, linear, imq"),
        (lambda: HSIC(GRID, gamma=0.0), "hsic_gamma=0.0 must be above 0"),
        (lambda: HSIC(GRID, pooling="max"), "pooling='max' is unknown"),
        (lambda: HSIC(GRID, input_layer=2), "hsic_input_layer=2 must be below the layers that are trained"),
        (lambda: HSIC(GRID, input_layer=-1), "hsic_input_layer=-1 must be below"),
        (lambda: TeacherMSE(GRID, teacher_dim=6)(NestedBatch(make_batch().texts)), "TeacherMSE needs the teacher"),
        (lambda: TeacherMSE(GRID, teacher_dim=9)(make_batch()), "embeddings have 6 dims, not 9"),
        (lambda: HSIC(GRID)(make_batch(rows=1)), "HSIC is of several texts; there is a batch of one"),
        (lambda: Projection(8, 9), "projection_dim=9 must be within 1..8"),
    ],
)  # fmt: skip
def test_bad_arguments_say_what_is_legal(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_one_text_has_nothing_to_be_told_from():
    batch = NestedBatch(
        texts={"text": PooledStates({3: torch.randn(1, 6)}, "mean")}, teacher={"text": torch.randn(1, 6)}
    )
    with pytest.raises(ValueError, match="at least two candidates"):
        TeacherContrast(Grid.parse("3x6"), teacher_dim=6)(batch)


def test_an_objective_of_ones_own_needs_only_its_loss():
    class L1(RepresentationDistillation):
        name = "l1"

        def losses(self, students, granularity, taught):
            return (students - taught.teacher[:, : granularity.dim]).abs().mean(dim=1)

    batch = make_batch()
    students, teachers, _ = students_and_teachers(batch, 2)
    terms = L1(Grid.parse("2x4"), teacher_dim=TEACHER)(batch)
    torch.testing.assert_close(terms["l1_2x4"], (students[:, :4] - teachers[:, :4]).abs().mean())
