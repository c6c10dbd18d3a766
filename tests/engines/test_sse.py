"""Server-sent events, for any chunking."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tidegate.core.errors import EngineError
from tidegate.engines.sse import Event, SseParser

RECORDED = Path(__file__).parents[3] / "shared" / "data" / "streaming" / "recorded_chunks"


def parse(*pieces: bytes, bound: int = 1 << 20) -> list[Event]:
    parser = SseParser(bound)
    return [event for piece in pieces for event in parser.feed(piece)]


def data_of(*pieces: bytes) -> list[bytes]:
    return [event.data for event in parse(*pieces)]


def test_the_usual_event() -> None:
    """An event is the data between `data: ` and the blank line."""
    assert data_of(b'data: {"a": 1}\n\ndata: [DONE]\n\n') == [b'{"a": 1}', b"[DONE]"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_any_line_end(end: bytes) -> None:
    """LF, CRLF and CR end lines alike."""
    assert data_of(b"data: one" + end * 2 + b": comment" + end * 2 + b"data: two" + end * 2) == [b"one", b"two"]


def test_crlf_split_between_reads() -> None:
    """A CRLF that is cut in two is one line end, not two."""
    assert data_of(b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n") == [b"a\nb"]


def test_byte_order_mark() -> None:
    """A BOM at the very beginning is dropped, split or not; elsewhere it is data."""
    assert data_of(b"\xef\xbb\xbfdata: a\n\n") == [b"a"]
    assert data_of(b"\xef", b"\xbb\xbfdata: a\n\n") == [b"a"]
    assert data_of(b"data: a\n\ndata: \xef\xbb\xbfb\n\n") == [b"a", b"\xef\xbb\xbfb"]


def test_several_data_lines() -> None:
    """Data lines of one event are joined by LF; only one blank after the colon is dropped; an empty data line counts."""
    assert data_of(b"data:a\ndata:  b\ndata\n\n") == [b"a\n b\n"]


def test_event_and_id() -> None:
    """A name belongs to its event; an id stays until the next; an id with NUL is ignored."""
    events = parse(b"event: error\nid: 7\ndata: a\n\ndata: b\n\nid: x\0y\ndata: c\n\n")
    assert events == [Event(b"a", b"error", b"7"), Event(b"b", b"", b"7"), Event(b"c", b"", b"7")]


def test_a_name_without_data_is_no_event() -> None:
    """A block without data dispatches nothing, and its name does not leak into the next."""
    assert parse(b"event: ping\n\ndata: a\n\n") == [Event(b"a")]


def test_comments_and_unknown_fields_are_skipped() -> None:
    """Comments, `retry` and fields nobody knows change nothing."""
    assert data_of(b": hello\n\nretry: 5\nfoo: bar\ndata: a\n: mid\n\n") == [b"a"]


def test_an_unfinished_event_is_none() -> None:
    """What the stream's end cuts off is not dispatched, but is known to be pending."""
    parser = SseParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.pending


@pytest.mark.parametrize("size", [1, 1000, 100_000])
def test_a_line_without_end_does_not_eat_memory(size: int) -> None:
    """A line that outgrows the bound is an error at once, however it comes."""
    parser = SseParser(max_event_bytes=50_000)
    with pytest.raises(EngineError, match="larger than 50000 bytes"):
        feed_for_ever(parser, b"x" * size)
    assert len(parser._tail) <= 50_000 + size


def test_many_data_lines_do_not_eat_memory() -> None:
    """The bound holds for an event of many short lines too."""
    parser = SseParser(max_event_bytes=10_000)
    with pytest.raises(EngineError):
        feed_for_ever(parser, b"data: 0123456789\n")


def feed_for_ever(parser: SseParser, data: bytes) -> None:
    for _ in range(200_000):
        parser.feed(data)


def cuts(stream: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(a % (len(stream) + 1) for a in at), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


_LINES = st.one_of(
    st.sampled_from(
        [b"data: {}", b"data:x", b"data", b": c", b"event: e", b"id: 1", b"id", b"", b"", b"\xef\xbb\xbfdata: y", b"data: \xe4\xbd\xa0"]
    ),
    st.binary(max_size=8),
)
_STREAMS = st.lists(st.tuples(_LINES, st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"])), max_size=12).map(
    lambda lines: b"".join(line + end for line, end in lines)
)


@given(stream=_STREAMS, at=st.lists(st.integers(0, 10_000), max_size=8))
@example(stream=b"data: a\r\n\r\ndata: b\r\r", at=[8, 9, 10])
@settings(max_examples=400, deadline=None)
def test_every_chunking_gives_the_same_events(stream: bytes, at: list[int]) -> None:
    """The events do not depend on where the reads were cut: anywhere, byte by byte, or not at all."""
    once = parse(stream)
    assert parse(*cuts(stream, at)) == once
    assert parse(*(stream[i : i + 1] for i in range(len(stream)))) == once


@given(stream=_STREAMS, at=st.lists(st.integers(0, 10_000), max_size=8))
@settings(max_examples=200, deadline=None)
def test_the_bound_does_not_depend_on_chunking(stream: bytes, at: list[int]) -> None:
    """What is too large for one chunking is too large for every chunking."""

    def verdict(*pieces: bytes) -> list[Event] | str:
        try:
            return parse(*pieces, bound=9)
        except EngineError:
            return "too large"

    whole, split = verdict(stream), verdict(*cuts(stream, at))
    # an unfinished line may be judged earlier or later, but never differently once it is whole
    if stream.endswith((b"\n", b"\r")):
        assert split == whole


def recorded() -> list[Path]:
    return sorted(RECORDED.glob("*.txt")) if RECORDED.is_dir() else []


@pytest.mark.skipif(not recorded(), reason="no ../shared/data beside this checkout")
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_recorded_streams_for_any_chunking(end: bytes) -> None:
    """Every payload that 14 providers sent comes out as it went in, in reads of 1, 2, 7, 1000 bytes and at once."""
    for path in recorded():
        payloads = [line for line in path.read_bytes().split(b"\n") if line.strip() and b"\r" not in line][:60]
        stream = b"".join(b"data: " + payload + end * 2 for payload in payloads)
        for size in (1, 2, 7, 1000, len(stream)):
            assert data_of(*(stream[i : i + size] for i in range(0, len(stream), size))) == payloads, (path.name, size)
