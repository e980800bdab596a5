"""Parts of a bulk embedding, read and searched some rows at a time, against a search in everything at once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from trainers import Granularity
from trainers.evaluation import exact_search, parts
from trainers.evaluation.parts import read_vectors, search_parts


def write(file, ids, vectors, kind):
    numbers = pa.array(vectors.numpy().reshape(-1))
    width = vectors.shape[1]
    lists = (
        pa.FixedSizeListArray.from_arrays(numbers, width)
        if kind == "fixed"
        else pa.ListArray.from_arrays(list(range(0, len(numbers) + 1, width)), numbers)
    )
    pq.write_table(pa.table({"id": ids, "layer_6": lists}), file, row_group_size=11)
    return file


@pytest.mark.parametrize("kind", ["fixed", "lists"])
def test_all_parts_are_searched_together(tmp_path, kind, monkeypatch):
    """Also documents that are equal, in several files; the dim is a prefix."""
    monkeypatch.setattr(parts, "ROWS_AT_ONCE", 7)
    vectors = torch.randn(60, 12)
    vectors[20:40] = vectors[:20]
    ids = [f"d{row}" for row in range(60)]
    edges = ((0, 13), (13, 50), (50, 60))
    files = [write(tmp_path / f"{start}.parquet", ids[start:end], vectors[start:end], kind) for start, end in edges]
    read = torch.cat([block for file in files for block in read_vectors(file, Granularity(6, 8))])
    assert torch.equal(read, vectors[:, :8])
    queries = torch.randn(5, 12)
    for k in (1, 10, 100):
        cosines, found = search_parts(files, queries, Granularity(6, 8), k)
        expected = exact_search(queries[:, :8], vectors[:, :8], k)
        assert found == [[ids[row] for row in rows] for rows in expected.tolist()]
        near = torch.cosine_similarity(queries[:, None, :8], vectors[None, :, :8], dim=2).numpy()
        np.testing.assert_allclose(cosines, np.take_along_axis(near, expected, axis=1), atol=1e-6)


def test_halves_are_read(tmp_path):
    vectors = torch.randn(4, 6).half()
    file = write(tmp_path / "a.parquet", ["a", "b", "c", "d"], vectors, "fixed")
    assert torch.equal(next(read_vectors(file, Granularity(6, 6))), vectors)
    assert search_parts([file], vectors[2:3].float(), Granularity(6, 6), 1)[1] == [["c"]]


def test_what_a_file_lacks_is_said(tmp_path):
    file = write(tmp_path / "a.parquet", ["a"], torch.randn(1, 6), "fixed")
    with pytest.raises(ValueError, match="a.parquet has no column layer_4; it has id, layer_6"):
        next(read_vectors(file, Granularity(4, 6)))
    with pytest.raises(ValueError, match="a.parquet has 6 dims in the column layer_6, not 8"):
        next(read_vectors(file, Granularity(6, 8)))
    with pytest.raises(ValueError, match="a.parquet has no column key; it has id, layer_6"):
        search_parts([file], torch.randn(1, 6), Granularity(6, 6), 1, id_column="key")
