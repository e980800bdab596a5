"""Codes of stored embeddings: their bits and bytes."""

from __future__ import annotations

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
