"""Counting hashes with files."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from trainers.data.hash_counts import HashCounts, merged


@pytest.mark.parametrize("limit", [1, 10, 10_000])
def test_counts_are_those_of_a_dictionary(tmp_path, limit):
    generator = np.random.default_rng(0)
    counts, expected = HashCounts(tmp_path, limit), Counter()
    values = (generator.zipf(1.3, 2000).astype(np.uint64) * np.uint64(2**63 // 7 + 1)).tolist()
    for value in values:
        counts.add(value)
        expected[value] += 1
        counts.spill()
    asked = [*expected, 1, 2**64 - 1]
    found = [old + counts.recent[value] for value, old in zip(asked, counts.on_disk(asked), strict=True)]
    assert found == [expected[value] for value in asked]
    assert len(list(tmp_path.iterdir())) == len(counts.files) <= 12  # files were merged
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 8 * sum(len(found) for _, found in counts.files)


@pytest.mark.parametrize("block", [1, 3, 100])
def test_merging_is_sorting(block):
    generator = np.random.default_rng(0)
    for sizes in ((40, 7), (0, 5), (5, 0), (20, 20)):
        one, other = (np.sort(generator.integers(0, 15, size).astype(np.uint64)) for size in sizes)
        parts = list(merged(one, other, block))
        assert max(map(len, parts)) <= 2 * block
        assert np.concatenate(parts).tolist() == sorted([*one.tolist(), *other.tolist()])
