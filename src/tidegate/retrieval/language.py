"""Which of the two languages that the product speaks a text is in, by its letters and commonest words. It guesses nothing else."""

from __future__ import annotations

import re

_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff]")
_KANA = re.compile(r"[\u3040-\u30ff]")
_LATIN_WORD = re.compile(r"[A-Za-z]+")
_ENGLISH = frozenset((
    "the", "of", "and", "to", "in", "is", "a", "for", "that", "on", "with", "as", "be", "by", "or", "are", "this", "not", "from", "at",
    "it", "an", "we", "you", "your", "if",
))

#: Of Chinese characters and Latin words together, so many are Chinese characters in a Chinese text that quotes English names.
HAN_SHARE = 0.4
#: More kana than this beside Chinese characters is Japanese.
KANA_SHARE = 0.1
#: In running English about four words of ten are among the commonest; in other languages next to none.
ENGLISH_SHARE = 0.15
#: Enough to tell.
SAMPLE_CHARS = 20_000


def detect(text: str) -> str | None:
    """"zh", "en", or None where it is neither or too little."""
    text = text[:SAMPLE_CHARS]
    han, kana = len(_HAN.findall(text)), len(_KANA.findall(text))
    words = _LATIN_WORD.findall(text)
    if han and han >= HAN_SHARE * (han + len(words)):
        return None if kana > KANA_SHARE * han else "zh"
    common = sum(word.lower() in _ENGLISH for word in words)
    return "en" if words and common >= ENGLISH_SHARE * len(words) else None
