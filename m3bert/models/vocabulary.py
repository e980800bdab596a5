"""The tokens that texts need of a tokenizer, and a tokenizer that has only these."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, Self

from tokenizers import Tokenizer


class Vocabulary:
    """
    The tokens of a tokenizer, and those in use ([`~Vocabulary.add_texts`]).

    Args:
        tokenizer (`tokenizers.Tokenizer`): The tokenizer. It neither truncates nor pads afterwards.
        content (`Mapping`, *optional*): What its tokenizer.json holds. Default: what the tokenizer would write.
    """

    def __init__(self, tokenizer: Tokenizer, content: Mapping[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.content: Mapping[str, Any] = json.loads(tokenizer.to_str()) if content is None else content
        self.model: Mapping[str, Any] = self.content["model"]
        self.used_ids: set[int] = set()
        tokenizer.no_truncation()
        tokenizer.no_padding()

    @cached_property
    def ids(self) -> dict[str, int]:
        """Token -> id, without added tokens."""
        vocabulary = self.model["vocab"]
        if isinstance(vocabulary, dict):
            return vocabulary
        return {token: number for number, (token, _) in enumerate(vocabulary)}

    @property
    def unknown(self) -> int | None:
        """The id of the unknown token, if there is one."""
        return self.model["unk_id"] if "unk_id" in self.model else self.ids.get(self.model["unk_token"])

    def add_texts(self, texts: Sequence[str]) -> None:
        """Add the tokens of texts, with special ones, to those in use. An unknown word adds the pieces that WordPiece
        takes before it finds none: with others in their place, the word might no longer be unknown."""
        encoded = self.tokenizer.encode_batch_fast(texts)
        tokens = {token for encoding in encoded for token in encoding.ids}
        if self.model["type"] == "WordPiece" and self.unknown in tokens:
            strange = [text for text, encoding in zip(texts, encoded, strict=True) if self.unknown in encoding.ids]
            tokens |= {piece for text in strange for word in self.words(text) for piece in self.pieces(word)}
        self.used_ids |= tokens

    def words(self, text: str) -> list[str]:
        """The words of a text, as the tokenizer divides it before it looks for tokens."""
        normalizer, divider = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return [text] if divider is None else [word for word, _ in divider.pre_tokenize_str(text)]

    def pieces(self, word: str) -> Iterator[int]:
        """The pieces that WordPiece takes of a word, the longest first, up to where it finds none."""
        start, prefix = 0, ""
        while start < len(word) <= self.model["max_input_chars_per_word"]:  # longer words are unknown as a whole
            end = next((end for end in range(len(word), start, -1) if prefix + word[start:end] in self.ids), None)
            if end is None:
                return
            yield self.ids[prefix + word[start:end]]
            start, prefix = end, self.model["continuing_subword_prefix"]

    def spelled(self, token: str) -> str:
        """A token without the mark of its place in a word."""
        prefix, suffix = (self.model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix"))
        return token.removeprefix(prefix).removesuffix(suffix) or token

    def merged(self, token: str, ranks: Mapping[tuple[str, ...], int]) -> Iterator[str]:
        """The tokens that byte-pair encoding makes on the way from the characters to a token."""
        symbols, suffix = [*self.spelled(token)], self.model["end_of_word_suffix"] or ""
        symbols[-1] += suffix if token.endswith(suffix) else ""
        while merges := [(ranks[pair], at) for at, pair in enumerate(pairwise(symbols)) if pair in ranks]:
            at = min(merges)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
            yield symbols[at]

    def needed_ids(self, *, every_character: bool = True) -> list[int]:
        """The ids of a trimmed tokenizer, ascending: tokens in use, added ones, the unknown one, bytes, and single
        characters (all of them, or those of the other tokens).

        Texts in these tokens are divided as before. WordPiece takes the longest piece and Unigram the most likely
        pieces, which are all there; byte-pair encoding makes each token by the same merges, in the same order."""
        added = {token["id"] for token in self.content["added_tokens"]}
        tokens = {token for token, number in self.ids.items() if number in self.used_ids - added}
        if self.model["type"] == "BPE":
            ranks = {tuple(pair): rank for rank, pair in enumerate(self.model["merges"])}
            tokens |= {made for token in tokens for made in self.merged(token, ranks)}
        if self.model["type"] == "Unigram":  # an unknown character costs a constant more than the least likely piece
            tokens.add(min(self.model["vocab"], key=lambda piece: piece[1])[0])
        of_bytes = "ByteLevel" in json.dumps([self.content["normalizer"], self.content["pre_tokenizer"]])
        characters = {*chain.from_iterable(tokens)}
        for token in self.ids:
            text = self.spelled(token)
            single = len(text) == 1 and (every_character or of_bytes or text in characters)
            if single or re.fullmatch("<0x[0-9A-F]{2}>", text):
                tokens.add(token)
        numbers = {self.ids[token] for token in tokens} | added
        return sorted(numbers if self.unknown is None else numbers | {self.unknown})

    def trimmed(self, ids: Sequence[int]) -> dict[str, Any]:
        """The content of a tokenizer.json with these tokens alone, which are renumbered in their order."""
        content = json.loads(json.dumps(self.content))
        model, new = content["model"], {old: number for number, old in enumerate(ids)}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {token: new[old] for token, old in model["vocab"].items() if old in new}
        else:
            model["vocab"] = [piece for old, piece in enumerate(model["vocab"]) if old in new]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if {*pair, "".join(pair)} <= model["vocab"].keys()]
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
        for token in content["added_tokens"]:
            token["id"] = new[token["id"]]
        if content["padding"]:
            content["padding"]["pad_id"] = new[content["padding"]["pad_id"]]
        processor = content["post_processor"] or {}
        for part in processor.get("processors", [processor]):
            for name in {"sep", "cls"} & part.keys():
                part[name][1] = new[part[name][1]]
            for special in part.get("special_tokens", {}).values():
                special["ids"] = [new[old] for old in special["ids"]]
        return content

    def smaller(self, **options: bool) -> Self:
        """A vocabulary of the tokens that are [`~Vocabulary.needed_ids`]."""
        return type(self)(Tokenizer.from_str(json.dumps(self.trimmed(self.needed_ids(**options)))))
