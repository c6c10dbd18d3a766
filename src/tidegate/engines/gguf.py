"""The header of a GGUF file: what a model says about itself, without its weights. Plain or gzipped.

The format is llama.cpp's (ggml, docs/gguf.md): a magic number, counts, then key-value pairs. Only these are read; the tensors are left alone.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any, BinaryIO, cast

from tidegate.core.errors import BadRequest

_MAGIC = b"GGUF"
_GZIP = b"\x1f\x8b"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
#: Bounds against broken and hostile files: a real header has tens of pairs, a vocabulary of a quarter of a million tokens, templates of kilobytes.
_MOST_PAIRS = 4096
_MOST_ITEMS = 4_000_000
_LONGEST_TEXT = 4 << 20
_MOST_BYTES = 512 << 20


class _Reader:
    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._left = _MOST_BYTES

    def bytes(self, count: int) -> bytes:
        self._left -= count
        if self._left < 0:
            raise self.broken(f"its header is larger than {_MOST_BYTES >> 20} MiB")
        data = self._file.read(count)
        if len(data) != count:
            raise self.broken("it ends in the middle of its header")
        return data

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.bytes(struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.number("<Q")
        if length > _LONGEST_TEXT:
            raise self.broken(f"a text in it would be {length} bytes long")
        return self.bytes(length).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.broken(f"it holds a value of the unknown type {kind}")
        inner, count = self.number("<I"), self.number("<Q")
        if count > _MOST_ITEMS:
            raise self.broken(f"a list in it would have {count} items")
        if inner in _SCALARS:
            code = _SCALARS[inner]
            return list(struct.unpack(f"<{count}{code[1]}", self.bytes(count * struct.calcsize(code))))
        if inner != _STRING:
            raise self.broken(f"it holds a list of the type {inner}")
        return [self.text() for _ in range(count)]

    def broken(self, why: str) -> BadRequest:
        return BadRequest(f"{self._path} is no GGUF file that can be read: {why}.", hint="Is it whole? GGUF versions 2 and 3 are read.")


def read_header(path: Path) -> dict[str, Any]:
    """The key-value pairs of a GGUF file (`general.architecture`, `tokenizer.ggml.tokens`, ...), as Python values.

    Raises BadRequest where the file cannot be read or is not GGUF.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device may keep its reader for ever
            raise BadRequest(f"{path} is no regular file.", hint="Name a GGUF file, plain or gzipped.")
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
        with cast(BinaryIO, gzip.open(path) if packed else path.open("rb")) as file:
            return _pairs(_Reader(file, path))
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadRequest(f"{path} cannot be read: {why}.", hint="Name a GGUF file, plain or gzipped.") from error


def _pairs(reader: _Reader) -> dict[str, Any]:
    if reader.bytes(4) != _MAGIC:
        raise reader.broken("it does not begin with GGUF")
    version = reader.number("<I")
    if version not in _VERSIONS:
        raise reader.broken(f"its version is {version}")
    reader.number("<Q")  # how many tensors
    count = reader.number("<Q")
    if count > _MOST_PAIRS:
        raise reader.broken(f"it claims {count} pairs")
    pairs: dict[str, Any] = {}
    for _ in range(count):
        key = reader.text()
        pairs[key] = reader.value(reader.number("<I"))
    return pairs
