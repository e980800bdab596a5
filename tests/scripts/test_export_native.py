"""The command that exports a plain BERT."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from hub_cards.checkpoint import Checkpoint
from scripts import export
from scripts.convert import convert
from trainers import Granularity


@pytest.fixture
def elastic(minilm, tmp_path) -> str:
    convert(minilm, str(tmp_path / "elastic"))
    return str(tmp_path / "elastic")


def test_a_granularity_becomes_a_plain_bert(elastic, tmp_path, capsys, run_bare):
    arguments = ["--format", "native", "--model_name_or_path", elastic, "--granularity", "4x64"]
    export.main([*arguments, "--output_dir", str(tmp_path / "native")])
    assert f"BertModel, 4x64 of {elastic}; needs no remote code." in capsys.readouterr().out
    assert Checkpoint(tmp_path / "native").full == Granularity(4, 64)
    printed = run_bare(
        """
        from sentence_transformers import SentenceTransformer
        model = SentenceTransformer("native")
        print(type(model[0].auto_model).__name__, model.encode(["one text"]).shape, model.max_seq_length)
        """
    )
    assert "BertModel (1, 64) 256" in printed


def test_the_model_type_can_be_chosen(elastic, tmp_path, minilm):
    """RoBERTa's positions begin after the padding token's, so its output is equal where no text is padded."""
    options = ["--format=native", "--model_name_or_path", elastic, "--model_type", "roberta"]
    export.main([*options, "--output_dir", str(tmp_path / "native")])
    native = AutoModel.from_pretrained(tmp_path / "native")
    inputs = AutoTokenizer.from_pretrained(minilm)(["one text"], return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        found, expected = (model(**inputs)[0] for model in (native, AutoModel.from_pretrained(elastic)))
    assert type(native).__name__ == "RobertaModel" and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--granularity", "2,4x64"], "'2,4x64' must be one granularity, such as 4x64"),
        (["--granularity", "9x64"], "output_layer=9 is not available here"),
        (["--model_type", "gpt2"], "model_type='gpt2' is unknown; legal values: bert, roberta"),
        (["--model_name_or_path", "runs/no/model"], "runs/no/model is neither a folder nor a Hub id"),
        (["--output_dir", "FULL"], "full holds config.json: pass --overwrite"),
    ],
)
def test_bad_options_are_named(elastic, tmp_path, options, error):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").touch()
    options = [str(tmp_path / "full") if word == "FULL" else word for word in options]
    where = [] if "--output_dir" in options else ["--output_dir", str(tmp_path / "native")]
    with pytest.raises(ValueError, match=error):
        export.main(["--format", "native", "--model_name_or_path", elastic, *where, *options])


def test_unknown_formats_are_refused(elastic):
    with pytest.raises(ValueError, match="--format tflite is not known; legal values: onnx, native, static, router"):
        export.main(["--format", "tflite", "--model_name_or_path", elastic])
