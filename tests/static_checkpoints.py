"""Tiny checkpoints with a static table, and tokenizers of several kinds: what is exported for other libraries."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from m3bert.modeling import M3BertModel
from tests.conftest import WORDS, save, tiny_config
from tests.modeling_m3bert.static_models import VOCABULARY, WIDTH, affine, halves
from tests.models.test_native import BIASES, POST_NORM


PROMPTS = {"query": "read the ", "document": "text of "}
LONGEST = 40


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A Unigram tokenizer, as SentencePiece makes them, with the frame of XLM-R."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", *(f"\u2581{word}" for word in WORDS), "\u2581", *"abcdefgh"]
    scores = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=48, **special)


def plain_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words that adds no special tokens, and whose ids have a gap."""
    words = {word: row for row, word in enumerate(["<unk>", "<pad>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel({**words, "last": len(words) + 5}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=48, pad_token="<pad>", unk_token="<unk>"
    )


def save_static(
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    pooling: str = "mean",
    ignored: list[int] | None = None,
    normalize: bool = False,
    **changes: object,
) -> M3BertModel:
    """
    Save a post-norm model of random weights, whose layers 0, 2 and 4 of 6 read a static table, with its tokenizer,
    its modules and prompts. By default, the table ignores the special tokens.
    """
    model = M3BertModel(tiny_config(**{**POST_NORM, **BIASES, **changes})).eval()
    model.set_depths(
        exits={layer: affine() for layer in (2, 4)},
        joints={layer: affine(2 * WIDTH) for layer in (2, 4)},
        table=halves(VOCABULARY, WIDTH),
        ignored_ids=sorted(set(tokenizer.all_special_ids)) if ignored is None else ignored,
    )
    save(folder, model, tokenizer, max_length=LONGEST, pooling=pooling, prompts=PROMPTS, normalize=normalize)
    return model


def state_only_model(folder: Path) -> M3BertModel:
    """The model of a folder with the maps of its states alone as exits."""
    model = M3BertModel.from_pretrained(folder)
    weights = {layer: model.elastic.exits[str(layer)].state_dict() for layer in (2, 4)}
    model.set_depths(exits={layer: (its["weight"], its["bias"]) for layer, its in weights.items()})
    return model


def in_8_bits(rows: torch.Tensor) -> torch.Tensor:
    """Every row as whole numbers up to 127 times a scale of its own, computed number by number."""
    found = []
    for row in rows.tolist():
        scale = max(map(abs, row)) / 127
        found.append([round(number / scale) * scale for number in row])
    return torch.tensor(found)


def break_row(folder: Path, token: int) -> None:
    """Put NaN into the row of a token."""
    model = M3BertModel.from_pretrained(folder)
    with torch.no_grad():
        model.elastic.table.weight[token, 3] = torch.nan
    model.save_pretrained(folder)
