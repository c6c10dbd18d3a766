"""The scripted engine's answers, as steps: bytes to write, and what else happens on the connection."""

from __future__ import annotations

import enum
import gzip
import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from tidegate.bench.directives import Directives, parse, pieces
from tidegate.bench.tokens import CONTROL, OTHERS, WORDS, after_mark, decode, encode, render
from tidegate.core.errors import BadRequest

MODEL = "scripted"
_CREATED = 1_700_000_000
_ARGUMENTS = ('{"ci', 'ty":"Par', 'is é"', ',"n":1', "2}")
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"


class Act(enum.Enum):
    """What a step does where it is not a write or a wait."""

    NEXT = "wait for the answer's next token from the steps that all answers share"
    CLOSE = "close the connection after what was written"
    RESET = "reset the connection"
    BREAK = "write what is no HTTP chunk"
    HANG = "do nothing any more"
    STALE = "close it when the next request comes"
    REFUSE = "close it, and the next one as soon as it comes"


#: Bytes: write them. A number: wait until that many ms after the last wait ended. An Act: see there.
Step = bytes | float | Act
Kind = Literal["chat", "completion"]
#: Tokens of an answer that is not to end by itself.
_MOST_TOKENS = 100_000


class Request(msgspec.Struct):
    """What the engine was asked, as far as the script cares.

    `words`: the tokens that it will say, and `finish` why it ends there. `prompt_ids`: where the prompt came as ids. `tells_ids`: each event
    carries the ids of its tokens, as vLLM's do.
    """

    kind: Kind
    stream: bool
    usage: bool
    prompt: str
    orders: Directives
    words: list[str]
    finish: str
    prompt_ids: list[int] | None = None
    tells_ids: bool = False
    #: Milliseconds before each token but the first, where they are not all `orders.between_ms`.
    gaps: list[float] | None = None
    #: Its tokens come when the engine's steps give them (bench/steps.py), not after times of its own.
    in_steps: bool = False


def read(kind: Kind, body: dict[str, Any]) -> Request:
    """The request in a body; `max_tokens` (or `max_completion_tokens`) bounds the answer as with a real engine.

    A prompt of token ids, or a last message that is to be continued (`continue_final_message`), is the middle of an answer: what of the answer
    stands in it already is not said again, nor does a fault happen again whose token lies there. Raises BadRequest for orders and ids that are
    not understood.
    """
    options = body.get("stream_options")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    # Load tools ask for answers of an exact length: without an end of its own, an answer has as many tokens as it may have.
    endless = min(limit, _MOST_TOKENS) if body.get("ignore_eos") is True and isinstance(limit, int) else 0
    ids = body.get("prompt")
    if isinstance(ids, list) and ids and all(type(number) is int for number in ids):
        prompt, words, orders = _go_on(ids, endless)
    elif body.get("continue_final_message") is True and body.get("messages"):
        *before, last = body["messages"]
        begun = [*encode(render(before), special=True), *encode(str(last.get("content")), special=False)]
        ids, (prompt, words, orders) = None, _go_on(begun, endless)
    else:
        ids, prompt = None, prompt_of(body)
        orders = parse(prompt)
        words = _script(orders, endless)
    banned = _banned(body.get("logit_bias"))
    if banned:
        words = [_allowed(word, banned) for word in words]
    finish = "length" if 0 < endless <= len(words) else "stop"
    if isinstance(limit, int) and 0 < limit < len(words):
        words, finish = words[:limit], "length"
        if ids is not None and orders.at >= limit and orders.fault in _AT_TOKEN:
            orders.fault = "none"
    return Request(
        kind, body.get("stream") is True, isinstance(options, dict) and options.get("include_usage") is True, prompt, orders, words, finish,
        ids, body.get("return_token_ids") is True,
    )  # fmt: skip


def prompt_of(body: dict[str, Any]) -> str:
    """All text of the messages or the prompt, in order, one a line. Raises BadRequest for ids that are not of the vocabulary."""
    texts: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            for item in value:
                collect(item)
        elif isinstance(value, dict):
            collect(value.get("content"))
            collect(value.get("text"))

    collect(body.get("messages"))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and all(type(number) is int for number in prompt):
        texts.append(_decoded(prompt).decode("utf-8", "replace"))
    else:
        collect(prompt)
    return "\n".join(texts)


def answer(request: Request) -> Iterator[Step]:
    """The steps of the whole response."""
    orders = request.orders
    refused = _REFUSALS.get(orders.fault)
    if refused is not None:
        yield from _waited(orders.first_ms)
        yield refused
    elif orders.fault == "hang":
        yield Act.HANG
    elif orders.fault == "die":
        yield from _waited(orders.first_ms)
        yield Act.CLOSE
    elif orders.fault == "cut_bytes":
        yield from _first_bytes(_stream(request) if request.stream else _whole(request), orders.at)
    elif orders.fault == "huge_head":
        yield b"HTTP/1.1 200 OK\r\n"
        for number in range(4096):
            yield b"x-filler-%d: %b\r\n" % (number, b"f" * 1000)
        yield Act.HANG
    elif request.stream:
        yield from _stream(request)
    else:
        yield from _whole(request)
    if orders.fault == "stale":
        yield Act.STALE
    elif orders.fault == "close_idle":
        yield Act.CLOSE
    elif orders.fault == "refuse_next":
        yield Act.REFUSE


def native(request: Request, limit: int | None) -> dict[str, Any]:
    """The whole answer as llama.cpp's own /completion says it, as far as it is read here: `limit` counts ids, and may end inside a character."""
    ids = encode("".join(request.words), special=False)
    ended = limit is None or limit > len(ids)
    ids = [*ids, *encode(CONTROL[1], special=True)] if ended else ids[:limit]
    return {
        "content": decode(ids[:-1] if ended else ids).decode("utf-8", "replace"), "tokens": ids, "stop": True,
        "stop_type": "eos" if ended else "limit", "tokens_predicted": len(ids), "tokens_evaluated": prompt_tokens(request),
    }  # fmt: skip


def json_response(status: int, fields: Any, *headers: bytes) -> bytes:
    """A response with a JSON body."""
    return _response(status, b"application/json", json.dumps(fields, ensure_ascii=False).encode(), *headers)


# -- whole


def _whole(request: Request) -> Iterator[Step]:
    orders = request.orders
    words, finish = request.words, request.finish
    if request.in_steps:
        yield from [Act.NEXT] * max(1, len(words))
    else:
        yield from _waited(orders.first_ms + (sum(request.gaps) if request.gaps else orders.between_ms * max(0, len(words) - 1)))
    text = "" if orders.fault in ("empty", "silent") else "".join(words)
    ids = encode(text, special=False) if request.tells_ids else []
    text = _shown(text)
    fields: dict[str, Any] = {"id": "scripted-1", "object": _object(request), "created": _CREATED, "model": MODEL}
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if request.kind == "completion":
        choice["text"] = text
    elif orders.fault == "tools":
        choice["message"] = {"role": "assistant", "content": None, "tool_calls": [_tool_call("".join(_ARGUMENTS))]}
        choice["finish_reason"] = "tool_calls"
    elif orders.fault == "reasoning":
        half = len(words) // 2
        choice["message"] = {"role": "assistant", "content": "".join(words[half:]), "reasoning_content": "".join(words[:half])}
    else:
        choice["message"] = {"role": "assistant", "content": text}
    if request.tells_ids:
        choice["token_ids"] = ids
    fields["choices"] = [choice]
    if orders.fault != "no_usage":
        fields["usage"] = _usage(request, len(words))
    body = json.dumps(fields, ensure_ascii=False).encode()
    if orders.fault == "junk_json":
        body = body[: len(body) // 2]
    elif orders.fault == "abort":
        body = body.replace(b'"finish_reason": "stop"', b'"finish_reason": "abort"')
    elif orders.fault == "bad_utf8":
        body = body.replace(b'"content": "', b'"content": "\xff\xfe', 1)
    if orders.fault == "gzip":
        yield _response(200, b"application/json", gzip.compress(body, mtime=0), b"content-encoding: gzip")
    elif orders.fault in ("cut", "cut_event", "end_early", "reset"):
        whole = _response(200, b"application/json", body)
        yield whole[: len(whole) - len(body) // 2]
        yield Act.CLOSE
    elif orders.fault in ("stall", "stall_comments"):
        whole = _response(200, b"application/json", body)
        yield whole[: len(whole) - len(body) // 2]
        yield Act.HANG
    elif orders.fault == "error_event":
        yield json_response(500, {"error": _ERROR})
    elif orders.fault == "busy_event":
        yield json_response(429, {"error": _BUSY}, b"retry-after: 7")
    elif orders.fault == "huge_line":
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        yield from _endless()
    elif orders.fault == "dribble":
        yield from _bytes(_response(200, b"application/json", body))
    elif orders.fault == "until_close":
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + body
        yield Act.CLOSE
    else:
        yield _response(200, b"application/json", body)


# -- stream


def _stream(request: Request) -> Iterator[Step]:
    """Head and events, each framed as one HTTP chunk; without waits everything is one write."""
    orders = request.orders
    fault = orders.fault
    if fault == "early_head":
        yield _HEAD + b"transfer-encoding: chunked\r\n\r\n"
    if request.in_steps:
        yield Act.NEXT
    else:
        yield from _waited(orders.first_ms)
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
        yield from _bytes(b"%x\r\n%b\r\n" % (len(event), event))

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
            if fault in _INTERRUPTED:
                return
        yield _event(payload, number, fault, line_end)
    if fault in _INTERRUPTED:  # k lies behind the last token
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
        last += _event(_json({**_top(request), "choices": [], "usage": _usage(request, tokens)}), -2, fault, line_end)
    if fault != "no_done":
        last += b"data: [DONE]" + line_end * 2
    if last:
        yield last


_INTERRUPTED = frozenset(
    {
        "cut", "cut_event", "reset", "end_early", "error_event", "busy_event", "stall", "stall_comments", "junk_json", "bad_utf8", "bad_chunk",
        "huge_line", "abort",
    }
)  # fmt: skip
#: Faults that happen at token k.
_AT_TOKEN = _INTERRUPTED
_ERROR = {"message": "the engine died", "type": "server_error", "code": "engine_dead", "status": 503}
_BUSY = {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded", "status": 429, "retry_after": 7}


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
        yield b"data: " + _json({"error": _ERROR if fault == "error_event" else _BUSY}).encode() + b"\n\n"
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
        word = _shown(piece)
        if request.kind == "completion":
            choice: dict[str, Any] = {"text": word}
        elif fault == "tools":
            if number == 0:
                choice = {"delta": {"role": "assistant", "content": None, "tool_calls": [{"index": 0, **_tool_call("")}]}}
            else:
                arguments = _ARGUMENTS[number - 1] if number <= len(_ARGUMENTS) else ""
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


# -- parts


def _script(orders: Directives, least: int = 0) -> list[str]:
    """All tokens of the answer, at least so many where the prompt does not order the words."""
    if orders.answer is not None:
        return pieces(orders.answer)
    count = max(orders.tokens, least)
    if orders.word is not None:
        return [orders.word] * count
    return [WORDS[number % len(WORDS)] for number in range(count)]


def _go_on(ids: list[int], endless: int) -> tuple[str, list[str], Directives]:
    """The text of a prompt of ids, the tokens that are left to say, and the orders with their fault's place counted from here.

    `endless`: tokens that the answer still has where it is not to end by itself.
    """
    at = after_mark(ids)
    if at is not None:
        said = _decoded(ids[at:])
        prompt = _decoded(ids[:at]).decode("utf-8", "replace")
        orders = parse(prompt)
        words, done, _ = _rest(_script(orders, endless and endless + len(ids)), said)
    else:
        whole = _decoded(ids)
        prompt = whole.decode("utf-8", "replace")
        orders = parse(prompt)
        words, done = _rest_of_completion(_script(orders, endless and endless + len(ids)), whole)
    orders.at -= done
    if orders.fault == "cut_bytes" or (orders.fault in _AT_TOKEN and orders.at <= 0):
        orders.fault = "none"
    return prompt, words, orders


def _rest_of_completion(script: list[str], prompt: bytes) -> tuple[list[str], int]:
    """Where nothing marks the answer's beginning: what stands behind the orders is its beginning, else the longest end of the prompt that is."""
    behind = prompt[prompt.rfind(b"##") + 2 :] if b"##" in prompt else prompt
    longest = sum(max(len(word.encode()), *(len(other) for other in OTHERS)) for word in script)
    for at in range(max(0, len(behind) - longest), len(behind) + 1):
        words, done, exact = _rest(script, behind[at:])
        if exact:
            return words, done
    return script, 0


def _rest(script: list[str], said: bytes) -> tuple[list[str], int, bool]:
    """The tokens that come after `said`, how many were begun, and whether all of `said` is the script's.

    A token that was said in part is the rest of its bytes (`surrogateescape`). A token may have been said as one of OTHERS. Where something stands
    that is not the script's, the script goes on with its next token.
    """
    for number, word in enumerate(script):
        if not said:
            return script[number:], number, True
        ways = [way.encode() for way in (word, *OTHERS)]
        whole = next((way for way in ways if said.startswith(way)), None)
        if whole is not None:
            said = said[len(whole) :]
            continue
        begun = next((way for way in ways if way.startswith(said)), None)
        if begun is None:
            return script[number:], number, False
        return [begun[len(said) :].decode("utf-8", "surrogateescape"), *script[number + 1 :]], number + 1, True
    return [], len(script), not said


def _shown(text: str) -> str:
    """Parts of characters as engines show them: U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _decoded(ids: list[int]) -> bytes:
    try:
        return decode(ids)
    except ValueError as error:
        raise BadRequest(str(error), hint="POST /tokenize makes ids of a text.", param="prompt") from None


def _banned(bias: Any) -> frozenset[int]:
    """The ids that may not be said: those with a bias of -100 or less, or false, as llama.cpp has it."""
    pairs = bias.items() if isinstance(bias, dict) else bias if isinstance(bias, list) else ()
    banned = set()
    for number, value in pairs:
        if value is False or (isinstance(value, (int, float)) and value is not True and value <= -100):
            banned.add(int(number))
    return frozenset(banned)


def _allowed(word: str, banned: frozenset[int]) -> str:
    """The word, or where its first token is banned the first of OTHERS that is not."""
    return next((way for way in (word, *OTHERS) if encode(way, special=False)[:1][0] not in banned), word) if word else word


def _top(request: Request) -> dict[str, Any]:
    return {"id": "scripted-1", "object": _object(request), "created": _CREATED, "model": MODEL}


def _object(request: Request) -> str:
    if request.kind == "completion":
        return "text_completion"
    return "chat.completion.chunk" if request.stream else "chat.completion"


def _payload(request: Request, choice: dict[str, Any]) -> str:
    choices = [{"index": 0, **choice}]
    if request.orders.fault == "two_choices":
        choices.append({"index": 1, **choice})
    return _json({**_top(request), "choices": choices})


def _json(fields: Any) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def _usage(request: Request, tokens: int) -> dict[str, int]:
    prompt = prompt_tokens(request)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def prompt_tokens(request: Request) -> int:
    """Words, or ids where the prompt came as ids."""
    return len(request.prompt.split()) if request.prompt_ids is None else len(request.prompt_ids)


def _tool_call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


def _waited(ms: float) -> Iterator[Step]:
    if ms > 0:
        yield ms


def _first_bytes(steps: Iterator[Step], left: int) -> Iterator[Step]:
    """The first bytes of a response, then the connection closes."""
    for step in steps:
        if isinstance(step, bytes):
            if len(step) > left:
                yield step[:left]
                yield Act.CLOSE
                return
            left -= len(step)
        yield step


def _bytes(data: bytes) -> Iterator[Step]:
    for at in range(len(data)):
        yield data[at : at + 1]
        yield 0.0


def _endless() -> Iterator[Step]:
    for _ in range(16_384):
        yield b"10000\r\n" + b"a" * 65_536 + b"\r\n"
    yield Act.HANG


_REASONS = {
    200: b"OK", 307: b"Temporary Redirect", 400: b"Bad Request", 401: b"Unauthorized", 404: b"Not Found", 429: b"Too Many Requests",
    500: b"Internal Server Error", 503: b"Service Unavailable",
}  # fmt: skip


def _response(status: int, media_type: bytes, body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\n%bcontent-length: %d\r\n\r\n%b" % (
        status, _REASONS[status], media_type, lines, len(body), body,
    )  # fmt: skip


def _error(status: int, message: str, *headers: bytes, **more: Any) -> bytes:
    return json_response(status, {"error": {"message": message, **more}}, *headers)


_REFUSALS = {
    "rate_limit": _error(429, "slow down", b"retry-after: 7", type="rate_limit", code="rate_limit_exceeded"),
    "server_error": _error(500, "boom", type="server_error"),
    "oom": _error(500, "CUDA out of memory. Tried to allocate 2.00 GiB.", type="InternalServerError", param=None, code=500),
    "overloaded": _response(503, b"text/plain", b"overloaded, come back later"),
    "refuse_key": _error(401, "no such key", type="invalid_request_error", code="invalid_api_key"),
    "context": _error(
        400, "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens.",
        type="invalid_request_error", param="messages", code="context_length_exceeded",
    ),
    "context_llama": _error(
        400, "the request exceeds the available context size, try increasing it",
        type="exceed_context_size_error", code=400, n_prompt_tokens=9000, n_ctx=8192,
    ),
    "image_llama": _error(
        500, "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj", type="server_error", code=500,
    ),
    "content_type": _response(200, b"text/html", b"<html><body>Welcome to the proxy</body></html>"),
    "redirect": _response(307, b"text/plain", b"", b"location: http://elsewhere.invalid/v1/chat/completions"),
}  # fmt: skip
