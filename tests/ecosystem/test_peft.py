"""peft adapts every head: what is saved alone is all that was trained, and merged it is a complete checkpoint."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from m3bert import modeling as modeling_m3bert
from tests.conftest import padded_batch, tiny_config


SMALL = {"output_layer": 4, "output_dim": 8}
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Task of peft -> Auto class, class, and labels of four texts of up to seven tokens.
TASKS = {
    "SEQ_CLS": (
        "AutoModelForSequenceClassification",
        modeling_m3bert.M3BertForSequenceClassification,
        {"labels": torch.tensor([0, 1, 1, 0])},
    ),
    "TOKEN_CLS": (
        "AutoModelForTokenClassification",
        modeling_m3bert.M3BertForTokenClassification,
        {"labels": torch.arange(28).view(4, 7) % 2},
    ),
    None: ("AutoModelForMaskedLM", modeling_m3bert.M3BertForMaskedLM, {"labels": torch.arange(28).view(4, 7)}),
}
BARE = """
import torch, transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file

batch, found = load_file("batch.safetensors"), {{}}
for task, auto in {autos}.items():
    base = getattr(transformers, auto).from_pretrained(f"base-{{task}}", trust_remote_code=True)
    adapted = PeftModel.from_pretrained(base, f"adapter-{{task}}").eval()
    merged = getattr(transformers, auto).from_pretrained(f"merged-{{task}}", trust_remote_code=True).eval()
    with torch.no_grad():
        for size, options in {{"full": {{}}, "small": {small}}}.items():
            found[f"adapted {{task}} {{size}}"] = adapted(**batch, **options)[0].contiguous()
            found[f"merged {{task}} {{size}}"] = merged(**batch, **options)[0].contiguous()
save_file(found, "found.safetensors")
"""


@pytest.mark.slow
def test_adapters_of_every_head(tmp_path, run_bare):
    """A head that the checkpoint does not have is initialised anew by each process: the adapter must bring it."""
    batch, expected = padded_batch(lengths=(7, 7, 7, 7)), {}
    save_file(batch, tmp_path / "batch.safetensors")
    for task, (_, head, labels) in TASKS.items():
        start = head if task is None else modeling_m3bert.M3BertModel
        start(tiny_config()).save_pretrained(tmp_path / f"base-{task}")
        base = head.from_pretrained(tmp_path / f"base-{task}")
        model = get_peft_model(base, LoraConfig(task_type=task, r=2, target_modules=LINEAR))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        losses = []
        for _ in range(8):
            loss = model(**batch, **labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0], task
        model.eval().save_pretrained(tmp_path / f"adapter-{task}")
        saved = load_file(tmp_path / f"adapter-{task}" / "adapter_model.safetensors")
        assert not [name for name in saved if ".layers." in name and "lora_" not in name], "the adapter alone"
        with torch.no_grad():
            for size, options in {"full": {}, "small": SMALL}.items():
                expected[f"{task} {size}"] = model(**batch, **options)[0]
        model.merge_and_unload().save_pretrained(tmp_path / f"merged-{task}")

    run_bare(BARE.format(autos={task: auto for task, (auto, _, _) in TASKS.items()}, small=SMALL))
    found = load_file(tmp_path / "found.safetensors")
    for name, logits in expected.items():
        torch.testing.assert_close(found[f"adapted {name}"], logits)
        torch.testing.assert_close(found[f"merged {name}"], logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("task", ["SEQ_CLS", None])  # of other heads peft 0.21 would adapt the head as well
def test_all_linear_layers_are_those_of_the_encoder(task):
    model = get_peft_model(TASKS[task][1](tiny_config()), LoraConfig(task_type=task, target_modules="all-linear"))
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == set(LINEAR)


def test_a_merged_adapter_opens_as_an_encoder(tmp_path):
    base = modeling_m3bert.M3BertForSequenceClassification(tiny_config())
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", r=2, target_modules=LINEAR, init_lora_weights=False))
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    encoder = AutoModel.from_pretrained(tmp_path)
    for (name, found), wanted in zip(encoder.named_parameters(), merged.model.parameters(), strict=True):
        assert torch.equal(found, wanted), name
