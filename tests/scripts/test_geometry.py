"""Figures and numbers of how embeddings lie in space, from a checkpoint."""

from __future__ import annotations

import json

import pytest
import torch

from modeling_m3bert import M3BertModel
from scripts.geometry import main
from tests.conftest import tiny_config


@pytest.fixture
def arguments(tmp_path, tiny_tokenizer, sentences) -> list[str]:
    M3BertModel(tiny_config()).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join([*sentences, sentences[0]]))
    named = {"--model_name_or_path": "model", "--files": "texts.txt", "--output_dir": "out"}
    return [part for option, value in named.items() for part in (option, str(tmp_path / value))]


def test_a_checkpoint_is_drawn_at_its_layers_and_dims(arguments, tmp_path, capsys, tiny_tokenizer, sentences):
    main([*arguments, "--grid", "2,6x8,16", "--dims", "16"])
    found = {file.name for file in (tmp_path / "out").iterdir()}
    figures = {
        f"{kind}.png" for layer in (2, 6) for kind in (f"variances_layer_{layer}", f"correlation_layer_{layer}_dim_16")
    }
    assert found == figures | {"geometry.json"}
    assert all((tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG") for name in figures)
    numbers = json.loads((tmp_path / "out" / "geometry.json").read_text())
    assert {layer: list(scores) for layer, scores in numbers.items()} == {"2": ["8", "16"], "6": ["8", "16"]}
    # The correlation of the prefix with what is behind it at full width, from the model's own outputs.
    model = M3BertModel.from_pretrained(tmp_path / "model").eval()
    texts = list(dict.fromkeys(sentences))
    inputs = tiny_tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][:, :, None]
    pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
    expected = torch.corrcoef(pooled.T)[:16, 16:].abs().mean().item()
    assert numbers["6"]["16"]["prefix_residual_correlation"] == pytest.approx(expected, abs=1e-4)
    assert "6x16: effective_rank" in capsys.readouterr().out


def test_what_is_drawn_when_no_dim_is_named(arguments, tmp_path):
    main([*arguments, "--grid", "6x8,16,32"])
    assert (tmp_path / "out" / "correlation_layer_6_dim_16.png").is_file(), "the largest below the full width"


@pytest.mark.parametrize("dim", ["32", "0", "99"])
def test_a_prefix_with_nothing_behind_it_is_refused(arguments, dim):
    with pytest.raises(ValueError, match=rf"--dims {dim} must be within 1..31, below the hidden size"):
        main([*arguments, "--dims", dim])
