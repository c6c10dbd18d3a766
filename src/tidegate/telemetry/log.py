"""The process's log: one JSON object per line on stderr, one line per finished flight. Digests and counts, never prompt or answer text."""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import time
import traceback
from typing import Any, Literal

import msgspec

from tidegate.core.chunk import CLEAN_ENDS
from tidegate.core.errors import TidegateError
from tidegate.core.flight import FlightRecord
from tidegate.core.ports import KeptText
from tidegate.telemetry.settings import LogSettings

#: A pipe that is writable takes this many bytes without blocking (POSIX PIPE_BUF).
MAX_LINE_BYTES = 4096
#: Longest name taken over from a request (a model's name, an error's code of an engine).
MAX_NAME = 128
#: Loggers that come with handlers of their own; they are made to speak through ours.
FOREIGN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "fastapi")


class FlightLine(msgspec.Struct, omit_defaults=True):
    """What a finished flight says in the log. `ms` and `ttft_ms` are milliseconds."""

    time: str
    level: str
    event: str
    id: str
    route: str
    end: str
    status: int
    ms: float
    tenant: str = ""
    key: str = ""
    capability: str = ""
    model: str = ""
    engine: str = ""
    stream: bool = False
    ttft_ms: float = 0  # left out where there was no first token; a float would never be taken for the default
    prompt_tokens: int = 0
    completion_tokens: int = 0
    exact: bool = False
    error: str = ""
    request_sha256: str = ""
    answer_sha256: str = ""
    prompt_version: str = ""
    index_version: str = ""
    #: Lines left out before this one because stderr was not being read.
    dropped: int = 0


class FlightLog:
    """A FlightSink that writes one line per flight to the file descriptor `fd`.

    A slow reader of stderr must not stop the event loop: a line is written only when the descriptor is writable at once, and else dropped
    and counted (`dropped`, also said on the next line that is written).
    """

    def __init__(self, flights: bool | Literal["errors"] = True, fd: int = 2) -> None:
        self.dropped = 0
        self._told = 0
        self._flights = flights
        self._fd = fd
        self._encoder = msgspec.json.Encoder()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._second = -1
        self._second_text = ""

    def finished(self, record: FlightRecord, kept: KeptText | None = None) -> None:
        """Writes the flight's line, or drops it where stderr would block."""
        well = record.end in CLEAN_ENDS and record.http_status < 400
        if self._flights is False or (self._flights == "errors" and well):
            return
        events = self._poll.poll(0)
        if not events or not events[0][1] & select.POLLOUT:
            self.dropped += 1
            return
        try:
            os.write(self._fd, self._line(record, well))
        except OSError:  # a closed stderr, a full disk: the log is not worth an answer
            self.dropped += 1

    def _line(self, record: FlightRecord, well: bool) -> bytes:
        usage = record.usage
        line = FlightLine(
            self._stamp(record.began_unix_ns + record.whole_ns), "info" if well or record.http_status < 500 else "warning", "flight",
            record.id, record.route[:MAX_NAME], record.end, record.http_status, record.whole_ns / 1e6, record.tenant, record.key_id,
            record.capability[:MAX_NAME], record.model[:MAX_NAME], record.engine, record.stream,
            record.first_token_ns and record.first_token_ns / 1e6, usage.prompt_tokens, usage.completion_tokens, usage.exact,
            record.error_code[:MAX_NAME], record.request_sha256, record.answer_sha256, record.prompt_version,
            record.index_version, self.dropped - self._told,
        )
        self._told = self.dropped
        return self._encoder.encode(line) + b"\n"

    def _stamp(self, unix_ns: int) -> str:
        # The seconds' text is kept: strftime for every line costs as much as the rest of it.
        second, rest_ns = divmod(unix_ns, 1_000_000_000)
        if second != self._second:
            self._second = second
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._second_text}.{rest_ns // 1_000_000:03d}Z"


_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, what was given as `extra`, and for exceptions type and stack.

    The message of an exception that is not ours may quote what a caller sent (validation errors do), so it is left out unless
    `exception_messages`; those of TidegateError and OSError never do.
    """

    def __init__(self, exception_messages: bool = False) -> None:
        super().__init__()
        self._exception_messages = exception_messages

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update((name, value) for name, value in vars(record).items() if name not in _STANDARD)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = self.exception(record.exc_info[1])
        return json.dumps(line, ensure_ascii=False, default=str)

    def exception(self, error: BaseException) -> dict[str, Any]:
        """Type, message where it may be told, and the stack as file:line function, innermost last."""
        frames = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(error.__traceback__)]
        told = self._exception_messages or isinstance(error, TidegateError | OSError)
        return {"type": type(error).__qualname__, "stack": frames} | ({"message": str(error)} if told else {})


class TextFormatter(logging.Formatter):
    """The same facts for a person at a terminal."""

    def __init__(self, exception_messages: bool = False) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S")
        self._json = JsonFormatter(exception_messages)

    def formatException(self, ei: Any) -> str:
        told = self._json.exception(ei[1])
        return "\n".join([f"  {told['type']}: {told.get('message', '(message withheld)')}", *(f"    {frame}" for frame in told["stack"])])


def configure(settings: LogSettings) -> None:
    """Sends every logger of the process, uvicorn's too, through one handler on stderr. Give uvicorn `log_config=None`.

    uvicorn's access log is switched off: the flight's line says more.
    """
    handler = logging.StreamHandler(sys.stderr)
    kind = JsonFormatter if settings.format == "json" else TextFormatter
    handler.setFormatter(kind(settings.exception_messages))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.level.upper())
    for name in FOREIGN:
        foreign = logging.getLogger(name)
        foreign.handlers.clear()
        foreign.propagate = True
        foreign.setLevel(logging.NOTSET)
    logging.getLogger("uvicorn.access").disabled = True
    # httpx says every request at INFO; that is noise at the level at which we speak.
    logging.getLogger("httpx").setLevel(max(logging.WARNING, root.level))
