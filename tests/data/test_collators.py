"""Which columns are trained on, by their names, and columns made of several fields, tokenised together."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from m3bert.trainers import ContrastiveConfig, TextColumnsCollator
from m3bert.utils.columns import text_columns_of
from tests.conftest import refused


def test_fields_are_joined_by_the_separator_token(tiny_tokenizer):
    collator = TextColumnsCollator(tiny_tokenizer, ["query", "title+text"], max_length=16)
    data = [
        {"query": "open", "title": "file", "text": "read it"},
        {"query": "open", "title": "", "text": "read"},
        {"query": "read", "title": None, "text": "read"},
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
    texts = ["open the file", "Open the  file", "open the file read", "a name", "open"]
    collator = TextColumnsCollator(tiny_tokenizer, ["a", "b"], max_length=5)
    batch = collator([{"a": text, "b": text} for text in texts])
    ids = batch["a"]["text_ids"].tolist()
    assert ids == batch["b"]["text_ids"].tolist()
    assert ids[0] == ids[1] == ids[2], "cut at five tokens, the third is the first"
    assert len(set(ids)) == 3
    assert min(ids) >= 0
    alone = collator([{"a": "open", "b": "open the file"}])  # padded otherwise
    assert (alone["a"]["text_ids"].item(), alone["b"]["text_ids"].item()) == (ids[4], ids[0])


def test_prompts_and_lengths_of_columns_are_those_of_hand_made_texts(tiny_tokenizer):
    """Equal to texts that begin with the prompt, cut by themselves; equal texts keep equal ids."""
    rows = [{"a": "open the file", "b": "read it " * 9}, {"a": "open", "b": "a name"}, {"a": "open", "b": "open"}]
    prompts, lengths = {"a": "list: ", "b": "do "}, {"a": 6}
    collator = TextColumnsCollator(tiny_tokenizer, ["a", "b"], 7, prompts=prompts, max_lengths=lengths)
    batch = collator(rows)
    for column, longest in (("a", 6), ("b", 7)):
        texts = [prompts[column] + row[column] for row in rows]
        expected = tiny_tokenizer(texts, padding=True, truncation=True, max_length=longest, return_tensors="pt")
        assert torch.equal(batch[column]["input_ids"], expected["input_ids"])
        assert torch.equal(batch[column]["attention_mask"], expected["attention_mask"])
    assert batch["a"]["input_ids"].shape == (3, 6)
    ids = batch["a"]["text_ids"]
    assert ids[1] == ids[2] == batch["b"]["text_ids"][2] != ids[0]


def test_a_teacher_is_asked_for_texts_without_prompts(tiny_tokenizer):
    asked = []
    teacher = SimpleNamespace(of=lambda texts: asked.append(texts) or torch.zeros(len(texts), 2))
    TextColumnsCollator(tiny_tokenizer, ["a"], 7, teacher=teacher, prompts={"a": "do "})([{"a": "open"}])
    assert asked == [["open"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "a"}, "Column 'text' of a row is not text: None; the row has title"),
        ({"title": "a", "text": 3}, "Column 'text' of a row is not text: 3; the row has title, text"),
        ({"title": "", "text": "  "}, "Column 'title.text' of a row has no text"),
    ],
)
def test_a_row_without_text_is_refused(tiny_tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        TextColumnsCollator(tiny_tokenizer, ["title+text"], max_length=8)([row])


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (["positive", "anchor"], ["anchor", "positive"]),
        (["negative_10", "negative_2", "document", "query"], ["query", "document", "negative_2", "negative_10"]),
        (["score", "sentence1", "sentence2"], ["sentence1", "sentence2"]),
        (["text", "label"], ["text"]),
        (["text", "query"], ["query", "text"]),
        (["positive", "text"], ["text", "positive"]),
        (["question", "answer", "negative"], ["question", "answer", "negative"]),
    ],
)
def test_columns_are_known_by_their_names_in_any_order(actual, expected):
    assert text_columns_of(actual) == expected


@pytest.mark.parametrize(
    "actual",
    [
        ["source", "anchor", "positive"], ["anchor", "query", "positive"], ["query", "document", "text"],
        ["query", "negative"], ["query", "pos", "neg"],
    ],
)  # fmt: skip
def test_columns_that_may_mean_something_else_are_refused(actual):
    refused(f"has the column.s. {', '.join(actual)}; .* pass text_columns", text_columns_of, actual)


def test_labels_are_left_out_and_the_log_says_so(tmp_path, caplog):
    args = ContrastiveConfig(output_dir=str(tmp_path), use_cpu=True)
    rows = Dataset.from_dict({"sentence1": ["a"], "sentence2": ["b"], "score": [0.5]})
    assert args.columns_of(rows) == ["sentence1", "sentence2"]
    assert "score are not read: every row is a positive pair" in caplog.text
