"""Averaged checkpoints."""

from __future__ import annotations

import pytest
import torch

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config
from trainers.core.averaging import average, average_checkpoints
from trainers.core.checkpoints import last_checkpoints


def saved(folder, seed: int, **changes) -> M3BertForMaskedLM:
    torch.manual_seed(seed)
    model = M3BertForMaskedLM(tiny_config(**changes)).eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_mean_is_rounded_once(dtype):
    states = [{"w": torch.randn(3, 5).to(dtype), "count": torch.tensor([4])} for _ in range(3)]
    found = average(states)
    expected = (sum(state["w"].double() for state in states) / 3).to(dtype)
    assert torch.equal(found["w"], expected) and found["w"].dtype == dtype
    assert torch.equal(found["count"], torch.tensor([4]))
    found["count"] += 1
    assert states[0]["count"].item() == 4, "a copy"


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "nothing to average"),
        ([{"a": torch.ones(2)}, {"b": torch.ones(2)}], "Not all checkpoints have the same tensors: a, b"),
        ([{"a": torch.ones(2)}, {"a": torch.ones(3)}], r"a has different shapes: \[2\], \[3\]"),
        ([{"a": torch.tensor([1])}, {"a": torch.tensor([2])}], "a is not a float tensor and differs"),
    ],
)
def test_what_cannot_be_averaged_is_refused(states, message):
    with pytest.raises(ValueError, match=message):
        average(states)


@pytest.mark.parametrize("tied", [True, False])
def test_an_averaged_checkpoint_loads(tmp_path, tied):
    models = [saved(tmp_path / str(seed), seed, tie_word_embeddings=tied) for seed in range(3)]
    (tmp_path / "2" / "tokenizer.json").write_text("{}")
    (tmp_path / "2" / "optimizer.bin").write_text("training only")
    average_checkpoints([tmp_path / str(seed) for seed in range(3)], tmp_path / "mean")
    found = M3BertForMaskedLM.from_pretrained(tmp_path / "mean")
    states = [model.state_dict() for model in models]
    for name, tensor in found.state_dict().items():
        expected = (sum(state[name].double() for state in states) / 3).to(tensor.dtype)
        assert torch.equal(tensor, expected), name
    shared = found.get_output_embeddings().weight is found.get_input_embeddings().weight
    assert shared is tied
    assert (tmp_path / "mean" / "tokenizer.json").is_file()
    assert not (tmp_path / "mean" / "optimizer.bin").exists()


def test_bad_checkpoints_are_refused_and_nothing_is_written(tmp_path):
    saved(tmp_path / "a", 0)
    saved(tmp_path / "b", 1, num_hidden_layers=2, matryoshka_layers=[])
    M3BertModel(tiny_config()).save_pretrained(tmp_path / "c")
    (tmp_path / "empty").mkdir()
    saved(tmp_path / "cut", 2)
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    for others, message in (
        (["a"], "two checkpoints or more"),
        (["a", "b"], "b has another config than .*a: matryoshka_layers, num_hidden_layers"),
        (["a", "c"], "c has another config than .*a: architectures"),
        (["a", "empty"], "empty is no checkpoint: it has no config.json"),
        (["a", "cut"], "cannot be read; it may be truncated"),
    ):
        with pytest.raises(ValueError, match=message):
            average_checkpoints([tmp_path / name for name in others], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()
    with pytest.raises(ValueError, match="a exists already"):
        average_checkpoints([tmp_path / "b", tmp_path / "c"], tmp_path / "a")


def test_the_last_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    for step in (9, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-200").mkdir()  # being written
    assert [folder.rpartition("-")[2] for folder in last_checkpoints(tmp_path, 2)] == ["20", "100"]
    with pytest.raises(ValueError, match="has 3 complete checkpoints, fewer than 4"):
        last_checkpoints(tmp_path, 4)
