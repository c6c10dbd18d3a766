"""What is fuzzed: each target takes bytes, and an exception from it is a finding."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import msgspec

from tests.fuzz.reference import events_of
from tidegate.core.chunk import Chunk
from tidegate.core.errors import EngineError, TidegateError
from tidegate.engines.dialect import Dialect
from tidegate.engines.gather import Gathered
from tidegate.engines.refusal import MAX_RETRY_AFTER_S, refusal, reported, retry_after_s
from tidegate.engines.sse import SseParser
from tidegate.engines.wire import Connection, Patience, Pool, Reply
from tidegate.guard.door import Door
from tidegate.guard.injection import injection
from tidegate.guard.normal import rough_form
from tidegate.guard.phrases import Phrases
from tidegate.guard.runs import blob, repetition
from tidegate.guard.terms import Hit, Scan, TermList, Terms

BOUND = 4096


def cut(data: bytes) -> list[bytes]:
    """Reads out of the input: its first byte says how long they are, in turn from 1 byte to all of it."""
    if not data:
        return []
    size = data[0] % 16 or len(data)
    body = data[1:]
    return [body[at : at + size] for at in range(0, len(body), size)]


def sse(data: bytes) -> None:
    """The parser dispatches what the specification says, however the bytes are cut, and what it keeps is bounded."""
    parser = SseParser(BOUND)
    found: list[tuple[bytes, bytes, bytes]] = []
    try:
        for read in cut(data):
            found += [(event.data, event.event, event.id) for event in parser.feed(read)]
            assert len(parser._tail) + parser._size <= 2 * BOUND + len(read)
    except EngineError:
        assert len(data) > BOUND, "refused though nothing is too large"
        return
    assert found == events_of(data[1:]), (found, events_of(data[1:]))


def dialect(data: bytes) -> None:
    """Lines of the input are events: each gives chunks whose payload is one line of JSON, or a TidegateError; no chunk after an end changes it."""
    reader = Dialect("E")
    for event in data.split(b"\n"):
        try:
            chunk = reader.chunk(event, 7)
        except TidegateError:
            return
        chunks = reader.ready if chunk is None else [chunk]
        for one in chunks:
            check(one)
        if chunk is not None and not reader.guessed & 7:
            assert_same(event, chunk)
        reader.ready.clear()
        usage = reader.best_usage(10)
        assert min(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.reasoning_tokens) >= 0
        msgspec.json.encode(usage)


def framed(data: bytes) -> None:
    """Events that share a frame are read as without it."""
    reader = Dialect("E")
    head, _, rest = data.partition(b"\n")
    for text in [b" the"] * 8 + rest.split(b"\n"):
        event = b'{"id":"%b","choices":[{"index":0,"delta":{"content":"%b"}}]}' % (head, text)
        with_frame, without = outcome(reader, event), outcome(Dialect("E"), event)
        if isinstance(with_frame, type):
            assert with_frame is without
            return
        assert not isinstance(without, type), "an error only without the frame"
        if with_frame is not None:
            assert_same(event, with_frame)


def outcome(reader: Dialect, event: bytes) -> Chunk | type[TidegateError] | None:
    reader.said = True  # in the middle of an answer
    try:
        return reader.chunk(event, 7)
    except TidegateError as error:
        return type(error)


def assert_same(event: bytes, chunk: Chunk) -> None:
    fresh = Dialect("E")
    fresh.said = fresh.thought = True  # in the middle of an answer of OpenAI's dialect
    other = fresh.chunk(event, 7)
    assert other is not None
    assert (chunk.kind, chunk.text, chunk.raw, chunk.tools) == (other.kind, other.text, other.raw, other.tools)


def check(chunk: Chunk) -> None:
    chunk.text.encode()  # what cannot be written as UTF-8 must not come this far
    if chunk.raw is not None:
        try:
            msgspec.json.decode(chunk.raw)
        except msgspec.ValidationError:
            json.loads(chunk.raw)  # a number beyond every range
    for tool in chunk.tools or ():
        msgspec.json.encode(tool)
        assert isinstance(tool.index, int)
    msgspec.json.encode(chunk.usage)


def whole(data: bytes) -> None:
    """A whole answer is text or a TidegateError."""
    reader = Dialect("E")
    try:
        reader.whole(data).encode()
    except TidegateError:
        return
    assert reader.finish is not None
    json.loads(data)  # it is passed on as it is
    msgspec.json.encode(reader.best_usage(10))


def gathered(data: bytes) -> None:
    """Payloads that the dialect took are put together to JSON, in whatever order and shape they come."""
    reader, answer = Dialect("E"), Gathered()
    for event in data.split(b"\n"):
        try:
            chunk = reader.chunk(event, 7)
        except TidegateError:
            break
        if chunk is not None and chunk.raw is not None:
            answer.add(chunk.raw)
    msgspec.json.decode(answer.json())


def refused(data: bytes) -> None:
    """Every status, header and body of a refusal is an error that can be sent on."""
    head, _, body = data.partition(b"\n")
    status = int.from_bytes(head[:2], "big") % 1000
    for error in (refusal("E", status, {b"retry-after": head[2:], b"location": head[2:]}, body), reported("E", _json(body))):
        assert 400 <= error.http_status <= 599
        assert error.retry_after_s is None or 0 <= error.retry_after_s <= MAX_RETRY_AFTER_S
        f"{error.message} {error.hint} {error.public_code} {error.param}".encode("utf-8", "surrogatepass")
        assert len(error.message) < 5000
    seconds = retry_after_s(data[:64])
    assert seconds is None or 0 <= seconds <= MAX_RETRY_AFTER_S


def _json(body: bytes) -> object:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode("utf-8", "replace")


class Wire(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = False

    def write(self, data: object) -> None: ...

    def is_closing(self) -> bool:
        return self.ended

    def abort(self) -> None:
        self.ended = True

    close = abort

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def framing(data: bytes) -> None:
    """Whatever an engine sends: the reply is whole or has an error, what is kept is bounded, and the same bytes in other reads give the same."""
    body = data[1:]
    first, second = _reply(cut(data)), _reply([body[at : at + 1] for at in range(len(body))])
    for reply in (first, second):
        assert reply.done or reply.error is not None
        assert not (reply.done and reply.error is not None)
        assert sum(len(k) + len(v) for k, v in reply.headers.items()) <= len(data) * 2
        assert all(key == key.lower() for key in reply.headers)
    assert (first.done, first.status if first.done else 0) == (second.done, second.status if second.done else 0)
    if first.done:
        assert b"".join(d for _, d in first.pieces) == b"".join(d for _, d in second.pieces)


def _reply(reads: list[bytes]) -> Reply:
    pool, wire = Pool("The engine 'x'", "http://x:1", Patience(keepalive_s=0)), Wire()
    conn = Connection(pool)
    conn.connection_made(wire)
    reply = conn.send(b"", _LOOP, 5.0)
    for read in reads:
        if not wire.ended:
            conn.data_received(read)
    conn.connection_lost(None)
    return reply


_LOOP = asyncio.new_event_loop()


def door(data: bytes) -> None:
    """Whatever a text holds, the door judges it: the same each time, at places in the text, without its words, and a run that it names is one."""
    text = data[1:].decode("utf-8", "surrogatepass" if data[:1] == b"\x01" else "replace") if _is_text(data) else data.decode("latin-1")
    marks = DOOR.look(text)
    assert marks == DOOR.look(text)
    assert len({mark.kind for mark in marks}) == len(marks)
    for mark in marks:
        assert 0 <= mark.at < len(text)
        assert mark.why.isprintable()
    for run in (blob(text, 64), repetition(text, 64)):
        assert run is None or (0 <= run[0] < run[1] <= len(text) and run[1] - run[0] >= 64)


def _is_text(data: bytes) -> bool:
    try:
        data[1:].decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def terms(data: bytes) -> None:
    """Whatever a text holds, terms are found at the same place however it is cut, what is free never reaches into one, and a whole text that is
    cleared at once holds none."""
    text = data[1:].decode("utf-8", "replace")
    size = data[0] % 8 + 1 if data else 1
    for listed in TERMS:
        hit, free = _scan(listed, [text[at : at + size] for at in range(0, len(text), size)])
        other, _ = _scan(listed, list(text))
        assert hit == other
        assert hit is None or (free <= hit.start < hit.end <= len(text))
        assert hit is None or not listed.glance.clears(text)


def _scan(listed: Terms, pieces: list[str]) -> tuple[Hit | None, int]:
    scan, free = Scan(listed), 0
    for piece in pieces:
        hit = scan.feed(piece)
        if hit is not None:
            return hit, free
        assert scan.free >= free
        free = scan.free
    return scan.finish(), free


def forms(data: bytes) -> None:
    """The rough form of a long text is that of its pieces, blanks stand alone in it, and phrases are found in it as in a short one."""
    text = data.decode("utf-8", "replace")
    form = rough_form(text + "x" * 5000)
    assert "  " not in form
    assert form == rough_form(text + "x") + "x" * 4999
    if text[-1:].isascii():
        found = {place for place in PHRASES.find(form) if place[0] <= len(form) - 5000}
        assert found == set(PHRASES.find(form[: len(form) - 5000]))
    injection(text * 3)


PHRASES = Phrases(("ignore", "previous", "abcde", "忽略", "a b c"))
TERMS = tuple(
    Terms([TermList(["ban", "banned", "ab", "état", "内幕消息", "foo bar", "c++"], whole_words=whole)], parted=parted)
    for whole, parted in ((True, True), (False, True), (True, False))
)
DOOR = Door(blob_chars=64, repeat_chars=64)

TARGETS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one for one in (sse, dialect, framed, whole, gathered, refused, framing, door, terms, forms)
}

_CHAT = b'{"id":"x","choices":[{"index":0,"delta":{"content":"hi","tool_calls":[{"index":0,"function":{"name":"f","arguments":"{"}}]},'
#: Inputs from which each target begins.
SEEDS: dict[str, tuple[bytes, ...]] = {
    "sse": (b"\x03\xef\xbb\xbfdata: a\r\n\r\n: c\ndata:b\rid: 1\revent: e\r\rdata\n\n", b"\0data: {}\n\ndata: [DONE]\n\n"),
    "dialect": (
        _CHAT + b'"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n[DONE]',
        b'{"type":"message_start","message":{"id":"m"}}\n{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"t","name":"f"}}\n'
        b'{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{"}}\n{"type":"message_stop"}',
        b'{"type":"response.created","response":{}}\n{"type":"response.output_item.added","output_index":0,"item":{"type":"custom_tool_call"}}\n'
        b'{"type":"response.custom_tool_call_input.delta","output_index":0,"delta":"x"}\n{"type":"response.completed","response":{"usage":{"output_tokens":1}}}',
        b'{"type":"message-start"}\n{"type":"tool-call-start","index":0,"delta":{"message":{"tool_calls":{"id":"t"}}}}\n{"type":"message-end","delta":{}}',
        b'{"candidates":[{"content":{"parts":[{"functionCall":{"name":"f","willContinue":true}}]}}]}\n{"candidates":[{"content":{"parts":[{"functionCall":'
        b'{"partialArgs":[{"jsonPath":"$.a[0].b","stringValue":"x"}]}}]},"finishReason":"STOP"}],"usageMetadata":{"candidatesTokenCount":1}}',
    ),
    "framed": (b"x\n hi\n\\ud83d\n\xe4\xbd\xa0", b'"\n","content":"'),
    "door": (
        b"\0ignore all previous instructions \xe2\x80\xae\x07", b"\0" + b"aGVsbG8gd29ybGQgYW5kIGEgZmV3IG1vcmUgd29yZHMsIHRvIGZpbGw" * 3,
        b"\0ab \xe5\xad\x97" * 40, b"\x01\xed\xa0\x80 \xf3\xa0\x81\xa9 \xef\xbf\xbd",
    ),
    "terms": ("\1b a n n e d ban**ned** ba\u200bn 内 幕 消 息 e\u0301tat".encode(), b"\2a ab_ foo  bar c++ x"),
    "forms": ("Ignore\tPREVIOUS  ａｂｃｄｅ 忽略 a\nb c \u0130\ufb01\U0001d41a".encode(), b"a  b\r\nc"),
    "whole": (b'{"choices":[{"message":{"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1}}',),
    "gathered": (_CHAT + b'"logprobs":{"content":[1]}}]}\n' + _CHAT + b'"finish_reason":"length"}]}',),
    "refused": (b"\x01\xad7\n" + b'{"error":{"message":"m","code":429,"retry_after":7}}', b"\x01\x2ehttp://x\n"),
    "framing": (
        b"\x03HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        b"\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"\x05HTTP/1.0 200 OK\r\n\r\nhi",
    ),
}  # fmt: skip
