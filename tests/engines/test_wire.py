"""The wire's own promises: sockets, TLS, names that do not resolve, replies that come in pieces."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tidegate.bench.scripted import Scripted, start
from tidegate.core.errors import EngineCut, EngineDown, EngineError
from tidegate.core.flight import Flight
from tidegate.engines.cause import cause_of
from tidegate.engines.openai_http import OpenAIHttp
from tidegate.engines.wire import Connection, Patience, Pool, Reply

from .conftest import Build, ask, until

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def raw_server(*pieces: bytes, close: bool = True) -> AsyncIterator[str]:
    """Answers each request with these pieces, one write each, then closes or waits."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for piece in pieces:
                    if writer.is_closing():  # uvloop's write would raise, and no ConnectionError
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if close:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def pool_of(url: str, **patience: float) -> AsyncIterator[Pool]:
    pool = Pool("The engine 'x'", url, Patience(**{"first_token_s": 2.0, "inter_token_s": 2.0, "total_s": 5.0, **patience}))
    try:
        yield pool
    finally:
        await pool.close()


async def body_of(reply: Reply) -> bytes:
    body = b""
    while True:
        body += b"".join(data for _, data in reply.take())
        if reply.error is not None:
            raise reply.error
        if reply.done:
            return body
        await reply.wait(2**62, "the rest")


async def test_nagle_is_off_on_both_sides(build: Build, server: Scripted) -> None:
    """TCP_NODELAY is read back from our socket and from the scripted engine's."""
    engine = build()
    await engine.whole(ask("##n=1##"), Flight("test"))
    (ours,) = engine.pool._all
    (theirs,) = server.connections
    for connection in (ours, theirs):
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


async def test_errors_of_connecting_are_told_apart(tmp_path: Path) -> None:
    """Refused, unknown host and time-out each say what they are."""
    with socket.socket() as taken:  # bound, not listening
        taken.bind(("127.0.0.1", 0))
        async with pool_of(f"http://127.0.0.1:{taken.getsockname()[1]}") as pool:
            with pytest.raises(EngineDown, match="refuses connections"):
                await pool.send(ASK, Flight("test"))
    async with pool_of("http://no-such-host.invalid:80") as pool:
        with pytest.raises(EngineDown, match="does not resolve"):
            await pool.send(ASK, Flight("test"))


async def test_a_gateway_without_room_for_a_connection_blames_itself() -> None:
    """Its limit of open files is reached: the error says so, and nothing is held against the engine."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), []
    async with pool_of("http://127.0.0.1:9") as pool:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[0], 512), limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(EngineDown, match="no room for one more connection to") as full:
                await pool.send(ASK, Flight("test"))
        finally:
            for one in held:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (cause_of(full.value), full.value.retry_after_s) == ("none", 1.0)
    assert "open files" in str(full.value.hint)


async def test_a_connection_that_is_never_accepted() -> None:
    """A host that does not answer the handshake is EngineDown after connect_s, and the time is the flight's `engine.connect`."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        fillers = []
        for _ in range(4):  # the queue of connections is full: the next handshake is dropped
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
            fillers.append(filler)
        flight = Flight("test")
        async with pool_of(f"http://127.0.0.1:{deaf.getsockname()[1]}", connect_s=0.1) as pool:
            with pytest.raises(EngineDown, match=r"within 0\.1 s"):
                await pool.send(ASK, flight)
        for filler in fillers:
            filler.close()
    assert [part for part, _ in flight.laps] == ["engine.connect"]


async def test_an_answer_in_single_bytes_without_length() -> None:
    """Head and body may come byte by byte, and a body without a length ends with the connection."""
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nconnection: close\r\n\r\nhello"
    async with raw_server(*(answer[i : i + 1] for i in range(len(answer)))) as url, pool_of(url) as pool:
        reply = await pool.send(ASK, Flight("test"))
        assert (reply.status, reply.headers[b"content-type"], await body_of(reply)) == (200, b"text/plain", b"hello")


async def test_an_interim_answer_is_skipped() -> None:
    """100 Continue is not the answer."""
    answer = b"HTTP/1.1 100 Continue\r\nx: y\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
    async with raw_server(*answer, close=False) as url, pool_of(url) as pool:
        for _ in range(2):
            reply = await pool.send(ASK, Flight("test"))
            assert (reply.status, await body_of(reply)) == (200, b"hi")
            assert b"x" not in reply.headers


async def test_a_length_that_is_not_kept() -> None:
    """Fewer bytes than announced are a cut."""
    async with raw_server(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhi") as url, pool_of(url) as pool:
        with pytest.raises(EngineCut):
            await body_of(await pool.send(ASK, Flight("test")))


async def test_more_than_was_asked_for() -> None:
    """Bytes behind an answer never become the next request's answer: the connection is closed."""
    two = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhiHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with raw_server(two, close=False) as url, pool_of(url) as pool:
        for _ in range(3):
            assert await body_of(await pool.send(ASK, Flight("test"))) == b"hi"
            await until(lambda: pool.open_connections == 0)


async def test_bytes_nobody_asked_for() -> None:
    """An idle connection on which the engine speaks is closed and not used."""
    late = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"
    async with raw_server(*late, close=False) as url, pool_of(url) as pool:
        assert await body_of(await pool.send(ASK, Flight("test"))) == b"hi"
        await until(lambda: pool.open_connections == 0)


async def test_an_engine_that_says_it_will_close_is_believed() -> None:
    """A connection that the engine announced to close is not used again, whether it closes or not."""
    farewell = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi"
    async with raw_server(farewell, close=False) as url, pool_of(url) as pool:
        assert await body_of(await pool.send(ASK, Flight("test"))) == b"hi"
        await until(lambda: pool.open_connections == 0)


async def test_no_http_at_all() -> None:
    """A server of another protocol is an EngineError that says so."""
    async with raw_server(b"SSH-2.0-OpenSSH_9.2\r\n") as url, pool_of(url) as pool:
        with pytest.raises(EngineError, match="does not speak HTTP"):
            await pool.send(ASK, Flight("test"))


async def test_an_old_idle_connection_is_not_used(server: Scripted) -> None:
    """A connection idle for longer than keepalive_s is replaced."""
    async with pool_of(server.url, keepalive_s=0.001) as pool:
        for _ in range(2):
            assert await body_of(await pool.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", Flight("test")))
            await asyncio.sleep(0.01)
    assert server.accepted == 2


async def test_a_connection_lost_before_its_first_request(server: Scripted) -> None:
    """A connection that dies between being made and being used fails at once, not after a time-out."""
    loop = asyncio.get_running_loop()
    async with pool_of(server.url) as pool:
        _, conn = await loop.create_connection(lambda: Connection(pool), server.host, server.port)
        await until(lambda: bool(server.connections))
        for connection in server.connections:
            connection.transport.abort()
        await until(lambda: conn.lost)
        assert isinstance(conn.send(ASK, loop, 1.0).error, EngineDown)


async def test_idle_connections_are_bounded(server: Scripted) -> None:
    """No more than max_idle connections are kept."""
    pool = Pool("The engine 'x'", server.url, Patience(), max_idle=2)
    get = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    replies = await asyncio.gather(*(pool.send(get, Flight("test")) for _ in range(8)))
    assert [reply.status for reply in replies] == [200] * 8
    await until(lambda: pool.open_connections == 2)
    await pool.close()


async def test_laps_of_a_failed_request(server: Scripted) -> None:
    """The time of a request that failed has an owner too."""
    flight = Flight("test")
    async with pool_of(server.url, first_token_s=0.05) as pool:
        body = b'{"messages": [{"role": "user", "content": "##m=hang##"}]}'
        with pytest.raises(EngineError):
            await pool.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body), flight)
    assert [part for part, _ in flight.laps] == ["engine.connect", "engine.send", "engine.first_byte"]
    assert flight.laps[-1][1] >= 50_000_000


# -- framing: every case in large reads and byte by byte

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
SIZED = OK + b"content-length: 2\r\n\r\nhi"


class Wire(asyncio.Transport):
    """A transport to nowhere that remembers how it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = ""

    def write(self, data: object) -> None:
        pass

    def is_closing(self) -> bool:
        return bool(self.ended)

    def abort(self) -> None:
        self.ended = self.ended or "aborted"

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def resume_reading(self) -> None:
        pass


async def fed(reads: list[bytes]) -> tuple[Reply, Wire]:
    """The reply after these reads and the end of the connection, where it is not over before."""
    pool, wire = Pool("The engine 'x'", "http://x:1", Patience()), Wire()
    conn = Connection(pool)
    conn.connection_made(wire)
    reply = conn.send(ASK, asyncio.get_running_loop(), 5.0)
    for read in reads:
        if not wire.ended:
            conn.data_received(read)
    conn.connection_lost(None)
    await pool.close()
    return reply, wire


async def both_ways(answer: bytes) -> AsyncIterator[tuple[Reply, Wire]]:
    for size in (10_000, 1):
        yield await fed([answer[at : at + size] for at in range(0, len(answer), size)])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (CHUNKED + b"FFFFFFFFFFFFFFFFF\r\nhi", "Chunk size overflow"),
        (CHUNKED + b"-1\r\nhi", "chunk size"),
        (CHUNKED + b"0x2\r\nhi\r\n0\r\n\r\n", "chunk size"),
        (CHUNKED + b"\r\nhi\r\n0\r\n\r\n", "chunk size"),
        (CHUNKED + b"2\r\nhijk\r\n0\r\n\r\n", "as it should"),
        (OK + b"content-length: 2\r\ncontent-length: 2\r\n\r\nhi", "Duplicate Content-Length"),
        (OK + b"content-length: 2\r\ncontent-length: 4\r\n\r\nhi", "Duplicate Content-Length"),
        (OK + b"content-length: 2, 2\r\n\r\nhi", "Content-Length"),
        (OK + b"content-length: -2\r\n\r\nhi", "Content-Length"),
        (OK + b"content-length: 99999999999999999999999\r\n\r\nhi", "Content-Length overflow"),
        (OK + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "Content-Length"),
        (OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "Content-Length"),
        (OK + b"x: a\0b\r\ncontent-length: 2\r\n\r\nhi", "header value"),
        (OK + b"x\0y: a\r\ncontent-length: 2\r\n\r\nhi", "header token"),
        (b"HTTP/1.1 200 OK\ncontent-length: 2\n\nhi", "as it should"),
        (b"HTTP/9.9 200 OK\r\ncontent-length: 2\r\n\r\nhi", "HTTP version"),
        (b"HTTP/1.1 2000 OK\r\ncontent-length: 2\r\n\r\nhi", "status"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nxx", "switches to another protocol"),
        (b"\x15\x03\x01\x00\x02\x02\x16", "Expected HTTP/"),  # TLS, by a server that expects it
        (b"\0\xff\xfe", "Expected HTTP/"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 5000, "head of more than"),
        (b"HTTP/1.1 103 Early Hints\r\n" + b"link: x\r\n" * 9000, "head of more than"),
        (CHUNKED + b"2;" + b"x" * 90_000, "head of more than"),
        (CHUNKED + b"2\r\nhi\r\n0\r\n" + b"x: y\r\n" * 20_000, "head of more than"),
    ],
)
async def test_broken_framing(answer: bytes, words: str) -> None:
    """What is no proper HTTP/1.1 is an error that says so, however it comes, and costs the connection."""
    async for reply, wire in both_ways(answer):
        assert isinstance(reply.error, EngineError)
        assert words in reply.error.message
        assert wire.ended == "aborted"


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (SIZED, True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + SIZED, True),
        (b"HTTP/1.1 103 Early Hints\r\ncontent-length: 4\r\n\r\n" + SIZED, True),
        (CHUNKED + b"2;a=b;c\r\nhi\r\n0\r\nx: y\r\n\r\n", True),
        (OK + b"upgrade: h2c\r\ncontent-length: 2\r\n\r\nhi", True),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", False),
        (OK + b"\r\nhi", True),
    ],
)
async def test_odd_but_proper_framing(answer: bytes, kept: bool) -> None:
    """Interim answers, chunk extensions and trailers are skipped; a body without a length ends with the connection."""
    async for reply, wire in both_ways(answer):
        assert (reply.error, reply.status, b"".join(data for _, data in reply.pieces)) == (None, 200, b"hi")
        assert bool(wire.ended) != kept


@pytest.mark.parametrize("size", [b"FFFFFFFFFFFFFFFF", b"40000000"])
async def test_a_size_that_is_only_announced(size: bytes) -> None:
    """A chunk of a gigabyte or of 2^64 bytes takes no room before it is there; what came before the end is given, the end is a cut."""
    async for reply, _ in both_ways(CHUNKED + size + b"\r\nhi"):
        assert b"".join(data for _, data in reply.pieces) == b"hi"
        assert isinstance(reply.error, EngineCut)


async def test_trailers_change_no_header() -> None:
    """What comes behind the body does not change how the body was to be read."""
    async for reply, _ in both_ways(CHUNKED + b"2\r\nhi\r\n0\r\ncontent-encoding: gzip\r\ncontent-type: x\r\n\r\n"):
        assert reply.done
        assert reply.headers == {b"transfer-encoding": b"chunked"}


async def test_compression_on_the_way_is_seen() -> None:
    """A transfer coding other than chunked is compression too, and is told as such."""
    async for reply, _ in both_ways(OK + b"transfer-encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"):
        assert reply.headers[b"content-encoding"] == b"gzip, chunked"


async def test_an_engine_that_closes_its_half() -> None:
    """An engine that ends its side in the middle of a body cuts the answer; behind a body without a length that is its end."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = await reader.readuntil(b"\r\n\r\n")
        writer.write((CHUNKED + b"2\r\nhi\r\n") if b"cut" in path else OK + b"\r\nhi")
        writer.write_eof()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with pool_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as pool:
        assert await body_of(await pool.send(ASK, Flight("test"))) == b"hi"
        with pytest.raises(EngineCut):
            await body_of(await pool.send(ASK.replace(b"/", b"/cut", 1), Flight("test")))
    server.close()
    await server.wait_closed()


async def read(engine: OpenAIHttp) -> None:
    await (await engine.start(ask(), Flight("test"))).relay(lambda batch: None)


async def test_an_engine_that_closes_after_the_head(build: Build) -> None:
    """A head without anything behind it is a cut, streamed and whole, not an empty answer."""
    for head in (CHUNKED, OK + b"content-length: 9\r\n\r\n"):
        for kind in (b"text/event-stream", b"application/json"):
            async with raw_server(head.replace(b"\r\n", b"\r\ncontent-type: %b\r\n" % kind, 1)) as url:
                engine = build(url=url)
                taken = engine.whole(ask(), Flight("test")) if kind == b"application/json" else read(engine)
                with pytest.raises(EngineCut):
                    await taken


async def test_one_timer_watches_all_answers(server: Scripted) -> None:
    """Each answer ends at its own time, the later ones too, and an idle pool keeps no timer going."""
    body = b'{"messages": [{"role": "user", "content": "##m=hang##"}]}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with pool_of(server.url) as pool:

        async def hang(seconds: float) -> float:
            began = asyncio.get_running_loop().time()
            with pytest.raises(EngineError):
                await pool.send(request, Flight("test"), first_token_s=seconds)
            return asyncio.get_running_loop().time() - began

        took = await asyncio.gather(hang(0.3), hang(0.1), hang(0.2))
        assert [round(seconds, 1) for seconds in sorted(took)] == sorted(round(seconds, 1) for seconds in took[1:] + took[:1])
        assert min(took) >= 0.09
        assert pool._timer is None


def certificate(folder: Path, host: str, *, days: tuple[int, int] = (-1, 1)) -> tuple[Path, Path]:
    """A self-signed certificate for a host, and its key; `days`: from when until when it is good, counted from now."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    try:
        subject: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        subject = x509.DNSName(host)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
        .not_valid_before(now + datetime.timedelta(days=days[0])).not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.SubjectAlternativeName([subject]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


@pytest.mark.parametrize(
    ("case", "words"), [("trusted", ""), ("unknown", "self-signed"), ("other host", "not valid for '127.0.0.1'"), ("expired", "expired")]
)
async def test_https(build: Build, tmp_path: Path, case: str, words: str) -> None:
    """https works with a CA of one's own; an unknown certificate, an old one or one for another host is EngineDown that says so."""
    host = "127.0.0.1" if case != "other host" else "elsewhere.invalid"
    cert, key = certificate(tmp_path, host, days=(-9, -1) if case == "expired" else (-1, 1))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server = await start(ssl=context)
    engine = build(url=f"https://127.0.0.1:{server.port}", ca_file=None if case == "unknown" else str(cert))
    try:
        if case == "trusted":
            for _ in range(2):
                stream = await engine.start(ask("##n=10,i=1##"), Flight("test"))
                assert sum([len(batch) async for batch in stream]) == 12
            assert server.accepted == 1
        else:
            with pytest.raises(EngineDown, match="TLS failed") as caught:
                await engine.whole(ask(), Flight("test"))
            assert words in caught.value.message
    finally:
        await engine.close()
        await server.close()


async def test_http_where_https_is_spoken_and_the_other_way_round(build: Build, tmp_path: Path, server: Scripted) -> None:
    """The wrong scheme in url is an error that points to url, both ways."""
    cert, key = certificate(tmp_path, "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    secure = await start(ssl=context)
    try:
        with pytest.raises(EngineError) as caught:
            await build(url=secure.url).whole(ask(), Flight("test"))
        assert "url" in (caught.value.hint or "") or isinstance(caught.value, EngineDown)
        with pytest.raises(EngineDown, match="TLS failed") as other:
            await build(url=server.url.replace("http:", "https:")).whole(ask(), Flight("test"))
        assert "url" in (other.value.hint or "")
    finally:
        await secure.close()


async def test_a_caller_that_leaves_while_it_connects_leaves_nothing(server: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the very turn in which the connection is made: the pool holds nothing, and the engine sees it closed."""
    made = Connection.connection_made
    task: asyncio.Task[Reply] | None = None

    def made_and_left(conn: Connection, transport: asyncio.BaseTransport) -> None:
        made(conn, transport)
        assert task is not None
        task.cancel()

    monkeypatch.setattr(Connection, "connection_made", made_and_left)
    async with pool_of(server.url) as pool:
        for _ in range(5):
            task = asyncio.get_running_loop().create_task(pool.send(ASK, Flight("x")))
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: pool.open_connections == 0 and not server.connections)
