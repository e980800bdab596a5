"""Rows of text and vector: formats, equal texts, and what is refused, with file and row."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from m3bert.data.target_vectors import read_target_vectors
from tests.conftest import refused


VECTORS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
TEXTS = ["one", "two", "three"]


def write_rows(file: Path, rows) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def rows_of(texts, vectors):
    return [{"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True)]


def test_parquet_json_lines_and_the_texts_of_pgvector_give_the_same_vectors(tmp_path):
    lists = pa.array([*VECTORS], pa.list_(pa.float32(), 4))  # as LanceDB exports
    half = pa.array([*VECTORS.astype(np.float16)], pa.list_(pa.float16()))
    columns = {"lance": lists, "half": half}
    files = [str(tmp_path / f"{name}.parquet") for name in columns]
    for file, column in zip(files, columns.values(), strict=True):
        pq.write_table(pa.table({"id": [1, 2, 3], "text": TEXTS, "vector": column}), file)
    files.append(write_rows(tmp_path / "lists.jsonl", rows_of(TEXTS, VECTORS.tolist())))
    files.append(write_rows(tmp_path / "strings.jsonl", rows_of(TEXTS, [*map(json.dumps, VECTORS.tolist())])))
    for file in files:
        sources, vectors = read_target_vectors([file])
        assert sources == {Path(file).name: TEXTS}
        assert np.array_equal(vectors.of(TEXTS[::-1]), VECTORS[::-1]) and vectors.width == 4
    # Equal texts with nearly equal vectors count once, where they are first; rows without text do not count.
    more = write_rows(
        tmp_path / "more.jsonl", rows_of(["one", " ", None, "four"], [[1, 2, 3, 4.01], [9], [9], [5] * 4])
    )
    sources, vectors = read_target_vectors([files[0], more])
    assert sources == {"lance.parquet": TEXTS, "more.jsonl": ["four"]} and len(vectors) == 4
    assert np.array_equal(vectors.of(["one"]), VECTORS[:1])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "one", "embedding": [1.0]}], r"rows.jsonl lacks the column\(s\) vector; it has text, embedding"),
        ([{"body": "one", "vector": [1.0]}], r"lacks the column\(s\) text \(text_column names another\); it"),
        (rows_of(TEXTS, [[1, 2], [3, 4], [5, 6, 7]]), "row 3: the vector has 3 dims, and the first one 2"),
        (rows_of(TEXTS, [[1, 2], [3, None], [5, 6]]), "row 2: 'vector' has numbers that are not finite"),
        (rows_of(TEXTS, [[1, 2], [3, 1e300], [5, 6]]), "row 2: 'vector' has numbers that are not finite"),
        (rows_of(TEXTS, [[1, 2], [3, 4], [0, 0.0]]), "row 3: 'vector' is zero"),
        (rows_of(TEXTS, [[1, 2], None, [5, 6]]), "row 2: 'vector' is not a list of numbers"),
        (rows_of(TEXTS, ["[1, 2]", "[3, 4]", "5, 6"]), "row 3: 'vector' is not a list of numbers"),
        (rows_of(TEXTS, [{"dense": [1.0]}] * 3), "row 1: 'vector' is not a list of numbers"),
        (
            rows_of(["one", "two", "one"], [[1, 2], [3, 4], [2, 1]]),
            r"row 3: the text has another vector than in .*rows.jsonl, row 1: 'one'",
        ),
        (rows_of(["", " "], [[1, 2], [3, 4]]), "No row of .*rows.jsonl has a text in the column 'text'"),
    ],
)
def test_rows_that_are_no_targets_are_refused(rows, message, tmp_path):
    refused(message, read_target_vectors, [write_rows(tmp_path / "rows.jsonl", rows)])


def test_vectors_of_two_files_must_have_the_same_number_of_dims(tmp_path):
    files = [write_rows(tmp_path / f"{dims}.jsonl", rows_of(["one", str(dims)], [[1] * dims] * 2)) for dims in (2, 3)]
    refused(r"3.jsonl, row 1: the vector has 3 dims, and the first one 2", read_target_vectors, files)
