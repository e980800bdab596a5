"""Train a tokenizer on text of one or many languages."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
BYTES = 256


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = 32_000, max_length: int = 512, min_frequency: int = 2
) -> PreTrainedTokenizerBase:
    """
    A tokenizer that covers every text: byte-pair encoding of UTF-8 bytes after NFKC. Texts become `[CLS] ... [SEP]`.
    The same texts give the same tokenizer.

    Args:
        texts (`Iterable[str]`): The texts.
        vocab_size (`int`, *optional*, defaults to 32000): Number of tokens, with the 256 bytes and five special
            tokens; fewer if the texts do not have so many frequent pairs.
        max_length (`int`, *optional*, defaults to 512): Longest text in tokens, as the tokenizer's limit.
        min_frequency (`int`, *optional*, defaults to 2): How often a pair must occur to become a token.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]

    Raises:
        ValueError: if the vocabulary is too small for all bytes, or there is no text.
    """
    smallest = BYTES + len(SPECIAL)
    if vocab_size < smallest:
        raise ValueError(f"vocab_size={vocab_size} must be {smallest} or more: all bytes and the special tokens.")
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk"]))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    counted = _Counted(texts)
    tokenizer.train_from_iterator(counted, trainer)
    if not counted.number:
        raise ValueError("There is no text to train a tokenizer on.")
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL['cls']} $A {SPECIAL['sep']}",
        pair=f"{SPECIAL['cls']} $A {SPECIAL['sep']} $B {SPECIAL['sep']}",
        special_tokens=[(SPECIAL["cls"], ids["cls"]), (SPECIAL["sep"], ids["sep"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        bos_token=SPECIAL["cls"],
        eos_token=SPECIAL["sep"],
        **{f"{name}_token": token for name, token in SPECIAL.items()},
    )


class _Counted:
    """Texts that are not empty, with their number."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.number = texts, 0

    def __iter__(self) -> Iterable[str]:
        for text in self.texts:
            if text.strip():
                self.number += 1
                yield text
