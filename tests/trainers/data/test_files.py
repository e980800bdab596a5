"""Reading data files, and tokenising their texts."""

from __future__ import annotations

import gzip
import json

import pytest
from datasets import Dataset, IterableDataset

from trainers.data.files import files_by_name, load_files, require_texts, tokenize_texts


ROWS = [{"query": "open", "text": "read it"}, {"query": "list", "text": "a name"}]
WRITERS = {
    "rows.jsonl": lambda: "\n".join(map(json.dumps, ROWS)),
    "rows.csv": lambda: "query,text\n" + "\n".join(",".join(row.values()) for row in ROWS),
    "rows.tsv": lambda: "query\ttext\n" + "\n".join("\t".join(row.values()) for row in ROWS),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", list(WRITERS))
def test_rows_are_read_whole_or_as_a_stream(tmp_path, name, zipped):
    file = tmp_path / (f"{name}.gz" if zipped else name)
    with (gzip.open if zipped else open)(file, "wt", encoding="utf-8") as opened:
        opened.write(WRITERS[name]())
    assert load_files([str(file)]).to_list() == ROWS
    stream = load_files([str(file)], streaming=True)
    assert isinstance(stream, IterableDataset) and list(stream) == ROWS


def test_files_are_grouped_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lang=en.csv").touch()
    named = ["nli=a.csv", "qa=https://host/c?x=1", "nli=lang=en.csv"]
    assert files_by_name(named) == {"nli": ["a.csv", "lang=en.csv"], "qa": ["https://host/c?x=1"]}
    assert files_by_name(["a.csv", "lang=en.csv", "https://host/c?x=1", "data/x=1.csv"]) == {}
    with pytest.raises(ValueError, match=r"All files need a name, or none: nli=a\.csv, b\.csv is both"):
        files_by_name(["nli=a.csv", "b.csv"])


def test_only_an_empty_cell_of_a_table_is_missing(tmp_path):
    (tmp_path / "rows.csv").write_text("text,score\nNA,1.5\nnull,\n,2\n")
    found = load_files([str(tmp_path / "rows.csv")])
    assert found["text"][:] == ["NA", "null", None] and found["score"][:] == [1.5, None, 2.0]


def test_a_line_of_a_text_file_is_a_row(tmp_path):
    for name, text in (("a.txt", "one\ntwo\n"), ("b.txt", "three\n")):
        (tmp_path / name).write_text(text)
    found = load_files([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    assert found.to_list() == [{"text": "one"}, {"text": "two"}, {"text": "three"}]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("a.txt", "a.csv", "a.tsv"):
        (tmp_path / name).write_text("one")
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    (tmp_path / "good.jsonl").write_text('{"text": "a"}')
    for names, message in (
        (["no.txt"], "no.txt does not exist"),
        (["a.xml"], "a.xml has an unknown format"),
        (["empty.jsonl"], "The dataset is empty: .*empty.jsonl"),
        (["a.txt", "good.jsonl"], "one format; got json, text"),
        (["a.csv", "a.tsv"], "one format; got csv, tsv"),
        ([], "one format; got no"),
        (["broken.jsonl"], "broken.jsonl, line 1 is not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            load_files([str(tmp_path / name) for name in names])


def test_texts_become_token_ids_and_long_ones_are_cut(tiny_tokenizer):
    data = Dataset.from_dict({"body": ["open the file", "read " * 20], "other": [1, 2]})
    found = tokenize_texts(data, tiny_tokenizer, column="body", max_length=6)
    assert set(found.column_names) == {"input_ids", "attention_mask", "special_tokens_mask"}
    assert found[0]["input_ids"] == tiny_tokenizer("open the file")["input_ids"]
    assert len(found[1]["input_ids"]) == 6 and found[1]["special_tokens_mask"] == [1, 0, 0, 0, 0, 1]
    with pytest.raises(ValueError, match=r"lacks the column\(s\) text; it has body, other"):
        tokenize_texts(data, tiny_tokenizer)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', "", '{"text": "b"', '{"text": "c"}'], "b.jsonl.*, line 3 is not JSON: "),
        (['{"text": "a"}', '["b"]'], r"b.jsonl.*, line 2 is not a JSON object: \["),
    ],
)
def test_a_broken_line_is_named(tmp_path, lines, message, zipped):
    name = "b.jsonl.gz" if zipped else "b.jsonl"
    with (gzip.open if zipped else open)(tmp_path / name, "wt") as opened:
        opened.write("\n".join(lines))
    other = "a.jsonl.gz" if zipped else "a.jsonl"
    with (gzip.open if zipped else open)(tmp_path / other, "wt") as opened:
        opened.write('{"text": "first"}\n')
    with pytest.raises(ValueError, match=message):
        load_files([str(tmp_path / other), str(tmp_path / name)])


MISSING = {
    "rows.jsonl": ('{"query": "a", "text": "b"}\n\n{"query": "c", "text": null}\n', "rows.jsonl, line 3: .* has None"),
    "rows.csv": ('query,text\n"a\nb",c\n\nd,  \n', "rows.csv, line 5: column 'text' has no text"),
    "rows.tsv": ("query\ttext\na\tb\nc\t\n", "rows.tsv, line 3: column 'text' has None"),
    "rows.txt": ("a\n\nb\n", "rows.txt, line 2: column 'text' has no text"),
}


@pytest.mark.parametrize("name", list(MISSING))
def test_a_missing_or_empty_text_is_named_by_file_line_and_column(tmp_path, name):
    content, message = MISSING[name]
    (tmp_path / name).write_text(content)
    columns = ["text"] if name == "rows.txt" else ["query", "text"]
    with pytest.raises(ValueError, match=message):
        require_texts(load_files([str(tmp_path / name)]), columns)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        ({"text": ["a", None]}, ["text"], "Row 2 of the dataset: column 'text' has None"),
        ({"text": [None, None]}, ["text"], "Row 1 of the dataset: column 'text' has None"),
        ({"text": ["a", " \n"]}, ["text"], "Row 2 of the dataset: column 'text' has no text"),
        ({"text": ["a"], "idx": [3]}, ["text", "idx"], "Column 'idx' is not text, but int64; .* in text_columns"),
        ({"text": [["a"]]}, ["text"], "Column 'text' is not text, but "),
        ({"title": ["", ""], "text": ["a", None]}, ["title+text"], "Row 2 of the dataset: .*'title.text' has no text"),
    ],
)
def test_a_dataset_is_checked_before_training(rows, columns, message):
    with pytest.raises(ValueError, match=message):
        require_texts(Dataset.from_dict(rows), columns)
    good = Dataset.from_dict({"title": [None, "a"], "text": ["b", ""]})
    require_texts(good.shuffle(seed=1), ["title+text"])
    with pytest.raises(ValueError, match="Row 1 of the dataset: column 'text' has no text"):
        require_texts(good.select([1, 0]), ["text"])


def test_rows_of_a_second_file_are_named_by_its_lines(tmp_path):
    texts = {"a.csv": "text,id\na,1\nb,2\n", "b.csv": "text,id\nc,3\n  ,4\n"}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    data = load_files([str(tmp_path / name) for name in texts])
    with pytest.raises(ValueError, match=r"b\.csv, line 3: column 'text' has no text"):
        require_texts(data, ["text"])
    data.to_parquet(str(tmp_path / "c.parquet"))
    with pytest.raises(ValueError, match=r"c\.parquet, row 4: column 'text' has no text"):
        require_texts(load_files([str(tmp_path / "c.parquet")]), ["text"])
