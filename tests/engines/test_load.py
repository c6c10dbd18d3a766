"""An engine's own metrics: every engine's names, what cannot be true, and endpoints that lie, hang or vanish."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.engines import load as load_module
from tidegate.engines.load import CONTRADICTIONS, LONGEST_PAUSE_S, MIN_DRAFTED, Load, Watch, parse
from tidegate.engines.settings import EngineSettings

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="a } b"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0
vllm:%b{engine="0"} 0.25
vllm:%b{engine="1"} 0.5
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 60.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 1e+02
"""


@pytest.mark.parametrize("usage", [b"kv_cache_usage_perc", b"gpu_cache_usage_perc"])
def test_vllm_by_its_new_and_old_names(usage: bytes) -> None:
    """Counts of its processes are added up, the fullest cache counts, longer names are others."""
    assert parse(VLLM % (usage, usage)) == Load(7, 2, 0.5, 60, 100)


@pytest.mark.parametrize(
    ("body", "load"),
    [
        (b"llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\nllamacpp:kv_cache_usage_ratio 0.5\n", Load(2, 1, 0.5)),
        (
            b'sglang:num_running_reqs{model_name="m"} 2.0\nsglang:num_queue_reqs{model_name="m"} 1\nsglang:token_usage{model_name="m"} 0.28\n'
            b'sglang:spec_accept_rate{model_name="m"} 0.6',
            Load(2, 1, 0.28, acceptance=0.6),
        ),
        (b"tgi_batch_current_size 2\ntgi_queue_size 1\n", Load(2, 1)),
        (b'nv_inference_pending_request_count{model="m",version="1"} 4\n', Load(waiting=4)),
        (
            b'nv_inference_pending_request_count{model="m"} 9\n'
            b'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 2\n'
            b'nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512\n'
            b'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 1\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 6239\n'
            b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.125\n',
            Load(2, 1, 0.125),
        ),
        (b"vllm:spec_decode_draft_acceptance_rate 0.7 1700000000\n", Load(acceptance=0.7)),
    ],
)
def test_every_engine_by_its_names(body: bytes, load: Load) -> None:
    """llama.cpp, SGLang, TGI, Triton, TensorRT-LLM, older vLLM; a time stamp behind the value is none of it."""
    assert parse(body) == load


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "no metric that is known"),
        (b"<html>404</html>", "no metric that is known"),
        (b"vllm:num_requests_running -3\n", "'-3', which is no amount"),
        (b"vllm:num_requests_running NaN\n", "no amount"),
        (b"vllm:num_requests_running +Inf\n", "no amount"),
        (b"vllm:num_requests_running many\n", "no amount"),
        (b"vllm:num_requests_running 1e9\n", "cannot be"),
        (b"vllm:kv_cache_usage_perc 87.5\n", "no share"),
        (b"vllm:spec_decode_num_draft_tokens_total 1e300\n", "cannot be"),
    ],
)
def test_what_cannot_be_true(body: bytes, why: str) -> None:
    """It is said by name, and nothing of it is used."""
    with pytest.raises(ValueError, match=why):
        parse(body)


@settings(deadline=None)
@given(st.binary(max_size=300) | st.text(alphabet='vllm:num_requests_running{}" 0123456789.eE+-\n', max_size=300).map(str.encode))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    """Whatever comes, it is a load of amounts or a reason."""
    try:
        load = parse(b"vllm:num_requests_running" + body)
    except ValueError:
        return
    assert all(value is None or 0 <= value < 1e16 for value in load)


Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def endpoint(serve: Serve) -> AsyncIterator[str]:
    """A server that reads a request and does what `serve` says, connection by connection."""

    meetings: set[asyncio.Task[Any]] = set()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        meetings.add(task)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await serve(writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # its end, or ours
        finally:
            meetings.discard(task)
            writer.close()

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/metrics"
    finally:
        server.close()
        for task in list(meetings):
            task.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)


def told(body: bytes, status: str = "200 OK") -> Serve:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status.encode(), len(body), body))

    return serve


def watching(url: str, **more: Any) -> Watch:
    return Watch("a", EngineSettings.model_validate({"adapter": "vllm", "url": "http://127.0.0.1:1", "models": ["m"], "metrics_url": url, **more}))


async def test_requests_of_others_are_what_is_beside_ours() -> None:
    """The engine tells of all, ours among them; kept alive, one connection serves every look."""
    async with endpoint(told(b"vllm:num_requests_running 5\nvllm:num_requests_waiting 2\n")) as url:
        watch = watching(url)
        for _ in range(3):
            await watch.look(3, 2.0)
        assert (watch.requests, watch.why, watch.pause_s) == (4, "", 2.0)
        assert watch.figures() == {"used": True, "running": 5, "waiting": 2}
        await watch.look(9, 2.0)
        assert watch.requests == 0
        await watch.close()


async def hang(writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def half(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nvllm:num")
    writer.close()


async def flood(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while not writer.is_closing():
        writer.write(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        await writer.drain()


@pytest.mark.parametrize(
    ("serve", "why"),
    [
        (hang, "did not come within"), (half, "closed the connection"), (flood, "longer than"), (told(b"", "404 Not Found"), r"refused \(404\)"),
        (told(b"vllm:num_requests_running 1e12\n"), "cannot be"), (told(b"\x00\xff"), "no metric that is known"),
    ],
)  # fmt: skip
async def test_endpoints_that_lie_hang_or_vanish(serve: Serve, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised and nothing believed; the reason is told, and the looks become rare."""
    monkeypatch.setattr(load_module, "READ_S", 0.3)
    monkeypatch.setattr(load_module, "MOST_BYTES", 200_000)
    async with endpoint(serve) as url:
        watch = watching(url)
        watch.requests = 50.0
        for _ in range(2):
            await watch.look(1, 2.0)
        assert watch.requests == 0
        assert watch.figures()["used"] is False
        assert re.search(why, watch.figures()["why"]), watch.figures()
        assert watch.pause_s == 4.0
        await watch.close()
    watch.pause_s = 29.0
    await watch.look(1, 2.0)
    assert "refuses connections" in watch.why, "nobody is there any more"
    assert watch.pause_s == LONGEST_PAUSE_S


async def test_metrics_that_do_not_see_our_requests_are_not_believed() -> None:
    """They say that nothing runs while ours do; once they see them again they are believed again."""
    watch = watching("http://127.0.0.1:1/metrics")
    for _ in range(CONTRADICTIONS):
        watch._take(Load(0, 0), 2, 2.0)
        assert "why" not in watch.figures()
    watch._take(Load(0, 0), 2, 2.0)
    why: str = watch.figures()["why"]
    assert why == "they know of no request while ours run there"
    watch._take(Load(2, 0), 2, 2.0)
    assert (watch.why, watch.requests) == ("", 0)
    for _ in range(3 * CONTRADICTIONS):  # begun and ended between two looks: no contradiction
        watch._take(Load(0, 0), 1, 2.0)
        watch._take(Load(0, 0), 0, 2.0)
    assert watch.why == ""


async def test_the_acceptance_of_speculated_tokens_is_watched() -> None:
    """It is that of the tokens since the last look, told only where there were enough of them, and noted where it is low; a restart is no news."""
    watch = watching("http://127.0.0.1:1/metrics")
    watch._take(Load(1, 0, accepted=5000, drafted=6000), 0, 2.0)
    assert "acceptance" not in watch.figures()
    watch._take(Load(1, 0, accepted=5000 + MIN_DRAFTED / 4, drafted=6000 + MIN_DRAFTED), 0, 2.0)
    assert watch.acceptance == 0.25
    assert "Draft fewer" in watch.figures()["note"]
    watch._take(Load(1, 0, accepted=0, drafted=0), 0, 2.0)
    assert watch.acceptance == 0.25
    watch._take(Load(1, 0, accepted=0.9 * MIN_DRAFTED, drafted=MIN_DRAFTED), 0, 2.0)
    assert watch.acceptance == pytest.approx(0.9)
    assert "note" not in watch.figures()


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"adapter": "vllm"}, "http://h:1/metrics"), ({"adapter": "llama_cpp", "url": "http://h:1/x/v1"}, "http://h:1/x/metrics"),
        ({"adapter": "openai"}, ""), ({"adapter": "triton"}, ""), ({"adapter": "triton", "metrics_url": "http://h:8002/metrics"}, "http://h:8002/metrics"),
        ({"adapter": "vllm", "metrics_url": "off"}, ""),
    ],
)  # fmt: skip
def test_where_metrics_are(fields: dict[str, Any], url: str) -> None:
    """Beside the API of engines that are known to have them; elsewhere where the settings say; nowhere where they are off."""
    assert Watch("a", EngineSettings.model_validate({"url": "http://h:1", "models": ["m"], **fields})).url == url


async def test_the_key_stays_with_its_engine() -> None:
    """Another host that serves metrics is not told the engine's key."""
    own = watching("http://127.0.0.1:8002/metrics", api_key="sesame")
    other = watching("http://elsewhere:8002/metrics", api_key="sesame")
    assert b"Bearer sesame" in own._request
    assert b"sesame" not in other._request


async def test_the_real_llama_cpp_tells_its_load(llama_url: str, llama_key: str) -> None:
    """The embedded engine's metrics are found and read."""
    watch = Watch("local", EngineSettings.model_validate({"adapter": "llama_cpp", "url": llama_url, "models": ["m"], "api_key": llama_key}))
    await watch.look(0, 2.0)
    assert watch.why == ""
    assert watch.load is not None
    assert watch.load.running is not None
    assert watch.load.waiting is not None
    await watch.close()
