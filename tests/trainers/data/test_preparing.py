"""Preparing text: the same files whatever happens meanwhile, and rows that hold all of the text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from tests.conftest import tiny_config
from trainers.data.collators import MaskedLMCollator
from trainers.data.languages import row_probabilities, smoothed_probabilities
from trainers.data.prepared import PreparedData, Sizes, mixture, tokenizer_fingerprint
from trainers.data.preparing import Settings, files_by_language, prepare


SETTINGS = Settings(max_length=16, documents_per_shard=5)


@pytest.fixture
def texts(tmp_path, sentences) -> Path:
    """Two languages in folders; one document is long, and one is empty."""
    folder = tmp_path / "data"
    parts = {
        "en/a.jsonl": [*sentences[:22], " ".join(sentences[:9])],
        "en/b.jsonl": sentences[23:30],
        "de/a.jsonl": [""],
    }
    parts["de/a.jsonl"] += sentences[40:46]
    for name, rows in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def words(prepared: PreparedData, tokenizer, language: str) -> Counter[str]:
    """The words of a language, without special tokens."""
    rows = [row["input_ids"] for file in prepared.shards(language) for row in Dataset.from_file(str(file))]
    return Counter(word for row in rows for word in tokenizer.decode(row, skip_special_tokens=True).split())


def test_rows_hold_all_of_the_text(texts, tmp_path, tiny_tokenizer, sentences):
    prepared = prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    english = [*sentences[:22], " ".join(sentences[:9]), *sentences[23:30]]
    assert words(prepared, tiny_tokenizer, "en") == Counter(" ".join(english).split())
    assert words(prepared, tiny_tokenizer, "de") == Counter(" ".join(sentences[40:46]).split())
    assert [file.name for file in prepared.shards("en")] == [f"{number:06d}.arrow" for number in range(6)]

    size = prepared.sizes["en"]
    assert (size.documents, size.empty) == (30, 0) and prepared.sizes["de"].empty == 1
    assert size.tokens == sum(words(prepared, tiny_tokenizer, "en").values()) + 2 * size.pieces
    again = PreparedData.read(tmp_path / "out")
    assert again == prepared
    for language, size in again.sizes.items():
        rows = [row for file in again.shards(language) for row in Dataset.from_file(str(file))]
        assert len(rows) == size.rows and max(len(row["input_ids"]) for row in rows) <= 16
        assert all(sum(row["document_lengths"]) == len(row["input_ids"]) for row in rows)
        assert sum(len(row["document_lengths"]) for row in rows) == size.pieces


def test_a_shard_without_text(tmp_path, tiny_tokenizer, sentences):
    (tmp_path / "en").mkdir()
    (tmp_path / "en" / "a.txt").write_text("\n".join(["", *[" "] * 6, *sentences[:5]]))
    prepared = prepare([str(tmp_path / "en" / "a.txt")], tiny_tokenizer, tmp_path / "out", SETTINGS)
    assert (prepared.sizes["en"].empty, prepared.sizes["en"].documents) == (7, 5)
    assert len(Dataset.from_file(str(prepared.shards("en")[0]))) == 0
    assert len(prepared.dataset()) == prepared.sizes["en"].rows > 0


def test_the_mixture_is_by_tokens_and_on_record(texts, tmp_path, tiny_tokenizer):
    prepared = prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS, exponent=0.5)
    saved = json.loads((tmp_path / "out" / "prepared.json").read_text())
    tokens = [saved["languages"][language]["tokens"] for language in ("de", "en")]
    assert [saved["languages"][language]["probability"] for language in ("de", "en")] == pytest.approx(
        smoothed_probabilities(tokens, 0.5)
    )
    assert saved["language_exponent"] == 0.5
    rows = prepared.dataset(seed=1)
    assert sorted(rows.column_names) == ["document_lengths", "input_ids"]
    assert len(rows) >= sum(size.rows for size in prepared.sizes.values())
    later = prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS, exponent=1.0)
    assert later.exponent == 1.0 and later.sizes == prepared.sizes


def test_mixture_of_known_sizes():
    found = mixture({"a": Sizes(tokens=900), "b": Sizes(tokens=100)}, 0.7)
    assert found["a"]["probability"] == pytest.approx(0.82318, abs=1e-5)
    assert found["b"] == pytest.approx({"share": 0.1, "probability": 0.17682, "passes": 1.7682}, abs=1e-4)
    # Rows of b are half as long, so twice as many are drawn for the same tokens.
    drawn = row_probabilities([0.5, 0.5], [10, 10], [200, 100])
    assert drawn == pytest.approx([1 / 3, 2 / 3])


def test_several_processes_write_the_same_files(texts, tmp_path, tiny_tokenizer):
    for num_proc in (1, 2):
        prepare([str(texts)], tiny_tokenizer, tmp_path / str(num_proc), SETTINGS, num_proc=num_proc)
    assert content(tmp_path / "1") == content(tmp_path / "2")


def test_a_run_that_was_killed_goes_on_and_writes_the_same_files(texts, tmp_path, tiny_tokenizer, monkeypatch):
    from trainers.data import preparing

    expected = tmp_path / "at once"
    prepare([str(texts)], tiny_tokenizer, expected, SETTINGS)
    write, begun = preparing.write_shard, []

    def dies(file: Path, *arguments: object) -> None:
        begun.append(file)
        if len(begun) == 4:
            file.with_suffix(".part").write_bytes(b"half")
            raise KeyboardInterrupt
        write(file, *arguments)

    monkeypatch.setattr(preparing, "write_shard", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    with pytest.raises(ValueError, match="out is not complete: run the same `m3bert prepare` again"):
        PreparedData.read(tmp_path / "out")
    prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    assert len(begun) == 4 + 8 - 3  # three shards of eight are kept
    assert content(tmp_path / "out") == content(expected)


def test_a_killed_process_leaves_whole_shards_only(texts, tmp_path, tiny_tokenizer):
    """With SIGKILL, in the middle of the work."""
    big = tmp_path / "big" / "en"
    big.mkdir(parents=True)
    (big / "a.txt").write_text((" ".join(["read"] * 1000) + "\n") * 200)
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    settings = Settings(max_length=16, documents_per_shard=10)
    code = (
        "import sys; from transformers import AutoTokenizer; from trainers.data.preparing import Settings, prepare; "
        "prepare([sys.argv[1]], AutoTokenizer.from_pretrained(sys.argv[2]), "
        "sys.argv[3], Settings(max_length=16, documents_per_shard=10))"
    )
    arguments = [str(tmp_path / "big"), str(tmp_path / "tokenizer"), str(tmp_path / "out")]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], env=os.environ)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").rglob("*.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = len(list((tmp_path / "out").rglob("*.arrow")))
    assert kept > 0
    for name in ("out", "at once"):
        prepare([str(tmp_path / "big")], tiny_tokenizer, tmp_path / name, settings)
    assert content(tmp_path / "out") == content(tmp_path / "at once")


def test_other_settings_are_refused(texts, tmp_path, tiny_tokenizer):
    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, SETTINGS)
    with pytest.raises(ValueError, match=r"begun with other settings: max_length \(16, now 12\)\. Choose another"):
        prepare([str(texts)], tiny_tokenizer, out, Settings(max_length=12, documents_per_shard=5))
    (texts / "en" / "c.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"begun with other settings: files\. "):
        prepare([str(texts)], tiny_tokenizer, out, SETTINGS)
    with pytest.raises(ValueError, match="is not empty and holds no prepared data"):
        prepare([str(texts)], tiny_tokenizer, texts, SETTINGS)


def test_a_column_names_the_language(tmp_path, tiny_tokenizer, sentences):
    rows = [{"lang": "de" if number % 4 == 0 else "en", "body": text} for number, text in enumerate(sentences)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = Settings(max_length=16, text_column="body", language_column="lang", documents_per_shard=7)
    prepared = prepare([str(tmp_path / "all.jsonl")], tiny_tokenizer, tmp_path / "out", settings)
    assert {language: size.documents for language, size in prepared.sizes.items()} == {"de": 12, "en": 36}
    assert words(prepared, tiny_tokenizer, "de") == Counter(" ".join(sentences[::4]).split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"lang": "fr", "text": " "}, {"lang": "en", "text": "read"}], "Language 'fr' has no text: all its 1 doc"),
        ([{"lang": "", "text": "read"}], "Column 'lang' has an empty value"),
        ([{"lang": None, "text": "read"}, {"lang": "en", "text": "read"}], "Column 'lang' has an empty value"),
        ([{"lang": "../x", "text": "read"}], "Language '../x' cannot name a folder"),
        ([{"lang": "en", "text": 3}], "Column 'text' has a value that is not text: 3"),
        ([{"lang": "en"}], r"lacks the column\(s\) text"),
    ],
)
def test_bad_rows_are_refused(tmp_path, tiny_tokenizer, rows, message):
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = Settings(max_length=16, language_column="lang")
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / "all.jsonl")], tiny_tokenizer, tmp_path / "out", settings)
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused(texts, tmp_path, tiny_tokenizer):
    assert list(files_by_language([str(texts)])) == ["de", "en"]
    one = str(texts / "en" / "a.jsonl")
    assert files_by_language([one]) == {"en": [one]}
    (texts / "fr").mkdir()
    with pytest.raises(ValueError, match="Language 'fr' has no text: .*fr has no files of a known format"):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    (texts / "fr" / "a.jsonl").touch()
    with pytest.raises(ValueError, match="Language 'fr' cannot be read: The dataset is empty: "):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    with pytest.raises(ValueError, match="en has no folders: it must have one per language"):
        files_by_language([str(texts / "en")])
    for settings, message in (
        ({"max_length": 0}, "max_length=0"),
        ({"documents_per_shard": 0}, "documents_per_shard=0"),
    ):
        with pytest.raises(ValueError, match=f"{message} must be 1 or more"):
            Settings(**settings)
    with pytest.raises(ValueError, match="max_length=2 must be more than the 2 special tokens"):
        prepare([one], tiny_tokenizer, tmp_path / "out", Settings(max_length=2))
    with pytest.raises(ValueError, match="num_proc=0 must be 1 or more"):
        prepare([one], tiny_tokenizer, tmp_path / "out", SETTINGS, num_proc=0)


def test_reading_checks_model_tokenizer_and_files(texts, tmp_path, tiny_tokenizer, minilm):
    from transformers import AutoTokenizer, DebertaConfig

    prepared = prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    prepared.check(tiny_tokenizer, tiny_config())
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        prepared.check(AutoTokenizer.from_pretrained(minilm), tiny_config())
    with pytest.raises(ValueError, match="documents of up to 16 tokens, but the model reads 8"):
        prepared.check(tiny_tokenizer, tiny_config(max_position_embeddings=8))
    with pytest.raises(ValueError, match="model_type='deberta' cannot read packed rows"):
        prepared.check(tiny_tokenizer, DebertaConfig())
    before = tokenizer_fingerprint(tiny_tokenizer)
    tiny_tokenizer(["read", "read open"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tiny_tokenizer) == before

    prepared.shards("en")[0].unlink()
    with pytest.raises(ValueError, match=r"out/en has \d+ rows, not \d+: run `m3bert prepare` again"):
        prepared.dataset()
    prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    prepared.dataset()
    prepared.shards("en")[0].write_bytes(b"x")
    with pytest.raises(ValueError, match="000000.arrow is not a shard of `m3bert prepare`, or is damaged: delete it"):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS)
    with pytest.raises(ValueError, match=r"nowhere has no prepared\.json"):
        PreparedData.read(tmp_path / "nowhere")


def test_the_collator_numbers_documents_and_leaves_special_tokens(texts, tmp_path, tiny_tokenizer):
    rows = [*prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS).dataset()][:6]
    collator = MaskedLMCollator(tiny_tokenizer, mlm_probability=0.99)
    batch = collator(rows)
    for row, ids, labels, numbers in zip(
        rows, batch["input_ids"], batch["labels"], batch["document_ids"], strict=True
    ):
        length = len(row["input_ids"])
        assert numbers[:length].tolist() == [
            n for n, size in enumerate(row["document_lengths"], 1) for _ in range(size)
        ]
        assert not numbers[length:].any() and (labels[length:] == -100).all() and (ids[length:] == 1).all()
        special = [token in (0, 2) for token in row["input_ids"]]
        assert all(label == -100 for label, is_special in zip(labels.tolist(), special, strict=False) if is_special)
        assert all(label in (-100, token) for label, token in zip(labels.tolist(), row["input_ids"], strict=False))
    assert (batch["labels"] != -100).sum() > 50


def test_masks_depend_on_the_key_and_the_batch_only(texts, tmp_path, tiny_tokenizer):
    rows = [*prepare([str(texts)], tiny_tokenizer, tmp_path / "out", SETTINGS).dataset()]
    plain = [{"input_ids": row["input_ids"]} for row in rows]
    for first, second in ((rows[:4], rows[4:8]), (plain[:4], plain[4:8])):
        collator = MaskedLMCollator(tiny_tokenizer, mlm_probability=0.5, key=(0, 0))
        before = torch.get_rng_state()
        labels = [collator(batch)["labels"] for batch in (first, second)]
        assert torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(7)
        assert torch.equal(collator(second)["labels"], labels[1])
        collator.key = (0, 1)
        assert not torch.equal(collator(first)["labels"], labels[0])
        collator.key = None
        torch.manual_seed(7)
        drawn = collator(first)["labels"]
        assert not torch.equal(collator(first)["labels"], drawn)
