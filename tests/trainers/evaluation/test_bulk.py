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
from trainers.core.streams.stream import Row
from trainers.data.files import stream_files
from trainers.evaluation import GridEncoder, bulk
from trainers.evaluation.bulk import GridEmbedder, embed_part, is_embedded, share_of, spark_schema


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
    np.testing.assert_allclose(np.array(mapped["layer_6"][:]), expected, atol=1e-5)


def test_data_frames_get_lists_as_spark_wants_them(encoder, sentences):
    """The function goes to Spark's workers as a bound method, and yields what the schema says, also without rows."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"id": ["a", "b", "c"], "te`xt": [None, "read", ""], "text": sentences[:3]})
    travelled = pickle.loads(pickle.dumps(GridEmbedder(partial(itself, "not loaded")).map_frames))
    assert travelled.__self__._encoder is None
    embedder = GridEmbedder(partial(itself, encoder))
    first, empty, last = embedder.map_frames(iter([frame[:2], frame[:0], frame[2:]]))
    assert list(first.columns) == ["id", "te`xt", "text", "layer_2", "layer_6"]
    assert list(first.columns) == list(empty.columns) == list(last.columns) and len(empty) == 0
    assert first["te`xt"].isna().tolist() == [True, False] and list(last.index) == [2]
    expected = encoder.encode(sentences[:3], role="document").layers[6]
    lists = [*first["layer_6"], *last["layer_6"]]
    assert all(isinstance(found, list) and isinstance(found[0], float) for found in lists)
    np.testing.assert_allclose(lists, expected, atol=1e-6)
    schema = spark_schema([("id", "string"), ("te`xt", "string"), ("text", "string")], GRID)
    assert schema == ("`id` string, `te``xt` string, `text` string, `layer_2` array<float>, `layer_6` array<float>")
    with pytest.raises(ValueError, match="Column 'text' of a row is not text: None"):
        next(embedder.map_frames([frame.assign(text=None)]))
    joined = GridEmbedder(partial(itself, encoder), text_column="te`xt+text")
    expected = encoder.encode([sentences[0], f"read </s> {sentences[1]}"], role="document").layers[2]
    np.testing.assert_allclose(next(joined.map_frames([frame[:2]]))["layer_2"].tolist(), expected, atol=1e-6)


def test_columns_are_never_replaced_and_batches_may_be_empty(encoder):
    embedder = GridEmbedder(partial(itself, encoder))
    with pytest.raises(ValueError, match="have a column layer_6 already: rename it"):
        embedder({"text": ["open"], "layer_6": [1]})
    empty = embedder({"id": [], "text": []})
    assert empty["layer_2"].shape == (0, 16) and empty["layer_2"].dtype == np.float32


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


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return stream_files([str(file)]).shards[0]


def test_rows_that_differ_from_the_first_are_refused(encoder, tmp_path, monkeypatch):
    """In one line that says where; a missing value is none."""
    monkeypatch.setattr(bulk, "ROWS_AT_ONCE", 2)
    embedder, out = GridEmbedder(partial(itself, encoder)), tmp_path / "out.parquet"
    rows = [Row({"text": "open", "n": 1}, f"x, line {line}") for line in range(1, 4)]

    class Part:
        name, size = "x", None

        def __init__(self, last):
            self.last = last

        def rows(self, start=0):
            return iter([*rows, Row(self.last, "x, line 4")][start:])

    with pytest.raises(ValueError, match=r"^x, line 4: the column m is new; the first row has text, n\.$"):
        embed_part(Part({"text": "read", "m": 2}), out, embedder, {})
    with pytest.raises(ValueError, match=r"^x, after row 2: a column changes its type: .*$"):
        embed_part(Part({"text": "read", "n": "two"}), out, embedder, {})
    with pytest.raises(ValueError, match=r"^x, line 4: the row has no id in the column n; it has text\.$"):
        embed_part(Part({"text": "read"}), out, embedder, {}, id_column="n")
    assert list(tmp_path.iterdir()) == []
    embed_part(Part({"text": "read"}), out, embedder, {})
    assert pq.read_table(out)["n"].to_pylist() == [1, 1, 1, None]


def test_two_processes_for_one_part_end_in_a_clear_error(encoder, tmp_path):
    """The later one removes what the earlier one writes, which never becomes the output."""
    part, out = written(tmp_path / "a.jsonl", [{"text": "open"}]), tmp_path / "out.parquet"

    later, write_table = iter([None]), pq.ParquetWriter.write_table

    def write(self, table, *arguments, **options):
        write_table(self, table, *arguments, **options)
        if next(later, "done") is None:
            embed_part(part, out, GridEmbedder(partial(itself, encoder)), {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_table", write)
        with pytest.raises(
            ValueError, match="Another process embeds .*a.jsonl into .*out.parquet: start each share once"
        ):
            embed_part(part, out, GridEmbedder(partial(itself, encoder)), {})
    assert pq.read_table(out)["text"].to_pylist() == ["open"]
    assert not list(tmp_path.glob("*.unfinished"))


def test_shares_are_disjoint_and_complete():
    items = list(range(10))
    assert sorted(item for index in range(4) for item in share_of(items, f"{index}/4")) == items
    with pytest.raises(ValueError, match="shard='3/4' has no file: of 2 files, there are at most 2 shares"):
        share_of(items[:2], "3/4")
    for wrong in ("4/4", "1", "a/4", "-1/4", "1/0"):
        with pytest.raises(ValueError, match="must be i/n"):
            share_of(items, wrong)
