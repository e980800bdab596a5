"""Short spans of texts, in place of queries."""

from __future__ import annotations

from hashlib import blake2b

from ..utils.words import word_spans


QUERIES = 0.1  # share of the texts whose spans are queries
SPAN_WORDS = (3, 16)


def is_query(text: str) -> bool:
    """Whether the span of a text is a query of the comparison."""
    return blake2b(text.encode(), digest_size=4, person=b"query").digest()[0] < QUERIES * 256


def span_of(text: str) -> str:
    """Some words in a row of a text, in place of a query: 3 to 16 ([`word_spans`]), or all of a shorter text. The same
    text always gives the same span."""
    words = word_spans(text) or [(0, len(text))]
    digest = blake2b(text.encode(), digest_size=8).digest()
    fewest, most = SPAN_WORDS
    count = fewest + int.from_bytes(digest[:4], "big") % (most - fewest + 1)
    start = int.from_bytes(digest[4:], "big") % max(1, len(words) - count + 1)
    chosen = words[start : start + count]
    return text[chosen[0][0] : chosen[-1][1]]
