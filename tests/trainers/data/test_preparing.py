"""Preparing text: the same rows whatever happens meanwhile, and rows that hold all of the text."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_from_disk
from tokenizers import normalizers

from tests.conftest import tiny_config
from trainers.data import preparing
from trainers.data.collators import MaskedLMCollator
from trainers.data.languages import row_probabilities, smoothed_probabilities
from trainers.data.preparing import (
    files_by_language,
    load_prepared,
    mixture,
    prepare,
    read_prepared,
    tokenizer_fingerprint,
)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch) -> None:
    monkeypatch.setattr(preparing, "PACKED_TOGETHER", 5)


@pytest.fixture
def texts(tmp_path, sentences) -> Path:
    """Two languages in folders; one document is long, and one is empty."""
    folder = tmp_path / "data"
    parts = {
        "en/a.jsonl": [*sentences[:22], " ".join(sentences[:9])],
        "en/b.jsonl": sentences[23:30],
        "de/a.jsonl": ["", *sentences[40:46]],
    }
    for name, rows in parts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return folder


def rows(folder: Path, language: str) -> list[dict[str, list[int]]]:
    return load_from_disk(str(folder / language)).to_list()


def words(folder: Path, tokenizer, language: str) -> Counter[str]:
    """The words of a language, without special tokens."""
    texts = [tokenizer.decode(row["input_ids"], skip_special_tokens=True) for row in rows(folder, language)]
    return Counter(" ".join(texts).split())


def test_rows_hold_all_of_the_text(texts, tmp_path, tiny_tokenizer, sentences):
    out = tmp_path / "out"
    prepared = prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    english = [*sentences[:22], " ".join(sentences[:9]), *sentences[23:30]]
    assert words(out, tiny_tokenizer, "en") == Counter(" ".join(english).split())
    assert words(out, tiny_tokenizer, "de") == Counter(" ".join(sentences[40:46]).split())
    assert sorted(file.name for file in out.iterdir()) == ["de", "en", "prepared.json"]
    assert read_prepared(out) == prepared
    assert [(size["documents"], size["empty"]) for size in prepared["languages"].values()] == [(6, 1), (30, 0)]
    for language, size in prepared["languages"].items():
        found = rows(out, language)
        assert size["rows"] == len(found) and max(len(row["input_ids"]) for row in found) <= 16
        assert all(sum(row["document_lengths"]) == len(row["input_ids"]) for row in found)
        pieces = sum(len(row["document_lengths"]) for row in found)
        assert size["tokens"] == sum(words(out, tiny_tokenizer, language).values()) + 2 * pieces


def test_documents_of_which_the_tokenizer_makes_nothing(tmp_path, tiny_tokenizer, sentences):
    tokenizer = copy.deepcopy(tiny_tokenizer)  # the fixture is shared by all tests
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    file = tmp_path / "en" / "a.txt"
    file.parent.mkdir()
    file.write_text("\n".join(["~"] * 6 + sentences[:5]))  # more than one window
    prepare([str(file)], tokenizer, tmp_path / "out", max_length=16)
    assert words(tmp_path / "out", tokenizer, "en") == Counter(" ".join(sentences[:5]).split())
    file.write_text("\n".join(["~"] * 6))
    with pytest.raises(ValueError, match="Language 'en' has no text: the tokenizer makes no tokens of it"):
        prepare([str(file)], tokenizer, tmp_path / "none", max_length=16)


def test_the_mixture_is_by_tokens_and_on_record(texts, tmp_path, tiny_tokenizer):
    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, max_length=16, exponent=0.5)
    saved = read_prepared(out)
    sizes = saved["languages"]
    assert [sizes[language]["probability"] for language in ("de", "en")] == pytest.approx(
        smoothed_probabilities([sizes[language]["tokens"] for language in ("de", "en")], 0.5)
    )
    assert saved["language_exponent"] == 0.5
    mixed = load_prepared(out, tiny_tokenizer, tiny_config(), seed=1)
    assert sorted(mixed.column_names) == ["document_lengths", "input_ids"]
    assert len(mixed) >= sum(size["rows"] for size in sizes.values())
    later = prepare([str(texts)], tiny_tokenizer, out, max_length=16, exponent=1.0)
    assert later["language_exponent"] == 1.0 and later["languages"]["de"]["rows"] == sizes["de"]["rows"]


def test_mixture_of_known_sizes():
    found = mixture({"a": 900, "b": 100}, 0.7)
    assert found["a"]["probability"] == pytest.approx(0.82318, abs=1e-5)
    assert found["b"] == pytest.approx({"share": 0.1, "probability": 0.17682, "passes": 1.7682}, abs=1e-4)
    # Rows of b are half as long, so twice as many are drawn for the same tokens.
    assert row_probabilities([0.5, 0.5], [10, 10], [200, 100]) == pytest.approx([1 / 3, 2 / 3])


def test_several_processes_make_the_same_rows(texts, tmp_path, tiny_tokenizer):
    for num_proc in (1, 2):
        prepare([str(texts)], tiny_tokenizer, tmp_path / str(num_proc), max_length=16, num_proc=num_proc)
    for language in ("de", "en"):
        assert rows(tmp_path / "1", language) == rows(tmp_path / "2", language)


def test_an_interrupted_run_goes_on_and_makes_the_same_rows(texts, tmp_path, tiny_tokenizer, monkeypatch):
    prepare([str(texts)], tiny_tokenizer, tmp_path / "at once", max_length=16)
    out, save, saved = tmp_path / "out", Dataset.save_to_disk, []

    def dies(self: Dataset, folder: str) -> None:
        saved.append(Path(folder).name)
        save(self, folder)
        if saved == ["de", "en"]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Dataset, "save_to_disk", dies)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match="out is not complete: run the same `m3bert prepare` again"):
        read_prepared(out)
    monkeypatch.setattr(preparing, "PACKED_TOGETHER", 10**6)  # packed again, the rows would be others
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    assert saved == ["de", "en", "en"]
    for language in ("de", "en"):
        assert rows(out, language) == rows(tmp_path / "at once", language)


def test_other_settings_are_refused(texts, tmp_path, tiny_tokenizer):
    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match=r"begun with other settings: max_length\. Choose another"):
        prepare([str(texts)], tiny_tokenizer, out, max_length=12)
    (texts / "en" / "c.jsonl").write_text('{"text": "more"}\n')
    with pytest.raises(ValueError, match=r"begun with other settings: files\. "):
        prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match="is not empty and holds no prepared data"):
        prepare([str(texts)], tiny_tokenizer, texts, max_length=16)


def test_a_column_names_the_language(tmp_path, tiny_tokenizer, sentences):
    documents = [{"lang": "de" if number % 4 == 0 else "en", "body": text} for number, text in enumerate(sentences)]
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, documents)))
    options = {"max_length": 16, "text_column": "body", "language_column": "lang"}
    prepared = prepare([str(tmp_path / "all.jsonl")], tiny_tokenizer, tmp_path / "out", **options)
    assert {language: size["documents"] for language, size in prepared["languages"].items()} == {"de": 12, "en": 36}
    assert words(tmp_path / "out", tiny_tokenizer, "de") == Counter(" ".join(sentences[::4]).split())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"lang": "fr", "text": " "}, {"lang": "en", "text": "read"}], "Language 'fr' has no text: all its 1 doc"),
        ([{"lang": "fr", "text": None}], "Language 'fr' has no text: all its 1 doc"),
        ([{"lang": "", "text": "read"}], "Column 'lang' has an empty value"),
        ([{"lang": None, "text": "read"}, {"lang": "en", "text": "read"}], "Column 'lang' has an empty value"),
        ([{"lang": "../x", "text": "read"}], "Language '../x' cannot name a folder"),
        ([{"lang": "en", "text": 3}], r"all.jsonl: column 'text' is not text, but Value\('int64'\)"),
        ([{"lang": "en"}], r"lacks the column\(s\) text"),
    ],
)
def test_bad_rows_are_refused(tmp_path, tiny_tokenizer, rows, message):
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / "all.jsonl")], tiny_tokenizer, tmp_path / "out", max_length=16, language_column="lang")
    assert not (tmp_path / "out").exists()


def test_bad_folders_are_refused(texts, tmp_path, tiny_tokenizer):
    assert list(files_by_language([str(texts)])) == ["de", "en"]
    one = str(texts / "en" / "a.jsonl")
    assert files_by_language([one]) == {"en": [one]}
    (texts / "fr").mkdir()
    with pytest.raises(ValueError, match="Language 'fr' has no text: .*fr has no files of a known format"):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out")
    (texts / "fr" / "a.jsonl").touch()
    with pytest.raises(ValueError, match="Language 'fr' cannot be read: The dataset is empty: "):
        prepare([str(texts)], tiny_tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match="en has no folders: it must have one per language"):
        files_by_language([str(texts / "en")])
    with pytest.raises(ValueError, match="max_length=2 must be more than the 2 special tokens"):
        prepare([one], tiny_tokenizer, tmp_path / "out", max_length=2)
    with pytest.raises(ValueError, match="num_proc=0 must be 1 or more"):
        prepare([one], tiny_tokenizer, tmp_path / "out", num_proc=0)


def test_reading_checks_model_tokenizer_and_files(texts, tmp_path, tiny_tokenizer, minilm):
    from transformers import AutoTokenizer, DebertaConfig

    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        load_prepared(out, AutoTokenizer.from_pretrained(minilm), tiny_config())
    with pytest.raises(ValueError, match="documents of up to 16 tokens, but the model reads 8"):
        load_prepared(out, tiny_tokenizer, tiny_config(max_position_embeddings=8))
    with pytest.raises(ValueError, match="model_type='deberta' cannot read packed rows"):
        load_prepared(out, tiny_tokenizer, DebertaConfig())
    before = tokenizer_fingerprint(tiny_tokenizer)
    tiny_tokenizer(["read", "read open"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tiny_tokenizer) == before

    next((out / "en").glob("*.arrow")).write_bytes(b"x")
    with pytest.raises(ValueError, match="out/en cannot be read: .* run `m3bert prepare` again"):
        load_prepared(out, tiny_tokenizer, tiny_config())
    (out / "en").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="out/en cannot be read: .* run `m3bert prepare` again"):
        load_prepared(out, tiny_tokenizer, tiny_config())
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    load_prepared(out, tiny_tokenizer, tiny_config())
    with pytest.raises(ValueError, match=r"nowhere has no prepared\.json"):
        read_prepared(tmp_path / "nowhere")


@pytest.fixture
def packed(texts, tmp_path, tiny_tokenizer) -> list[dict[str, list[int]]]:
    prepare([str(texts)], tiny_tokenizer, tmp_path / "out", max_length=16)
    return load_prepared(tmp_path / "out", tiny_tokenizer, tiny_config()).to_list()


def test_the_collator_numbers_documents_and_leaves_special_tokens(packed, tiny_tokenizer):
    rows = packed[:6]
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


def test_masks_depend_on_the_key_and_the_batch_only(packed, tiny_tokenizer):
    plain = [{"input_ids": row["input_ids"]} for row in packed]
    for first, second in ((packed[:4], packed[4:8]), (plain[:4], plain[4:8])):
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
