"""Preparing text: the same rows whatever happens meanwhile, and rows that hold all of the text."""

import copy
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from datasets import Dataset, load_from_disk
from tokenizers import normalizers

from m3bert.data import preparing
from m3bert.data.collators import MaskedLMCollator
from m3bert.data.languages import mix_languages, smoothed_probabilities
from m3bert.data.packing import Frame, pack, packed_rows
from m3bert.data.preparing import load_prepared, prepare, read_prepared, tokenizer_fingerprint
from tests.conftest import refused, tiny_config


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
        actual = rows(out, language)
        assert size["rows"] == len(actual) and max(len(row["input_ids"]) for row in actual) <= 16
        assert all(sum(row["document_lengths"]) == len(row["input_ids"]) for row in actual)
        pieces = sum(len(row["document_lengths"]) for row in actual)
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
    with pytest.raises(ValueError, match="Language 'en' has no text: its 6 documents make no tokens"):
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
    assert sum(size["share"] * size["passes"] for size in sizes.values()) == pytest.approx(1)
    mixed = load_prepared(out, tiny_tokenizer, tiny_config(), seed=1)
    assert sorted(mixed.column_names) == ["document_lengths", "input_ids"]
    assert len(mixed) >= sum(size["rows"] for size in sizes.values())
    later = prepare([str(texts)], tiny_tokenizer, out, max_length=16, exponent=1.0)
    assert later["language_exponent"] == 1.0 and later["languages"]["de"]["rows"] == sizes["de"]["rows"]


def test_rows_of_half_the_length_are_drawn_twice_as_often():
    languages = [Dataset.from_dict({"x": [language] * 500}) for language in (0, 1)]
    mixed = mix_languages(languages, exponent=0.0, tokens=[200, 100])
    assert sum(mixed["x"]) / len(mixed) == pytest.approx(2 / 3, abs=0.03)


def test_several_processes_lose_no_text(texts, tmp_path, tiny_tokenizer):
    for num_proc in (1, 2):
        prepare([str(texts)], tiny_tokenizer, tmp_path / str(num_proc), max_length=16, num_proc=num_proc)
    for language in ("de", "en"):
        actual, expected = (words(tmp_path / number, tiny_tokenizer, language) for number in ("2", "1"))
        assert actual == expected


def test_an_interrupted_run_goes_on_and_makes_the_same_rows(texts, tmp_path, tiny_tokenizer, monkeypatch):
    prepare([str(texts)], tiny_tokenizer, tmp_path / "at once", max_length=16)
    (texts / "en" / "b.jsonl").rename(texts / "en" / "c.jsonl")  # what is kept for the first run is not for this one
    out, save, packed = tmp_path / "out", Dataset.save_to_disk, []

    def dies(self: Dataset, folder: str) -> None:
        save(self, folder)
        if Path(folder).name == "en":
            raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "packed_rows", lambda *given: packed.append(given) or packed_rows(*given))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Dataset, "save_to_disk", dies)
        prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    assert not out.exists(), "nobody reads a part of the languages"
    packed.clear()
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    assert len(packed) == 1, "nothing is packed again"
    for language in ("de", "en"):
        assert rows(out, language) == rows(tmp_path / "at once", language)


def test_other_settings_are_refused(texts, tmp_path, tiny_tokenizer):
    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match=r"made with other settings: max_length\. Choose another"):
        prepare([str(texts)], tiny_tokenizer, out, max_length=12)
    (texts / "en" / "c.jsonl").write_text('{"text": "more"}\n')
    refused(r"made with other settings: files\. ", prepare, [str(texts)], tiny_tokenizer, out, max_length=16)


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
        ([{"lang": "fr", "text": " "}, {"lang": "en", "text": "read"}], "Language 'fr' has no text"),
        ([{"lang": None, "text": "read"}, {"lang": "en", "text": "read"}], "Language '' cannot name a folder"),
        ([{"lang": "../x", "text": "read"}], "Language '../x' cannot name a folder"),
    ],
)
def test_a_language_without_text_or_name_is_refused(tmp_path, tiny_tokenizer, rows, message):
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=message):
        prepare([str(tmp_path / "all.jsonl")], tiny_tokenizer, tmp_path / "out", max_length=16, language_column="lang")
    assert not (tmp_path / "out").exists()


def test_reading_checks_model_tokenizer_and_files(texts, tmp_path, tiny_tokenizer, minilm):
    from transformers import AutoTokenizer, DebertaConfig

    out = tmp_path / "out"
    prepare([str(texts)], tiny_tokenizer, out, max_length=16)
    with pytest.raises(ValueError, match="was prepared with another tokenizer"):
        load_prepared(out, AutoTokenizer.from_pretrained(minilm), tiny_config())
    with pytest.raises(ValueError, match="documents of up to 16 tokens, but the model reads 8"):
        load_prepared(out, tiny_tokenizer, tiny_config(max_position_embeddings=8))
    refused("model_type='deberta' cannot read packed rows", load_prepared, out, tiny_tokenizer, DebertaConfig())
    before = tokenizer_fingerprint(tiny_tokenizer)
    tiny_tokenizer(["read", "read open"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tiny_tokenizer) == before

    next((out / "en").glob("*.arrow")).write_bytes(b"x")
    refused("out/en cannot be read: ", load_prepared, out, tiny_tokenizer, tiny_config())


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


def test_smoothing_raises_small_languages():
    # 0.9^0.7 / (0.9^0.7 + 0.1^0.7)
    assert smoothed_probabilities([90, 10]) == pytest.approx([0.82318, 0.17682], abs=1e-5)
    assert smoothed_probabilities([3, 1], exponent=1.0) == pytest.approx([0.75, 0.25])
    assert sum(smoothed_probabilities([5, 7, 11, 1])) == pytest.approx(1)


def test_languages_are_drawn_with_smoothed_probabilities():
    large, small = Dataset.from_dict({"x": [0] * 900}), Dataset.from_dict({"x": [1] * 100})
    mixed = mix_languages([large, small], seed=1)
    assert len(mixed) > 1000
    assert sum(mixed["x"]) / len(mixed) == pytest.approx(0.177, abs=0.03)
    assert mix_languages([large]) is large


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
    refused("max_length=2 must be more than the 2 special tokens", packed_rows, documents, Frame((0,), (2,)), 2)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

    refused("Slow is no fast tokenizer", Frame.of, Slow())
