"""The encoders that PyPI packages carry."""

from __future__ import annotations

import struct

import numpy as np

from benchmarks.reproduction.encoders import BLOCK, four_bits


def test_four_bits_are_scaled_integers():
    """Against a block at a time, a byte at a time."""
    draw = np.random.default_rng(0)
    scales, content = draw.normal(size=3).astype(np.float16), draw.integers(0, 256, (3, 16), dtype=np.uint8)
    raw = b"".join(struct.pack("<e16B", scale, *nibbles) for scale, nibbles in zip(scales, content, strict=True))
    expected = []
    for scale, nibbles in zip(scales, content.tolist(), strict=True):
        expected += [(byte % 16 - 8) * np.float32(scale) for byte in nibbles]
        expected += [(byte // 16 - 8) * np.float32(scale) for byte in nibbles]
    np.testing.assert_array_equal(four_bits(np.frombuffer(raw, BLOCK)), np.array(expected, np.float32))
