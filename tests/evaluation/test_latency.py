"""Latency of one query: at each layer, in each engine, on a machine that is busy with other work."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from benchmarks._measure import seconds_in_turn
from m3bert.evaluation import latency, measure_latency
from m3bert.modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.models.anatomy import anatomy_of
from m3bert.trainers import Grid


class Clock:
    """A clock that stands still but for what the timed functions add."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def taking(self, *seconds):
        """A function that takes these seconds, in turn."""
        turn = cycle(seconds)

        def run(*arguments):
            self.seconds += next(turn)

        return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(latency, "time", clock)
    return clock


def test_a_busy_machine_does_not_change_what_is_measured(clock):
    often_disturbed = {"quick": clock.taking(0.002, 0.1, 0.1, 0.1), "slow": clock.taking(0.1, 0.1, 0.1, 0.005)}
    assert latency.milliseconds_in_turn(often_disturbed, 20) == {"quick": 2.0, "slow": 5.0}
    assert seconds_in_turn({"medians": clock.taking(9.0, 1.0, 2.0, 30.0)}, 3) == {"medians": 2.0}


def test_every_engine_has_blocks_of_its_own_whose_first_round_does_not_count(clock):
    calls = []

    def engine(name, first, later):
        def encode(text):
            clock.seconds += later if calls and calls[-1][0] == name else first
            calls.append((name, text))

        return encode

    engines = {"a": {2: engine("a", 9.0, 0.001)}, "b": {2: engine("b", 9.0, 0.002)}}
    assert latency.encode_milliseconds(engines, ["one", "two"], rounds=2 * latency.BLOCK) == {
        "a": {"2": 1.0},
        "b": {"2": 2.0},
    }
    block = latency.BLOCK + 1
    assert [name for name, _ in calls] == (["a"] * block + ["b"] * block) * 2
    assert [text for name, text in calls if name == "b"] == ["one", "two"] * block


def test_other_engines_are_timed_with_the_prompt(encoder_with_exits, tmp_path):
    read = []
    encoder = replace(encoder_with_exits, grid=Grid.parse("0,2x8"), prompts={"query": "query: "})
    actual = measure_latency(encoder, ["open"], documents=50, rounds=1, engines={"other": {2: read.append}})
    assert set(read) == {"query: open"} and set(actual.engine_ms["other"]) == {"2"}
    assert set(actual.encode_ms_by_engine(2)) == {"torch", "other"} and set(actual.encode_ms_by_engine(0)) == {"torch"}
    assert actual.quantile == latency.QUANTILE and actual.statistic.startswith("the 10th percentile of ")


def test_layer_0_runs_no_layer(encoder_with_exits):
    ran = []
    anatomy_of(encoder_with_exits.model)  # which runs all of them
    for index, layer in enumerate(encoder_with_exits.model.layers, start=1):
        layer.register_forward_hook(lambda module, args, output, index=index: ran.append(index))
    look_up = replace(encoder_with_exits, grid=Grid.parse("0x8"))
    actual = measure_latency(look_up, ["open the file"], documents=50, rounds=2)
    assert actual.encode_ms["0"] > 0 and ran == []
    deeper = replace(encoder_with_exits, grid=Grid.parse("0,2x8"))
    actual = measure_latency(deeper, ["open the file"], documents=50, rounds=2)
    assert set(actual.encode_ms) == {"0", "2"} and ran == [1, 2] * 3


def test_searches_in_codes_are_timed(encoder, sentences):
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6]))
    quantizer.initialize(torch.randn(100, 32))
    coded = replace(encoder, grid=Grid.parse("6x8@qama-2,6x8,6x16@float16,6x16@int4"), quantizer=quantizer)
    times = measure_latency(coded, ["open the file"], documents=30, rounds=2)
    assert set(times.search_ms) == {"8", "16", "8@qama-2", "16@float16", "16@int4"}
    assert set(times.rerank_ms) == {"8", "16", "8@qama-2", "8@int8", "16@int8"}
    assert all(set(sizes) == {"10", "20"} for sizes in times.rerank_ms.values())
    assert all(times.of(g) < float("inf") for g in coded.grid)
