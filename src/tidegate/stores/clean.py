"""What PostgreSQL cannot keep: NUL in text and JSON, and halves of surrogate pairs, which are not UTF-8."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T", bound=msgspec.Struct)

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
#: What stands where a character could not be kept, so that offsets and lengths stay.
MARK = "\N{REPLACEMENT CHARACTER}"


def clean_text(text: str) -> str:
    """The text with each character that cannot be stored replaced by U+FFFD; the same object where there is none."""
    return _UNSTORABLE.sub(MARK, text) if _UNSTORABLE.search(text) else text


def clean_value(value: Any) -> Any:
    """`clean_text` through dicts, lists and tuples; keys too. Other values come back as they are."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_value(key): clean_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean_value(item) for item in value]
    return value


def clean_struct(struct: T) -> T:
    """`clean_value` for all fields of a struct; facts of a type that has no JSON become their text."""
    return msgspec.convert(clean_value(msgspec.to_builtins(struct, enc_hook=str)), type(struct))


# A fact of a type that has no JSON (a NumPy number, a path) is better kept as its text than lost with its flight.
_encode = msgspec.json.Encoder(enc_hook=str).encode


def json_text(struct: msgspec.Struct) -> bytes:
    """The struct as JSON that PostgreSQL takes as jsonb."""
    try:
        text = _encode(struct)
    except UnicodeEncodeError:  # half a surrogate pair, e.g. in a model's name
        return _encode(clean_struct(struct))
    # A cheap look first: this runs for every flight, and nearly none has a NUL.
    return _encode(clean_struct(struct)) if b"\\u0000" in text else text
