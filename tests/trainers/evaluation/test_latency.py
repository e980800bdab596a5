"""Latency of one query at each layer."""

from __future__ import annotations

from dataclasses import replace

from trainers import Grid
from trainers.evaluation import measure_latency


def test_layer_0_runs_no_layer(encoder_with_exits):
    ran = []
    for index, layer in enumerate(encoder_with_exits.model.layers, start=1):
        layer.register_forward_hook(lambda module, args, output, index=index: ran.append(index))
    look_up = replace(encoder_with_exits, grid=Grid.parse("0x8"))
    latency = measure_latency(look_up, ["open the file"], documents=50, rounds=2)
    assert latency.encode_ms["0"] > 0 and ran == []
    deeper = replace(encoder_with_exits, grid=Grid.parse("0,2x8"))
    latency = measure_latency(deeper, ["open the file"], documents=50, rounds=2)
    assert set(latency.encode_ms) == {"0", "2"} and ran == [1, 2] * 3
