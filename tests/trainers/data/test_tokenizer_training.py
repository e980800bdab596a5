"""Tokenizers that are trained here."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from scripts import tokenizer as command
from trainers.data.tokenizer_training import train_tokenizer


TEXTS = [
    "the file has a list of names",
    "Über die Straße",
    "这是一个句子",
    "это предложение",
    "the names of the files",
]


def test_every_text_has_tokens_and_comes_back(tmp_path):
    train_tokenizer(TEXTS * 3, 300, max_length=24).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == 24 and len(tokenizer) <= 300
    for text in [*TEXTS, "never seen: ⠓ 🦜 ไทย", ""]:
        ids = tokenizer(text)["input_ids"]
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
    assert tokenizer("the file <x> [MASK]")["input_ids"][-2] == tokenizer.mask_token_id
    first, second = (tokenizer(text)["input_ids"] for text in TEXTS[:2])
    assert tokenizer(*TEXTS[:2])["input_ids"] == first + second[1:], "a pair is [CLS] a [SEP] b [SEP]"


def test_the_same_texts_give_the_same_tokenizer():
    first, second = (train_tokenizer(iter(TEXTS * 5), 320).get_vocab() for _ in range(2))
    assert first == second
    assert len(train_tokenizer(TEXTS * 5, 320, min_frequency=1000)) == 261, "no pair is so frequent"


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="vocab_size=260 must be 261 or more"):
        train_tokenizer(TEXTS, 260)
    with pytest.raises(ValueError, match="no text to train"):
        train_tokenizer(["", "  "], 300)


def test_the_command_reads_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    (tmp_path / "b.txt").write_text("\n".join(TEXTS))
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    command.main(["--files", *files, "--vocab_size", "280", "--output_dir", str(tmp_path / "out")])
    assert capsys.readouterr().out.endswith("280 tokens from 10 texts\n")
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 280
    with pytest.raises(ValueError, match="needs --files"):
        command.main([])
