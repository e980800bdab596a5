"""Reading data files, and tokenising their texts."""

import gzip

import pytest
from datasets import Dataset

from m3bert.data.files import load_files, require_texts, tokenize_texts
from m3bert.data.formats import check_files, files_by_name
from m3bert.data.hub_data import load_hub
from tests.conftest import refused


def test_files_are_grouped_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lang=en.csv").touch()
    named = ["nli=a.csv", "qa=https://host/c?x=1", "nli=lang=en.csv"]
    assert files_by_name(named) == {"nli": ["a.csv", "lang=en.csv"], "qa": ["https://host/c?x=1"]}
    assert files_by_name(["a.csv", "lang=en.csv", "https://host/c?x=1", "data/x=1.csv"]) == {}
    refused(r"All files need a name, or none: nli=a\.csv, b\.csv is both", files_by_name, ["nli=a.csv", "b.csv"])


def test_only_an_empty_cell_of_a_table_is_missing(tmp_path):
    (tmp_path / "rows.csv").write_text("text,score\nNA,1.5\nnull,\n,2\n")
    assert check_files([str(tmp_path / "rows.csv")], ["text"]) == ["text", "score"]
    actual = load_files([str(tmp_path / "rows.csv")])
    assert actual["text"][:] == ["NA", "null", None] and actual["score"][:] == ["1.5", None, "2"]


def test_a_line_of_a_text_file_is_a_row(tmp_path):
    for name, text in (("a.txt", "one\ntwo\n"), ("b.txt", "three\n")):
        (tmp_path / name).write_text(text)
    actual = load_files([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert actual.to_list() == [{"text": "one"}, {"text": "two"}, {"text": "three"}]


BROKEN = {
    "cut.jsonl": b'{"text": ',
    "cut_at_once.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 99)[:12],
    "cut_later.jsonl.gz": gzip.compress(b'{"text": "a"}\n' * 99)[:-9],
    "empty.jsonl": b"",
    "no.parquet": b"PAR1",
    "wide.csv": b"text\na,b\n1,2,3\n",
    "half.jsonl": b'{"text": "a"}\n' * 1500 + b'{"text": "a \\ud83d"}\n',
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_file_is_named(tmp_path, name, streaming):
    (tmp_path / name).write_bytes(BROKEN[name])
    why = f"{name} cannot be read: line 1501 is not JSON: 'utf-8' codec can't encode" if name == "half.jsonl" else name
    refused(why, lambda: list(load_files([str(tmp_path / name)], streaming=streaming)))
    if name not in ("half.jsonl", "no.parquet", "wide.csv"):  # which a first look leaves to their libraries
        refused(f"{name} cannot be read: ", check_files, [str(tmp_path / name)])


@pytest.mark.parametrize("content", ['[{"text": "a"}]', '{"text": "a"}\n\n{"title": "b"}', "\ufeff" + '{"text": "a"}'])
def test_what_a_library_reads_is_not_refused(tmp_path, content):
    """An array over the whole file, an empty line and a column that some rows lack, and the mark of a byte order."""
    (tmp_path / "rows.jsonl").write_text(content, encoding="utf-8")
    assert load_files([str(tmp_path / "rows.jsonl")])["text"][0] == "a"
    check_files([str(tmp_path / "rows.jsonl")], ["text"])
    check_files(["https://host/rows.jsonl", "parts/*.jsonl"], ["text"])


def test_files_of_several_formats_or_of_none_are_refused(tmp_path):
    for names in (["a.xml"], ["a.txt", "a.jsonl"], ["a.csv", "a.tsv"]):
        refused(f"{', '.join(names)} cannot be read: name files of one format", load_files, names)
    with pytest.raises(OSError, match=r"no\.txt"):
        load_files([str(tmp_path / "no.txt")])


def test_texts_become_token_ids_and_long_ones_are_cut(tiny_tokenizer):
    data = Dataset.from_dict({"body": ["open the file", "read " * 20], "other": [1, 2]})
    actual = tokenize_texts(data, tiny_tokenizer, column="body", max_length=6)
    assert set(actual.column_names) == {"input_ids", "attention_mask", "special_tokens_mask"}
    assert actual[0]["input_ids"] == tiny_tokenizer("open the file")["input_ids"]
    assert len(actual[1]["input_ids"]) == 6 and actual[1]["special_tokens_mask"] == [1, 0, 0, 0, 0, 1]
    stream = tokenize_texts(data.to_iterable_dataset(), tiny_tokenizer, column="body", max_length=6)
    assert list(stream) == actual.to_list()


@pytest.mark.parametrize(
    ("rows", "columns", "place"),
    [
        ({"text": ["a", None]}, ["text"], "Row 2 of the dataset: column 'text'"),
        ({"text": [None, None]}, ["text"], "Row 1 of the dataset: column 'text'"),
        ({"text": ["a", " \n"]}, ["text"], "Row 2 of the dataset: column 'text'"),
        ({"title": ["", ""], "text": ["a", None]}, ["title+text"], "Row 2 of the dataset: column 'title.text'"),
    ],
)
def test_a_missing_text_is_named_before_training(rows, columns, place):
    refused(f"{place} has no text", require_texts, Dataset.from_dict(rows), columns)
    require_texts(Dataset.from_dict({"title": [None, "a"], "text": ["b", ""]}).shuffle(seed=1), ["title+text"])


def test_a_part_of_a_split_is_not_streamed(tmp_path):
    (tmp_path / "train.csv").write_text("text\none\ntwo\n")
    refused("a part of a split, .* cannot be streamed", load_hub, str(tmp_path), split="train[:1]", streaming=True)
