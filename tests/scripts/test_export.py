"""ONNX files from a checkpoint, by the command."""

from __future__ import annotations

import numpy as np
import pytest

from hub_cards import onnx_export
from modeling_m3bert import M3BertModel
from scripts.export import main
from tests.conftest import tiny_config
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder


@pytest.fixture
def arguments(tmp_path, tiny_tokenizer) -> list[str]:
    M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[])).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "onnx")]


def test_a_file_as_the_options_say_and_one_of_8_bits(arguments, tmp_path, capsys, tiny_tokenizer, sentences):
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason="needs the extra onnx")
    main([*arguments, "--granularities", "2x16", "--int8", "--pooling", "cls"])
    names = ["model_2x16.onnx", "model_2x16_int8.onnx"]
    assert sorted(file.name for file in (tmp_path / "onnx").iterdir()) == names
    model = M3BertModel.from_pretrained(tmp_path / "model")
    encoder = GridEncoder(model, tiny_tokenizer, Grid.parse("2x16"), pooling="cls")
    expected = encoder.encode(sentences[:5]).at(Granularity(2, 16), normalize=True)
    found = onnx_export.embed(onnx_export.open_session(tmp_path / "onnx" / names[0]), encoder, sentences[:5])
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)
    printed = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0].rpartition("/")[2] for line in printed] == names
    assert all(("differs from torch" in line) != ("cosine to float32" in line) for line in printed)


def test_each_granularity_has_a_file_of_its_name(arguments, tmp_path, monkeypatch):
    asked = []

    def export(encoder, granularity, file, **options):
        asked.append((granularity, file.name, options))
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"")

    monkeypatch.setattr("scripts.export.export_onnx", export)
    monkeypatch.setattr("scripts.export.largest_difference", lambda encoder, file: 0.0)
    for named in (["--granularities", "2x8", "1x8"], ["--grid", "1,2x8"]):
        main([*arguments, *named, "--no_normalize", "--opset", "20"])
    options = {"normalize": False, "opset": 20}
    files = [(Granularity(1, 8), "model_1x8.onnx", options), (Granularity(2, 8), "model_2x8.onnx", options)]
    assert asked == files * 2


def test_bad_requests_are_refused(arguments, monkeypatch):
    with pytest.raises(ValueError, match="--format gguf is not known; legal values: onnx"):
        main([*arguments, "--granularities", "2x8", "--format", "gguf"])
    for named in ([], ["--granularities", "2x8", "--grid", "4x8"]):
        with pytest.raises(ValueError, match="Pass either --granularities 2x64 6x384 or --grid 2,6x64,384"):
            main([*arguments, *named])
    with pytest.raises(ValueError, match="--opset 17 must be within 18..23"):
        main([*arguments, "--granularities", "2x8", "--opset", "17"])
    with pytest.raises(ValueError, match="outside of it: 9x8"):
        main([*arguments, "--granularities", "2x8", "9x8"])
    monkeypatch.setattr(onnx_export, "PACKAGES", ("absent",))
    with pytest.raises(ValueError, match=r"ONNX export needs absent: pip install 'm3bert\[onnx\]'"):
        main([*arguments, "--granularities", "2x8"])
