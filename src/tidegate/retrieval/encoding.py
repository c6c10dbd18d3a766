"""Bytes of a text file to text: UTF-8 and UTF-16 by their marks, GB18030 where that gives plausible Chinese, else a clear error."""

from __future__ import annotations

import codecs
import re

from tidegate.core.errors import DocumentUnreadable

_CJK = re.compile(r"[\u3000-\u303f\u3400-\u4dbf\u4e00-\u9fff\uff00-\uffef‘’“”—…·]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")

#: Almost any bytes are valid GB18030, so what comes out has to look Chinese: this share of what is not ASCII.
PLAUSIBLE_SHARE = 0.9


def decode(data: bytes) -> str:
    """The text, with `\\n` line ends and without a byte-order mark. Raises DocumentUnreadable."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = _strict(data, "utf-16")
    elif data.startswith(codecs.BOM_UTF8):
        text = _strict(data[3:], "utf-8")
    else:
        text = _unmarked(data)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _unmarked(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as broken:
        try:
            text = data.decode("gb18030")
        except UnicodeDecodeError:
            text = ""
        foreign = len(_NOT_ASCII.findall(text))
        if not foreign or len(_CJK.findall(text)) < PLAUSIBLE_SHARE * foreign:
            raise _unreadable("neither UTF-8 nor Chinese GB18030", broken.start) from None
        return text


def _strict(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as broken:
        raise _unreadable(f"marked as {encoding.upper()}, but not valid", broken.start) from None


def _unreadable(what: str, at: int) -> DocumentUnreadable:
    return DocumentUnreadable(
        f"The text is {what} (first broken byte at {at}).", hint="Convert it, for example: iconv -f LATIN1 -t UTF-8 old.txt > new.txt"
    )
