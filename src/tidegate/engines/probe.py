"""What a check may ask of an engine: raw HTTP where it is about the engine itself, its adapter where it is about the two together."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from tidegate.core.ask import EngineCall
from tidegate.core.chunk import Chunk, Usage
from tidegate.core.errors import BadRequest, EngineDown, EngineError, EngineStalled, TidegateError
from tidegate.core.flight import Flight
from tidegate.core.ports import Engine
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.sse import SseParser
from tidegate.engines.vocabulary import Vocabulary
from tidegate.engines.wire import Pool, Reply

Verdict = Literal["pass", "fail", "not proven", "not applicable"]
#: A member that fails a must is not used.
Level = Literal["must", "should"]

#: Names under which engines' figures tell how many answers they are working on.
_BUSY = ("running", "slots_busy", "requests_running", "requests_processing", "active")
#: What an engine answers that has no room or no model yet.
_BUSY_STATUS = (429, 502, 503, 504)
#: By these an engine says that it takes no messages: it has no chat template, or no such route.
_NO_CHAT = (400, 404, 405, 422, 501)
#: Bytes of an answer that a check reads before it gives up.
_MAX_BYTES = 8 << 20
#: The length of the answer that several checks share, in tokens.
SHORT_TOKENS = 24
#: How long an answer is that is given up: long enough to be seen running, also on an engine of a hundred tokens a second.
LONG_TOKENS = 400
#: The longest that an engine may go on for nobody.
FREE_S = 3.0
CALM_S = 1.0
LOOK_S = 0.01
#: How often an answer is left before a slot that is not freed is a fail: whoever comes in that very moment hides that one was.
TRIES = 3
#: What answers with a seed are asked, and how long they are.
SEEDED = "Tell a short story about a lighthouse."
SEEDED_TOKENS = 20
#: Words of the prompt from which tokens per word and the speed of prefill are taken.
PACE_WORDS = 64
#: Short words, about a token each.
_WORDS = ("sun", "sea", "tree", "bird", "road", "hand", "door", "rain", "book", "star", "fish", "wind", "king", "song", "milk", "moon")
#: A task that every model takes up at length.
COUNTING = "Count from 1 to 100, separated by commas. Begin at once: 1, 2, 3,"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict and its evidence: one line with the figures that it rests on."""

    verdict: Verdict
    evidence: str


def passed(evidence: str) -> Outcome:
    return Outcome("pass", evidence)


def failed(evidence: str) -> Outcome:
    return Outcome("fail", evidence)


def unproven(evidence: str) -> Outcome:
    return Outcome("not proven", evidence)


def inapplicable(evidence: str) -> Outcome:
    return Outcome("not applicable", evidence)


def refused(run: Run, what: str) -> Outcome:
    """For an answer that is none: a fail, but where the engine is only busy, which is not ill."""
    if run.status in _BUSY_STATUS:
        return unproven(f"{what} is turned away with {run.why}")
    return failed(f"{what} is refused with {run.why}")


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `prompts` and `tokens` are what it asks for at most: from them the time is estimated before it begins.

    `run` may raise TidegateError where the engine did not answer as it must; that is a fail. `quick`: it is among those of a registration.
    """

    order: int
    level: Level
    about: str
    run: Callable[[Probe], Awaitable[Outcome]]
    prompts: int = 1
    tokens: int = 0
    quick: bool = False


@dataclass(slots=True)
class Run:
    """One answer as it came. `reads` are (instant, text) of each event with text; instants and `sent_ns` are `perf_counter_ns`."""

    sent_ns: int = 0
    end_ns: int = 0
    status: int = 200
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    done: bool = False
    reads: list[tuple[int, str]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    error: dict[str, Any] = field(default_factory=dict)
    #: Why the bytes are not what they should be (no UTF-8, no JSON); empty where they are.
    broken: str = ""

    @property
    def why(self) -> str:
        """The engine's words for a refusal, short."""
        return f"{self.status}: {str(self.error.get('message') or 'no reason given')[:160]}"

    @property
    def tokens(self) -> int | None:
        found = (self.usage or {}).get("completion_tokens")
        return found if isinstance(found, int) else None

    @property
    def prompt_tokens(self) -> int | None:
        found = (self.usage or {}).get("prompt_tokens")
        return found if isinstance(found, int) else None

    @property
    def whole_ms(self) -> float:
        return (self.end_ns - self.sent_ns) / 1e6

    @property
    def first_ms(self) -> float:
        """To the first text; to the end where there was none."""
        return ((self.reads[0][0] if self.reads else self.end_ns) - self.sent_ns) / 1e6


async def tried(probe: Probe, once: Callable[[Probe], Awaitable[Outcome]]) -> Outcome:
    """A check that has failed only where it failed each of TRIES times."""
    outcome = await once(probe)
    for _ in range(TRIES - 1):
        if outcome.verdict == "fail":
            outcome = await once(probe)
    return outcome


def parted(one: Run, other: Run) -> int:
    """Characters after which two answers are no longer the same."""
    return next((at for at, (a, b) in enumerate(zip(one.text, other.text, strict=False)) if a != b), min(len(one.text), len(other.text)))


class Probe:
    """One engine under test. `model` is the engine's own name of the model; `vocabulary` the configured one, where there is one."""

    def __init__(
        self, engine: Engine, adapter: str, model: str, vocabulary: Vocabulary | None = None,
        vectors: list[tuple[str, list[int]]] | None = None,
    ) -> None:
        self.engine = engine
        self.adapter = adapter
        self.model = model
        self.vocabulary = vocabulary
        self.vectors = vectors or []
        self.cannot: Mapping[Any, str] = getattr(engine, "cannot", {})
        #: How the engine is asked: bare prompts where it has no chat template.
        self.kind: Literal["chat", "completion"] = "chat"
        #: Only what a registration checks, and as little of it as proves something.
        self.quick = False
        #: Tokens per second, measured by the first answers; None before.
        self.decode_per_s: float | None = None
        self.prefill_per_s: float | None = None
        self.first_ms = 0.0
        #: When the time for all checks is over.
        self.until_ns = 1 << 62
        self._raw = _Raw(engine) if isinstance(engine, OpenAIHttp) else None
        self._short: Run | None = None
        self._pace: Run | None = None

    async def close(self) -> None:
        """Close the probe's own connections; the engine's are its own."""
        if self._raw is not None:
            await self._raw.pool.close()

    @property
    def http(self) -> bool:
        """Whether the engine speaks OpenAI's HTTP API, so that it can be asked without its adapter."""
        return self._raw is not None

    def left_s(self) -> float:
        """Seconds of the time for all checks that are left."""
        return (self.until_ns - time.perf_counter_ns()) / 1e9

    # -- answers

    async def short(self) -> Run:
        """The answer that several checks share: `SHORT_TOKENS` tokens of counting at temperature 0, streamed. Asked for once."""
        if self._short is None:
            self._short = await self._first_answer()
            self._measure(self._short)
        return self._short

    async def _first_answer(self) -> Run:
        """To messages; to a bare prompt where the engine takes no messages, and then all that follows is asked like that."""
        run, wrong = Run(), None
        try:
            run = await self.chat(COUNTING, max_tokens=SHORT_TOKENS)
        except (EngineDown, EngineStalled):
            raise
        except TidegateError as error:
            wrong = error
        if wrong is None and run.status not in _NO_CHAT:
            return run
        try:
            bare = await self.complete(COUNTING, max_tokens=SHORT_TOKENS)
            if bare.status == 200:
                self.kind = "completion"
                return bare
        except BadRequest as error:  # what the adapter cannot ask of this engine says more than that it takes no messages
            if wrong is not None:
                self.kind, wrong = "completion", error
        except TidegateError:
            pass
        if wrong is not None:
            raise wrong
        return run

    def _measure(self, run: Run) -> None:
        self.first_ms = run.first_ms
        tokens = run.tokens or len(run.reads)
        if tokens > 1 and run.whole_ms > run.first_ms:
            self.decode_per_s = (tokens - 1) / max((run.whole_ms - run.first_ms) / 1e3, 1e-6)

    async def chat(self, prompt: str, *, max_tokens: int, stream: bool = True, **fields: Any) -> Run:
        """A chat answer at temperature 0: from the engine itself where it speaks HTTP, else through its adapter."""
        return await self.ask(self.kind, {**self._prompt(prompt), "max_tokens": max_tokens, **fields}, stream=stream)

    def _prompt(self, prompt: str) -> dict[str, Any]:
        return {"prompt": prompt} if self.kind == "completion" else {"messages": [{"role": "user", "content": prompt}]}

    async def complete(self, prompt: str, *, max_tokens: int, stream: bool = True, **fields: Any) -> Run:
        """The same for a bare prompt."""
        return await self.ask("completion", {"prompt": prompt, "max_tokens": max_tokens, **fields}, stream=stream)

    async def ask(self, kind: Literal["chat", "completion"], body: dict[str, Any], *, stream: bool) -> Run:
        body = {"temperature": 0, **body}
        if self._raw is not None:
            fields = {**body, "model": self.model}
            if stream:
                fields |= {"stream": True, "stream_options": {"include_usage": True}}
            return await self._raw.post(kind, msgspec.json.encode(fields), stream=stream)
        return await self.through_adapter(EngineCall(kind, self.model, body), stream=stream)

    async def post(self, body: bytes) -> Run:
        """Any bytes to the chat route. Only where `http`."""
        assert self._raw is not None
        return await self._raw.post("chat", body, stream=False)

    async def adapted(self, prompt: str, *, max_tokens: int, **fields: Any) -> Run:
        """A whole chat answer through the adapter: what a caller of the gateway would cause. Raises TidegateError."""
        body = {"temperature": 0, **self._prompt(prompt), "max_tokens": max_tokens, **fields}
        return await self.through_adapter(EngineCall(self.kind, self.model, body), stream=False)

    async def through_adapter(self, call: EngineCall, *, stream: bool) -> Run:
        flight = Flight("check")
        run = Run(sent_ns=time.perf_counter_ns())
        if not stream:
            answer = await self.engine.whole(call, flight)
            run.text, run.finish, run.usage = answer.text, answer.end, _usage(answer.usage)
            run.end_ns = time.perf_counter_ns()
            return run

        def take(batch: list[Chunk]) -> None:
            for chunk in batch:
                if chunk.kind == "text" and chunk.text:
                    run.reads.append((chunk.at_ns, chunk.text))
                run.finish = chunk.finish or run.finish

        running = await self.engine.start(call, flight)
        try:
            await running.relay(take)
        finally:
            running.abort()
        run.end_ns = time.perf_counter_ns()
        run.text = "".join(text for _, text in run.reads)
        run.usage = _usage(running.usage)
        run.done = True
        return run

    # -- what the engine tells beside answers

    async def busy(self) -> int | None:
        """How many answers the engine is working on, by its own count; None where it does not tell."""
        figures = await self.engine.figures()
        return next((int(figures[name]) for name in _BUSY if isinstance(figures.get(name), int | float)), None)

    async def seeded(self, seed: int = 7) -> Run:
        """An answer of `SEEDED_TOKENS` tokens to `SEEDED` at temperature 1."""
        return await self.chat(SEEDED, max_tokens=SEEDED_TOKENS, temperature=1.0, seed=seed)

    async def pace(self) -> Run:
        """The answer of one token to a prompt of `PACE_WORDS` words, from which the speed of prefill is taken. Asked for once."""
        if self._pace is None:
            run = await self.fill(PACE_WORDS)
            if run.prompt_tokens and run.first_ms > 0:
                self.prefill_per_s = run.prompt_tokens / (run.first_ms / 1e3)
            self._pace = run
        return self._pace

    async def fill(self, words: int) -> Run:
        """The answer of one token to a prompt of so many short words, never the same twice: a cached prompt would prove nothing."""
        text = " ".join(_WORDS[(at * 7 + at // len(_WORDS)) % len(_WORDS)] for at in range(words))
        return await self.chat(f"{secrets.token_hex(4)} {text}", max_tokens=1)

    async def calm(self) -> int | None:
        """How busy the engine is at rest: its count, once it is 0 or `CALM_S` have passed, since the last answer may still be in it."""
        await self.idle(CALM_S)
        return await self.busy()

    async def idle(self, within_s: float) -> None:
        """Wait until the engine makes no answer for anybody, at most so long; at once where it does not tell."""
        give_up_ns = time.perf_counter_ns() + int(within_s * 1e9)
        while (await self.busy() or 0) > 0 and time.perf_counter_ns() < give_up_ns:  # noqa: ASYNC110 - another program's state
            await asyncio.sleep(10 * LOOK_S)

    def long_call(self) -> EngineCall:
        """A call whose answer takes long enough to be given up."""
        # the scripted engine says as much as it is ordered to
        task = f"{COUNTING} ##n={LONG_TOKENS}##" if self.adapter == "scripted" else COUNTING
        return EngineCall(self.kind, self.model, {**self._prompt(task), "max_tokens": LONG_TOKENS, "temperature": 0})

    async def freed(self, during: int, left_ns: int, what: str) -> Outcome:
        """Wait until the engine's count falls below what it was while the answer ran (`during`); the verdict on how long that took from `left_ns`.

        Not until the engine is at rest: it may be answering others, whose coming raises the count and must not be held against it.
        """
        while True:
            now = await self.busy()
            took_ms = (time.perf_counter_ns() - left_ns) / 1e6
            if now is not None and now < during:
                return passed(f"{what} is free after {took_ms:.0f} ms by the engine's own count")
            if took_ms > FREE_S * 1e3:
                return failed(f"{what} is still being made after {took_ms:.0f} ms by the engine's own count ({now} at work)")
            during = max(during, now or 0)
            await asyncio.sleep(LOOK_S)

    async def context(self) -> int | None:
        """Tokens of context that the engine claims for one answer; None where it claims none."""
        claimed = (await self.engine.figures()).get("context")
        if isinstance(claimed, dict):
            claimed = claimed.get(self.model)
        return claimed if isinstance(claimed, int) and claimed > 0 else None

    async def tokenize(self, text: str, *, special: bool = False) -> list[int] | None:
        """The engine's own ids of a text without BOS; None where it does not offer them. `special`: control tokens in it are parsed as such."""
        if self._raw is None:
            return None
        root = self._raw.root
        for fields in (
            {"content": text, "add_special": False, "parse_special": special},  # llama.cpp
            {"model": self.model, "prompt": text, "add_special_tokens": False},  # vLLM, SGLang
            {"inputs": text, "add_special_tokens": False},  # TGI
        ):
            if ("content" in fields) != (self.adapter == "llama_cpp") or ("inputs" in fields) != (self.adapter == "tgi"):
                continue
            try:
                said = msgspec.json.decode(await self._raw.engine_post(f"{root}/tokenize", msgspec.json.encode(fields)))
            except (TidegateError, msgspec.DecodeError):
                return None
            ids = said.get("tokens") if isinstance(said, dict) else said
            if isinstance(ids, list) and all(isinstance(one, dict) for one in ids):
                ids = [one.get("id") for one in ids]
            return ids if isinstance(ids, list) and all(isinstance(one, int) for one in ids) else None
        return None


def _usage(usage: Usage) -> dict[str, Any] | None:
    if not usage.exact:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens, "total_tokens": usage.total_tokens,
    }


class _Raw:
    """The engine without its adapter: a pool of our own to the same address with the same key."""

    def __init__(self, engine: OpenAIHttp) -> None:
        settings = engine.settings
        parts = urlsplit(settings.url)
        self.root = engine.root
        self.pool = Pool(engine.label, settings.url, engine.patience, ca_file=settings.ca_file, max_idle=8)
        self._first_token_s = settings.first_token_s
        self._idle_ns = int(settings.inter_token_s * 1e9)
        key = settings.api_key.get_secret_value() if settings.api_key else ""
        self._common = (
            f"Host: {parts.netloc}\r\nUser-Agent: tidegate-check\r\nAccept-Encoding: identity\r\nContent-Type: application/json\r\n"
            + (f"Authorization: Bearer {key}\r\n" if key else "")
        ).encode()
        self._paths = {"chat": f"{engine.base}/chat/completions", "completion": f"{engine.base}/completions"}

    async def post(self, kind: str, body: bytes, *, stream: bool) -> Run:
        """The answer, whatever its status. Raises TidegateError where none comes or it breaks off."""
        reply = await self._send(self._paths[kind], body)
        run = Run(sent_ns=reply.sent_ns, status=reply.status)
        if stream and reply.status == 200:
            await self._read_stream(reply, run)
        else:
            _read_whole(b"".join([data async for _, data in self._pieces(reply)]), run)
        run.end_ns = time.perf_counter_ns()
        run.text = run.text or "".join(text for _, text in run.reads)
        return run

    async def engine_post(self, path: str, body: bytes) -> bytes:
        reply = await self._send(path, body)
        said = b"".join([data async for _, data in self._pieces(reply)])
        if reply.status != 200:
            raise EngineError(f"{path} answers with {reply.status}.")
        return said

    async def _send(self, path: str, body: bytes) -> Reply:
        head = b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n" % (path.encode(), self._common, len(body))
        return await self.pool.send(head + body, Flight("check"), first_token_s=self._first_token_s)

    async def _pieces(self, reply: Reply) -> Any:
        size = 0
        first_ns = reply.sent_ns + int(self._first_token_s * 1e9)
        try:
            while True:
                for at_ns, data in reply.take():
                    size += len(data)
                    yield at_ns, data
                if size > _MAX_BYTES:
                    raise EngineError(f"{self.pool.label} sent more than {_MAX_BYTES >> 20} MiB.")
                if reply.pieces:
                    continue
                if reply.error is not None:
                    raise reply.error
                if reply.done:
                    return
                # head and comments may come before the prompt is read
                await reply.wait(max(time.perf_counter_ns() + self._idle_ns, first_ns), "the next bytes (first_token_s, inter_token_s)")
        except (asyncio.CancelledError, GeneratorExit, EngineError):
            reply.abort()
            raise

    async def _read_stream(self, reply: Reply, run: Run) -> None:
        sse = SseParser(_MAX_BYTES)
        async for at_ns, data in self._pieces(reply):
            for event in sse.feed(data):
                if event.data == b"[DONE]":
                    run.done = True
                else:
                    _read_event(event.data, at_ns, run)


def _read_event(data: bytes, at_ns: int, run: Run) -> None:
    said = _decoded(data, run)
    if said.get("error"):
        run.error = said["error"] if isinstance(said["error"], dict) else {"message": said["error"]}
    if isinstance(said.get("usage"), dict):
        run.usage = said["usage"]
    for choice in said.get("choices") or ():
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if isinstance(text, str) and text:
            run.reads.append((at_ns, text))
        run.finish = choice.get("finish_reason") or run.finish
        run.logprobs += _logprobs(choice)


def _read_whole(body: bytes, run: Run) -> None:
    said = _decoded(body, run)
    error = said.get("error", said if run.status >= 400 else None)
    if error:
        run.error = error if isinstance(error, dict) else {"message": error}
    run.usage = said.get("usage") if isinstance(said.get("usage"), dict) else None
    for choice in said.get("choices") or ():
        run.text = choice.get("text") or (choice.get("message") or {}).get("content") or ""
        run.finish = choice.get("finish_reason")
        run.logprobs += _logprobs(choice)


def _decoded(data: bytes, run: Run) -> dict[str, Any]:
    try:
        data.decode()  # the decoder skips over strings that it does not need
        said = msgspec.json.decode(data)
    except UnicodeDecodeError:
        run.broken = run.broken or "bytes that are no UTF-8"
        return {}
    except (msgspec.DecodeError, RecursionError):
        run.broken = run.broken or "an event that is no JSON"
        return {}
    return said if isinstance(said, dict) else {}


def _logprobs(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """In the shape of chat answers, whichever shape they came in."""
    told = choice.get("logprobs") or {}
    content = told.get("content")
    if isinstance(content, list):
        return [one for one in content if isinstance(one, dict)]
    tokens, values = told.get("tokens"), told.get("token_logprobs")
    if isinstance(tokens, list) and isinstance(values, list):
        return [{"token": token, "logprob": value} for token, value in zip(tokens, values, strict=False)]
    return []
