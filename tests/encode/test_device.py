"""Where and how an encoder computes: its device, type, attention and compilation."""

import subprocess
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from transformers.utils.generic import is_flash_attention_requested

from m3bert.encode.device import ComputeArguments, autocast, device_of, place
from m3bert.encode.states import is_flash
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import MultigranularMLM, NestedTrainer, nested_states
from tests.conftest import padded_batch, tiny_config
from tests.trainers.tiny_run import GRID, arguments, quiet_model


ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def state(model: torch.nn.Module, batch: dict[str, torch.Tensor], layer: int = 6) -> torch.Tensor:
    with torch.no_grad():
        return nested_states(model, batch, [layer]).layers[layer]


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", None])
def test_the_default_device_is_the_accelerator(monkeypatch, kind):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    assert device_of() == ComputeArguments().torch_device == torch.device(kind or "cpu")
    assert ComputeArguments().uses_cpu == (kind is None)
    assert ComputeArguments(device="cuda:1").torch_device == torch.device("cuda", 1)


def test_reading_the_options_does_not_load_torch():
    code = "import sys, m3bert.encode.device; assert not {'torch', 'transformers'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_widened_unless_they_are_asked_for(tiny_model, dtype):
    half = tiny_model.to(dtype)
    remaining = {name: tensor.clone() for name, tensor in half.state_dict().items()}
    assert place(half, ComputeArguments(device="cpu", compute_dtype="bfloat16")).dtype == dtype
    wide = place(half, ComputeArguments(device="cpu"))
    assert wide.dtype == torch.float32
    for name, tensor in wide.state_dict().items():
        assert torch.equal(tensor, remaining[name].float())


def test_quantised_weights_keep_their_type(tmp_path):
    torchao = pytest.importorskip("torchao.quantization")
    M3BertModel(tiny_config()).to(torch.bfloat16).save_pretrained(tmp_path)
    settings = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = M3BertModel.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=settings).eval()
    batch = padded_batch()
    expected = state(model, batch)
    assert place(model, ComputeArguments(device="cpu")).dtype == torch.bfloat16
    assert torch.equal(state(model, batch), expected)


@pytest.mark.parametrize(("name", "tolerance"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_mixed_precision_leaves_the_weights_and_comes_close(tiny_model, name, tolerance):
    batch, options = padded_batch(), ComputeArguments(device="cpu", compute_dtype=name)
    expected = state(tiny_model, batch)
    assert place(tiny_model, options).dtype == torch.float32
    with autocast(CPU, options.autocast_dtype):
        actual = state(tiny_model, batch)
    assert not torch.equal(actual, expected)
    torch.testing.assert_close(actual.float(), expected, atol=tolerance, rtol=tolerance)
    with autocast(CPU, ComputeArguments(device="cpu").autocast_dtype):
        assert torch.equal(state(tiny_model, batch), expected)


@pytest.mark.parametrize("name", ["eager", "sdpa", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_the_attention_that_was_asked_for_computes_the_same(tiny_masked_lm, name):
    batch = padded_batch()
    expected = state(tiny_masked_lm, batch)
    place(tiny_masked_lm, ComputeArguments(device="cpu", attn_implementation=name))
    assert tiny_masked_lm.model.config._attn_implementation == name
    torch.testing.assert_close(state(tiny_masked_lm, batch), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "flash"),
    [
        *((name, False) for name in ("eager", "sdpa", "flex_attention")),
        *((f"flash_attention_{version}", True) for version in (2, 3, 4)),
        *((f"kernels-community/{name}", True) for name in ("flash-attn2", "vllm-flash-attn3")),
    ],
)
def test_flash_attention_reads_one_row_and_refuses_float32(name, flash, tmp_path, monkeypatch):
    assert is_flash(name) == is_flash_attention_requested(requested_attention_implementation=name) == flash
    assert ComputeArguments(attn_implementation=name, compute_dtype="bfloat16").attn_implementation == name
    model = quiet_model()
    monkeypatch.setattr(model.config, "_attn_implementation_internal", name)
    made = (
        partial(ComputeArguments, attn_implementation=name),
        partial(NestedTrainer, model, MultigranularMLM(GRID), arguments(tmp_path), data_collator=list),
    )
    for make in made:
        with pytest.raises(ValueError, match="needs half precision: ") if flash else nullcontext():
            make()
    NestedTrainer(model, MultigranularMLM(GRID), arguments(tmp_path, bf16=True), data_collator=list)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["m3bert", "mpnet"])
def test_a_compiled_encoder_equals_the_eager_one(model_type):
    from tests.encode.test_states import backbone

    model = backbone(model_type)
    lengths = [(7, 3, 1, 5), (9, 4), (5,), (11, 11, 11)]
    batches = [padded_batch(lengths=part) for part in lengths]
    expected = [nested_states(model, batch, [2, 4]).layers for batch in batches]
    names = list(model.state_dict())
    place(model, ComputeArguments(device="cpu", compile=True))
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for batch, states in zip(batches, expected, strict=True):
            actual = nested_states(model, batch, [2, 4]).layers
            for layer in (2, 4):
                torch.testing.assert_close(actual[layer], states[layer], atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3  # not one per shape
    assert list(model.state_dict()) == names


@pytest.mark.slow
def test_compilation_reaches_the_encoder_inside_a_head_and_an_adapter():
    peft = pytest.importorskip("peft")
    batch = padded_batch()
    whole = M3BertForMaskedLM(tiny_config()).eval()
    adapter = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    for model in (whole, peft.get_peft_model(M3BertForMaskedLM(tiny_config()).eval(), adapter)):
        expected = state(model, batch)
        place(model, ComputeArguments(device="cpu", compile=True))
        torch._dynamo.utils.counters.clear()
        torch.testing.assert_close(state(model, batch), expected, atol=1e-5, rtol=1e-5)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_gpu_gives_what_the_cpu_gives(tiny_model, name):
    batch = padded_batch()
    expected = state(tiny_model, batch)
    options = ComputeArguments(compute_dtype=name)
    place(tiny_model, options)
    assert tiny_model.device.type == "cuda"
    with autocast(tiny_model.device, options.autocast_dtype):
        actual = state(tiny_model, {key: tensor.cuda() for key, tensor in batch.items()})
    tolerance = 1e-3 if name == "float32" else 0.1
    torch.testing.assert_close(actual.float().cpu(), expected, atol=tolerance, rtol=tolerance)
