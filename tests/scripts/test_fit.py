"""The commands that fit exits: from an m3BERT, while converting, with a teacher, and what they refuse."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from modeling_m3bert import EmbeddingSettings
from scripts.convert import main as convert
from scripts.fit_exits import main as fit_exits
from tests.conftest import write_modules
from tests.trainers.exits.test_fit import pooled, random_texts


@pytest.fixture
def source(tmp_path, tiny_tokenizer):
    """A tiny BERT that pools by the first token, with prompts."""
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=99, hidden_size=20, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "source")
    tiny_tokenizer.save_pretrained(tmp_path / "source")
    write_modules(
        tmp_path / "source", width=20, max_length=32, pooling="cls", prompts={"query": "name: ", "document": "text: "}
    )
    return str(tmp_path / "source")


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lines.txt").write_text("\n".join(random_texts(60)) + "\n")
    rows = [{"body": text} for text in random_texts(60, seed=1)] + [{"body": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "lines.txt"), str(tmp_path / "rows.jsonl")


def test_convert_and_fit_at_once_is_convert_and_then_fit(source, files, tmp_path, capsys):
    convert([source, str(tmp_path / "once"), "--fit_exits", files[0], "--exit_layers", "1", "2"])
    printed = capsys.readouterr().out
    assert "Exits fitted to 60 texts (target: last layer, basis: last_layer, pooling: cls)" in printed
    convert([source, str(tmp_path / "plain")])
    fit_exits([str(tmp_path / "plain"), str(tmp_path / "twice"), "--files", files[0], "--exit_layers", "1", "2"])
    once, twice = (AutoModel.from_pretrained(tmp_path / name) for name in ("once", "twice"))
    assert once.config.exit_layers == [0, 1, 2] and once.config.exit_fit == twice.config.exit_fit
    assert once.config.exit_fit["prompts"] == ["name: ", "text: "]
    for name, tensor in once.state_dict().items():
        assert torch.equal(twice.state_dict()[name], tensor)
    assert EmbeddingSettings.read(str(tmp_path / "once")).pooling == "cls"


def test_stitches_are_fitted_on_request_and_the_report_says_which_layers_run(source, files, tmp_path, capsys):
    convert([source, str(tmp_path / "model"), "--fit_exits", files[0], "--exit_layers", "1", "--stitch_layers", "2=2"])
    assert "Depth 2 runs 0 first and 2 last layers; its stitch explains" in capsys.readouterr().out
    assert AutoModel.from_pretrained(tmp_path / "model", output_layer=2).config.stitches == {2: 2}
    with pytest.raises(ValueError, match="--stitch_layers two is neither a depth nor a depth and its number"):
        convert([source, str(tmp_path / "other"), "--fit_exits", files[0], "--stitch_layers", "two"])


def test_a_fit_in_mixed_precision_leaves_the_weights_as_they_were(source, files, tmp_path):
    convert([source, str(tmp_path / "plain")])
    line = [str(tmp_path / "plain"), "--files", files[0], "--device", "cpu", "--exit_layers", "1", "2"]
    fit_exits([line[0], str(tmp_path / "exact"), *line[1:]])
    options = ["--compute_dtype", "bfloat16", "--attn_implementation", "eager"]
    fit_exits([line[0], str(tmp_path / "mixed"), *line[1:], *options])
    plain, exact, mixed = (AutoModel.from_pretrained(tmp_path / name) for name in ("plain", "exact", "mixed"))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(mixed.state_dict()[name], tensor)
    for layer in mixed.exits:
        weights = [model.exits[layer].weight for model in (exact, mixed)]
        assert not torch.equal(*weights)
        assert torch.cosine_similarity(*(weight.flatten() for weight in weights), dim=0) > 0.9


def test_a_checkpoint_in_half_precision_stays_one(source, files, tmp_path):
    convert([source, str(tmp_path / "plain")])
    AutoModel.from_pretrained(tmp_path / "plain").to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    fit_exits([str(tmp_path / "plain"), str(tmp_path / "exits"), "--files", files[0]])
    plain, fitted = (AutoModel.from_pretrained(tmp_path / name) for name in ("plain", "exits"))
    assert fitted.dtype == torch.bfloat16
    for name, tensor in plain.state_dict().items():
        assert torch.equal(fitted.state_dict()[name], tensor)


def test_each_file_is_a_source(source, files, tmp_path):
    convert([source, str(tmp_path / "model"), "--fit_exits", files[1], "--text_column", "body"])
    assert AutoModel.from_pretrained(tmp_path / "model").config.exit_fit["sources"] == {"rows.jsonl": 60}
    (tmp_path / "more.txt").write_text("\n".join(random_texts(30, seed=2)))
    fit_exits([str(tmp_path / "model"), str(tmp_path / "again"), "--files", files[0], str(tmp_path / "more.txt")])
    record = AutoModel.from_pretrained(tmp_path / "again").config.exit_fit
    assert record["sources"] == {"lines.txt": 60, "more.txt": 30} and record["texts"] == 90


def test_a_teacher_is_named_in_the_record(source, files, tmp_path, encoder_folder, tiny_tokenizer):
    pytest.importorskip("sentence_transformers")
    convert(
        [source, str(tmp_path / "model"), "--fit_exits", files[0], "--teacher", str(encoder_folder)]
        + ["--teacher_cache_dir", str(tmp_path / "cache"), "--basis", "principal"]
    )
    model = AutoModel.from_pretrained(tmp_path / "model").eval()
    assert model.config.exit_fit["target"] == "tiny-bert" and model.config.exit_layers == [0, 1, 2, 3]
    assert pooled(model, AutoTokenizer.from_pretrained(tmp_path / "model"), ["a list"], [3], "cls")[3].isfinite().all()


def test_what_is_wrong_is_said(source, files, tmp_path):
    for command, line in ((convert, ["nowhere", "out", "--fit_exits", files[0]]), (fit_exits, ["nowhere", "out"])):
        options = ["--files", files[0]] if command is fit_exits else []
        with pytest.raises(ValueError, match="compute_dtype='int8' is unknown; legal values: float32, bfloat16"):
            command([*line, *options, "--compute_dtype", "int8"])
    with pytest.raises(ValueError, match="--fit_exits needs the pooling, which --encoder_only leaves out"):
        convert([source, str(tmp_path / "out"), "--fit_exits", files[0], "--encoder_only"])
    with pytest.raises(ValueError, match=r"layers=\[3\] must be within 0..2"):
        convert([source, str(tmp_path / "out"), "--fit_exits", files[0], "--exit_layers", "3"])
    with pytest.raises(ValueError, match="text"):
        convert([source, str(tmp_path / "out"), "--fit_exits", files[1]])
    with pytest.raises(ValueError, match="BertModel has no exits: convert it to an m3BERT first"):
        fit_exits([source, str(tmp_path / "out"), "--files", files[0]])
    assert not (tmp_path / "out").exists()
