"""ONNX exports as onnxruntime runs them: their numbers, and engines that encode with them."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import set_seed

from m3bert.evaluation import GridEncoder, measure_latency
from m3bert.hub_cards import onnx_graphs
from m3bert.hub_cards.card import render_card
from m3bert.hub_cards.card_source import CardSource
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.onnx_export import export_onnx, open_session
from m3bert.hub_cards.onnx_graphs import Graph, GraphReport, embed_all, onnx_engines, write_graphs
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused, tiny_config
from tests.evaluation_data import write_data


pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra onnx")

ONE_LAYER = {"num_hidden_layers": 1, "matryoshka_layers": []}
REPORT = GraphReport(
    date="2026-11-22",
    machine="a machine",
    versions={"onnx": "1.23.2"},
    texts="256 texts",
    metrics={"stsb": "spearman"},
    graphs=[
        Graph("onnx/model.onnx", "6x32", "float32", 90_300_000, scores={"stsb": 0.8203}),
        Graph("onnx/model_quantized.onnx", "6x32", "int8", 22_800_000, 0.99163, 0.98476, {"stsb": 0.8201}),
    ],
)


@pytest.fixture
def encoder(tiny_tokenizer) -> GridEncoder:
    set_seed(0)
    return GridEncoder(M3BertModel(tiny_config(**ONE_LAYER)).eval(), tiny_tokenizer, Grid.parse("1x32"))


def test_the_full_size_is_written_once_and_always_in_8_bits_too(encoder, tmp_path, sentences):
    data = write_data(tmp_path.with_name("data"), sentences)
    report = write_graphs(encoder, [Granularity(1, 32), Granularity(1, 8)], tmp_path, data=data)
    assert report.metrics == {"stsb": "spearman"}
    names = ["onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_1x8.onnx"]
    assert [graph.file for graph in report.graphs] == names
    files = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {*names, "onnx/quality.json"}
    assert json.loads((tmp_path / "onnx" / "quality.json").read_text()) == json.loads(json.dumps(asdict(report)))
    # The cosines are those of the two files.
    texts = [text for pair in list(onnx_graphs.topic_pairs())[:128] for text in (pair.summary, pair.body)]
    full, small = (
        embed_all(onnxruntime.InferenceSession(tmp_path / name), encoder, texts).double() for name in names[:2]
    )
    cosines = torch.nn.functional.cosine_similarity(full, small)
    assert report.graphs[1].mean_cosine == pytest.approx(cosines.mean().item(), abs=1e-5)
    assert report.graphs[1].lowest_cosine == pytest.approx(cosines.min().item(), abs=1e-5)


def test_any_number_of_texts_keeps_its_order_and_gets_its_prompt(encoder, tmp_path, sentences):
    write_graphs(encoder, [], tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    prompted = GridEncoder(
        encoder.model, encoder.tokenizer, encoder.grid, batch_size=5, prompts={"document": "open the "}
    )
    for role in ("query", "document"):
        expected = prompted.encode(sentences, role=role).at(Granularity(1, 32))
        np.testing.assert_allclose(embed_all(session, prompted, sentences, role), expected, atol=1e-5)


def test_what_float16_cannot_compute_is_refused(encoder, tmp_path):
    with torch.no_grad():
        encoder.model.layers[0].mlp.down_proj.weight.mul_(1e7)
    why = r"1x32 cannot be computed in float16: the cosine to float32 is only .*the limit is 0\.999"
    refused(why, write_graphs, encoder, [], tmp_path, fp16=True)


def test_the_card_has_the_loss_of_each_graph(run):
    assert REPORT.table().splitlines()[2:] == [
        "| `onnx/model.onnx` | 6x32 | float32 | 90.3 |  |  | 82.03 |",
        "| `onnx/model_quantized.onnx` | 6x32 | int8 | 22.8 | 0.9916 | 0.9848 | 82.01 |",
    ]
    card = str(render_card(CardSource("user/model", Checkpoint(run / "output"), onnx=REPORT)))
    assert REPORT.table() in card and "256 texts. Measured on 2026-11-22 on a machine, with onnx 1.23.2." in card
    assert 'hf_hub_download("user/model", "onnx/model.onnx")' in card and "- onnx\n" in card
    without = str(render_card(CardSource("user/model", Checkpoint(run / "output"))))
    assert "onnxruntime.Inf" not in without and "- onnx\n" not in without


@pytest.fixture
def short_encoder(tiny_tokenizer) -> GridEncoder:
    set_seed(0)
    model = M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[1])).eval()
    return GridEncoder(model, tiny_tokenizer, Grid.parse("1,2x8,32"), max_lengths={"query": 6})


@pytest.mark.slow
def test_an_engine_encodes_a_query_as_torch_does(short_encoder):
    text = "open the file and read all of its lines at once"  # longer than a query may be
    engines = onnx_engines(short_encoder, [2])
    assert {name: set(functions) for name, functions in engines.items()} == {"ONNX float32": {2}, "ONNX int8": {2}}
    vector = short_encoder.encode([text], role="query").at(Granularity(2, 32), normalize=True).numpy()
    np.testing.assert_allclose(engines["ONNX float32"][2](text), vector, atol=1e-5)
    assert (engines["ONNX int8"][2](text) * vector).sum() > 0.95

    latency = measure_latency(short_encoder, [text], documents=10, rounds=1, engines=engines)
    assert {engine: set(times) for engine, times in latency.engine_ms.items()} == dict.fromkeys(engines, {"2"})


def test_threads_are_as_many_as_asked_for(short_encoder, tmp_path):
    file = export_onnx(short_encoder, Granularity(1, 8), tmp_path / "model.onnx")
    options = open_session(file, threads=3).get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert open_session(file).get_session_options().intra_op_num_threads == 0  # onnxruntime's own choice
