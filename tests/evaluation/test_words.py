"""Words of all languages: the same in the spans of a fit, in BM25 and in comparisons, and divided nowhere else."""

import numpy as np
import pytest

from m3bert.evaluation import bm25_search
from m3bert.evaluation.hybrid import folded
from m3bert.exits.queries import span_of
from m3bert.utils.words import word_spans, words


# Texts, and their words with a bar between them.
LANGUAGES = {
    "en": ("Don't stop: H2O, 3.14 na\u00efve cafe\u0301s!", "Don|t|stop|H2O|3|14|na\u00efve|cafe\u0301s"),
    "zh": ("我爱北京。2024年iPhone手机", "我|爱|北|京|2024|年|iPhone|手|机"),
    "ja": ("時々、コーヒーを「がぶ飲み」ｶﾞ", "時|々|コ|ー|ヒ|ー|を|が|ぶ|飲|み|ｶﾞ"),
    "th": ("น้ำดี ที่๒๕๖๗", "น้ำ|ดี|ที่|๒๕๖๗"),
    "lo": ("ພາສາ", "ພ|າ|ສ|າ"),
    "km": ("ភាសាខ្មែរ", "ភា|សា|ខ្មែ|រ"),
    "my": ("ကို", "ကို"),
    "ko": ("한국어 문장, 둘", "한국어|문장|둘"),
    "ar": ("مَرْحَبًا بالعالم، ١٢٣", "مَرْحَبًا|بالعالم|١٢٣"),
    "fa": ("می\u200cخواهم بروم", "می\u200cخواهم|بروم"),
    "hi": ("हिन्दी में क्षत्रिय।", "हिन्दी|में|क्षत्रिय"),
    "emoji": ("hi 👩\u200d👩\u200d👧👍🏽🇩🇪🇫🇷 ☕\ufe0fok", "hi|👩\u200d👩\u200d👧|👍🏽|🇩🇪|🇫🇷|☕\ufe0f|ok"),
    "none": ("!? -- $ \n", ""),
}


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_part_has_the_same_words(language):
    text, barred = LANGUAGES[language]
    expected = barred.split("|") if barred else []
    assert words(text) == expected and [text[start:end] for start, end in word_spans(text)] == expected
    # A word is found where it is, and in no other text.
    others = [other for name, (other, _) in LANGUAGES.items() if name != language]
    for word in {*expected} - {"t"}:  # of "Don't", and Latin words in several texts
        actual = bm25_search([word], [*others, text])
        holding = {row for row, part in enumerate([*others, text]) if folded(word) in map(folded, words(part))}
        assert {*actual.rows[0].tolist()} - {-1} == holding and len(others) in holding
    for end in range(30):
        whole = f"{end} {text * 9}"
        span, part = span_of(whole), words(whole)
        assert span in whole and 0 < len(span)
        at = [start for start in range(len(part)) if part[start : start + len(words(span))] == words(span)]
        assert at and 3 <= len(words(span)) <= 16 or language == "none"
        assert span_of(whole) == span, "always the same"


def test_a_word_is_compared_without_case_accents_and_forms_of_unicode():
    for one, other in (
        ("STRASSE", "straße"),
        ("caf\u00e9", "cafe\u0301"),
        ("ｶﾞ", "ガ"),
        ("Ｈ２", "h2"),
        ("Ёлка", "елка"),
    ):
        assert folded(one) == folded(other)
    for one, other in (("か", "が"), ("की", "का"), ("มี", "ม")):
        assert folded(one) != folded(other)


def test_texts_without_a_word_find_nothing_and_a_query_of_stop_words_alone_searches_these():
    actual = bm25_search(["!", "a", ""], ["?", "...", ""])
    assert np.array_equal(actual.rows, -np.ones((3, 3))) and not actual.scores.any()
    actual = bm25_search(["to be or not to be"], ["some text", "he said to be or not to be"])
    assert actual.rows[0].tolist() == [1, -1]
