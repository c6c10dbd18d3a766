"""Which room a part of the waterfall belongs to: one colour per room, everywhere on the page."""

from __future__ import annotations

#: In the order of the path; the CSS has one colour for each. `decode` is the engine too, in a lighter tone: from the first token on.
ROOMS = ("api", "admission", "retrieval", "pipeline", "engine", "decode", "other")
#: What people read beside a colour.
NAMES = {"engine": "engine, to first token", "decode": "engine, tokens"}

_BY_FIRST_WORD = {
    "api": "api", "read": "api", "parse": "api", "auth": "api", "receive": "api", "write": "api", "close": "api", "respond": "api", "replay": "api",
    "admission": "admission", "limits": "admission", "limit": "admission", "queue": "admission", "gate": "admission",
    "retrieval": "retrieval", "retrieve": "retrieval", "embed": "retrieval", "search": "retrieval", "rerank": "retrieval",
    "pipeline": "pipeline", "prompt": "pipeline", "contract": "pipeline", "cite": "pipeline", "stage": "pipeline",
    "faq": "pipeline", "ladder": "pipeline",
    "engine": "engine", "generate": "engine", "stream": "decode",
}


def room_of(part: str) -> str:
    """The room (and tone) of a part by the first word of its name: `engine.first_byte` is the engine's. What nobody claims is `other`."""
    return _BY_FIRST_WORD.get(part.partition(".")[0], "other")
