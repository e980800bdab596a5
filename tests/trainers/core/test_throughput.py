"""The operations of a training step against those that torch counts, and rates with a clock that the test holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config
from tests.trainers.tiny_run import GRID, masked_dataset, mlm_trainer, quiet_model
from trainers import Contrastive, Grid, MultigranularMLM
from trainers.core import throughput
from trainers.core.encoding.packed_rows import DOCUMENTS
from trainers.core.model import NestedModel
from trainers.core.throughput import ModelCost, ThroughputMeter, peak_of, sizes_of


class Clock:
    """Seconds that the test sets."""

    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("changes", [{}, {"mlp_gated": False}, {"attention_bias": True, "mlp_bias": True}])
def test_operations_are_those_that_torch_counts(changes):
    """Forward and backward, of texts without padding, with a plain head at each layer."""
    model = M3BertForMaskedLM(tiny_config(attn_implementation="eager", **changes)).train()
    ids, masked = torch.randint(5, 99, (3, 11)), torch.arange(11) % 4 == 1
    labels = torch.where(masked.expand(3, 11), ids, -100)
    with FlopCounterMode(display=False) as counter:
        hidden = model.model(ids, output_hidden_states=True).hidden_states
        losses = []
        for layer in (2, 6):
            scores = hidden[layer][labels != -100] @ model.lm_head.weight.T
            losses.append(torch.nn.functional.cross_entropy(scores, labels[labels != -100]))
        torch.stack(losses).sum().backward()
    cost = ModelCost.of(NestedModel(model, MultigranularMLM(Grid.parse("2,6x8,32"))))
    sizes = sizes_of({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    assert sizes.tolist() == [33, 3 * 121, 9]
    assert cost.operations(*sizes.tolist()) == counter.get_total_flops()


def test_only_layers_up_to_the_deepest_that_is_read_count():
    config = tiny_config(attn_implementation="eager")
    model, shallow = M3BertModel(config), M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[2]))
    for objective, depth in ((Contrastive(Grid.parse("1,2x8")), 2), (Contrastive(Grid.parse("6x8")), 6)):
        cost = ModelCost.of(NestedModel(model, objective))
        assert (cost.attention, cost.head) == (depth * 32, 0)
    two = ModelCost.of(NestedModel(model, Contrastive(Grid.parse("2x8"))))
    assert two == ModelCost.of(NestedModel(shallow, Contrastive(Grid.parse("2x32"))))


def test_a_model_whose_matrices_are_not_all_trained_has_no_mfu():
    model = M3BertModel(tiny_config())
    model.layers[1].mlp.requires_grad_(False)
    assert ModelCost.of(NestedModel(model, Contrastive(Grid.parse("2x8")))) is None
    assert ModelCost.of(NestedModel(model, Contrastive(Grid.parse("1x8")))) is not None


def test_padding_does_not_count_and_packed_documents_are_texts():
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    pairs = {"query": {"attention_mask": mask}, "document": {"attention_mask": torch.ones(2, 5)}}
    assert sizes_of(pairs).tolist() == [3 + 1 + 5 + 5, 9 + 1 + 25 + 25, 0]
    documents = torch.tensor([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    packed = {"input_ids": documents, DOCUMENTS: documents, "labels": torch.tensor([[-100, 7], [8, -100]])}
    assert sizes_of(packed).tolist() == [11, 9 + 4 + 1 + 1 + 16, 2]


def test_rates_are_those_since_the_last_log():
    clock, mask = Clock(), torch.ones(2, 3)
    meter = ThroughputMeter(ModelCost(matrices=5, attention=2), peak=1000.0, clock=clock)
    assert meter.pop() == {}
    meter.add({"attention_mask": mask})
    clock.now += 1
    meter.add({"attention_mask": mask})
    clock.now += 3
    operations = 3 * (2 * 5 * 12 + 4 * 2 * 36)
    assert meter.pop() == {"tokens_per_second": 3.0, "mfu": pytest.approx(operations / 4000)}
    meter.add({"attention_mask": mask})
    clock.now += 0.5
    assert meter.pop()["tokens_per_second"] == 12.0
    assert meter.pop() == {}


@pytest.mark.parametrize("known", [(None, 1e12), (ModelCost(5, 2), None)])
def test_what_is_not_known_is_not_invented(known):
    clock = Clock()
    meter = ThroughputMeter(*known, clock=clock)
    meter.add({"attention_mask": torch.ones(2, 3)})
    clock.now += 2
    assert meter.pop() == {"tokens_per_second": 3.0}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GeForce GTX 1080", None),
        ("cpu", None),
    ],
)
def test_peaks_by_name(name, peak):
    assert peak_of(name) == peak


@pytest.mark.parametrize(
    ("device", "bf16", "gpus", "peak"),
    [("cuda", True, 1, 312e12), ("cuda", True, 4, 4 * 312e12), ("cuda", False, 1, None), ("cpu", True, 0, None)],
)
def test_the_peak_of_a_process(monkeypatch, device, bf16, gpus, peak):
    """Without a launcher, one process uses all GPUs. In float32, the peak would be another."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    args = SimpleNamespace(device=torch.device(device), bf16=bf16, fp16=False, n_gpu=gpus)
    model = NestedModel(M3BertModel(tiny_config()), Contrastive(Grid.parse("2x8")))
    assert throughput.peak_for(model, args) == peak


def test_a_run_logs_its_speed_on_request(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "peak_for", lambda model, args: 1e12)
    steps = {"max_steps": 4, "logging_steps": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, report_throughput=True, eval_strategy="steps", eval_steps=1, **steps
    )
    clock = Clock()
    counted: list[int] = []
    original = ThroughputMeter.add

    def add(self, inputs):
        original(self, inputs)
        self.clock = clock
        self.since = self.since if counted else clock.now
        counted.append(int(inputs["attention_mask"].sum()))
        clock.now += 1

    monkeypatch.setattr(ThroughputMeter, "add", add)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(counted) == 8, "evaluation is not counted"
    assert sum(counted) == sum(len(row["input_ids"]) for row in masked_dataset())
    assert [entry["tokens_per_second"] for entry in logs] == [sum(counted[:4]) / 4, sum(counted[4:]) / 4]
    assert all(0 < entry["mfu"] < 1 for entry in logs)
    assert {"mlm_2x8", "mlm_6x32"} <= logs[0].keys()


def test_nothing_is_reported_unless_asked_for(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=1)
    trainer.train()
    assert not any("tokens_per_second" in entry for entry in trainer.state.log_history)
    assert ThroughputMeter.of(NestedModel(quiet_model(), MultigranularMLM(GRID)), trainer.args) is None


def test_ranks_add_their_tokens_and_share_the_peak_of_all(monkeypatch):
    monkeypatch.setattr(throughput, "sum_over_ranks", lambda sizes: sizes + torch.tensor([9, 27, 0]))
    monkeypatch.setattr(throughput, "world_size", lambda: 2)
    clock = Clock()
    meter = ThroughputMeter(ModelCost(5, 2), 1000.0, clock)
    meter.add({"attention_mask": torch.ones(2, 3)})
    clock.now += 5
    operations = 3 * (2 * 5 * 15 + 4 * 2 * 45)
    assert meter.pop() == {"tokens_per_second": 3.0, "mfu": pytest.approx(operations / (5 * 2000))}
