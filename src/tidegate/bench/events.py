"""The scripted engine's streams: head, events, how they are framed, and what interrupts them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from tidegate.bench.act import Act, Step, one_by_one, waited
from tidegate.bench.directives import AT_TOKEN
from tidegate.bench.script import Request
from tidegate.bench.tokens import encode
from tidegate.bench.whole import ARGUMENTS, BUSY, ERROR, shown, tool_call, top, usage

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"


def streamed(request: Request) -> Iterator[Step]:
    """Head and events, each framed as one HTTP chunk; without waits everything is one write."""
    orders = request.orders
    fault = orders.fault
    if fault == "early_head":
        yield _HEAD + b"transfer-encoding: chunked\r\n\r\n"
    if request.in_steps:
        yield Act.NEXT
    else:
        yield from waited(orders.first_ms)
    if fault == "until_close":
        yield _HEAD + b"connection: close\r\n\r\n"
    elif fault == "gzip":
        yield _HEAD + b"content-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n"
    elif fault != "early_head":
        yield _HEAD + b"transfer-encoding: chunked\r\n\r\n"
    frame = _framing(fault)
    for step in _events(request):
        if isinstance(step, bytes):
            yield from frame(step)
        else:
            yield step
            if isinstance(step, Act) and step is not Act.NEXT:
                return
    if fault == "until_close":
        yield Act.CLOSE
    elif fault == "no_end":
        yield Act.HANG
    else:
        yield b"0\r\n\r\n"


def _framing(fault: str) -> Any:
    def plain(event: bytes) -> Iterator[Step]:
        yield b"%x\r\n%b\r\n" % (len(event), event)

    def split(event: bytes) -> Iterator[Step]:
        at = next((i + 1 for i, byte in enumerate(event) if byte >= 0xC0), 0)
        if at:
            yield from plain(event[:at])
            yield 1.0  # its own write, so most likely its own read
            yield from plain(event[at:])
        else:
            yield from plain(event)

    def dribble(event: bytes) -> Iterator[Step]:
        yield from one_by_one(b"%x\r\n%b\r\n" % (len(event), event))

    def bare(event: bytes) -> Iterator[Step]:
        yield event

    def packed(event: bytes) -> Iterator[Step]:
        yield from plain(gzip.compress(event, mtime=0))

    return {"utf8_split": split, "dribble": dribble, "until_close": bare, "gzip": packed}.get(fault, plain)


def _events(request: Request) -> Iterator[Step]:
    """The events' bytes, and what interrupts them."""
    orders = request.orders
    fault = orders.fault
    words, finish = request.words, request.finish
    if fault in ("empty", "silent"):
        words = []
    line_end = {"crlf": b"\r\n", "cr": b"\r"}.get(fault, b"\n")
    if fault == "bom":
        yield b"\xef\xbb\xbf"
    for number, payload in enumerate(_payloads(request, words)):
        gap = request.gaps[number - 1] if number and request.gaps else orders.between_ms
        if number and request.in_steps:
            yield Act.NEXT
        elif number and gap:
            yield gap
        if number == orders.at:
            yield from _interruption(fault, payload)
            if fault in AT_TOKEN:
                return
        yield _event(payload, number, fault, line_end)
    if fault in AT_TOKEN:  # k lies behind the last token
        yield from _interruption(fault, "{}")
        return
    yield from _last_events(request, len(words), finish, line_end)


def _last_events(request: Request, tokens: int, finish: str, line_end: bytes) -> Iterator[Step]:
    fault = request.orders.fault
    last = b""
    if fault not in ("no_finish", "empty"):
        choice: dict[str, Any] = {"text": ""} if request.kind == "completion" else {"delta": {}}
        last += _event(_payload(request, {**choice, "finish_reason": "tool_calls" if fault == "tools" else finish}), -1, fault, line_end)
    if request.usage and fault not in ("no_usage", "empty"):
        last += _event(_json({**top(request), "choices": [], "usage": usage(request, tokens)}), -2, fault, line_end)
    if fault != "no_done":
        last += b"data: [DONE]" + line_end * 2
    if last:
        yield last


def _interruption(fault: str, payload: str) -> Iterator[Step]:
    """What comes in place of event k."""
    if fault == "cut":
        yield Act.CLOSE
    elif fault == "reset":
        yield 5.0  # what was written must have left
        yield Act.RESET
    elif fault == "bad_chunk":
        yield Act.BREAK
    elif fault == "cut_event":
        yield b"data: " + payload[: len(payload) // 2].encode()
        yield Act.CLOSE
    elif fault in ("error_event", "busy_event"):
        yield b"data: " + _json({"error": ERROR if fault == "error_event" else BUSY}).encode() + b"\n\n"
    elif fault == "stall":
        yield Act.HANG
    elif fault == "stall_comments":
        for _ in range(10_000):
            yield b": keep-alive\n\n"
            yield 10.0
        yield Act.HANG
    elif fault == "junk_json":
        yield b'data: {"choices": [{"index": 0, "delta": {"cont\n\n'
    elif fault == "bad_utf8":
        yield b'data: {"choices": [{"index": 0, "delta": {"content": "\xff\xfe\xc3"}}]}\n\n'
    elif fault == "abort":
        yield b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}\n\ndata: [DONE]\n\n'
    elif fault == "huge_line":
        yield b'data: {"choices": [{"index": 0, "delta": {"content": "'
        for _ in range(16_384):
            yield b"a" * 65_536
        yield Act.HANG


def _payloads(request: Request, words: list[str]) -> Iterator[str]:
    """The JSON of each event that carries a token."""
    fault = request.orders.fault
    if fault == "silent":
        yield _payload(request, {"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    for number, piece in enumerate(words):
        word = shown(piece)
        if request.kind == "completion":
            choice: dict[str, Any] = {"text": word}
        elif fault == "tools":
            if number == 0:
                choice = {"delta": {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **tool_call("")}]}}
            else:
                arguments = ARGUMENTS[number - 1] if number <= len(ARGUMENTS) else ""
                choice = {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}}
        elif fault == "reasoning" and number < len(words) // 2:
            choice = {"delta": {"reasoning_content": word}}
        else:
            choice = {"delta": {"role": "assistant", "content": word} if number == 0 else {"content": word}}
        if request.tells_ids:
            choice["token_ids"] = encode(piece, special=False)
        yield _payload(request, {**choice, "finish_reason": None})


def _event(payload: str, number: int, fault: str, line_end: bytes) -> bytes:
    data = payload.encode()
    if fault == "surrogates":
        data = data.replace(b'"content":"', b'"content":"\\ud83d', 1)
    if fault == "multiline":
        at = data.index(b",") + 1
        body = b"data: " + data[:at] + line_end + b"data:" + data[at:]
    else:
        body = b"data: " + data
    if fault == "comments":
        body = b": keep-alive" + line_end * 2 + body
    elif fault == "ids":
        body = b"event: message%bid: %d%b" % (line_end, number, line_end) + body
    return body + line_end * 2


def _payload(request: Request, choice: dict[str, Any]) -> str:
    choices = [{"index": 0, **choice}]
    if request.orders.fault == "two_choices":
        choices.append({"index": 1, **choice})
    return _json({**top(request), "choices": choices})


def _json(fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
