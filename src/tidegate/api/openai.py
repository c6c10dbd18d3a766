"""The OpenAI-compatible routes: /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models."""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from tidegate.admission.gate import FREE, Place
from tidegate.admission.limits import Limits, Ticket
from tidegate.api.events import EventMaker, usage_fields
from tidegate.api.exchange import MOST_NAME_CHARS, Exchange, asking
from tidegate.api.fields import CHAT, COMPLETION, EMBEDDING, check_fields, check_lists, check_messages, check_prompt, decode_object, stream_options
from tidegate.api.leave import resume, resumes, stay_as_asked
from tidegate.api.notes import noted, told_in_answer
from tidegate.api.waiting import Admission, admitted, enter, leave, turn
from tidegate.core.ask import DEFAULT, Ask, EngineAnswer, EngineCall
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import BadRequest, MethodNotAllowed, NotFound, StoreDown
from tidegate.core.plugins import nearest
from tidegate.core.ports import Embedder, Stage
from tidegate.pipeline.entrance import Entrance, without_media
from tidegate.pipeline.runner import Step, run
from tidegate.pipeline.stages.generate import estimate_prompt_tokens

_DEFAULT_ANSWER_TOKENS = 256
_MOST_TEXTS = 2048
DONE = b"data: [DONE]\n\n"
#: The route of all models, and of one with its name behind.
MODELS = "/v1/models"
Kind = Literal["chat", "completion"]


class Models(Protocol):
    """The public model names; the first is what DEFAULT means."""

    def models(self, tenant: str) -> list[str]: ...


class GenerationRoute:
    """/v1/chat/completions and /v1/completions: check, admit, generate, relay."""

    def __init__(self, kind: Kind, limits: Limits, generate: Stage, entrance: Entrance | None = None, fit: Stage | None = None) -> None:
        """`entrance`: the door, where there is one; `fit`: what makes a prompt fit, where that is wanted."""
        self._kind: Kind = kind
        self._entrance = entrance if entrance is not None and not entrance.open else None
        self._fields = CHAT if kind == "chat" else COMPLETION
        self._limits = limits
        self._steps = [Step(stage, None) for stage in (fit, generate) if stage is not None]

    async def __call__(self, exchange: Exchange) -> None:
        exchange.need_post()
        caller = await asking(exchange)
        body = await exchange.body()
        if (at := resumes(exchange)) is not None:
            await resume(exchange, caller, at, body)
            return
        ask = exchange.new_ask(caller)
        try:
            self._parse(ask, body, streams=exchange.on_socket)
        finally:
            ask.flight.lap("parse")  # also of a body that is refused
        call = ask.call
        assert call is not None
        prompt_tokens, wanted = estimate_prompt_tokens(call), _wanted_tokens(call.body)
        ticket = self._limits.admit(caller, prompt_tokens, wanted or _DEFAULT_ANSWER_TOKENS, call.model)
        if ticket.waits:
            ticket = await ticket.leased()
        ask.flight.lap("limits")
        place = FREE
        try:
            place = enter(exchange.house.gate, ask, call.model, prompt_tokens, wanted)
            exchange.watch()
            if (cutting := exchange.converse()) is not None:
                await cutting
            if ask.stream:
                await self._stream(exchange, ask, admitted(ticket, place), place)
            else:
                await self._whole(exchange, ask, admitted(ticket, place), place)
        finally:
            settle(ticket, exchange)
            leave(place, ask.flight)

    def _parse(self, ask: Ask, body: bytes, *, streams: bool) -> None:
        """`streams`: the answer is a stream without being asked for as one."""
        fields = decode_object(body)
        check_fields(fields, self._fields)
        check_lists(fields)
        if self._kind == "chat":
            check_messages(fields.get("messages"))
        else:
            check_prompt(fields.get("prompt"))
        if self._entrance is not None:
            if self._kind == "chat":
                self._entrance.admit(ask, "messages", without_media(fields["messages"]))
            else:
                self._entrance.admit(ask, "prompt", fields["prompt"])
        if fields.get("n", 1) not in (1, None):
            raise BadRequest("`n` other than 1 is not supported.", hint="Send the request n times.", param="n")
        asked = fields.pop("stream", streams)
        if streams and not asked:
            raise BadRequest("A WebSocket always streams.", hint="Leave `stream` out, or send a POST for a whole answer.", param="stream")
        ask.stream = ask.flight.stream = asked
        options = fields.get("stream_options")
        ask.shows_usage = stream_options(fields, asked) if options else "never"
        named = fields.pop("model", None)
        # The caller's own bytes may be forwarded as they are, but not where the model or `stream` has to be added, not with an option that is
        # ours, and not a stream whose usage nobody asked for: we book it in any case.
        usable = named is not None and (not asked or (ask.shows_usage == "last" and not streams)) and fields.get("stream_options") is options
        ask.call = EngineCall(self._kind, named or DEFAULT, fields, body if usable else None)
        ask.flight.model = named[:MOST_NAME_CHARS] if named else ""

    async def _whole(self, exchange: Exchange, ask: Ask, admission: Admission, place: Place) -> None:
        if place.waits:
            await turn(place, ask.flight)
        await run(ask, self._steps)
        answer = ask.whole
        assert answer is not None
        body = answer.raw if answer.raw is not None else _whole_body(self._kind, ask, answer)
        if ask.notes:
            body = noted(body, ask.notes)
        await exchange.json(200, body, admission.headers())

    async def _stream(self, exchange: Exchange, ask: Ask, admission: Admission, place: Place) -> None:
        exchange.opening = admission.headers
        stay_as_asked(exchange)
        if place.waits:
            await turn(place, ask.flight)
        relay = Relay(self._kind, exchange, admission, ask)
        ask.emit = relay.emit
        await run(ask, self._steps)
        await exchange.end_stream(relay.notes(ask) + DONE if ask.notes else DONE)


class Relay:
    """Writes chunks as OpenAI events: the engine's own exactly as it said them, the others made here. The head waits for the first event, so
    that an error keeps its status."""

    def __init__(self, kind: Kind, exchange: Exchange, admission: Admission, ask: Ask) -> None:
        self._kind: Kind = kind
        self._exchange = exchange
        self._admission = admission
        self._shows_usage = ask.shows_usage != "never"
        self._counted = ask if ask.shows_usage == "always" else None
        self._begun = False
        self._first: bytes | None = None  # the engine's own first event
        self._maker: EventMaker | None = None

    def emit(self, batch: list[Chunk]) -> Awaitable[None] | None:
        shows_usage = self._shows_usage
        pieces: list[bytes] = []
        for chunk in batch:
            raw = chunk.raw
            if raw is None:
                pieces.append(self._made(batch, chunk))
            elif shows_usage or chunk.kind != "usage":
                pieces.append(b"data: " + raw + b"\n\n")
        piece = b"".join(pieces)
        if not piece:
            return None
        if self._counted is not None:
            piece += self._count(batch, self._counted)
        if self._begun:
            return self._exchange.write(piece)
        return self._begin(batch, piece)

    def _begin(self, batch: list[Chunk], piece: bytes) -> Awaitable[None] | None:
        self._begun = True
        if self._maker is None:
            self._first = batch[0].raw
        exchange = self._exchange
        return exchange.write(piece) if exchange.started else exchange.start_stream(piece, self._admission.headers())

    def notes(self, ask: Ask) -> bytes:
        """The last event before the end, where the caller is told something beside the answer."""
        told = told_in_answer(ask.notes or {})
        return self._events([]).beside({"tidegate": told}) if told else b""

    def _made(self, batch: list[Chunk], chunk: Chunk) -> bytes:
        """The events of a chunk that did not come as one."""
        return self._events(batch).events(chunk, shows_usage=self._shows_usage)

    def _count(self, batch: list[Chunk], ask: Ask) -> bytes:
        """The tokens so far, where the batch does not end in the engine's own count."""
        if batch[-1].usage is not None or ask.running is None:
            return b""
        return self._events(batch).usage(ask.running.usage)

    def _events(self, batch: list[Chunk]) -> EventMaker:
        if self._maker is None:
            first = self._first if self._begun or not batch else batch[0].raw
            self._maker = EventMaker(self._kind, self._exchange.flight, first)
        return self._maker


def settle(ticket: Ticket, exchange: Exchange) -> None:
    """Book the true count. What no engine ran, or what an engine failed at, costs nothing; who leaves before the first token pays for the
    prompt, or a limit would end nobody's asking and leaving."""
    flight = exchange.flight
    call = exchange.ask.call if exchange.ask is not None else None
    if exchange.ask is not None and exchange.ask.aside is not None:  # what was asked beside the answer is spent, whatever became of that
        ticket.book(flight.usage.plus(exchange.ask.aside), flight.model)
    elif flight.engine and (flight.usage.total_tokens or flight.token_ns):
        ticket.book(flight.usage, flight.model)
    elif flight.engine and call is not None and (exchange.gone or exchange.expired or exchange.superseded_by):
        flight.usage = Usage(estimate_prompt_tokens(call), 0, exact=False)
        ticket.book(flight.usage, flight.model)
    else:
        ticket.refund()


def _wanted_tokens(body: dict[str, Any]) -> int:
    """The most that the answer may have; 0 where that is not said."""
    wanted = int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)
    return wanted if wanted > 0 else 0  # -1 means "without end" to some engines


def _whole_body(kind: Kind, ask: Ask, answer: EngineAnswer) -> bytes:
    """OpenAI's shape, for an engine whose whole answers are put together here."""
    usage = answer.usage
    choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": answer.end}
    if kind == "chat":
        choice["message"] = {"role": "assistant", "content": answer.text}
    else:
        choice["text"] = answer.text
    return msgspec.json.encode({
        "id": ("chatcmpl-" if kind == "chat" else "cmpl-") + ask.flight.id,
        "object": "chat.completion" if kind == "chat" else "text_completion",
        "created": time.time_ns() // 1_000_000_000,
        "model": ask.flight.model,
        "choices": [choice],
        "usage": usage_fields(usage),
    })


class EmbeddingRoute:
    """/v1/embeddings on the gateway's own embedder."""

    def __init__(self, limits: Limits, embedder: Embedder | None, entrance: Entrance | None = None) -> None:
        """`entrance`: the door, where there is one."""
        self._limits = limits
        self._embedder = embedder
        self._entrance = entrance if entrance is not None and not entrance.open else None

    async def __call__(self, exchange: Exchange) -> None:
        exchange.need_post()
        caller = await asking(exchange)
        body = await exchange.body()
        ask = exchange.new_ask(caller)
        flight = ask.flight
        try:
            wanted = _wanted(body)
            if self._entrance is not None:
                self._entrance.admit(ask, "input", wanted.texts)
        finally:
            flight.lap("parse")
        if self._embedder is None:
            raise StoreDown("This gateway has no embedder.", hint="Set [embedder], or start it with `tidegate up`.")
        if wanted.model not in (None, self._embedder.model):  # vectors of another model than is believed find nothing, and say nothing
            said = f"There is no embedding model {str(wanted.model)[:200]!r}."
            raise NotFound(said, hint=f"Known: {self._embedder.model}. Without `model` it is taken.", param="model")
        if wanted.dimensions not in (None, self._embedder.dimensions):
            said = f"The vectors here have {self._embedder.dimensions} numbers, no other number can be asked for."
            raise BadRequest(said, hint="Leave `dimensions` out.", param="dimensions")
        flight.model = self._embedder.model
        ticket = self._limits.admit(caller, len(body) // 4 + 1, 0, flight.model)
        if ticket.waits:
            ticket = await ticket.leased()
        flight.lap("limits")
        try:
            exchange.watch()
            await self._answer(exchange, ask, self._embedder, wanted)
        finally:
            settle(ticket, exchange)

    async def _answer(self, exchange: Exchange, ask: Ask, embedder: Embedder, wanted: Wanted) -> None:
        flight = ask.flight
        try:
            counts = await embedder.count_tokens(wanted.texts)
            vectors = await embedder.embed(wanted.texts, wanted.kind)
        finally:
            flight.lap("embed")
        flight.engine = "embedder"
        flight.usage = Usage(sum(counts), 0)
        flight.end = "stop"
        rows: Sequence[Any] = vectors.tolist() if wanted.floats else [base64.b64encode(row.tobytes()).decode() for row in vectors]
        await exchange.json(200, msgspec.json.encode({
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)],
            "model": embedder.model,
            "usage": {"prompt_tokens": flight.usage.prompt_tokens, "total_tokens": flight.usage.prompt_tokens},
        }))


class Wanted(NamedTuple):
    """What an embedding request asks for."""

    texts: list[str]
    floats: bool
    kind: Literal["query", "passage"]
    dimensions: int | None
    model: str | None


def _wanted(body: bytes) -> Wanted:
    fields = decode_object(body)
    check_fields(fields, EMBEDDING)
    texts = _texts(fields.get("input"))
    encoding = fields.get("encoding_format", "float")
    if encoding not in ("float", "base64"):
        raise BadRequest("`encoding_format` is neither `float` nor `base64`.", hint="Leave it out for `float`.", param="encoding_format")
    kind = fields.get("input_type", "query")
    if kind not in ("query", "passage"):
        raise BadRequest("`input_type` is neither `query` nor `passage`.", hint="Leave it out for `query`.", param="input_type")
    return Wanted(texts, encoding == "float", kind, fields.get("dimensions"), fields.get("model"))


def _texts(given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise BadRequest(
            "`input` is neither a text nor a list of texts, or is empty.", hint="Send text; token ids are not understood.", param="input"
        )
    if len(texts) > _MOST_TEXTS:
        raise BadRequest(f"`input` has more than {_MOST_TEXTS} texts.", hint="Send them in several requests.", param="input")
    return texts


def models_route(models: Models) -> Callable[[Exchange], Awaitable[None]]:
    """/v1/models, and /v1/models/ID for one of them."""

    async def route(exchange: Exchange) -> None:
        wanted = exchange.path.removeprefix(MODELS).removeprefix("/")
        exchange.flight.route = MODELS
        if exchange.scope["method"] != "GET":
            raise MethodNotAllowed(f"{MODELS} takes GET.", hint="Send a GET.")
        caller = await exchange.caller()
        names = models.models(caller.tenant)
        if wanted and wanted not in names:
            raise NotFound(f"There is no model {wanted[:200]!r}.", hint=nearest(wanted[:200], names), param="model")
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "tidegate"} for name in ([wanted] if wanted else names)]
        exchange.flight.end = "stop"
        await exchange.json(200, msgspec.json.encode(rows[0] if wanted else {"object": "list", "data": rows}))

    return route
