"""The scripted engine's whole answers and its refusals, and what all its answers hold."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

from tidegate.bench.act import Act, Step, one_by_one, waited
from tidegate.bench.script import MODEL, Request, prompt_tokens
from tidegate.bench.tokens import CONTROL, decode, encode

_CREATED = 1_700_000_000
ARGUMENTS = ('{"ci', 'ty":"Par', 'is é"', ',"n":1', "2}")
ERROR = {"message": "the engine died", "type": "server_error", "code": "engine_dead", "status": 503}
BUSY = {"message": "slow down", "type": "rate_limit_error", "code": "rate_limit_exceeded", "status": 429, "retry_after": 7}


def json_response(status: int, fields: Any, *headers: bytes) -> bytes:
    """A response with a JSON body."""
    return _response(status, b"application/json", json.dumps(fields, ensure_ascii=False).encode(), *headers)


def native(request: Request, limit: int | None) -> dict[str, Any]:
    """The whole answer as llama.cpp's own /completion says it, as far as it is read here: `limit` counts ids, and may end inside a character."""
    ids = encode("".join(request.words), special=False)
    ended = limit is None or limit > len(ids)
    ids = [*ids, *encode(CONTROL[1], special=True)] if ended else ids[:limit]
    return {
        "content": decode(ids[:-1] if ended else ids).decode("utf-8", "replace"), "tokens": ids, "stop": True,
        "stop_type": "eos" if ended else "limit", "tokens_predicted": len(ids), "tokens_evaluated": prompt_tokens(request),
    }  # fmt: skip


def whole(request: Request) -> Iterator[Step]:
    orders = request.orders
    words, finish = request.words, request.finish
    if request.in_steps:
        yield from [Act.NEXT] * max(1, len(words))
    else:
        yield from waited(orders.first_ms + (sum(request.gaps) if request.gaps else orders.between_ms * max(0, len(words) - 1)))
    text = "" if orders.fault in ("empty", "silent") else "".join(words)
    ids = encode(text, special=False) if request.tells_ids else []
    text = shown(text)
    fields = top(request)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": None}
    if request.kind == "completion":
        choice["text"] = text
    elif orders.fault == "tools":
        choice["message"] = {"role": "assistant", "content": None, "tool_calls": [tool_call("".join(ARGUMENTS))]}
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
        fields["usage"] = usage(request, len(words))
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
        reply = _response(200, b"application/json", body)
        yield reply[: len(reply) - len(body) // 2]
        yield Act.CLOSE
    elif orders.fault in ("stall", "stall_comments"):
        reply = _response(200, b"application/json", body)
        yield reply[: len(reply) - len(body) // 2]
        yield Act.HANG
    elif orders.fault == "error_event":
        yield json_response(500, {"error": ERROR})
    elif orders.fault == "busy_event":
        yield json_response(429, {"error": BUSY}, b"retry-after: 7")
    elif orders.fault == "huge_line":
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        yield from _endless()
    elif orders.fault == "dribble":
        yield from one_by_one(_response(200, b"application/json", body))
    elif orders.fault == "until_close":
        yield b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + body
        yield Act.CLOSE
    else:
        yield _response(200, b"application/json", body)


def shown(text: str) -> str:
    """Parts of characters as engines show them: U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def top(request: Request) -> dict[str, Any]:
    return {"id": "scripted-1", "object": _kind_of(request), "created": _CREATED, "model": MODEL}


def _kind_of(request: Request) -> str:
    if request.kind == "completion":
        return "text_completion"
    return "chat.completion.chunk" if request.stream else "chat.completion"


def usage(request: Request, tokens: int) -> dict[str, int]:
    prompt = prompt_tokens(request)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def tool_call(arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}


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


REFUSALS = {
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
