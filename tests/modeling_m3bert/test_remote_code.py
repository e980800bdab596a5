"""A checkpoint brings its own code: loaded by a process that cannot import this project."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3bert import modeling as modeling_m3bert
from tests.conftest import padded_batch, tiny_config


CLASSES = {
    "AutoModel": modeling_m3bert.M3BertModel,
    "AutoModelForMaskedLM": modeling_m3bert.M3BertForMaskedLM,
    "AutoModelForSequenceClassification": modeling_m3bert.M3BertForSequenceClassification,
    "AutoModelForTokenClassification": modeling_m3bert.M3BertForTokenClassification,
}
RUN = """
import torch, transformers
from safetensors.torch import load_file, save_file
batch = load_file("batch.safetensors")
outputs = {{}}
for name, arguments in {{"full": {{}}, "cut": {{"output_layer": 4, "output_dim": 8}}}}.items():
    model = transformers.{auto}.from_pretrained("model", trust_remote_code=True, **arguments).eval()
    with torch.no_grad():
        outputs[name] = model(**batch)[0].contiguous()
    model.save_pretrained(name)
    again = transformers.{auto}.from_pretrained(name, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], outputs[name])
save_file(outputs, "outputs.safetensors")
"""


@pytest.mark.parametrize("auto", CLASSES)
def test_a_saved_model_loads_runs_and_saves_again_without_the_project(tmp_path, run_bare, auto):
    model = CLASSES[auto](tiny_config()).eval()
    model.save_pretrained(tmp_path / "model")
    batch = padded_batch()
    save_file(batch, tmp_path / "batch.safetensors")
    run_bare(RUN.format(auto=auto))
    outputs = load_file(tmp_path / "outputs.safetensors")
    with torch.no_grad():
        assert torch.equal(outputs["full"], model(**batch)[0])
        assert torch.equal(outputs["cut"], model(**batch, output_layer=4, output_dim=8)[0])


def test_a_checkpoint_opens_with_every_head(tmp_path, run_bare):
    modeling_m3bert.M3BertModel(tiny_config()).save_pretrained(tmp_path / "model")
    run_bare(
        f"""
        import transformers
        for auto in {list(CLASSES)}:
            getattr(transformers, auto).from_pretrained("model", trust_remote_code=True)
        """
    )
