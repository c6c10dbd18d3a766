"""What codes and ends mean, in words; and figures as people read them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from markupsafe import Markup, escape

from tidegate.core import errors
from tidegate.core.chunk import CLEAN_ENDS

#: End -> (the word that is shown, what it means). One for each of chunk.End.
ENDS = {
    "stop": ("complete", "The model finished its answer."),
    "length": ("length", "The answer reached its bound of tokens and was ended there."),
    "tool_calls": ("tool call", "The model asked for a tool."),
    "content_filter": ("filtered", "The engine's content filter ended the answer."),
    "client_gone": ("client left", "The client closed its connection before the answer was complete; the engine was stopped."),
    "cut": ("cut", "The engine's stream ended before its end. What had arrived was passed on, with an error after it."),
    "stalled": ("stalled", "The engine went silent for longer than the time-out."),
    "error": ("error", "The request failed."),
    "empty": ("empty", "The engine's stream ended well but said nothing."),
    "refused": ("refused", "The request was refused before it reached an engine."),
}


#: Part of the waterfall -> whose time it was, as docs/flights.md says it. A stage of somebody's own is not known here.
PARTS = {
    "auth": "the key was looked up",
    "read": "the body came in: a slow client shows here",
    "parse": "the body was decoded and checked",
    "limits": "the key's limits",
    "queue": "a slot of an engine was waited for",
    "retrieve.embed": "the question became a vector",
    "retrieve.store": "passages were found, by vectors and by words",
    "retrieve.rerank": "the reranker looked at them a second time",
    "retrieve": "the rest of the search; all of it where it failed",
    "prompt": "the prompt version was rendered",
    "engine.connect": "an idle connection was taken, or a new one made",
    "engine.send": "the call was written",
    "engine.first_byte": "until the head of the engine's answer came; some engines send it only with the first token",
    "engine.first_token": "until the first token: the engine's queue and its prefill",
    "stream": "from the first token to the last; a slow reader shows here too",
    "engine.answer": "an answer that was not streamed",
    "contract": "the output contract was checked",
    "cite": "the citations were found",
    "faq": "the list of frequent questions was looked through",
    "ladder": "a rung failed, and the next one was chosen",
    "embed": "vectors for /v1/embeddings",
    "replay": "a stream that was kept was read on",
    "respond": "the answer was written",
    "close": "what is left",
}


def tone(end: str) -> str:
    """good, warn or bad: the colour of an end. The word beside it says the same."""
    if end in CLEAN_ENDS:
        return "good" if end != "content_filter" else "warn"
    return "warn" if end in ("client_gone", "refused") else "bad"


def _classes(of: type[errors.TidegateError]) -> Iterator[type[errors.TidegateError]]:
    yield of
    for below in of.__subclasses__():
        yield from _classes(below)


_MEANINGS = {kind.code: (kind.__doc__ or "").strip().splitlines()[0] for kind in _classes(errors.TidegateError)}


def meaning(code: str) -> str:
    """The sentence of an error code; codes that an engine chose itself are not known here."""
    return _MEANINGS.get(code, "The engine's own code, passed on as it came, or the business code of a capability's last rung.")


def ms(nanoseconds: float) -> str:
    """Nanoseconds as milliseconds with three or more digits that count: 0.042, 7.31, 41.5, 1,204."""
    value = nanoseconds / 1e6
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"


def span(nanoseconds: float | None) -> str:
    """A duration with its unit: milliseconds below ten seconds, then seconds; an en dash where there is none."""
    if nanoseconds is None:
        return "–"
    return f"{ms(nanoseconds)} ms" if nanoseconds < 10e9 else f"{nanoseconds / 1e9:,.1f} s"


def tick(value_ms: float, whole_ns: int) -> str:
    """A tick's label in the unit of its axis."""
    return f"{value_ms / 1000:g} s" if whole_ns >= 10e9 else f"{value_ms:g} ms"


def percent(share: float) -> str:
    """A share of 0 to 1; what is there but too small for its digit is said to be."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{share * 100:.1f} %"


def marked(text: str) -> Markup:
    """Text of ours with `code` in backticks, as messages and hints have it, as HTML."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an odd backtick is a backtick
        return escape(text)
    return Markup("").join(Markup("<code>{}</code>").format(piece) if n % 2 else escape(piece) for n, piece in enumerate(pieces))


def local(unix_ns: int) -> datetime.datetime:
    """The instant in the time zone of the machine that serves the page."""
    return datetime.datetime.fromtimestamp(unix_ns / 1e9, datetime.UTC).astimezone()
