"""What a word is, in any language."""

from __future__ import annotations

import regex


# Scripts that put no spaces between words; LB=SA are South East Asian (Thai, Lao, Khmer, Myanmar, ...).
_WITHOUT_SPACES = r"(?=\p{L})[\p{scx=Han}\p{scx=Hira}\p{scx=Kana}\p{scx=Bopo}\p{sc=Yiii}\p{LB=SA}]"
_EMOJI = r"[\p{Extended_Pictographic}\p{Regional_Indicator}]"
_SPELLED = r"[\p{L}\p{N}\p{Co}]"  # with joiners between its letters, as in Persian, and marks, as in Hindi
_WORD = regex.compile(
    rf"(?={_WITHOUT_SPACES}|{_EMOJI})\X|(?!{_WITHOUT_SPACES}){_SPELLED}"
    rf"(?:(?!{_WITHOUT_SPACES})(?:{_SPELLED}|[\p{{M}}\u200c\u200d]))*"
)


def word_spans(text: str) -> list[tuple[int, int]]:
    """
    Start and end of the words of a text. A word is a run of letters and digits with their marks. In scripts without
    spaces between words (Chinese, Japanese, Thai, Lao, Khmer, Burmese, ...), each character with its marks is a word,
    and so is each emoji in all texts.
    """
    return [match.span() for match in _WORD.finditer(text)]


def words(text: str) -> list[str]:
    """The words of a text, as they are written in it."""
    return [text[start:end] for start, end in word_spans(text)]
