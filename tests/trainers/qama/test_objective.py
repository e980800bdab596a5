"""The objective QAMA: its terms and their sum against the losses called one by one, what learns, and its switches."""

import math

import pytest
import torch

from m3bert.encode.states import PooledStates
from m3bert.modeling import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import QAMA, Grid, NestedBatch, NestedModel
from m3bert.trainers.embedding.info_nce import nested_info_nce
from m3bert.trainers.qama import losses
from m3bert.trainers.qama.objective import WEIGHTS
from m3bert.utils.numerics import cosine_matrix
from tests.conftest import refused
from tests.trainers.tiny_run import named, quiet_model


WIDTH, ROWS, DIMS = 8, 5, [2, 4, 8]
GRID = Grid.parse("3x2,4,8")
COLUMNS = ("query", "document")


def make_quantizer(width: int = WIDTH, **changes) -> M3BertQuantizer:
    torch.manual_seed(4)
    quantizer = M3BertQuantizer(
        M3BertQuantizerConfig(hidden_size=width, **{"dims": DIMS, "layers": [3], **changes})
    ).double()
    with torch.no_grad():
        for parameter in quantizer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    quantizer.calibrate(torch.randn(100, width, dtype=torch.float64))
    return quantizer


def qama(grid: Grid = GRID, **changes) -> QAMA:
    """In evaluation, so that a call does not move the thresholds."""
    return QAMA(grid, **{"quantizer": make_quantizer(), **changes}).eval()


def make_batch(columns: tuple[str, ...] = COLUMNS, rows: int = ROWS, layers: tuple[int, ...] = ()) -> NestedBatch:
    torch.manual_seed(11)
    teacher = {name: torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for name in columns}
    texts = {
        name: PooledStates(
            {layer: torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=True) for layer in layers}, "mean"
        )
        for name in columns
    }
    ids = {name: torch.arange(rows) + rows * index for index, name in enumerate(columns)}
    return NestedBatch(texts=texts if layers else {}, text_ids=ids, teacher=teacher)


def expected_terms(objective: QAMA, vectors: torch.Tensor, teacher: torch.Tensor) -> dict[str, torch.Tensor]:
    """All terms of a layer on one process, written out, for pairs."""
    quantizer, z, terms = objective.quantizer, objective.quantizer(vectors), {}
    targets = cosine_matrix(teacher.detach(), teacher.detach())
    for dim in DIMS:
        sides = {f"3x{dim}": z[:, :dim]}
        sides |= {f"3x{dim}@{code}": losses.soft_bits(quantizer.margins(z, code, dim)) for code in objective.codes}
        for name, own in sides.items():
            similarities, count = cosine_matrix(own, own), objective.rank_texts
            terms[f"sim_{name}"] = losses.similarity_error(similarities, targets).mean()
            terms[f"kl_{name}"] = losses.similarity_divergence(
                similarities, targets, temperature=objective.temperature
            ).mean()
            terms[f"rank_{name}"] = losses.rank_error(similarities[:count], targets[:count]).mean()
            scores = similarities / objective.contrast_temperature
            rows = []
            for pair in range(ROWS):
                others = [scores[pair, row] for row in range(2 * ROWS) if row != pair]
                rows.append(torch.stack(others).logsumexp(dim=0) - scores[pair, ROWS + pair])
            terms[f"contrast_{name}"] = torch.stack(rows).mean()
    terms["orthogonality_3x8"] = losses.added_dims_overlap(z, DIMS)
    terms["bottleneck_3x8"] = losses.information_bottleneck(z).mean()
    parts = []
    for code in objective.codes:
        for bits, place, numbers in quantizer.parts(z, code, WIDTH):
            own = quantizer.thresholds(bits)[:, place]
            reach = 3 * (own[-1] - own[0]).clamp(min=1 / WIDTH)
            penalty = losses.range_penalty(numbers, own[0] - reach, own[-1] + reach)
            parts.append((losses.threshold_repulsion(numbers, own) + penalty).mean())
    terms["quantization_3x8"] = losses.ramp(objective.progress) * sum(parts) / len(parts)
    variances = [losses.variance_control(z[:, start:end]) for start, end in ((0, 2), (2, 4), (4, 8))]
    terms["variance_3x8"] = losses.ramp(objective.progress) * sum(variances)
    return terms


def shortened(terms) -> dict[str, torch.Tensor]:
    """Terms by name, without that of the objective."""
    return {name.removeprefix("qama_"): value for name, value in named(terms).items()}


@pytest.mark.parametrize("codes", [("qama-2",), ("qama-1.5", "qama-hybrid")])
@pytest.mark.parametrize("frozen", [True, False])
def test_terms_and_gradients_are_the_losses_one_by_one(frozen, codes):
    settings = {"rank_texts": 4, "temperature": 0.3, "contrast_temperature": 0.2, "quantized_gradient": True}
    objective = qama(frozen=frozen, codes=codes, **settings)
    objective.progress = 0.7
    batch = make_batch(layers=() if frozen else (3,))
    teacher = torch.cat(list(batch.teacher.values()))
    leaves = [] if frozen else [text.layers[3] for text in batch.texts.values()]
    vectors = teacher if frozen else torch.cat(leaves)
    terms, expected = objective(batch), expected_terms(objective, vectors.detach() if frozen else vectors, teacher)
    found = shortened(terms)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
    weights = {dim: math.sqrt(dim) for dim in DIMS}
    total = sum(
        WEIGHTS[name.partition("_")[0]]
        * (
            weights[int(name.partition("x")[2].partition("@")[0])] / sum(weights.values())
            if is_similarity(name)
            else 1
        )
        * value
        for name, value in expected.items()
    )
    torch.testing.assert_close(objective.total(terms), total)
    inputs = [*objective.quantizer.parameters(), *leaves]
    ours = torch.autograd.grad(objective.total(terms), inputs, allow_unused=True)
    theirs = torch.autograd.grad(total, inputs, allow_unused=True)
    for own, wanted in zip(ours, theirs, strict=True):
        assert (own is None) == (wanted is None)
        if wanted is not None:
            torch.testing.assert_close(own, wanted, atol=1e-10, rtol=1e-6)


def is_similarity(name: str) -> bool:
    return name.startswith(("sim_", "kl_", "rank_", "contrast_"))


def test_levels_have_their_own_weights():
    """The weight of a similarity is that of its dim times that of its kind; other terms have that of their kind."""
    levels, weights = {2: 3.0, 4: 0.5, 8: 7.0}, {"rank": 3.0, "variance": 0.0}
    for term in qama(level_weights=levels, weights=weights, quantized_gradient=True)(make_batch()):
        level = levels[term.granularity.dim] if is_similarity(f"{term.name}_") else 1.0
        assert term.weight == pytest.approx((WEIGHTS | weights)[term.name] * level)
    refused("needs a weight for each of the dims", qama, level_weights={8: 1.0})


def test_a_frozen_encoder_is_not_run_and_learns_nothing():
    model = quiet_model().model.double()
    quantizer = make_quantizer(32, dims=[16, 32])
    objective = QAMA(Grid.parse("6x16,32"), quantizer=quantizer)
    assert objective.layers == []
    calls = []
    model.register_forward_pre_hook(lambda *inputs: calls.append(inputs))
    columns = {"text": {"input_ids": torch.ones(9, 4, dtype=torch.long), "text_ids": torch.arange(9)}}
    columns["text"]["teacher"] = torch.randn(9, 32, dtype=torch.float64)
    outputs = NestedModel(model, objective)(**columns)
    outputs["loss"].backward()
    assert not calls and all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad.any() for name, parameter in quantizer.named_parameters() if name != "pair_weights")


def test_codes_pass_a_gradient_only_on_request():
    batch = make_batch()
    for quantized_gradient in (True, False):
        objective = qama(quantized_gradient=quantized_gradient)
        terms = objective(batch)
        coded = [value for term, value in terms.items() if term.granularity.code != "float32"]
        plain = [value for term, value in terms.items() if term.granularity.code == "float32"]
        assert len(coded) == 4 * len(DIMS) and sum(plain).requires_grad
        assert sum(coded).requires_grad == quantized_gradient
        other = named(qama(quantized_gradient=not quantized_gradient)(batch))
        for name, value in named(terms).items():
            torch.testing.assert_close(value, other[name], msg=name)


def test_without_a_gradient_codes_are_terms_of_an_evaluation_only():
    batch, objective = make_batch(), qama()
    evaluated, trained = shortened(objective(batch)), shortened(objective.train()(batch))
    coded = {name for name in evaluated if "@" in name}
    assert coded and trained.keys() == evaluated.keys() - coded
    assert shortened(qama(quantized_gradient=True).train()(batch)).keys() == evaluated.keys()


SWITCHES = {
    "matryoshka": lambda name: is_similarity(name) and (name.startswith("contrast") or "3x8" not in name),
    "quantization_loss": lambda name: "@" in name or name.startswith("quantization"),
    "regularization": lambda name: name.startswith(("orthogonality", "bottleneck")),
    "variance_control": lambda name: name.startswith("variance"),
}


@pytest.mark.parametrize("switch", list(SWITCHES))
def test_a_switch_removes_exactly_its_terms(switch):
    batch = make_batch()
    whole, without = shortened(qama()(batch)), shortened(qama(**{switch: False})(batch))
    gone = {name for name in whole if SWITCHES[switch](name)}
    assert gone and without.keys() == whole.keys() - gone
    for name, value in without.items():
        torch.testing.assert_close(value, whole[name], msg=name)


def test_equal_texts_are_not_negatives():
    """The second document equals the first query's document, and the third query is the first."""
    batch = make_batch()
    with torch.no_grad():
        batch.teacher["document"][1] = batch.teacher["document"][0]
        batch.teacher["query"][2] = batch.teacher["query"][0]
    batch.text_ids["document"][1], batch.text_ids["query"][2] = ROWS, 0
    values = []
    for mask_duplicates in (True, False):
        objective = qama(mask_duplicates=mask_duplicates)
        z = objective.quantizer(torch.cat(list(batch.teacher.values())).detach())
        ids = torch.cat(list(batch.text_ids.values())) if mask_duplicates else torch.arange(2 * ROWS)
        rows = []
        for pair in range(ROWS):
            kept = [
                row for row in range(2 * ROWS)
                if row == ROWS + pair or ids[row] not in (ids[pair], ids[ROWS + pair])
            ]  # fmt: skip
            rows.append(nested_info_nce(
                z[pair : pair + 1], z[kept], dims=(WIDTH,), temperature=0.05,
                targets=torch.tensor([kept.index(ROWS + pair)]),
            ))  # fmt: skip
        found = named(objective(batch))["qama_contrast_3x8"]
        torch.testing.assert_close(found, torch.cat(rows).mean())
        values.append(found)
    assert values[0] < values[1]


def test_thresholds_move_in_training_only():
    batch = make_batch()
    objective = qama()
    before = {name: value.clone() for name, value in objective.quantizer.named_buffers()}
    objective(batch)
    assert all(torch.equal(value, before[name]) for name, value in objective.quantizer.named_buffers())
    expected = make_quantizer()
    with torch.no_grad():
        expected.update_thresholds(expected(torch.cat(list(batch.teacher.values()))))
    objective.train()(batch)
    for name, value in objective.quantizer.named_buffers():
        torch.testing.assert_close(value, expected.get_buffer(name), msg=name)
        assert name == "calibrated" or not torch.equal(value, before[name])


def test_one_text_has_finite_terms():
    """A last batch of an evaluation may have one row."""
    terms = qama()(make_batch(("text",), rows=1))
    assert all(torch.isfinite(value) for value in terms.values())


def test_bfloat16_and_autocast_stay_close():
    quantizer, batch = make_quantizer().float(), make_batch(layers=(3,))
    objective = QAMA(GRID, quantizer=quantizer, frozen=False).eval()

    def cast(dtype):
        texts = {
            name: PooledStates({3: text.layers[3].detach().to(dtype)}, "mean") for name, text in batch.texts.items()
        }
        return NestedBatch(
            texts=texts, text_ids=batch.text_ids, teacher={k: v.float() for k, v in batch.teacher.items()}
        )

    expected = named(objective(cast(torch.float32)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = named(objective(cast(torch.float32)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)
    rounded = named(objective(cast(torch.bfloat16)))
    for name, value in expected.items():
        assert rounded[name].dtype == torch.float32
        if "@" not in name:
            torch.testing.assert_close(rounded[name], value, atol=0.02, rtol=0.05, msg=name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: qama(codes=("int8",)), "'int8' is not a precision of a quantizer; legal values: qama-2, "),
        (lambda: qama(Grid.parse("3x4,8")), r"grid 3x4,8 must have the nested dims of the quantizer, \[2, 4, 8\]"),
        (lambda: qama(weights={"ranks": 1.0}), "weights has unknown keys: ranks; legal values: sim, kl, rank, con"),
        (lambda: qama()(NestedBatch(texts={})), "QAMA needs a teacher's embeddings of the texts"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    refused(message, make)
