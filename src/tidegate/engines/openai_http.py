"""What all engines that speak OpenAI's HTTP API share: requests, heads, whole answers. An adapter adds what is its own."""

from __future__ import annotations

import asyncio
import time
from typing import Any, ClassVar
from urllib.parse import urlsplit

import msgspec

from tidegate.core.ask import EngineCall, Said
from tidegate.core.errors import CannotContinue, EngineError
from tidegate.core.flight import Flight
from tidegate.core.ports import EngineAnswer, EngineStream
from tidegate.engines.dialect import Dialect
from tidegate.engines.figures import up_or_why
from tidegate.engines.refusal import refusal
from tidegate.engines.settings import EngineSettings
from tidegate.engines.stream import Stream
from tidegate.engines.traits import Cannot
from tidegate.engines.wire import Patience, Pool, Reply

#: An error's body is read to here; what is longer is not a reason but a page.
MAX_ERROR_BYTES = 64 * 1024
#: Seconds of silence after which an error is told without the rest of its body.
ERROR_BODY_S = 2.0


class OpenAIHttp:
    """An `Engine` behind OpenAI's HTTP API (`/chat/completions`, `/completions`, `/models`)."""

    #: What servers of this kind cannot do; see engines/traits.py. An adapter says its own.
    cannot: ClassVar[Cannot] = {
        "continue": "OpenAI's API has no way to go on from the middle of an answer.",
        "forbid": "OpenAI's API has no way to go on from the middle of an answer.",
        "token_ids": "OpenAI's API tells no token ids.",
        "control_text": "OpenAI's API does not say what its tokenizer makes of control tokens in a message: text goes to the engine as it is.",
        "cancel_prefill": "OpenAI's API does not tell when a prompt was given up.",
        "running": "OpenAI's API does not tell how many answers are being made.",
    }

    def __init__(self, name: str, settings: EngineSettings) -> None:
        self.name = name
        self.models = tuple(settings.model_names)
        self.label = f"The engine {name!r}"
        self.settings = settings
        self.patience = Patience(
            settings.connect_s, settings.first_token_s, settings.inter_token_s, settings.total_s, settings.keepalive_s
        )
        parts = urlsplit(settings.url)
        self.base = parts.path or "/v1"
        #: The server's own root, beside its OpenAI API.
        self.root = self.base.removesuffix("/v1")
        self.pool = Pool(self.label, settings.url, self.patience, ca_file=settings.ca_file, max_idle=settings.max_idle)
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._common = (
            f"Host: {parts.netloc}\r\nUser-Agent: tidegate\r\nAccept-Encoding: identity\r\n"
            + (f"Authorization: Bearer {key}\r\n" if key else "")
        ).encode()
        self._heads = {
            "chat": self._post_head(f"{self.base}/chat/completions"),
            "completion": self._post_head(f"{self.base}/completions"),
        }

    # -- the port

    async def start(self, call: EngineCall, flight: Flight) -> Stream:
        """See `core.ports.Engine.start`."""
        return await self.open(call, flight, Dialect(self.label))

    async def whole(self, call: EngineCall, flight: Flight) -> EngineAnswer:
        """See `core.ports.Engine.whole`. `raw` is the engine's body as it came."""
        reply = await self._send(call, flight, stream=False)
        _expect(self.label, reply, b"application/json", "JSON")
        body = await self._body(reply, self.settings.max_answer_bytes)
        dialect = Dialect(self.label)
        text = dialect.whole(body)
        if dialect.finish is None:
            raise dialect.empty()
        if dialect.odd_finish is not None:
            flight.decide("engine_finish_unknown", finish_reason=dialect.odd_finish[:64], taken_as=dialect.finish)
        usage = dialect.usage
        if usage is None:
            flight.decide("usage_estimated")
            usage = dialect.best_usage(prompt_bytes(call))
        return EngineAnswer(text, dialect.finish, usage, body)

    async def continue_from(self, call: EngineCall, said: Said, flight: Flight, *, forbid: str = "") -> EngineStream:
        """See `core.ports.Engine.continue_from`. OpenAI's API alone has no way: adapters of engines that have one say how."""
        raise CannotContinue(
            f"{self.label} cannot go on from the middle of an answer.", hint="Engines that can: llama_cpp, vllm, sglang, tgi, triton, scripted."
        )

    async def figures(self) -> dict[str, Any]:
        """See `core.ports.Engine.figures`."""
        return await up_or_why(self.label, self.ask_figures())

    async def count_tokens(self, text: str) -> int | None:
        """Tokens of a text by the engine's own tokenizer; None where the engine does not offer it."""
        return None

    async def close(self) -> None:
        """Close all connections, busy ones too."""
        await self.pool.close()

    # -- what adapters replace

    async def ask_figures(self) -> dict[str, Any]:
        """The figures themselves; may raise TidegateError."""
        listed = await self.get_json(f"{self.base}/models")
        models = [m for m in listed.get("data") or () if isinstance(m, dict)]
        lengths = {str(m.get("id")): m["max_model_len"] for m in models if isinstance(m.get("max_model_len"), int)}
        return {"models": [str(m.get("id")) for m in models], **({"context": lengths} if lengths else {})}

    def body(self, call: EngineCall, *, stream: bool) -> bytes:
        """The request's body: as the caller sent it where it may be forwarded, else made from the call."""
        if call.raw is not None:
            return call.raw
        return msgspec.json.encode(self.fields(call, stream=stream))

    def fields(self, call: EngineCall, *, stream: bool) -> dict[str, Any]:
        """The call's fields with what is the engine's own: model, stream, and a stream's usage, so that tokens are counted, not guessed."""
        fields = dict(call.body) if call.body or call.raw is None else msgspec.json.decode(call.raw)
        fields["model"] = call.model
        options = fields.pop("stream_options", None)
        if stream:
            fields["stream"] = True
            fields["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        else:
            fields.pop("stream", None)
        return fields

    # -- for adapters

    async def open(self, call: EngineCall, flight: Flight, dialect: Dialect) -> Stream:
        """Send the call and give its stream, read by `dialect`. Raises as `start` does."""
        reply = await self._send(call, flight, stream=True)
        _expect(self.label, reply, b"text/event-stream", "a stream of events")
        return Stream(
            reply, dialect, flight, self.patience,
            prompt_bytes=prompt_bytes(call), max_event_bytes=self.settings.max_event_bytes, max_answer_bytes=self.settings.max_answer_bytes,
        )  # fmt: skip

    async def open_at(self, path: str, fields: dict[str, Any], flight: Flight, dialect: Dialect, *, prompt_bytes: int = 0) -> Stream:
        """As `open`, at a route of the engine's own, with the fields that it takes."""
        flight.engine = self.name
        request = _with_body(self._post_head(path), msgspec.json.encode(fields))
        reply = await self.pool.send(request, flight, first_token_s=self.patience.first_token_s)
        if reply.status != 200 or b"content-encoding" in reply.headers:
            await self._refuse(reply)
        _expect(self.label, reply, b"text/event-stream", "a stream of events")
        return Stream(
            reply, dialect, flight, self.patience,
            prompt_bytes=prompt_bytes, max_event_bytes=self.settings.max_event_bytes, max_answer_bytes=self.settings.max_answer_bytes,
        )  # fmt: skip

    async def get_json(self, path: str) -> dict[str, Any]:
        """A GET that answers with a JSON object. Raises TidegateError."""
        return _object(self.label, await self.get(path))

    async def get(self, path: str) -> bytes:
        """The body of a GET. Raises TidegateError."""
        return await self._ask(b"GET %b HTTP/1.1\r\n%b\r\n" % (path.encode(), self._common))

    async def post_json(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A POST of JSON that answers with a JSON object. Raises TidegateError."""
        return _object(self.label, await self.post(path, fields))

    async def post(self, path: str, fields: dict[str, Any]) -> bytes:
        """The body of a POST of JSON. Raises TidegateError."""
        return await self._ask(_with_body(self._post_head(path), msgspec.json.encode(fields)))

    # --

    def _post_head(self, path: str) -> bytes:
        return b"POST %b HTTP/1.1\r\n%bContent-Type: application/json\r\nContent-Length: " % (path.encode(), self._common)

    async def _send(self, call: EngineCall, flight: Flight, *, stream: bool) -> Reply:
        flight.engine = self.name
        request = _with_body(self._heads[call.kind], self.body(call, stream=stream))
        # without a stream the head comes when the answer is ready
        patience_s = self.patience.first_token_s if stream else self.patience.total_s
        reply = await self.pool.send(request, flight, first_token_s=patience_s)
        if reply.status != 200 or b"content-encoding" in reply.headers:
            await self._refuse(reply)
        return reply

    async def _ask(self, request: bytes) -> bytes:
        reply = await self.pool.send(request, Flight("engine"))
        if reply.status != 200 or b"content-encoding" in reply.headers:
            await self._refuse(reply)
        return await self._body(reply, self.settings.max_answer_bytes)

    async def _refuse(self, reply: Reply) -> None:
        """Raise for an answer that is not 200, or that is compressed."""
        if 300 <= reply.status < 400:
            reply.abort()
            raise refusal(self.label, reply.status, reply.headers, b"")
        encoding = reply.headers.get(b"content-encoding", b"identity").strip().lower()
        if encoding != b"identity":
            reply.abort()
            raise EngineError(
                f"{self.label} compresses its answers ({encoding.decode('latin-1')[:40]}), though asked not to.",
                hint="Switch compression off there: it delays tokens.",
            )
        if 200 <= reply.status < 300:
            return
        body = await self._body(reply, MAX_ERROR_BYTES, strict=False)
        raise refusal(self.label, reply.status, reply.headers, body)

    async def _body(self, reply: Reply, limit: int, *, strict: bool = True) -> bytes:
        """The whole body. More than `limit` bytes, or a body cut short: an error, or where not `strict` what there is."""
        parts: list[bytes] = []
        size = 0
        idle_ns = int((self.patience.inter_token_s if strict else min(self.patience.inter_token_s, ERROR_BODY_S)) * 1e9)
        try:
            while True:
                for _, data in reply.take():
                    parts.append(data)
                    size += len(data)
                if size > limit:
                    reply.abort()
                    if strict:
                        raise EngineError(f"{self.label} sent an answer of more than {limit} bytes.", hint="Raise max_answer_bytes.")
                    break
                if reply.error is not None and not reply.pieces:
                    if strict:
                        raise reply.error
                    break
                if reply.done and not reply.pieces:
                    break
                await reply.wait(time.perf_counter_ns() + idle_ns, "the rest of its answer (inter_token_s)")
        except asyncio.CancelledError:
            reply.abort()
            raise
        return parts[0] if len(parts) == 1 else b"".join(parts)


def prompt_bytes(call: EngineCall) -> int:
    """UTF-8 bytes of the prompt's text: what an estimate of its tokens rests on."""
    return _text_bytes(call.body.get("messages") or call.body.get("prompt")) if call.body else len(call.raw or b"")


def _text_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):  # not any mapping: asking for that costs as much as all the rest
        return _text_bytes(value.get("content")) + _text_bytes(value.get("text"))
    if isinstance(value, list):
        return sum(_text_bytes(item) for item in value)
    return 4 if isinstance(value, int) else 0  # a token id


def _with_body(head: bytes, body: bytes) -> bytes:
    return b"%b%d\r\n\r\n%b" % (head, len(body), body)


def _expect(label: str, reply: Reply, media_type: bytes, what: str) -> None:
    found = reply.headers.get(b"content-type", b"")
    if found.startswith(media_type) or found.lower().startswith(media_type):
        return
    reply.abort()
    raise EngineError(
        f"{label} answered with {found.decode('latin-1')[:80] or 'no content type'!r} where {what} was expected.",
        hint="Is url of this engine the address of an OpenAI-compatible API?",
    )


def _object(label: str, body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise EngineError(f"{label} answered with something that is not a JSON object.", hint="Check url.")
    return found
