"""Codes of stored embeddings: their bits and bytes."""

from __future__ import annotations

import numpy as np
import pytest

from m3bert.encode.precisions import PRECISIONS, bytes_per_vector, stored_bits
from m3bert.modeling import quantization_m3bert


def test_codes_go_from_most_to_fewest_bits():
    bits = [code.bits for code in PRECISIONS.values()]
    assert bits == sorted(bits, reverse=True)
    assert {name for name, code in PRECISIONS.items() if code.learned} == {*quantization_m3bert.CODES}


@pytest.mark.parametrize("name", PRECISIONS)
def test_bits_per_dim_are_exact_at_whole_widths(name):
    for dim in (64, 384, 768):
        assert stored_bits(name, dim) == PRECISIONS[name].bits * dim
        assert bytes_per_vector(name, dim) == PRECISIONS[name].bits * dim / 8


@pytest.mark.parametrize("dim", [1, 3, 7, 8, 31, 385])
def test_odd_widths_take_whole_bytes(dim):
    vector = np.zeros((1, dim), dtype=np.float32)
    assert bytes_per_vector("float32", dim) == vector.nbytes
    assert bytes_per_vector("float16", dim) == vector.astype(np.float16).nbytes
    assert bytes_per_vector("int8", dim) == dim
    assert bytes_per_vector("binary", dim) == np.packbits(vector > 0, axis=1).nbytes
    for name in PRECISIONS:
        assert 8 * bytes_per_vector(name, dim) - 8 < stored_bits(name, dim) <= 8 * bytes_per_vector(name, dim)


@pytest.mark.parametrize("dim", [1, 7, 64])
def test_the_bytes_of_faiss_are_these(dim):
    faiss = pytest.importorskip("faiss")
    for name, kind in (("int8", "QT_8bit"), ("int4", "QT_4bit")):
        index = faiss.IndexScalarQuantizer(dim, getattr(faiss.ScalarQuantizer, kind), faiss.METRIC_INNER_PRODUCT)
        assert bytes_per_vector(name, dim) == index.code_size
