"""ONNX files from a checkpoint, by the command."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers import AutoConfig, AutoTokenizer

from m3bert.commands.export import main
from m3bert.evaluation import GridEncoder
from m3bert.evaluation.readers import load_task
from m3bert.evaluation.tasks import find_task
from m3bert.hub_cards import onnx_export
from m3bert.hub_cards.onnx_graphs import QUALITY
from m3bert.modeling import M3BertModel
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import Granularity, Grid
from tests.conftest import save, tiny_config
from tests.evaluation_data import write_data


@pytest.fixture
def arguments(tmp_path, tiny_tokenizer) -> list[str]:
    save(tmp_path / "model", M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[])), tiny_tokenizer)
    return ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "onnx")]


@pytest.mark.slow
def test_the_folder_has_the_names_that_clients_look_for(
    arguments, tmp_path, capsys, tiny_tokenizer, sentences, monkeypatch
):
    for package in onnx_export.PACKAGES:
        pytest.importorskip(package, reason="needs the extra onnx")
    monkeypatch.setenv("M3BERT_DATA", str(write_data(tmp_path / "data", sentences)))
    options = ["--granularity", "2x16", "2x32", "--int8", "--fp16", "--pooling", "cls", "--max_length", "20"]
    main([*arguments, *options])
    folder = tmp_path / "onnx"
    sizes, weights = ("", "_2x16"), ("", "_quantized", "_fp16")
    names = [f"onnx/model{size}{kind}.onnx" for size in sizes for kind in weights]
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    assert {name for name in found if name.startswith("onnx/")} == {*names, "onnx/quality.json"}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "1_Pooling/config.json"} < found

    assert AutoConfig.from_pretrained(folder).num_hidden_layers == 2
    assert AutoTokenizer.from_pretrained(folder).model_max_length == 20
    settings = EmbeddingSettings.read(folder)
    assert settings.pooling == "cls" and settings.max_length == 20
    model = M3BertModel.from_pretrained(tmp_path / "model")
    encoder = GridEncoder(model, tiny_tokenizer, Grid.parse("2x16,2x32"), pooling="cls", max_length=20)
    expected = encoder.encode(sentences[:5])
    for name, granularity in ((names[0], Granularity(2, 32)), (names[3], Granularity(2, 16))):
        vectors = onnx_export.embed(onnx_export.open_session(folder / name), encoder, sentences[:5])
        np.testing.assert_allclose(vectors, expected.at(granularity), atol=1e-4, rtol=0)

    report = json.loads((folder / "onnx" / "quality.json").read_text())
    assert [graph["file"] for graph in report["graphs"]] == names and report["metrics"] == {"stsb": "spearman"}
    evaluator = load_task(find_task("stsb"), tmp_path / "data")
    vectors = {name: encoder.encode(texts).at(Granularity(2, 32)) for name, texts in evaluator.texts.items()}
    for graph in report["graphs"]:
        assert graph["bytes"] == (folder / graph["file"]).stat().st_size
        assert (graph["mean_cosine"] is None) == (graph["weights"] == "float32")
        assert graph["weights"] == "float32" or 0.9 < graph["lowest_cosine"] <= graph["mean_cosine"] <= 1.000001
    assert report["graphs"][0]["scores"]["stsb"] == pytest.approx(evaluator.score(vectors)["spearman"], abs=1e-3)
    printed = capsys.readouterr().out
    assert str(folder / QUALITY) in printed and all(f"| `{name}` |" in printed for name in names)


def test_options_reach_the_graphs_and_the_folder_of_a_checkpoint_stays_as_it_is(arguments, tmp_path, monkeypatch):
    asked = []

    def write(encoder, granularities, folder, **options):
        asked.append(granularities)
        assert options["normalize"] is False and not options["int8"]
        return SimpleNamespace(table=str)

    monkeypatch.setattr("m3bert.hub_cards.onnx_graphs.write_graphs", write)
    own = [*arguments[:2], "--output_dir", arguments[1]]
    before = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "model").iterdir()}
    for named in (["--granularity", "2x8", "1x8"], ["--grid", "1,2x8"], []):
        main([*own, *named, "--normalize", "false"])
    assert asked == [[Granularity(1, 8), Granularity(2, 8)]] * 2 + [[]]
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "model").iterdir()} == before
