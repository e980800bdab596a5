"""Cleaning of pairs, and text columns made of several fields."""

from __future__ import annotations

import json

import pytest
from datasets import Dataset, IterableDataset

from trainers import TextColumnsCollator
from trainers.data import clean_pairs, load_files


PAIRS = [
    ("a", "one", "x"),
    ("a", "one", "x"),  # identical
    ("b", "one", "x"),
    ("a", "two", "x"),
    ("a", "three", "x"),  # a third of "a"
    ("a", "two", "x"),  # identical
    ("a", "two", "y"),  # another document, and a third of "a"
    ("b", "", "onex"),
    ("b", "one", "x"),  # identical
]


def rows() -> list[dict[str, str]]:
    return [{"query": query, "title": title, "text": text} for query, title, text in PAIRS]


def as_dataset(kind: str, folder) -> Dataset | IterableDataset:
    if kind == "map":
        return Dataset.from_list(rows())
    if kind == "stream":
        return Dataset.from_list(rows()).to_iterable_dataset()
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows())))
    return load_files([str(folder / "pairs.jsonl")], streaming=True)


@pytest.mark.parametrize("kind", ["map", "stream", "file"])
def test_identical_pairs_and_frequent_queries_are_cut(tmp_path, kind):
    dataset = as_dataset(kind, tmp_path)
    cleaned, report = clean_pairs(dataset, ["query"], ["title", "text"], max_per_query=2)
    assert isinstance(cleaned, Dataset if kind == "map" else IterableDataset)
    for _ in range(2):  # a second epoch starts anew
        kept = [(row["query"], row["title"], row["text"]) for row in cleaned]
        assert kept == [PAIRS[index] for index in (0, 2, 3, 7)]
        assert (report.rows, report.identical, report.over_cap) == (9, 3, 2)
    assert str(report) == ("Kept 4 of 9 pairs; dropped 3 identical ones and 2 over the cap of documents per query.")


def test_without_a_cap_only_identical_pairs_go():
    cleaned, report = clean_pairs(Dataset.from_list(rows()), ["query"], ["title", "text"])
    assert len(cleaned) == 6
    assert report.over_cap == 0


def test_a_stream_is_not_read_ahead():
    seen = []

    def endless():
        index = 0
        while True:
            seen.append(index)
            yield {"query": f"q{index}", "text": "d"}
            index += 1

    cleaned, report = clean_pairs(IterableDataset.from_generator(endless), ["query"], ["text"])
    assert [row["query"] for row, _ in zip(cleaned, range(3), strict=False)] == ["q0", "q1", "q2"]
    assert report.rows == len(seen) <= 5


def test_cleaning_refuses_bad_input():
    with pytest.raises(ValueError, match="max_per_query=0 must be 1 or more"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["text"], max_per_query=0)
    with pytest.raises(ValueError, match=r"lacks the column\(s\) body; it has query, title, text"):
        clean_pairs(Dataset.from_list(rows()), ["query"], ["body"])
    with pytest.raises(ValueError, match="The dataset is empty"):
        clean_pairs(Dataset.from_list(rows()).select([]), ["query"], ["text"])


def test_fields_are_joined_by_the_separator_token(tiny_tokenizer):
    collator = TextColumnsCollator(tiny_tokenizer, ["query", "title+text"], max_length=16)
    data = [
        {"query": "open", "title": "file", "text": "read it"},
        {"query": "open", "title": "", "text": "read"},
        {"query": "", "title": None, "text": "read"},
    ]
    batch = collator(data)
    assert list(batch) == ["query", "title+text"]
    start, end = tiny_tokenizer.bos_token_id, tiny_tokenizer.sep_token_id
    file, read, it = tiny_tokenizer.convert_tokens_to_ids(["file", "read", "it"])
    first, second, third = (
        ids[mask.bool()].tolist()
        for ids, mask in zip(batch["title+text"]["input_ids"], batch["title+text"]["attention_mask"], strict=True)
    )
    assert first == [start, file, end, read, it, end]
    assert second == third == [start, read, end]
    spelled = TextColumnsCollator(tiny_tokenizer, ["title+text"], max_length=16, separator="to")(data)
    to = tiny_tokenizer.convert_tokens_to_ids("to")
    assert spelled["title+text"]["input_ids"][0].tolist() == [start, file, to, read, it, end]


def test_text_ids_are_equal_for_equal_tokens_only(tiny_tokenizer):
    texts = ["open the file", "Open the  file", "open the file read", "", "open"]
    collator = TextColumnsCollator(tiny_tokenizer, ["a", "b"], max_length=5)
    batch = collator([{"a": text, "b": text} for text in texts])
    ids = batch["a"]["text_ids"].tolist()
    assert ids == batch["b"]["text_ids"].tolist()
    assert ids[0] == ids[1] == ids[2], "cut at five tokens, the third is the first"
    assert len(set(ids)) == 3
    assert min(ids) >= 0
    alone = collator([{"a": "open", "b": "open the file"}])  # padded otherwise
    assert (alone["a"]["text_ids"].item(), alone["b"]["text_ids"].item()) == (ids[4], ids[0])


def test_a_collator_refuses_what_it_cannot_join(tiny_tokenizer):
    no_separator = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(ValueError, match=r"'title\+text' needs a separator, and the tokenizer has none: pass one"):
        TextColumnsCollator(no_separator, ["title+text"], max_length=8)
    collator = TextColumnsCollator(tiny_tokenizer, ["title+text"], max_length=8)
    with pytest.raises(ValueError, match="Column 'text' of a row is not text: None; the row has title"):
        collator([{"title": "a"}])
    with pytest.raises(ValueError, match="Column 'text' of a row is not text: 3; the row has title, text"):
        collator([{"title": "a", "text": 3}])
