"""Engines of onnxruntime: what they encode, and with how many threads."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import set_seed

from m3bert.evaluation import GridEncoder, measure_latency
from m3bert.hub_cards.onnx_export import export_onnx, open_session
from m3bert.hub_cards.onnx_graphs import onnx_engines
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid
from tests.conftest import tiny_config


for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason="needs the extra onnx")


@pytest.fixture
def encoder(tiny_tokenizer) -> GridEncoder:
    set_seed(0)
    model = M3BertModel(tiny_config(num_hidden_layers=2, matryoshka_layers=[1])).eval()
    return GridEncoder(model, tiny_tokenizer, Grid.parse("1,2x8,32"), max_lengths={"query": 6})


@pytest.mark.slow
def test_an_engine_encodes_a_query_as_torch_does(encoder):
    text = "open the file and read all of its lines at once"  # longer than a query may be
    engines = onnx_engines(encoder, [2])
    assert {name: set(functions) for name, functions in engines.items()} == {"ONNX float32": {2}, "ONNX int8": {2}}
    vector = encoder.encode([text], role="query").at(Granularity(2, 32), normalize=True).numpy()
    np.testing.assert_allclose(engines["ONNX float32"][2](text), vector, atol=1e-5)
    assert (engines["ONNX int8"][2](text) * vector).sum() > 0.95

    latency = measure_latency(encoder, [text], documents=10, rounds=1, engines=engines)
    assert {engine: set(times) for engine, times in latency.engine_ms.items()} == dict.fromkeys(engines, {"2"})


def test_threads_are_as_many_as_asked_for(encoder, tmp_path):
    file = export_onnx(encoder, Granularity(1, 8), tmp_path / "model.onnx")
    options = open_session(file, threads=3).get_session_options()
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert open_session(file).get_session_options().intra_op_num_threads == 0  # onnxruntime's own choice
