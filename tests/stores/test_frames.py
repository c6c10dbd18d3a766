"""What is torn is recognised, what is whole is found."""

from __future__ import annotations

import bisect
import itertools
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.core.flight import FlightRecord
from tidegate.stores.frames import MAGIC, Entry, frame, next_frame, pack, unpack

from .flights import a_flight, a_text


def found_in(data: bytes) -> list[bytes]:
    """All whole payloads."""
    payloads, at = [], 0
    while found := next_frame(data, at):
        payloads.append(found.payload)
        at = found.end
    return payloads


def record_of(entry: Entry) -> FlightRecord:
    return msgspec.json.decode(entry.record, type=FlightRecord)


PAYLOADS = st.lists(st.binary(max_size=40) | st.binary(max_size=8).map(lambda tail: MAGIC + tail), max_size=6)


def test_a_flight_with_kept_text_survives() -> None:
    """Packed and unpacked it is equal, kept text included."""
    flight = a_flight(decisions=[(1, "limit", {"left": 3})], token_ns=[1, 2])
    entry = unpack(found_in(pack(flight, a_text(flight.id)))[0])
    assert record_of(entry) == flight
    assert entry.kept is not None
    assert entry.kept.sealed == a_text(flight.id).sealed


def test_a_newer_versions_field_is_stepped_over() -> None:
    """A record with a field that this version does not know can be read."""
    raw = msgspec.to_builtins(a_flight()) | {"seats": 3}
    assert record_of(unpack(msgspec.json.encode([raw, None]))).whole_ns == 7


def test_facts_of_unknown_type_are_kept_as_text() -> None:
    """A path or a NumPy number in a decision does not cost the flight."""
    flight = a_flight(decisions=[(1, "x", {"where": Path("/a")})], model="\ud800")
    assert record_of(unpack(found_in(pack(flight))[0])).decisions == [(1, "x", {"where": "/a"})]


@given(PAYLOADS, st.data())
def test_a_cut_loses_the_torn_frame_alone(payloads: list[bytes], data: st.DataObject) -> None:
    """Cut anywhere, every frame that lies wholly before the cut is found, and nothing else."""
    frames = [frame(payload) for payload in payloads]
    whole = b"".join(frames)
    cut = data.draw(st.integers(0, len(whole)))
    expected, end = [], 0
    for payload, packed in zip(payloads, frames, strict=True):
        end += len(packed)
        if end <= cut:
            expected.append(payload)
    assert found_in(whole[:cut]) == expected


@given(PAYLOADS, st.binary(max_size=30), st.integers(0, 6))
def test_rubbish_between_frames_costs_no_frame(payloads: list[bytes], rubbish: bytes, place: int) -> None:
    """Bytes that are no frame, e.g. zeros after a power cut, are stepped over."""
    frames = [frame(payload) for payload in payloads]
    frames.insert(place, rubbish)
    assert found_in(b"".join(frames)) == payloads


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=6), st.data())
def test_a_spoilt_byte_costs_one_frame_at_most(payloads: list[bytes], data: st.DataObject) -> None:
    """One byte changed: all frames but the one it lies in are found."""
    frames = [frame(payload) for payload in payloads]
    whole = bytearray(b"".join(frames))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    ends = list(itertools.accumulate(map(len, frames)))
    spoilt = bisect.bisect_right(ends, at)
    assert found_in(bytes(whole)) == payloads[:spoilt] + payloads[spoilt + 1 :]


@pytest.mark.parametrize("rubbish", [b"", MAGIC, MAGIC + b"\xff" * 8, b"\0" * 100])
def test_a_file_of_rubbish_has_no_frames(rubbish: bytes) -> None:
    """No frame and no error."""
    assert found_in(rubbish) == []
