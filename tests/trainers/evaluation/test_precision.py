"""One query on documents in several codes: what is found and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from modeling_m3bert.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder
from trainers.evaluation.coding import PackedIndex
from trainers.evaluation.precision import Setting, search_at


pytest.importorskip("sentence_transformers", reason="vectors in 8 bits or 1 need sentence-transformers")


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,4,6x8,16,32"), prompts={"query": "find "})


SETTINGS = [Setting(Granularity.parse(text)) for text in ("2x8@binary", "4x16@int8", "6x32")]


def test_each_setting_finds_what_its_own_granularity_and_code_find(encoder, sentences):
    documents = encoder.encode(sentences, role="document")
    results = search_at(encoder, documents, "read the file", SETTINGS, k=4, rounds=1)
    assert [result.setting for result in results] == SETTINGS
    query = encoder.encode(["read the file"], role="query")
    for result, g in zip(results, (setting.granularity for setting in SETTINGS), strict=True):
        index = PackedIndex.pack(documents.at(g, normalize=True), g.code)
        scores, rows = index.search(query.at(g, normalize=True), 4)
        assert result.rows == rows[0].tolist()
        assert result.scores == pytest.approx(scores[0].tolist(), abs=1e-5)
        assert (result.bytes_per_vector, result.index_bytes) == (index.bytes_per_vector, index.nbytes)
        assert result.encode_ms > 0 and result.search_ms > 0


def test_the_query_runs_no_layer_beyond_the_chosen_one(encoder, sentences):
    documents = encoder.encode(sentences)
    ran: list[int] = []
    for number, layer in enumerate(encoder.model.layers, start=1):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    search_at(encoder, documents, "read the file", SETTINGS[:2], rounds=3)
    turns = 1 + 1 + 3  # for the search, uncounted, counted
    assert [ran.count(number) for number in range(1, 7)] == [2 * turns, 2 * turns, turns, turns, 0, 0]


def test_a_query_that_is_not_finite_is_refused(encoder, sentences):
    documents = encoder.encode(sentences)
    with torch.no_grad():
        encoder.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        search_at(encoder, documents, "read the file", SETTINGS, rounds=1)


def test_a_learned_code_is_searched_with_the_quantizer_of_the_encoder(encoder, sentences):
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[4]))
    plain = encoder.encode(sentences, role="document")
    quantizer.initialize(plain.at(Granularity(4, 32)))
    coded = replace(encoder, grid=Grid.parse("4x16@qama-2"), quantizer=quantizer)
    documents = coded.encode(sentences, role="document")
    (result,) = search_at(coded, documents, "read the file", [Setting(Granularity(4, 16, "qama-2"))], k=4, rounds=1)
    query = coded.encode(["read the file"], role="query").widest(4)
    codes, other = (quantizer.encode(vectors, "qama-2", 16) for vectors in (query, plain.at(Granularity(4, 32))))
    best = quantizer.hamming(codes, other)[0].sort(descending=True).values[:4]
    assert result.scores == pytest.approx((2 * best - 1).tolist(), abs=1e-6)
    assert result.bytes_per_vector == 6
