"""The log is one JSON object per line, tells digests and never text, and never stops an answer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidegate.core.errors import StoreDown
from tidegate.core.flight import FlightRecord
from tidegate.telemetry.log import FOREIGN, MAX_LINE_BYTES, FlightLog, JsonFormatter, TextFormatter, configure
from tidegate.telemetry.settings import LogSettings

MakeFlight = Callable[..., FlightRecord]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The reading and the writing end."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


def lines(fd: int) -> list[dict[str, Any]]:
    os.set_blocking(fd, False)
    said = b""
    while True:
        try:
            said += os.read(fd, 1 << 16)
        except BlockingIOError:
            return [json.loads(line) for line in said.splitlines()]


def test_a_flight_is_one_line_of_facts(flight: MakeFlight, pipe: tuple[int, int]) -> None:
    """Id, caller, route, model, end, times in ms, tokens and digests are there."""
    FlightLog(fd=pipe[1]).finished(flight(id="f1", request_sha256="ab12", capability="support/answer"))
    (line,) = lines(pipe[0])
    assert line == {
        "time": "2023-11-14T22:13:20.100Z", "level": "info", "event": "flight", "id": "f1", "route": "/v1/chat/completions", "end": "stop",
        "status": 200, "ms": 100.0, "ttft_ms": 60.0, "tenant": "acme", "key": "key_1", "capability": "support/answer", "model": "smollm2",
        "engine": "local", "stream": True, "prompt_tokens": 12, "completion_tokens": 3, "exact": True, "request_sha256": "ab12",
    }


def test_a_flight_without_a_first_token_has_no_time_of_it(flight: MakeFlight, pipe: tuple[int, int]) -> None:
    """A zero would be counted as the fastest of all."""
    FlightLog(fd=pipe[1]).finished(flight(first_token_ns=0))
    (line,) = lines(pipe[0])
    assert "ttft_ms" not in line


@pytest.mark.parametrize(("setting", "said"), [(True, ["good", "bad"]), (False, []), ("errors", ["bad"])])
def test_which_flights_are_logged_is_a_setting(flight: MakeFlight, pipe: tuple[int, int], setting: Any, said: list[str]) -> None:
    """true logs all, false none, "errors" those that did not end well."""
    log = FlightLog(setting, pipe[1])
    log.finished(flight(id="good"))
    log.finished(flight(id="bad", end="cut"))
    assert [line["id"] for line in lines(pipe[0])] == said


def test_a_reader_that_does_not_read_never_stops_an_answer(flight: MakeFlight, pipe: tuple[int, int]) -> None:
    """With a full pipe lines are dropped and counted, and the next line that gets through says how many."""
    log = FlightLog(fd=pipe[1])
    for _ in range(2000):
        log.finished(flight())
    assert log.dropped > 0
    read = lines(pipe[0])
    assert len(read) + log.dropped == 2000
    log.finished(flight())
    (last,) = lines(pipe[0])
    assert last["dropped"] == log.dropped


def test_a_closed_stderr_never_stops_an_answer(flight: MakeFlight) -> None:
    """A broken pipe is counted, not raised."""
    reading, writing = os.pipe()
    log = FlightLog(fd=writing)
    os.close(reading)
    log.finished(flight())
    os.close(writing)
    assert log.dropped == 1


def test_a_line_fits_what_a_pipe_takes_at_once(flight: MakeFlight, pipe: tuple[int, int]) -> None:
    """Names from outside are cut, so that a line can never block half written."""
    long = "é" * 100_000
    FlightLog(fd=pipe[1]).finished(flight(model=long, capability=long, error_code=long, route=long))
    assert 0 < len(os.read(pipe[0], 1 << 16)) <= MAX_LINE_BYTES


def record(error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "tidegate.x", "msg": "said %s", "args": ("this",), "levelno": 40, "levelname": "ERROR"} | extra)
    if error is not None:
        try:
            raise error
        except type(error) as caught:
            made.exc_info = (type(caught), caught, caught.__traceback__)
    return made


def test_a_log_record_is_one_json_object() -> None:
    """Level, logger, message and what was given as extra."""
    line = json.loads(JsonFormatter().format(record(port=8080)))
    assert (line["level"], line["logger"], line["message"], line["port"]) == ("error", "tidegate.x", "said this", 8080)


def test_the_message_of_a_strange_exception_is_withheld() -> None:
    """It may quote what a caller sent; type and stack are told."""
    told = json.loads(JsonFormatter().format(record(ValueError("my secret prompt"))))
    assert told["exception"]["type"] == "ValueError"
    assert "test_log.py" in told["exception"]["stack"][-1]
    assert "secret" not in json.dumps(told)
    assert "secret" not in TextFormatter().format(record(ValueError("my secret prompt")))
    assert "secret" in JsonFormatter(exception_messages=True).format(record(ValueError("my secret prompt")))


def test_our_own_errors_and_the_systems_are_told_in_full() -> None:
    """They are written by us or by the system, and never quote a caller."""
    assert "no route" in JsonFormatter().format(record(StoreDown("no route to the database")))
    assert "refused" in JsonFormatter().format(record(ConnectionRefusedError(111, "refused")))


@pytest.fixture
def untouched_logging() -> Iterator[None]:
    """Puts the root's and the foreign loggers' state back."""
    names = ("", *FOREIGN, "httpx")
    before = [(logger, logger.handlers[:], logger.level, logger.propagate, logger.disabled) for logger in map(logging.getLogger, names)]
    yield
    for logger, handlers, level, propagate, disabled in before:
        logger.handlers[:], logger.propagate, logger.disabled = handlers, propagate, disabled
        logger.setLevel(level)


@pytest.mark.usefixtures("untouched_logging")
def test_the_servers_own_log_speaks_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn's lines go through the same handler, once, and its access log is silent."""
    logging.getLogger("uvicorn.error").addHandler(logging.StreamHandler())
    configure(LogSettings.model_validate({}))
    logging.getLogger("uvicorn.error").warning("careful")
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("tidegate").debug("too fine")
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["logger"], line["message"]) for line in said] == [("uvicorn.error", "careful")]
