"""The equations of the calculator against models, against small cases worked out by hand, and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modeling_m3bert import M3BertConfig, M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config
from trainers.core import scaling
from trainers.core.scaling_step import STAGES, Hardware, Stage, Step
from trainers.core.states import nested_states


PAPER = M3BertConfig()
PAIRS = Stage(64, 2, (2, 6), (8, 32), 16, 10)
CONFIGS = {
    "default": {},
    "as BERT": {"norm_type": "layernorm", "norm_position": "post", "attention_bias": True, "mlp_bias": True},
    "not gated": {"mlp_gated": False, "mlp_bias": True},
    "rotary": {"position_embedding_type": "rope"},
    "exits": {"exit_layers": [1, 2]},
    "static": {"exit_layers": [0, 2, 4], "static_layers": [0, 4]},
    "joint only": {"exit_layers": [0, 4], "static_layers": [4]},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name):
    config = tiny_config(**CONFIGS[name])
    assert scaling.encoder_parameters(config) == M3BertModel(config).num_parameters()
    both = scaling.encoder_parameters(config) + scaling.head_parameters(config)
    assert both == M3BertForMaskedLM(config).num_parameters()


def test_the_paper_s_model():
    assert scaling.encoder_parameters(PAPER) == 305_660_928


@pytest.mark.parametrize("name", ["default", "as BERT", "not gated"])
@pytest.mark.parametrize("bfloat16", [False, True])
def test_activations_are_those_that_autograd_keeps(name, bfloat16):
    """All that is saved for the backward pass, less parameters and the copies that autocast makes of them."""
    changes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "matryoshka_layers": [1, 3]}
    changes |= {"embedding_dropout": 0.0, "attention_dropout": 0.0, "matryoshka_dims": [64], **CONFIGS[name]}
    config = tiny_config(**changes)
    model, shape = M3BertModel(config).train(), (8, 12)
    inputs = {"input_ids": torch.randint(5, 99, shape), "attention_mask": torch.ones(shape, dtype=torch.long)}
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            states = nested_states(model, inputs, (1, 3))
            pooled = [states.pooled(layer) for layer in (1, 3)]
    assert pooled[0].shape == (8, 64)
    measured = sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in known)
    compute = 2 if bfloat16 else 4
    fused = config.norm_type == "layernorm"  # which is one kernel on CPUs, too
    layers = 3 * scaling.layer_activation_bytes(config, compute, fused)
    predicted = 96 * (layers + scaling.output_bytes(config, 2, fused))
    predicted += scaling.cast_weight_bytes(config, compute)
    assert predicted == pytest.approx(measured, rel=0.06)


def test_checkpointing_keeps_inputs_of_layers():
    plain, less = (
        scaling.activation_bytes(PAPER, 1000, read_layers=2, checkpointing=checkpointing)
        for checkpointing in (False, True)
    )
    layer = scaling.layer_activation_bytes(PAPER, 2)
    assert plain - less == 1000 * (11 * layer - 12 * 768 * 4)


def test_sizes_of_collectives_by_hand():
    """Four GPUs, ten bytes each: a ring all-reduce of 40 sends three quarters twice, an all-gather three blocks."""
    assert scaling.all_reduce_bytes(40, 4) == 60
    assert scaling.all_gather_bytes(40, 4) == 30
    assert scaling.candidate_communication(10, 2, 4, 1, ring=False) == 30 + 60 + 6
    assert scaling.candidate_communication(10, 2, 4, 1, ring=True) == 2 * 3 * (10 + 2) + 4 * 10
    assert scaling.candidate_communication(10, 2, 1, 1, ring=True) == 0
    assert scaling.parameter_communication(10, 4, "ddp", 5, 5) == 60
    assert scaling.parameter_communication(10, 4, "fsdp", 2, 1) == 4 * 30


def test_time_is_the_sum_of_its_parts():
    assert scaling.seconds([(6.0, 2.0), (1.0, 4.0)], 10, 0.5, 5) == 6.0 + 0.5 + 2.0
    fast = Hardware(compute=1e12, float32=1e12, utilisation=1.0, bandwidth=1e9, node_bandwidth=1e9)
    step = Step(PAPER, STAGES[3], 8, 64, hardware=fast)
    assert sum(step.seconds().values()) == pytest.approx(
        sum(step.operations().values()) / 1e12 + sum(step.communication().values()) / 1e9
    )


def test_operations_of_a_product_by_hand():
    """A layer of four 2x2 matrices and three 2x3 for five tokens, and attention between them."""
    config = replace_sizes(hidden_size=2, intermediate_size=3, num_hidden_layers=1)
    assert scaling.encoder_operations(config, 5, 5) == 5 * (2 * (4 * 4 + 3 * 6) + 4 * 5 * 2)
    assert scaling.passes(cached=True, checkpointing=True) == 5


def replace_sizes(**sizes: int) -> M3BertConfig:
    return M3BertConfig(num_attention_heads=1, matryoshka_layers=[], matryoshka_dims=[], **sizes)


def test_sharding_divides_what_is_kept():
    ddp, fsdp = (Step(PAPER, STAGES[3], 8, 64, strategy).kept_bytes() for strategy in ("ddp", "fsdp"))
    for part in ("parameters", "optimizer", "gradients"):
        assert ddp[part] == 8 * fsdp[part]
    assert ddp["buckets"] == ddp["gradients"] and not fsdp["buckets"]
    assert fsdp["unsharded"] and not ddp["unsharded"]


def test_a_ring_s_memory_does_not_grow_with_the_number_of_gpus():
    """As many pairs per GPU, at full width."""
    wide = replace(STAGES[3], dims=(768,))
    found = {
        (candidates, gpus): sum(
            Step(PAPER, replace(wide, batch=2**13 * gpus), gpus, 64, candidates=candidates).loss_bytes().values()
        )
        for candidates in ("gather", "ring")
        for gpus in (8, 64, 512)
    }
    assert found["ring", 8] == found["ring", 512]
    assert found["gather", 8] < found["gather", 64] < found["gather", 512]
    block = 2**13 * 768 * 4
    assert found["gather", 512] - found["gather", 64] == 3 * (512 - 64) * block


def test_both_send_about_as_much():
    gathered, ring = (
        Step(PAPER, STAGES[3], 64, 64, candidates=candidates).communication()["candidates"]
        for candidates in ("gather", "ring")
    )
    assert ring == pytest.approx(gathered, rel=0.05)


def test_mini_batches_are_about_equally_large():
    """48 texts in mini-batches of at most 32: twice 24."""
    assert Step(tiny_config(), replace(PAIRS, batch=24), 1, 32).texts_at_a_time == 24
    assert Step(tiny_config(), PAIRS, 1, 500).texts_at_a_time == 128


def test_more_of_everything_needs_more():
    def total(**changes: object) -> float:
        values = {"config": tiny_config(), "stage": PAIRS, "gpus": 4, "mini_batch": 4} | changes
        return sum(Step(**values).memory().values())

    assert total() < total(mini_batch=8) < total(cached=False)
    assert total(checkpointing=True) < total()
    assert total() < total(compute_bytes=4)
    assert total() < total(stage=replace(PAIRS, length=32))
    short = replace(PAIRS, length=1)
    assert total(stage=replace(short, batch=2**14)) < total(stage=replace(short, batch=2**15))


def test_stages_of_the_paper():
    assert STAGES[1] == STAGES[2] and not STAGES[1].contrastive
    assert (STAGES[1].batch, STAGES[1].layers, STAGES[1].dims) == (131_072, (4, 8, 12), (32, 64, 128, 768))
    assert (STAGES[3].batch, STAGES[3].layers, STAGES[3].dims) == (1_048_576, (4, 12), (32, 64, 128))
    masked = Step(PAPER, STAGES[1], 64, 32)
    assert masked.parameters == 305_660_928 + 250_002 * 769
    assert "head" in masked.loss_bytes() and "candidates" not in masked.communication()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "tp"}, "strategy='tp' is unknown; legal values: ddp, fsdp"),
        ({"candidates": "star"}, "candidates='star' is unknown; legal values: gather, ring"),
        ({"gpus": 0}, "gpus=0 must be 1 or more"),
        ({"mini_batch": 0}, "mini_batch=0 must be 1 or more"),
        ({"gpus": 3}, "A batch of 64 rows cannot be divided over 3 GPUs"),
        ({"stage": replace(PAIRS, layers=(7,))}, "reads 7 layers and 32 dims, but the model has 6 x 32"),
        ({"stage": replace(PAIRS, length=10_000)}, "length=10000 is above the model's"),
    ],
)
def test_what_cannot_be_trained_is_refused(changes, message):
    values = {"config": tiny_config(), "stage": PAIRS, "gpus": 4, "mini_batch": 4} | changes
    with pytest.raises(ValueError, match=message):
        Step(**values)


@pytest.mark.parametrize(("changes", "message"), [({"utilisation": 1.5}, "at most 1"), ({"bandwidth": 0}, "above 0")])
def test_impossible_hardware_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Hardware(**changes)
