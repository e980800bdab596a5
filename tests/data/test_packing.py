"""Cutting and packing of documents."""

from __future__ import annotations

import pytest
import torch

from m3bert.data.packing import Frame, pack, packed_rows


def test_a_document_goes_where_the_least_room_is_left():
    # 7 | 5 | 4 fits into 5 + 4 and leaves 1, not into 7 | 3 fits into 7 | 1 into 5 + 4
    assert pack([7, 5, 4, 3, 1, 10], 10) == [[0, 3], [1, 2, 4], [5]]
    assert pack([], 10) == []


@pytest.mark.parametrize("longest", [3, 17, 64])
def test_every_document_is_in_one_row_and_rows_are_full(longest):
    lengths = torch.randint(1, longest + 1, (500,)).tolist()
    rows = pack(lengths, 64)
    assert sorted(document for row in rows for document in row) == list(range(500))
    totals = [sum(lengths[document] for document in row) for row in rows]
    assert max(totals) <= 64
    # Any two rows together are more than one row: else best fit would have joined their documents.
    assert len(totals) < 2 or sum(sorted(totals)[:2]) > 64
    assert rows == pack(lengths, 64)
    assert [sorted(row) for row in rows] == rows  # documents of a row keep their order


def test_the_frame_is_what_the_tokenizer_adds(tiny_tokenizer, sentences):
    frame = Frame.of(tiny_tokenizer)
    assert (frame.begin, frame.end, len(frame)) == ((0,), (2,), 2)
    for text in sentences[:5]:
        plain = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tiny_tokenizer(text, return_special_tokens_mask=True)
        assert [*frame.begin, *plain, *frame.end] == whole["input_ids"]
        assert frame.special_tokens([len(plain) + 2]).tolist() == [*map(bool, whole["special_tokens_mask"])]
    assert frame.special_tokens([3, 2]).tolist() == [True, False, True, True, True]
    assert not Frame((), ()).special_tokens([3]).any()


def test_rows_hold_the_pieces_of_all_documents():
    documents = [[5, 6, 7, 8, 9, 10, 11], [], [12], [13, 14]]
    tokens, lengths = packed_rows(documents, Frame((0,), (2,)), 6)
    assert tokens == [[0, 5, 6, 7, 8, 2], [0, 9, 10, 11, 2], [0, 12, 2], [0, 13, 14, 2]]
    assert packed_rows(documents, Frame((0,), (2,)), 9)[1] == [[9], [3, 4]]
    assert lengths == [[6], [5], [3], [4]]
    with pytest.raises(ValueError, match="max_length=2 must be more than the 2 special tokens"):
        packed_rows(documents, Frame((0,), (2,)), 2)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="Slow is no fast tokenizer"):
        Frame.of(Slow())
