"""Conversations: a newer message may cut the answer to an older one that still runs (barge-in)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from tidegate.api.whereabouts import Whereabouts
from tidegate.core.errors import BadRequest
from tidegate.core.flight import Flight

CONVERSATION = b"x-tidegate-conversation"
BARGE_IN = b"x-tidegate-barge-in"
#: Characters of a conversation's name.
MOST_CHARS = 200
_YES_NO = {b"1": True, b"0": False}


class Key(NamedTuple):
    """A conversation is its caller's own: equal names of other tenants or keys are other conversations."""

    tenant: str
    key_id: str
    name: str


class Run(Protocol):
    """A running request."""

    flight: Flight

    def supersede(self, by: str) -> bool:
        """Cut it; False where it is ending already."""
        ...


class _Entry(NamedTuple):
    run: Run
    #: Grows with each run, over all workers; and the other workers in which older ones may run.
    number: int
    workers: list[int]


class Conversations:
    """What runs, by conversation. A conversation is here only while something of it runs: nothing is left behind."""

    def __init__(self, whereabouts: Whereabouts | None = None) -> None:
        """`whereabouts`: where several workers tell each other what runs in them."""
        self._whereabouts = whereabouts
        self._running: dict[Key, list[_Entry]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def enter(self, key: Key, newcomer: Run, *, barge_in: bool) -> list[str]:
        """Add a run; with `barge_in` cut all the others first. Returns the trace_ids of those that were cut."""
        running = self._running.setdefault(key, [])
        cut = [older.run.flight.id for older in running if older.run.supersede(newcomer.flight.id)] if barge_in else []
        running.append(_Entry(newcomer, *(self._whereabouts.enter(key, look=barge_in) if self._whereabouts is not None else (0, []))))
        return cut

    def elsewhere(self, key: Key, run: Run) -> tuple[int, list[int]]:
        """Of a run that entered: its number, and the other workers that are to be told to cut what is older."""
        return next((entry.number, entry.workers) for entry in self._running[key] if entry.run is run)

    def cut(self, conversation: tuple[str, str, str], number: int, by: str) -> list[str]:
        """Cut for a newcomer in another worker what entered before it. Returns the trace_ids of those that were cut."""
        return [entry.run.flight.id for entry in self._running.get(Key(*conversation), ()) if entry.number < number and entry.run.supersede(by)]

    def leave(self, key: Key, run: Run) -> None:
        """Take out a run that has ended. No-op where it is not there."""
        running = self._running.get(key)
        if running is None:
            return
        running[:] = [entry for entry in running if entry.run is not run]
        if not running:
            del self._running[key]
            if self._whereabouts is not None:
                self._whereabouts.leave(key)


def named_conversation(headers: Mapping[bytes, bytes]) -> tuple[str, bool | None] | None:
    """The conversation's name, and whether it is a barge-in (None: not said); None where no header names one. Raises BadRequest."""
    name, wanted = headers.get(CONVERSATION), headers.get(BARGE_IN)
    if name is None and wanted is None:
        return None
    if wanted is not None and wanted not in _YES_NO:
        raise BadRequest(f"The header {BARGE_IN.decode()} is neither 1 nor 0.", hint="Leave it out for 0.", param=BARGE_IN.decode())
    if name is None:
        raise BadRequest(
            f"The header {BARGE_IN.decode()} is there, but no conversation.", hint=f"Name it in the header {CONVERSATION.decode()}.",
            param=CONVERSATION.decode(),
        )  # fmt: skip
    text = name.decode("utf-8", "surrogateescape")
    if not 1 <= len(text) <= MOST_CHARS:
        raise BadRequest(
            f"The conversation's name has {len(text)} characters.", hint=f"Give it 1 to {MOST_CHARS}: an id of yours.", param=CONVERSATION.decode()
        )
    return text, None if wanted is None else _YES_NO[wanted]
