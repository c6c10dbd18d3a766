"""Which worker keeps a stream, and in which workers a conversation runs: a list in memory that all workers of a machine share.

Each worker writes in a part of its own, and reads those of the others. What stands there are digests and numbers: a stream by its id, with whose it
is; a conversation while something of it runs in that worker. A worker that died leaves its streams listed, so that whoever comes for one is told
that it is lost; the next worker with its number lists its own over them, the never used places first.

    words   the number of the newest run of any conversation | a part for each worker
    part    how often the worker was started, the places of conversations that were ever used | streams | conversations
    stream  its id, whose it is (two words each), and in which of the worker's lives
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from tidegate.core.memory import Shared

log = logging.getLogger(__name__)

#: Streams that are listed beside those that are held, a share of them for each worker: their clients are told that they are gone.
MOST_REMEMBERED = 4096
#: Conversations that may run in one worker at the same time and still be seen by the others.
MOST_CONVERSATIONS = 8192
_LIFE, _USED, _HEAD = 0, 1, 2
_STREAM, _CONVERSATION = 5, 2  # words
_NOBODY = bytes(16)


class Listed(NamedTuple):
    """A worker that keeps a stream; `alive` false: it was another one with this number, and the stream is lost."""

    worker: int
    alive: bool


class Entered(NamedTuple):
    """`number`: grows with each run of any conversation, over all workers; `workers`: the others in which older ones may run."""

    number: int
    workers: list[int]


class Whereabouts:
    """To be made before the fork; each worker then says `join`."""

    def __init__(self, workers: int, streams: int) -> None:
        """`streams`: how many one worker holds at most. Raises SettingsError where there is no such memory."""
        self.workers = workers
        self.worker = 0
        self._places = streams + -(-MOST_REMEMBERED // workers)
        self._part = _HEAD + self._places * _STREAM + MOST_CONVERSATIONS * _CONVERSATION
        self._memory = Shared(1 + workers * self._part, workers)
        self._streams: dict[str, int] = {}  # by id: its place, in words
        self._free: deque[int] = deque()
        self._running: dict[bytes, int] = {}  # by digest: its place
        self._unused: list[int] = []

    def join(self, worker: int) -> None:
        """This process is the worker with this number, from now on."""
        self.worker = worker
        self._streams, self._running = {}, {}
        self.clear(worker)
        words, first = self._memory.words, self._first(worker)
        words[first + _LIFE] += 1
        places = range(first + _HEAD, first + _HEAD + self._places * _STREAM, _STREAM)
        self._free = deque(sorted(places, key=lambda at: words[at] != 0 or words[at + 1] != 0))
        conversations = self._conversations(worker)
        self._unused = list(range(conversations + (MOST_CONVERSATIONS - 1) * _CONVERSATION, conversations - 1, -_CONVERSATION))

    def clear(self, worker: int) -> None:
        """The worker with this number is dead, or begins: nothing of a conversation runs in it."""
        words, at = self._memory.words, self._conversations(worker)
        for word in range(at, at + words[self._first(worker) + _USED] * _CONVERSATION):
            words[word] = 0
        words[self._first(worker) + _USED] = 0

    # -- streams

    def keep(self, stream_id: str, caller: tuple[str, str]) -> None:
        """This worker keeps a stream from now on."""
        at = self._streams[stream_id] = self._free.popleft()
        memory = self._memory
        with suppress(OSError), memory:
            memory.bytes[8 * at : 8 * at + 16] = _NOBODY
            memory.bytes[8 * at + 16 : 8 * at + 32] = _digest(*caller)
            memory.words[at + 4] = memory.words[self._first(self.worker) + _LIFE]
            memory.bytes[8 * at : 8 * at + 16] = bytes.fromhex(stream_id)

    def drop(self, stream_id: str, *, remember: bool) -> None:
        """It does not any more. `remember`: it stays listed until its place is needed."""
        at = self._streams.pop(stream_id, None)
        if at is None:
            return
        if not remember:
            self._memory.bytes[8 * at : 8 * at + 16] = _NOBODY
        self._free.append(at)

    def find(self, stream_id: str, caller: tuple[str, str]) -> Listed | None:
        """Who keeps this stream of this caller, or kept it last; None: nobody that is known."""
        try:
            wanted = bytes.fromhex(stream_id)
        except ValueError:
            return None
        if len(wanted) != len(_NOBODY):
            return None
        memory = self._memory
        for worker in range(self.workers):
            first = self._first(worker)
            at = self._look(wanted, first + _HEAD, self._places * _STREAM, _STREAM)
            if at is not None:  # an id is written last, and taken away first
                found = memory.bytes[8 * at + 16 : 8 * at + 32], memory.words[at + 4] == memory.words[first + _LIFE]
                return Listed(worker, found[1]) if found[0] == _digest(*caller) else None
        return None

    # -- conversations

    def enter(self, conversation: tuple[str, str, str], *, look: bool) -> Entered:
        """Something of it runs in this worker from now on. `look`: say in which others too. Whoever enters later sees who entered before."""
        digest, memory = _digest(*conversation), self._memory
        words, others = memory.words, []
        try:
            with memory:
                words[0] += 1
                if digest not in self._running and self._unused:
                    at = self._running[digest] = self._unused.pop()
                    memory.bytes[8 * at : 8 * at + 16] = digest
                    used = (at - self._conversations(self.worker)) // _CONVERSATION + 1
                    words[self._first(self.worker) + _USED] = max(used, words[self._first(self.worker) + _USED])
                for worker in range(self.workers) if look else ():
                    used = words[self._first(worker) + _USED]
                    if worker != self.worker and self._look(digest, self._conversations(worker), used * _CONVERSATION, _CONVERSATION) is not None:
                        others.append(worker)
                return Entered(words[0], others)
        except OSError as error:
            log.error("a conversation is seen by one worker only: the memory that workers share is not to be had: %s", error)
            return Entered(words[0], [])

    def leave(self, conversation: tuple[str, str, str]) -> None:
        """Nothing of it runs in this worker any more."""
        at = self._running.pop(_digest(*conversation), None)
        if at is not None:
            self._memory.bytes[8 * at : 8 * at + 16] = _NOBODY
            self._unused.append(at)

    # --

    def _first(self, worker: int) -> int:
        return 1 + worker * self._part

    def _conversations(self, worker: int) -> int:
        return self._first(worker) + _HEAD + self._places * _STREAM

    def _look(self, digest: bytes, first: int, words: int, size: int) -> int | None:
        """The place that begins with these 16 bytes, of places of `size` words each."""
        start, end = 8 * first, 8 * (first + words)
        while (at := self._memory.bytes.find(digest, start, end)) >= 0:
            if (at // 8 - first) % size == 0 and at % 8 == 0:
                return at // 8
            start = at + 1
        return None


def _digest(*names: str) -> bytes:
    """16 bytes that stand for these names, and for no others."""
    told = b"".join(b"%d:%b" % (len(name.encode("utf-8", "surrogatepass")), name.encode("utf-8", "surrogatepass")) for name in names)
    return hashlib.blake2b(told, digest_size=16).digest()
