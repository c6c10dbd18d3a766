"""What a prompt orders the scripted engine to do: `##t=20,i=5,n=32,m=cut,k=7##` and `##json={"any": "answer"}##`."""

from __future__ import annotations

import json
import re

import msgspec

from tidegate.core.errors import BadRequest
from tidegate.core.plugins import nearest

#: Each fault and what it does. In the prompt: `m=NAME`.
FAULTS: dict[str, str] = {
    "none": "no fault",
    "utf8_split": "each multi-byte character arrives in two writes",
    "crlf": "lines end in CRLF",
    "cr": "lines end in CR alone",
    "bom": "the stream begins with a byte order mark",
    "comments": "a keep-alive comment before each event",
    "multiline": "each event's JSON lies on two data lines",
    "ids": "each event has an id and a name",
    "dribble": "one byte a write",
    "early_head": "the head at once, then the wait for the first token",
    "tools": "a tool call in pieces instead of text",
    "reasoning": "half of the words are reasoning",
    "two_choices": "every event carries a second choice",
    "cut": "the connection closes after k tokens",
    "reset": "the connection is reset after k tokens",
    "cut_bytes": "the connection closes after k bytes of the response, its head included",
    "cut_event": "the connection closes in the middle of event k",
    "end_early": "the body ends well after k tokens, without finish_reason or [DONE]",
    "error_event": "an error event after k tokens, then the end",
    "busy_event": "an error event with status 429 and retry_after 7 after k tokens, then the end",
    "surrogates": "each token of a stream begins with half a surrogate pair",
    "rate_limit": "429 with Retry-After: 7",
    "server_error": "500",
    "oom": "500 CUDA out of memory, as vLLM says it",
    "overloaded": "503 with a plain text body",
    "context": "400 context_length_exceeded, as OpenAI says it",
    "context_llama": "400 exceed_context_size_error, as llama.cpp says it",
    "image_llama": "500 for a picture sent to a model of text, as llama.cpp says it",
    "refuse_key": "401",
    "empty": "a stream of [DONE] alone; a whole answer without text",
    "silent": "a stream of role, finish_reason and [DONE], no text",
    "hang": "no answer at all",
    "stall": "silence after k tokens",
    "stall_comments": "after k tokens keep-alive comments only",
    "no_done": "the stream ends well, but without [DONE]",
    "no_end": "[DONE], after which the body never ends",
    "no_finish": "[DONE] without a finish_reason before it",
    "no_usage": "usage is never told",
    "until_close": "a body without a length: it ends with the connection",
    "junk_json": "event k is not JSON",
    "bad_utf8": "event k holds bytes that are no UTF-8",
    "bad_chunk": "the framing breaks after k tokens",
    "gzip": "the answer is compressed though nobody asked",
    "content_type": "a page of HTML with status 200",
    "redirect": "307 to another address",
    "huge_line": "a line without end",
    "huge_head": "a response head without end",
    "stale": "a good answer, but the connection dies at the next request on it",
    "close_idle": "a good answer, and the connection closes right after it",
    "abort": "finish_reason abort after k tokens",
    "die": "the connection closes after t ms without an answer",
    "refuse_next": "a good answer, then the connection closes, and the next one is closed as soon as it comes",
}

#: Those that happen at token k.
AT_TOKEN = frozenset(
    {
        "cut", "cut_event", "reset", "end_early", "error_event", "busy_event", "stall", "stall_comments", "junk_json", "bad_utf8", "bad_chunk",
        "huge_line", "abort",
    }
)  # fmt: skip

_ORDER = re.compile(r"##([a-z]+=[^#]{0,200})##")
_JSON = "##json="


class Directives(msgspec.Struct):
    """One prompt's orders.

    `first_ms`: to the first token; `between_ms`: between tokens; `tokens`: how many; `at`: the token at which the fault happens (by default
    the middle one); `word`: every token is this word; `answer`: the whole text.
    """

    first_ms: float = 0.0
    between_ms: float = 0.0
    tokens: int = 16
    fault: str = "none"
    at: int = -1
    word: str | None = None
    answer: str | None = None


def parse(prompt: str) -> Directives:
    """The orders in a prompt: the last `##...##` block, and the last `##json=VALUE##`. Raises BadRequest for an unknown order."""
    found = Directives()
    at = prompt.rfind(_JSON)
    if at >= 0:
        found.answer = _answer(prompt[at + len(_JSON) :])
        prompt = prompt[:at]
    blocks = [block for block in _ORDER.findall(prompt) if not block.startswith("json=")]
    for order in blocks[-1].split(",") if blocks else ():
        _obey(found, order)
    if found.answer is not None:
        found.tokens = max(1, len(pieces(found.answer)))
    if found.at < 0:
        found.at = found.tokens // 2
    return found


def pieces(answer: str, size: int = 4) -> list[str]:
    """A fixed answer in tokens of `size` characters."""
    return [answer[i : i + size] for i in range(0, len(answer), size)]


def _answer(rest: str) -> str:
    """The answer that the JSON value at the beginning of `rest` stands for: a string is itself, anything else its own JSON text."""
    try:
        value, end = json.JSONDecoder().raw_decode(rest)
    except ValueError as error:
        raise BadRequest(f"##json=...## is not followed by JSON: {error}.", hint='Example: ##json={"premium": 12}##') from None
    return value if isinstance(value, str) else rest[:end]


def _obey(found: Directives, order: str) -> None:
    key, _, value = order.partition("=")
    key = key.strip()
    try:
        if key == "t":
            found.first_ms = float(value)
        elif key == "i":
            found.between_ms = float(value)
        elif key == "n":
            found.tokens = max(0, int(value))
        elif key == "k":
            found.at = max(0, int(value))
        elif key == "w":
            found.word = value
        elif key == "m":
            if value not in FAULTS:
                raise BadRequest(f"The scripted engine knows no fault {value!r}.", hint=nearest(value, FAULTS))
            found.fault = value
        else:
            raise BadRequest(f"The scripted engine knows no order {key!r}.", hint="Known: t, i, n, k, w, m, json.")
    except ValueError:
        raise BadRequest(f"The order {key}={value!r} wants a number.", hint="Example: ##t=20,i=5,n=32##") from None
