"""Frames between the embedder's process and its callers."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.retrieval.embedder_wire import CALLS, MAX_FRAME_BYTES, Cancel, Count, Embed, Frames, Info, Malformed, frame

NUMBER = st.integers(0, 2**40)
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5)
MESSAGES = st.one_of(
    st.builds(Embed, NUMBER, st.sampled_from(["query", "passage"]), TEXTS),
    st.builds(Count, NUMBER, TEXTS),
    st.builds(Info, NUMBER),
    st.builds(Cancel, NUMBER),
)


@settings(deadline=None)  # other work on the machine is no error
@given(st.lists(MESSAGES, max_size=6), st.data())
def test_messages_survive_any_chunking(messages, data):
    """However the socket cuts them, the same messages come out in the same order."""
    stream = b"".join(map(frame, messages))
    frames, came, at = Frames(), [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, len(stream) - at))
        came += [CALLS.decode(message) for message in frames.feed(stream[at : at + size])]
        at += size
    assert came == messages


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_garbage_is_malformed_or_incomplete(garbage):
    """Any bytes give messages, nothing yet, or one of two errors."""
    try:
        for message in Frames().feed(garbage):
            CALLS.decode(message)
    except (Malformed, msgspec.DecodeError):
        pass


def test_a_length_beyond_the_bound_is_refused_before_its_bytes_come():
    """Nobody can make the process hold four gigabytes."""
    with pytest.raises(Malformed, match="a frame of"):
        Frames().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
