"""How an error leaves: OpenAI's shape with our code, hint and trace_id."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tidegate.core.errors import NoAnswer, Superseded, TidegateError

#: The header that names the rung on which an answer was given.
RUNG = b"x-tidegate-rung"


def error_body(error: TidegateError, trace_id: str) -> dict[str, Any]:
    """`{"error": {...}}`: `message`, `type`, `code`, `param` as OpenAI has them; `hint`, `trace_id`, `retry_after_s`, `superseded_by`,
    `ticket` and `cause` are ours."""
    body: dict[str, Any] = {
        "message": error.message, "type": error.type, "code": error.public_code, "param": error.param, "hint": error.hint, "trace_id": trace_id,
    }
    if error.retry_after_s is not None:
        body["retry_after_s"] = round(error.retry_after_s, 3)
    if isinstance(error, Superseded):
        body["superseded_by"] = error.by
    if isinstance(error, NoAnswer):
        body |= {"ticket": error.ticket, "cause": error.cause, "rung": "message"}
    return {"error": body}


def error_bytes(error: TidegateError, trace_id: str) -> bytes:
    return msgspec.json.encode(error_body(error, trace_id))


def error_headers(error: TidegateError) -> list[tuple[bytes, bytes]]:
    """The rung, where it is the last one. `Retry-After` in whole seconds, rounded up: coming back as told must never be too early."""
    headers = [(RUNG, b"message")] if isinstance(error, NoAnswer) else []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return headers
