"""Streams: every row once per epoch in a seeded order, from any position on, and where a bad row stands."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from datasets import Dataset, IterableDataset

from trainers.core.streams.stream import ROWS_AT_ONCE, Position, Reading, Stream, streamed
from trainers.data.files import stream_files


SIZES = (5, 1, 7, 4)
START = Position()


@pytest.fixture
def files(tmp_path):
    """Four files with rows 0..16."""
    start, names = 0, []
    for index, size in enumerate(SIZES):
        file = tmp_path / f"{index}.jsonl"
        file.write_text("".join(json.dumps({"id": row}) + "\n" for row in range(start, start + size)))
        names.append(str(file))
        start += size
    return names


def ids(reading: Reading, count: int, start: Position = START) -> list[int]:
    return [row.values["id"] for row, _ in islice(reading.rows(start), count)]


@pytest.mark.parametrize("buffer_size", [0, 1, 3, 6, 100])
def test_each_epoch_has_every_row_once(files, buffer_size):
    found = ids(Reading(stream_files(files), buffer_size, seed=1), 3 * 17)
    epochs = [found[start : start + 17] for start in (0, 17, 34)]
    assert all(sorted(epoch) == list(range(17)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) is (buffer_size == 0)
    if buffer_size == 0:
        assert epochs[0] == list(range(17))
    if buffer_size == 100:
        assert epochs[0] != ids(Reading(stream_files(files), buffer_size, seed=2), 17)


@pytest.mark.parametrize("buffer_size", [0, 1, 3, 100])
def test_a_reading_continues_from_each_of_its_positions(files, buffer_size):
    reading = Reading(stream_files(files), buffer_size, seed=1)
    whole = list(islice(reading.rows(Position()), 40))
    for taken in range(1, 36):
        rest = ids(reading, 40 - taken, whole[taken - 1][1])
        assert rest == [row.values["id"] for row, _ in whole[taken:]], taken


def test_a_resumed_reading_does_not_read_the_shards_before_its_position(files, monkeypatch):
    stream = stream_files(files)
    reading = Reading(stream, 3, seed=1)
    *_, (_, position) = islice(reading.rows(Position()), 14)
    opened = []
    shard_class = type(stream.shards[0])
    rows = shard_class.rows
    monkeypatch.setattr(
        shard_class, "rows", lambda self, start=0: opened.append((self.name, start)) or rows(self, start)
    )
    ids(reading, 2, position)
    order = [shard.name for shard in reading.order(0)]
    assert position.shard > 0
    assert opened[0] == (order[position.shard], position.row)


@pytest.mark.parametrize("parts", [2, 4])
def test_parts_share_the_shards_of_each_epoch(files, parts):
    stream = stream_files(files)
    for epoch in range(3):
        orders = [Reading(stream, 2, 1, part, parts).order(epoch) for part in range(parts)]
        assert sorted(shard.name for order in orders for shard in order) == sorted(files)


def test_a_dataset_of_the_library_becomes_a_stream_of_its_shards():
    dataset = Dataset.from_dict({"id": list(range(10))}).to_iterable_dataset(num_shards=5)
    stream = streamed(dataset.map(lambda row: {"id": row["id"], "twice": 2 * row["id"]}))
    assert [shard.name for shard in stream.shards] == [f"shard {index} of 5" for index in range(5)]
    assert list(stream) == [{"id": row, "twice": 2 * row} for row in range(10)]
    assert stream.column_names == ["id", "twice"]
    assert sorted(ids(Reading(stream, 3), 10)) == list(range(10))
    assert streamed(stream) is stream
    assert streamed(None) is None


def test_a_dataset_that_is_shuffled_already_is_read_once_too():
    dataset = Dataset.from_dict({"id": list(range(40))}).to_iterable_dataset(num_shards=5)
    reading = Reading(streamed(dataset.shuffle(seed=1, buffer_size=4)))
    whole = list(islice(reading.rows(Position()), 40))
    order = [row.values["id"] for row, _ in whole]
    assert sorted(order) == list(range(40))
    assert order != list(range(40))
    assert ids(reading, 27, whole[12][1]) == order[13:]


def test_data_are_recognised_under_another_path_but_not_after_a_change(files, tmp_path):
    before = stream_files(files).identity
    (tmp_path / "moved").mkdir()
    moved = []
    for name in files:
        copy = tmp_path / "moved" / name.rsplit("/", 1)[-1]
        copy.write_bytes(open(name, "rb").read())
        moved.append(str(copy))
    assert stream_files(moved).identity == before
    assert stream_files(moved[::-1]).identity != before
    with open(moved[2], "a") as file:
        file.write('{"id": 17}\n')
    assert stream_files(moved).identity != before


def test_a_transform_runs_where_rows_are_used(files):
    calls = []

    def twice(rows):
        calls.append(len(rows))
        return [{"twice": 2 * row["id"]} for row in rows]

    stream = stream_files(files).with_transform(twice, ["twice"])
    assert stream.column_names == ["twice"]
    assert ids(Reading(stream), 17) == list(range(17))
    assert calls == []
    assert [row["twice"] for row in stream] == list(range(0, 34, 2))


def test_what_cannot_be_read_is_named(tmp_path):
    good = [json.dumps({"id": row}) + "\n" for row in range(3)]
    (tmp_path / "broken.jsonl").write_text("".join(good) + '{"id": 3\n')
    (tmp_path / "header.csv").write_text("id\n")
    with pytest.raises(ValueError, match=r"broken.jsonl cannot be read after line \d+: "):
        ids(Reading(stream_files([str(tmp_path / "broken.jsonl")])), 5)
    with pytest.raises(ValueError, match=r"The stream has no rows: .*header.csv is empty"):
        ids(Reading(stream_files([str(tmp_path / "header.csv")])), 1)
    with pytest.raises(ValueError, match=r"The dataset is empty: .*header.csv has no rows"):
        _ = stream_files([str(tmp_path / "header.csv")]).column_names
    (tmp_path / "nothing.jsonl").write_text("")
    with pytest.raises(ValueError, match="nothing.jsonl has no content"):
        stream_files([str(tmp_path / "nothing.jsonl")])
    with pytest.raises(ValueError, match="at least one shard"):
        Stream([])


def test_a_generator_that_fails_is_named():
    def rows():
        yield from ({"id": row} for row in range(ROWS_AT_ONCE + 2))
        raise ValueError("the disk is gone")

    found = []
    with pytest.raises(ValueError, match=f"shard 0 of 1 cannot be read after row {ROWS_AT_ONCE + 2}: the disk is gon"):
        found.extend(row["id"] for row in streamed(IterableDataset.from_generator(rows)))
    assert found == [*range(ROWS_AT_ONCE + 2)]
