"""Bulk embedding: batches of rows, and one output file per input file, however often it is started."""

from __future__ import annotations

import json
import pickle
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from trainers import Granularity, Grid
from trainers.data.files import stream_files
from trainers.evaluation import GridEncoder, bulk
from trainers.evaluation.bulk import GridEmbedder, embed_part, is_embedded, share_of


GRID = Grid.parse("2,6x8,16")


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID, batch_size=4, prompts={"document": "open "})


@pytest.fixture
def part(tmp_path, sentences):
    rows = [{"id": f"d{row}", "text": text} for row, text in enumerate(sentences)]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return stream_files([str(tmp_path / "part.jsonl")]).shards[0]


def itself(value):
    return value


def test_a_batch_gets_a_column_per_layer(encoder, sentences):
    embedder = GridEmbedder(partial(itself, encoder))
    found = embedder({"id": [1, 2, 3], "text": np.array(sentences[:3], dtype=object)})
    expected = encoder.encode(sentences[:3], role="document")
    assert list(found) == ["id", "text", "layer_2", "layer_6"]
    for layer in (2, 6):
        np.testing.assert_array_equal(found[f"layer_{layer}"], expected.layers[layer])
    unit = GridEmbedder(partial(itself, encoder), role="query", normalize=True)({"text": sentences[:3]})
    np.testing.assert_allclose(
        unit["layer_6"], encoder.encode(sentences[:3]).at(Granularity(6, 16), normalize=True), atol=1e-6
    )
    with pytest.raises(ValueError, match="Column 'text' of a row is not text: None"):
        embedder({"text": ["open", None]})


def test_the_function_travels_without_its_encoder(encoder, sentences):
    embedder = GridEmbedder(partial(itself, "encoder"))
    assert embedder.encoder == "encoder"
    assert pickle.loads(pickle.dumps(embedder))._encoder is None
    mapped = Dataset.from_dict({"text": sentences}).map(
        GridEmbedder(partial(itself, encoder)), batched=True, batch_size=7
    )
    expected = encoder.encode(sentences, role="document").layers[6]
    np.testing.assert_allclose(np.array(mapped["layer_6"][:]), expected, atol=1e-6)


def test_a_file_is_embedded_once(encoder, part, sentences, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "ROWS_AT_ONCE", 5)
    file, settings = tmp_path / "out" / "part.parquet", {"grid": str(GRID)}
    assert not is_embedded(part, file, settings)
    assert embed_part(part, file, GridEmbedder(partial(itself, encoder)), settings) == len(sentences)
    assert is_embedded(part, file, settings)
    table = pq.read_table(file)
    assert table["id"].to_pylist() == [f"d{row}" for row in range(len(sentences))]
    expected = encoder.encode(sentences, role="document").layers[2]
    np.testing.assert_allclose(np.array(table["layer_2"].to_pylist()), expected, atol=1e-6)
    with pytest.raises(ValueError, match="part.parquet was made with another grid: remove it"):
        is_embedded(part, file, {"grid": "6x8"})
    (tmp_path / "part.jsonl").write_text(json.dumps({"id": "x", "text": "open"}) + "\n")
    with pytest.raises(ValueError, match="part.parquet was made with another input"):
        is_embedded(stream_files([str(tmp_path / "part.jsonl")]).shards[0], file, settings)


def test_what_is_not_complete_is_not_there(encoder, tmp_path, monkeypatch):
    monkeypatch.setattr(bulk, "ROWS_AT_ONCE", 2)
    rows = [{"text": "open"}, {"text": "file"}, {"text": None}]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    part, file = stream_files([str(tmp_path / "part.jsonl")]).shards[0], tmp_path / "out" / "part.parquet"
    with pytest.raises(ValueError, match=r"part.jsonl, line 3: Column 'text' of a row is not text: None"):
        embed_part(part, file, GridEmbedder(partial(itself, encoder)), {})
    assert list(file.parent.iterdir()) == []
    (tmp_path / "header.csv").write_text("text\n")
    with pytest.raises(ValueError, match=r"header.csv has no rows"):
        embed_part(stream_files([str(tmp_path / "header.csv")]).shards[0], file, GridEmbedder(lambda: encoder), {})


def test_shares_are_disjoint_and_complete():
    items = list(range(10))
    assert sorted(item for index in range(4) for item in share_of(items, f"{index}/4")) == items
    for wrong in ("4/4", "1", "a/4", "-1/4", "1/0"):
        with pytest.raises(ValueError, match="must be i/n"):
            share_of(items, wrong)
