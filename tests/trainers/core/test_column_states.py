"""The texts of all columns, sorted by length and encoded in chunks: the same step as each column on its own."""

import itertools
import random
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from m3bert.encode.padded_batches import PassCost, chunked
from m3bert.encode.states import unwrap_encoder
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.models.anatomy import anatomy_of
from m3bert.trainers import (
    Contrastive,
    Grid,
    MICConfig,
    MIPICConfig,
    MultigranularMLM,
    NestedBatch,
    NestedModel,
    Objective,
    nested_states,
)
from m3bert.trainers.core.column_states import column_states
from m3bert.trainers.core.model import NOT_INPUTS
from tests.conftest import padded_batch, tiny_config
from tests.encode.test_states import OTHERS, PADDED_ON_ANY_SIDE, backbone


SINGLE_PRECISION = ("gemma3_text",)  # computes its norms in float32, also for float64 weights
LENGTHS = {"anchor": (3, 9, 3, 4, 1), "positive": (14, 2, 2, 7, 3), "negative": (6, 6, 1, 12, 3)}
GRID = Grid.parse("2,4x8,32")


@pytest.fixture(autouse=True)
def _many_chunks(monkeypatch):
    """Costs under which the few short texts of a test make several chunks."""
    monkeypatch.setattr(PassCost, "on", classmethod(lambda cls, device: cls(2, 30)))


def columns() -> dict[str, dict[str, torch.Tensor]]:
    """Three columns of different widths. Two positives are equal, and one of them equals a hard negative."""
    actual = {name: padded_batch(lengths=lengths) for name, lengths in LENGTHS.items()}
    actual["positive"]["input_ids"][2] = actual["positive"]["input_ids"][1]
    for number, column in enumerate(actual.values()):
        column["text_ids"] = torch.arange(5) + 10 * number
    actual["positive"]["text_ids"][2] = actual["positive"]["text_ids"][1]
    actual["negative"]["text_ids"][4] = actual["positive"]["text_ids"][1]
    return actual


def plain(model: Any, objective: Objective, batch: dict[str, dict[str, torch.Tensor]], **inputs: Any) -> torch.Tensor:
    """The loss with every column encoded on its own, as it is padded."""
    texts = {
        name: nested_states(
            model, {entry: value for entry, value in column.items() if entry not in NOT_INPUTS}, objective.layers
        )
        for name, column in batch.items()
    }
    ids = {name: column["text_ids"] for name, column in batch.items() if "text_ids" in column}
    nested = NestedBatch(texts=texts, text_ids=ids or None, output_embeddings=model.get_output_embeddings(), **inputs)
    return objective.total(objective(nested))


def encoder_calls(model: Any) -> list[tuple[int, ...]]:
    """Shapes of the batches that the encoder reads, appended as it runs."""
    calls: list[tuple[int, ...]] = []
    anatomy_of(unwrap_encoder(model))  # which runs it
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(
            tuple((kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"]).shape[:2])
        ),
        with_kwargs=True,
    )
    return calls


def assert_same_step(model: Any, ours: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Equal losses and equal gradients of every parameter, relative to the largest gradient."""
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    asked = torch.autograd.grad(expected, parameters, allow_unused=True)
    largest = max(gradient.abs().max() for gradient in asked if gradient is not None)
    for one, other in zip(torch.autograd.grad(ours, parameters, allow_unused=True), asked, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one - other).abs().max() <= tolerance * largest


def exactness(model_type: str) -> float:
    return 1e-7 if model_type in SINGLE_PRECISION else 1e-12


def objectives() -> dict[str, Objective]:
    nowhere: dict[str, Any] = {"output_dir": "unused", "report_to": "none"}
    return {
        "mean": Contrastive(GRID),
        "cls": Contrastive(GRID, pooling="cls", symmetric=True),
        "lasttoken": Contrastive(GRID, pooling="lasttoken"),
        "mic": MICConfig(**nowhere, scr={"layers": [2, 4]}, sir={"layers": [2, 4]}).build_objective(GRID),
        "mipic": MIPICConfig(**nowhere, sia={"layers": [1, 2]}, pic={"chain": "1x8,4x32"}).build_objective(GRID),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str)
@pytest.mark.parametrize("name", ["mean", "cls", "lasttoken", "mic", "mipic"])
def test_a_step_is_that_of_each_column_on_its_own(name, dtype, tolerance):
    model = M3BertModel(tiny_config()).to(dtype).eval()
    objective, batch = objectives()[name].to(dtype), columns()
    expected = plain(model, objective, batch)
    calls = encoder_calls(model)
    ours = NestedModel(model, objective)(**batch)["loss"]
    assert len(calls) > 2
    assert sum(rows for rows, _ in calls) == 15
    assert sum(rows * tokens for rows, tokens in calls) < 0.7 * sum(5 * max(lengths) for lengths in LENGTHS.values())
    assert_same_step(model, ours, expected, tolerance)


@pytest.mark.parametrize("model_type", [*OTHERS, "m3bert"])
def test_every_backbone(model_type):
    """Gradients of token embeddings too: they are looked up once for all chunks."""
    model, batch = backbone(model_type).double(), columns()
    causal = model_type == "qwen3"
    objective = Contrastive(GRID, pooling="lasttoken" if causal else "cls").double()
    lookups = []
    anatomy_of(model)  # which runs it
    model.get_input_embeddings().register_forward_hook(lambda module, args, output: lookups.append(args[0].numel()))
    ours = NestedModel(model, objective)(**batch)["loss"]
    assert len(lookups) == 1
    assert_same_step(model, ours, plain(model, objective, batch), exactness(model_type))


@pytest.mark.parametrize("model_type", ["bert", "m3bert", *PADDED_ON_ANY_SIDE])
def test_padding_on_the_left_stays(model_type):
    model = backbone(model_type).double()
    batch = {
        name: {entry: value.flip(1) if value.ndim > 1 else value for entry, value in column.items()}
        for name, column in columns().items()
    }
    objective = Contrastive(GRID, pooling="lasttoken").double()
    ours = NestedModel(model, objective)(**batch)["loss"]
    assert_same_step(model, ours, plain(model, objective, batch), exactness(model_type))


def test_masked_language_modelling():
    model = M3BertForMaskedLM(tiny_config()).double().eval()
    batch = padded_batch(lengths=(14, 3, 3, 9, 1))
    labels = torch.where(batch["attention_mask"].bool() & (torch.rand(5, 14) < 0.6), batch["input_ids"], -100)
    objective = MultigranularMLM(GRID)
    calls = encoder_calls(model.model)
    ours = NestedModel(model, objective)(**batch, labels=labels)["loss"]
    assert len(calls) > 1
    assert_same_step(model, ours, plain(model, objective, {"text": batch}, labels=labels), 1e-12)


@pytest.mark.parametrize("mini_batch_size", [None, 2])
def test_every_text_is_encoded_once_with_masks_of_its_own(mini_batch_size):
    model = M3BertModel(tiny_config(embedding_dropout=0.5)).train()
    batch = padded_batch(lengths=(9, 3, 3, 6))
    masked: list[torch.Tensor] = []
    anatomy_of(model)  # which runs it, without dropout
    model.dropout.register_forward_hook(lambda module, args, output: masked.append((output == 0).detach()))
    states = column_states(model, {"text": batch, "view": batch}, [2], "mean", mini_batch_size)
    drawn = torch.cat([zeros.flatten() for zeros in masked]).float().mean()
    assert drawn == pytest.approx(0.5, abs=0.03)
    assert sum(zeros.shape[0] for zeros in masked) == 8
    # Two views of a text are two rows, each with its own mask.
    views = (states["text"].pooled(2), states["view"].pooled(2))
    assert (views[0] - views[1]).abs().amax(dim=1).min() > 1e-3
    (views[0] - views[1]).square().sum().backward()


def test_rows_of_several_texts_are_left_alone(tiny_model):
    flat = {
        "input_ids": torch.randint(5, 99, (1, 7)), "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]]),
        "cu_seq_lens_q": torch.tensor([0, 4, 7], dtype=torch.int32),
        "cu_seq_lens_k": torch.tensor([0, 4, 7], dtype=torch.int32), "max_length_q": 4, "max_length_k": 4,
    }  # fmt: skip
    actual = column_states(tiny_model, {"text": flat}, [6])["text"].layers[6]
    assert torch.equal(actual, tiny_model(**flat).last_hidden_state)
    with pytest.raises(ValueError, match="can be cached for one text per row"):
        column_states(tiny_model, {"text": flat}, [6], "mean", mini_batch_size=2)


def attention_of_flattened_texts(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """What flash attention computes for flattened texts: each text on its own. It takes no mask."""
    assert attention_mask is None
    bounds = kwargs["cu_seq_lens_q"].tolist()
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(tensor[:, :, start:stop] for tensor in (query, key, value)),
            is_causal=module.is_causal,
            scale=kwargs.get("scaling"),
        )
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("model_type", ["m3bert", "bert", "roberta", "qwen3", "eurobert"])
def test_flash_attention_reads_flattened_texts(model_type):
    model, batch = backbone(model_type).double(), columns()
    objective = Contrastive(GRID, pooling="lasttoken").double()
    expected = plain(model, objective, batch)
    AttentionInterface.register("flash_of_the_test", attention_of_flattened_texts)
    model.config._attn_implementation = "flash_of_the_test"
    calls = encoder_calls(model)
    ours = NestedModel(model, objective)(**batch)["loss"]
    assert {rows for rows, _ in calls} == {1}
    assert sum(tokens for _, tokens in calls) == sum(map(sum, LENGTHS.values()))
    assert_same_step(model, ours, expected, 1e-12)


@pytest.mark.gpu
def test_flash_attention_on_a_gpu_equals_sdpa(flash_attention):
    model = M3BertModel(tiny_config()).eval().to("cuda", torch.bfloat16)
    batch = {name: {entry: value.cuda() for entry, value in column.items()} for name, column in columns().items()}
    objective = Contrastive(GRID)
    with torch.no_grad():
        expected = NestedModel(model, objective)(**batch)["loss"]
        model.set_attn_implementation(flash_attention)
        ours = NestedModel(model, objective)(**batch)["loss"]
    torch.testing.assert_close(ours, expected, rtol=0.02, atol=0.02)


def cheapest(lengths: list[int], cost: PassCost) -> int:
    """The lowest cost of all divisions of the sorted texts at any positions."""
    actual = []
    ordered = sorted(lengths, reverse=True)
    for count in range(len(lengths)):
        for cuts in itertools.combinations(range(1, len(lengths)), count):
            parts = [ordered[a:b] for a, b in itertools.pairwise((0, *cuts, len(lengths)))]
            if cost.most_tokens and any(len(part) > 1 and len(part) * part[0] > cost.most_tokens for part in parts):
                continue
            actual.append(sum(len(part) * part[0] + cost.overhead for part in parts))
    return min(actual)


@pytest.mark.parametrize("overhead", [0, 1, 7, 30, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_no_division_costs_less(overhead, seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 20) for _ in range(9)]
    cost = PassCost(overhead)
    chunks = chunked(lengths, cost)
    assert sorted(itertools.chain(*chunks)) == list(range(9))
    spent = sum(len(chunk) * max(lengths[row] for row in chunk) + overhead for chunk in chunks)
    assert spent == cheapest(lengths, cost)


@pytest.mark.parametrize("seed", range(4))
def test_no_pass_exceeds_the_limit_except_of_one_text(seed):
    draw = random.Random(seed)
    lengths = [draw.choice([1, 2, 3, 3, 8, 8, 8, 40]) for _ in range(60)]
    chunks = chunked(lengths, PassCost(2, most_tokens=24))
    assert sorted(itertools.chain(*chunks)) == list(range(60))
    for chunk in chunks:
        assert len(chunk) == 1 or len(chunk) * max(lengths[row] for row in chunk) <= 24
    assert [max(lengths[row] for row in chunk) for chunk in chunks] == sorted(
        (max(lengths[row] for row in chunk) for chunk in chunks), reverse=True
    )
    # Passes of equal length share their texts evenly: no pass is nearly empty.
    threes = [len(chunk) for chunk in chunked([3] * 33, PassCost(2, most_tokens=24))]
    assert len(threes) == 5
    assert max(threes) - min(threes) <= 1


def test_one_chunk_keeps_the_order():
    assert chunked([1, 3, 2], PassCost(100)) == [[0, 1, 2]]
    assert chunked([0, 0], PassCost(1)) == [[0, 1]]
    assert len(chunked([5, 1, 5, 1], PassCost(1))) == 2
    assert PassCost(1, 10).limited(20).most_tokens == 10
    assert PassCost(1, 30).limited(20).most_tokens == PassCost(1).limited(20).most_tokens == 20
