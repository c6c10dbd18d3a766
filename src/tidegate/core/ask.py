"""What a caller asks: the one object that travels with a request through every room."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import msgspec

from tidegate.core.chunk import Chunk, End, Usage
from tidegate.core.document import Box
from tidegate.core.errors import DeadlineExceeded
from tidegate.core.flight import Flight

Role = Literal["data", "admin"]


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks. `keep` is the tenant's policy for prompt and answer text; `ttl_s` how long kept text lives."""

    key_id: str
    tenant: str
    role: Role = "data"
    keep: bool = False
    ttl_s: int = 0
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    money_per_day: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether the key carries any limit of its own."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent or self.money_per_day)


class Deadline:
    """The instant after which nobody wants the answer any more. Monotonic."""

    __slots__ = ("at_ns",)

    def __init__(self, in_s: float) -> None:
        self.at_ns = time.perf_counter_ns() + int(in_s * 1e9)

    def passed(self) -> bool:
        return time.perf_counter_ns() > self.at_ns

    def left_s(self) -> float:
        """Seconds left; raises DeadlineExceeded where none are."""
        left = (self.at_ns - time.perf_counter_ns()) / 1e9
        if left <= 0:
            raise DeadlineExceeded("The request's time is used up.", hint="Raise server.deadline_s, or ask for less.")
        return left


class Passage(msgspec.Struct, frozen=True):
    """A piece of a document that can be quoted. `score` is cosine similarity, 0 to 1. `boxes`: where it stands on its pages.

    `shown`: what of the text the prompt shows; empty: all of it.
    """

    id: str
    document: str
    title: str
    text: str
    score: float
    page: int | None = None
    tags: dict[str, str] = {}
    boxes: list[Box] = []
    shown: str = ""


class Landing(msgspec.Struct, frozen=True):
    """A rung of the ladder below the full answer: its name, what its answers say of it, and the code of the error that led there."""

    rung: str
    note: str
    cause: str


#: In the place of a public model name: the first model of the first engine.
DEFAULT = "default"


class EngineCall(msgspec.Struct):
    """What an engine is asked: an OpenAI-shaped body without `model` and `stream`, which the adapter adds for its own engine.

    `raw` is the caller's own body, where it may be forwarded as it came: its model name is the engine's and nothing has to be added.
    """

    kind: Literal["chat", "completion"]
    model: str
    body: dict[str, Any]
    raw: bytes | None = None


class Said(msgspec.Struct):
    """An answer so far, as a prefix to go on from. `text` is exactly what the client saw of it (or what is to stand there in its place).

    `token_ids` are the ids of exactly that text, where the engine told all of them; None: the engine has to tokenise `text` anew, which the
    flight notes as `retokenised`. `tokens` is how many tokens it took, to be taken off the call's `max_tokens`.
    """

    text: str
    tokens: int
    token_ids: list[int] | None = None


class EngineAnswer(msgspec.Struct):
    """A whole (non-streamed) answer. `raw`: the engine's own OpenAI-shaped JSON where it may be passed on as it is, else None."""

    text: str
    end: End
    usage: Usage
    raw: bytes | None = None


#: Gives a batch of chunks to the client; None, or what to await until the client's buffer has room again.
Emit = Callable[[list[Chunk]], Awaitable[None] | None]


class Counting(Protocol):
    """Counts the tokens of a running generation: an engine's stream, or what stands for several."""

    @property
    def usage(self) -> Usage:
        """Tokens so far, good at any time."""
        ...


#: When the client is told the tokens of its stream: never, with its last event, or with every batch of events.
ShowsUsage = Literal["never", "last", "always"]


class Ask:
    """One request on its way. Rooms read what they need and add what they make; every field has one writer.

    - api: caller, deadline, flight, capability, stream, input, call (on /v1), emit, shows_usage, on_first_token
    - the door and `fit`: notes
    - retrieve, shard: passages
    - prompt: call
    - create_ticket: ticket
    - ladder: landing (below the full answer)
    - generate: text, whole (an engine's whole answer), running (while it streams), end (through the flight)
    - contract: answer
    """

    __slots__ = (
        "answer", "aside", "call", "caller", "capability", "deadline", "emit", "flight", "input", "landing", "notes", "on_first_token", "passages",
        "running", "shows_usage", "stream", "text", "ticket", "whole",
    )

    def __init__(self, flight: Flight, caller: Caller, deadline: Deadline, *, stream: bool = False, emit: Emit | None = None) -> None:
        self.flight = flight
        self.caller = caller
        self.deadline = deadline
        self.stream = stream
        self.emit = emit
        self.capability = ""
        self.input: dict[str, Any] = {}
        self.passages: list[Passage] = []
        self.call: EngineCall | None = None
        self.text: list[str] = []
        self.whole: EngineAnswer | None = None
        self.answer: dict[str, Any] | None = None
        self.ticket = ""
        #: Told when the first token of a streamed answer is there: whoever let the request in frees what its prompt held.
        self.on_first_token: Callable[[], None] | None = None
        self.landing: Landing | None = None
        #: What the caller is told beside the answer, in a header and in the answer: name -> facts, never text.
        self.notes: dict[str, Any] | None = None
        #: What models were asked beside the answer itself: a summary, the parts of a document. Its limits count it.
        self.aside: Usage | None = None
        self.running: Counting | None = None
        self.shows_usage: ShowsUsage = "never"

    def beside(self, route: str, call: EngineCall | None = None) -> Ask:
        """An Ask for a call beside this one: the same caller and deadline, and a flight of its own, for laps of several at once have no order."""
        flight = Flight(route)
        flight.tenant = self.caller.tenant
        aside = Ask(flight, self.caller, self.deadline)
        aside.call = call
        return aside

    def spend_aside(self, usage: Usage) -> None:
        """Tokens that were used beside the answer."""
        self.aside = usage if self.aside is None else self.aside.plus(usage)

    def note(self, name: str, facts: Any) -> None:
        """Tell the caller something beside the answer."""
        if self.notes is None:
            self.notes = {}
        self.notes[name] = facts
