"""What an engine's own Prometheus metrics say of its load: vLLM by its old and new names, llama.cpp, SGLang, TGI, Triton (also with TensorRT-LLM).

They are a help, never a need: an endpoint that lies, hangs or vanishes costs no request anything, and /health says so. What is read is bounded in
time and size; what cannot be true is not used.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tidegate.core.errors import EngineError, TidegateError
from tidegate.core.flight import Flight
from tidegate.engines.settings import EngineSettings
from tidegate.engines.wire import Patience, Pool

#: Seconds that one look may take, bytes that it may bring.
READ_S = 1.0
MOST_BYTES = 2 << 20
#: Requests, and tokens, beyond which a figure is no figure.
MOST_REQUESTS = 100_000
MOST_TOKENS = 1 << 53
#: Looks in a row that contradict what we see ourselves before an endpoint is no longer believed.
CONTRADICTIONS = 3
#: Seconds between two looks at an endpoint that fails, at most; each failure doubles the time.
LONGEST_PAUSE_S = 30.0
#: Drafted tokens between two looks from which an acceptance can be told.
MIN_DRAFTED = 200
#: Below this share of accepted tokens a draft model gives at most 1 / (1 - 0.3) = 1.4 tokens a step (Leviathan, Kalman and Matias 2023, eq. 1), which
#: is about what drafting costs.
LOW_ACCEPTANCE = 0.3

#: Metric -> what it is here. Counts of several engine processes are added up; of shares the largest counts.
_NAMES: Mapping[bytes, str] = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",
    b"vllm:gpu_cache_usage_perc": "kv_usage",  # before vLLM 0.10
    b"vllm:spec_decode_num_accepted_tokens_total": "accepted",
    b"vllm:spec_decode_num_draft_tokens_total": "drafted",
    b"vllm:spec_decode_draft_acceptance_rate": "acceptance",  # before vLLM's V1 engine
    b"llamacpp:requests_processing": "running",
    b"llamacpp:requests_deferred": "waiting",
    b"llamacpp:kv_cache_usage_ratio": "kv_usage",  # older servers
    b"sglang:num_running_reqs": "running",
    b"sglang:num_queue_reqs": "waiting",
    b"sglang:token_usage": "kv_usage",
    b"sglang:spec_accept_rate": "acceptance",
    b"tgi_batch_current_size": "running",
    b"tgi_queue_size": "waiting",
    b"nv_inference_pending_request_count": "waiting",
}
#: Metrics whose meaning lies in a label: name, label and value -> what it is here.
_LABELLED: Mapping[bytes, Mapping[bytes, str]] = {
    b"nv_trt_llm_request_metrics": {b'request_type="scheduled"': "running", b'request_type="waiting"': "waiting"},
    b"nv_trt_llm_kv_cache_block_metrics": {b'kv_cache_block_type="fraction"': "kv_usage"},
}
_SHARES = frozenset({"kv_usage", "acceptance"})
_COUNTS = frozenset({"running", "waiting"})


class Load(NamedTuple):
    """One look. None: not told. `accepted` and `drafted` are counters of speculative tokens, `acceptance` a gauge of their share."""

    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None
    accepted: float | None = None
    drafted: float | None = None
    acceptance: float | None = None


def parse(body: bytes) -> Load:
    """The load in an exposition. Raises ValueError that says what cannot be true, and where nothing in it is known."""
    found: dict[str, float] = {}
    text = b"\n" + body
    for name, meaning in _NAMES.items():
        _collect(text, name, {b"": meaning}, found)
    for name, meanings in _LABELLED.items():
        if name == b"nv_trt_llm_request_metrics" and b"\n" + name in text:
            found.pop("waiting", None)  # its own queue, not Triton's in front of it
        _collect(text, name, meanings, found)
    if not found:
        raise ValueError("it has no metric that is known")
    return Load(**found)


def _collect(text: bytes, name: bytes, meanings: Mapping[bytes, str], found: dict[str, float]) -> None:
    """Add up, or take the largest of, all lines of one metric."""
    start = b"\n" + name
    at = text.find(start)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        line = text[at + len(start) : end if end >= 0 else len(text)]
        at = text.find(start, at + 1)
        if line[:1] not in (b"{", b" ", b"\t"):  # a longer name
            continue
        labels, _, rest = line.rpartition(b"}")
        words = rest.split()
        for label, meaning in meanings.items():
            if label in labels and words:
                value = _number(name, words[0])
                if meaning in _SHARES:
                    if value > 1.001:
                        raise ValueError(f"{name.decode()} is {value:g}, which is no share")
                    found[meaning] = max(found.get(meaning, 0.0), value)
                else:
                    found[meaning] = total = found.get(meaning, 0.0) + value
                    if total > (MOST_REQUESTS if meaning in _COUNTS else MOST_TOKENS):
                        raise ValueError(f"{name.decode()} is {total:g}, which cannot be")


def _number(name: bytes, word: bytes) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name.decode()} is {word[:40].decode('latin-1')!r}, which is no amount")
    return value


class Watch:
    """Looks at one engine's metrics. `requests`: how many requests beside ours it has, as of the last look; 0 where it cannot be believed."""

    def __init__(self, name: str, section: EngineSettings) -> None:
        self.label = f"The metrics of engine {name!r}"
        self.url = _url(section)
        self.requests = 0.0
        self.load: Load | None = None
        #: Why the metrics are not used; empty where they are, or were not looked at yet.
        self.why = ""
        #: Share of speculated tokens that the model accepted lately; None where it is not told.
        self.acceptance: float | None = None
        self.pause_s = 0.0
        self._contradictions = 0
        self._seen_ours = 0
        self._before: tuple[float, float] | None = None  # accepted and drafted tokens at the last look
        self._pool: Pool | None = None
        if self.url:
            parts = urlsplit(self.url)
            key = section.api_key.get_secret_value() if section.api_key else ""
            # the key is the engine's own: no other host is told it
            same = parts.hostname == urlsplit(section.url).hostname
            auth = f"Authorization: Bearer {key}\r\n" if key and same else ""
            self._pool = Pool(self.label, self.url, Patience(READ_S, READ_S, READ_S, READ_S), ca_file=section.ca_file, max_idle=1)
            self._request = (
                f"GET {parts.path or '/metrics'} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: tidegate\r\nAccept: text/plain\r\n"
                f"Accept-Encoding: identity\r\n{auth}\r\n"
            ).encode()

    async def look(self, ours: int, period_s: float) -> None:
        """Read once; `ours`: requests of ours that run there now. Never raises; sets `pause_s`, the time until the next look."""
        try:
            async with asyncio.timeout(READ_S):
                load = parse(await self._read())
        except TimeoutError:
            self._fail(f"they did not come within {READ_S:g} s", period_s)
        except TidegateError as error:
            self._fail(error.message.removeprefix(self.label).strip(" .") or error.message, period_s)
        except ValueError as error:
            self._fail(str(error), period_s)
        else:
            self._take(load, ours, period_s)

    async def close(self) -> None:
        """Close the connection."""
        if self._pool is not None:
            await self._pool.close()

    def figures(self) -> dict[str, Any]:
        """What /health says: the last look, or why there is none."""
        if self.why:
            return {"used": False, "why": self.why}
        if self.load is None:
            return {}
        said: dict[str, Any] = {"used": True}
        said |= {name: round(value, 4) for name, value in self.load._asdict().items() if value is not None and name not in ("accepted", "drafted")}
        if self.acceptance is not None:
            said["acceptance"] = round(self.acceptance, 4)
            if self.acceptance < LOW_ACCEPTANCE:
                said["note"] = "Few speculated tokens are accepted: drafting them costs about what it saves. Draft fewer, or none."
        return said

    # --

    def _take(self, load: Load, ours: int, period_s: float) -> None:
        told = (load.running or 0.0) + (load.waiting or 0.0)
        # what runs on both sides of a look ran during it: an engine that knows of nothing then does not count our requests
        blind = load.running is not None and not told and ours > 0 and self._seen_ours > 0
        self._contradictions = self._contradictions + 1 if blind else 0
        self._seen_ours = ours
        if self._contradictions >= CONTRADICTIONS:
            self._fail("they know of no request while ours run there", period_s)
            self._seen_ours, self._contradictions = ours, CONTRADICTIONS
            return
        self.why, self.load, self.pause_s = "", load, period_s
        self.requests = max(0.0, told - ours)
        self._note_acceptance(load)

    def _note_acceptance(self, load: Load) -> None:
        if load.accepted is None or load.drafted is None:
            self.acceptance = load.acceptance
            return
        before, now = self._before, (load.accepted, load.drafted)
        if before is None or now[1] < before[1] or now[0] < before[0]:  # the first look, or the engine began anew
            self._before = now
        elif now[1] - before[1] >= MIN_DRAFTED:
            self.acceptance = min(1.0, (now[0] - before[0]) / (now[1] - before[1]))
            self._before = now

    def _fail(self, why: str, period_s: float) -> None:
        self.why, self.load, self.requests = why[:300], None, 0.0
        self.acceptance = self._before = None
        self.pause_s = min(LONGEST_PAUSE_S, max(period_s, 2 * self.pause_s))

    async def _read(self) -> bytes:
        assert self._pool is not None
        reply = await self._pool.send(self._request, Flight("metrics"))
        try:
            if reply.status != 200:
                raise EngineError(f"{self.label} are refused ({reply.status}).")
            parts, size = [], 0
            while True:
                for _, data in reply.take():
                    parts.append(data)
                    size += len(data)
                if size > MOST_BYTES:
                    raise EngineError(f"{self.label} are longer than {MOST_BYTES} bytes.")
                if reply.error is not None and not reply.pieces:
                    raise reply.error
                if reply.done and not reply.pieces:
                    return b"".join(parts)
                await reply.wait(time.perf_counter_ns() + int(READ_S * 1e9), "the rest of its metrics")
        finally:
            reply.abort()  # nothing where the answer is whole


def _url(section: EngineSettings) -> str:
    """Where an engine's metrics are; empty where nobody says."""
    if section.metrics_url == "off":
        return ""
    if section.metrics_url:
        return section.metrics_url
    if section.adapter not in ("vllm", "llama_cpp", "sglang", "tgi"):
        return ""
    parts = urlsplit(section.url)
    return f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}/metrics"
