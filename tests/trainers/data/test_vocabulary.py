"""Encoders that get the vocabulary of another tokenizer."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from m3bert.commands.backbone import BackboneArguments, load_backbone
from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers.data.vocabulary import tokens_of_source, transfer_vocabulary, transferred
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def target(sentences):
    """Byte-pair encoding of bytes, as in docs/pretrain.md."""
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer, level = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel()
    tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder = normalizers.NFKC(), level, decoders.ByteLevel()
    learned = {"vocab_size": 320, "special_tokens": [*names.values()], "initial_alphabet": level.alphabet()}
    tokenizer.train_from_iterator([*sentences, "straße"], trainers.BpeTrainer(show_progress=False, **learned))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def test_a_new_token_is_the_mean_of_old_ones():
    weight = torch.randn(5, 3)
    found = transferred(weight, [[2], [0, 4, 4], []])
    torch.testing.assert_close(found[0], weight[2])
    torch.testing.assert_close(found[1], (weight[0] + 2 * weight[4]) / 3)
    torch.testing.assert_close(found[2], weight.mean(dim=0))


def test_tokens_are_spelled_by_the_source(tiny_tokenizer, target):
    tokens = tokens_of_source(tiny_tokenizer, target)
    assert len(tokens) == len(target)
    ids = target("file list", add_special_tokens=False)["input_ids"]
    for token in ids:
        text = target.decode([token]).strip()
        if text in tiny_tokenizer.get_vocab():
            assert tokens[token] == [tiny_tokenizer.convert_tokens_to_ids(text)]
    assert tokens[target.mask_token_id] == [tiny_tokenizer.mask_token_id]
    assert tokens[target.pad_token_id] == [tiny_tokenizer.pad_token_id]
    half = target.convert_tokens_to_ids("Ã")  # the first byte of many letters, no text of its own
    assert tokens[half] == []
    own = tokens_of_source(tiny_tokenizer, tiny_tokenizer)
    assert all(its == [token] for token, its in enumerate(own)), "its own vocabulary changes nothing"


@pytest.mark.parametrize("tied", [True, False])
def test_a_masked_lm_gets_another_vocabulary(tiny_tokenizer, target, tied, tmp_path):
    model = M3BertForMaskedLM(tiny_config(tie_word_embeddings=tied)).eval()
    old, old_head = (part.weight.detach().clone() for part in (model.get_input_embeddings(), model.lm_head))
    transfer_vocabulary(model, tiny_tokenizer, target)
    tokens = tokens_of_source(tiny_tokenizer, target)
    torch.testing.assert_close(model.get_input_embeddings().weight, transferred(old, tokens))
    torch.testing.assert_close(model.lm_head.weight, transferred(old_head, tokens))
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    assert model.config.vocab_size == len(target) and model.config.pad_token_id == target.pad_token_id
    model.save_pretrained(tmp_path)
    again = M3BertForMaskedLM.from_pretrained(tmp_path)
    batch = target(["open the file", "a list"], padding=True, return_tensors="pt", return_token_type_ids=False)
    assert torch.equal(again(**batch).logits, model(**batch).logits) and again(**batch).logits.shape[-1] == len(target)


def test_training_starts_from_it(encoder_folder, target, tmp_path):
    target.save_pretrained(tmp_path)
    options = BackboneArguments(
        model_name_or_path=str(encoder_folder), tokenizer_name=str(tmp_path), transfer_vocabulary=True
    )
    for auto in (AutoModel, AutoModelForMaskedLM):
        model, tokenizer = load_backbone(options, auto)
        assert model.get_input_embeddings().weight.shape[0] == len(tokenizer) == len(target)
    for wrong in ({"tokenizer_name": None}, {"model_name_or_path": None}):
        with pytest.raises(ValueError, match="--transfer_vocabulary needs --model_name_or_path and --tokenizer_name"):
            load_backbone(BackboneArguments(**{**vars(options), **wrong}), AutoModel)
