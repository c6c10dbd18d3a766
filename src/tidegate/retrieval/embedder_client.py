"""The embedder as its callers see it: a socket to the one process that holds the model. Imports nothing heavy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from tidegate.core.errors import BadRequest, EmbedderDown
from tidegate.core.ports import Vectors as Rows
from tidegate.retrieval.embedder_texts import DIMENSIONS, FINGERPRINT, MODEL, TextKind, check_texts
from tidegate.retrieval.embedder_wire import (
    ANSWERS,
    MAX_TEXTS,
    Answer,
    Call,
    Cancel,
    Count,
    Counts,
    Embed,
    Failed,
    Figures,
    Frames,
    Info,
    Malformed,
    Vectors,
    frame,
)

#: Characters in one call, about: a character takes up to four bytes, a frame 4 MiB.
_CALL_CHARS = 500_000
_CONNECT_S = 2.0
_FIGURES_S = 2.0


class _Lost(Exception):
    """The connection ended before the answer came."""


class _Link(asyncio.Protocol):
    """One connection. Calls on it run side by side."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._frames = Frames()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self.lost = False

    async def call(self, call: Call) -> Answer:
        """Raises _Lost. Cancelling the caller's task cancels the call."""
        if self._transport is None or self.lost:
            raise _Lost
        future = self._waiting[call.id] = asyncio.get_running_loop().create_future()
        self._transport.write(frame(call))
        try:
            answer: Answer = await future
            return answer
        except asyncio.CancelledError:
            if not self.lost:
                self._transport.write(frame(Cancel(call.id)))
            raise
        finally:
            self._waiting.pop(call.id, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        try:
            answers = [ANSWERS.decode(message) for message in self._frames.feed(data)]
        except (Malformed, msgspec.DecodeError):
            self.close()  # whoever listens there is no embedder; who waits gets _Lost
            return
        for answer in answers:
            future = self._waiting.get(answer.id)
            if future is not None and not future.done():
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_Lost())


class EmbedderClient:
    """Implements `core.ports.Embedder` over the embedder's socket. One connection, made at the first call and again when it was lost."""

    model = MODEL
    dimensions = DIMENSIONS
    fingerprint = FINGERPRINT

    def __init__(self, socket_path: str | Path) -> None:
        self.socket = Path(socket_path)
        self._link: _Link | None = None
        self._closed = False
        self._connecting = asyncio.Lock()
        self._ids = itertools.count(1)

    async def embed(self, texts: Sequence[str], kind: TextKind) -> Rows:
        """Unit vectors, float32 (texts, 384). Raises BadRequest for a text that is too long or not Unicode, EmbedderDown."""
        check_texts(texts)
        rows = np.zeros((len(texts), DIMENSIONS), np.float32)
        done = 0
        for part in _parts(texts):
            answer = await self._ask(Embed(next(self._ids), kind, part))
            if not isinstance(answer, Vectors) or len(answer.rows) != len(part) * DIMENSIONS * 4:
                raise self._down("answered with something else than vectors")
            if answer.fingerprint != self.fingerprint:
                raise self._down(f"runs another model ({answer.fingerprint or 'unnamed'}, wanted {self.fingerprint}): start it again")
            came = np.frombuffer(answer.rows, "<f4").reshape(len(part), DIMENSIONS)
            if not np.isfinite(came).all():
                raise self._down("answered with something that is no number")
            rows[done : done + len(part)] = came
            done += len(part)
        return rows

    async def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Tokens that the model reads for each text, prefix and markers included. Raises as `embed` does."""
        check_texts(texts)
        counts: list[int] = []
        for part in _parts(texts):
            answer = await self._ask(Count(next(self._ids), part))
            if not isinstance(answer, Counts) or len(answer.counts) != len(part):
                raise self._down("answered with something else than counts")
            counts += answer.counts
        return counts

    async def figures(self) -> dict[str, Any]:
        """Live figures of the embedder's process. Never raises: `{"up": False, "why": ...}`."""
        try:
            async with asyncio.timeout(_FIGURES_S):
                answer = await self._ask(Info(next(self._ids)))
        except TimeoutError:
            return {"up": False, "why": f"no answer within {_FIGURES_S:g} s"}
        except EmbedderDown as error:
            return {"up": False, "why": error.message}
        return answer.figures if isinstance(answer, Figures) else {"up": False, "why": "no figures"}

    async def close(self) -> None:
        """Leave; calls that still wait get EmbedderDown."""
        self._closed = True
        if self._link is not None:
            self._link.close()

    async def _ask(self, call: Call) -> Answer:
        try:
            answer = await (await self._connect()).call(call)
        except _Lost:  # the process may have been restarted: its socket is there again, or will not be soon
            try:
                answer = await (await self._connect()).call(call)
            except _Lost:
                raise self._down("left before it answered, twice") from None
        if not isinstance(answer, Failed):
            return answer
        if answer.why == "refused":
            raise BadRequest(answer.message, hint=answer.hint or None)
        raise EmbedderDown(answer.message, hint=answer.hint or None, retry_after_s=1.0 if answer.why == "busy" else None)

    async def _connect(self) -> _Link:
        async with self._connecting:
            if self._closed:
                raise self._down("is no longer asked: this process is going down")
            if self._link is None or self._link.lost:
                try:
                    async with asyncio.timeout(_CONNECT_S):
                        _, self._link = await asyncio.get_running_loop().create_unix_connection(_Link, str(self.socket))
                except OSError as error:  # TimeoutError is one
                    raise self._down(f"cannot be reached ({error.strerror or type(error).__name__})") from error
            return self._link

    def _down(self, what: str) -> EmbedderDown:
        return EmbedderDown(
            f"The embedder at {self.socket} {what}.", hint="`tidegate up` starts it, and again when it died; embedder.socket says where.",
            retry_after_s=2.0,
        )


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Texts in calls that fit a frame."""
    part: list[str] = []
    chars = 0
    for text in texts:
        if part and (len(part) == MAX_TEXTS or chars + len(text) > _CALL_CHARS):
            yield part
            part, chars = [], 0
        part.append(text)
        chars += len(text)
    if part:
        yield part
