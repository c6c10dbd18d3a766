"""PostgreSQL that is down, restarted, frozen, busy or without a schema: StoreDown with the way out, and healing by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psycopg
import pytest
import uvloop

from tidegate.core.errors import StoreDown
from tidegate.local.folder import DataFolder
from tidegate.local.postgres import Postgres as Server
from tidegate.local.settings import LocalSettings
from tidegate.stores.drain import Drain
from tidegate.stores.migrate import migrate
from tidegate.stores.settings import SpoolSettings, StoreSettings
from tidegate.stores.spool import Spool
from tidegate.stores.systems import postgres as system
from tidegate.stores.systems.postgres import Postgres

from .flights import a_flight, as_json


@pytest.fixture
async def server(data_home: Path) -> AsyncIterator[Server]:
    """A PostgreSQL of this test's own, with a schema, to stop and start."""
    folder = DataFolder(data_home / f"outage-{os.urandom(4).hex()}")
    folder.open(min_free_mb=0)
    server = Server(folder, LocalSettings(data=str(folder.path), postgres_shared_buffers_mb=16), fsync=False)
    await server.start()
    await asyncio.to_thread(migrate, server.dsn)
    yield server
    await server.stop()
    folder.close()


async def back(store: Postgres, within_s: float = 20) -> None:
    """Wait until the store answers again."""
    deadline_ns = time.perf_counter_ns() + int(within_s * 1e9)
    while not (await store.figures())["up"]:
        assert time.perf_counter_ns() < deadline_ns
        await asyncio.sleep(0.02)


async def test_a_restarted_database_is_not_noticed(server: Server) -> None:
    """Connections that died with the old server are replaced within the call: no error reaches the caller."""
    store = Postgres(StoreSettings(dsn=server.dsn, pool_min=4))
    await store.write_flights(as_json(a_flight(1)), [])
    await server.stop()
    await server.start()
    await store.write_flights(as_json(a_flight(2)), [])
    assert len(await store.list_flights()) == 2
    await store.close()


async def test_it_may_be_down_at_start_and_in_the_middle(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """Down: StoreDown that names the place and the way out, at once after the first. Back: everything works, and the log says both once."""
    await server.stop()
    caplog.clear()
    caplog.set_level("INFO", "tidegate.stores")
    store = Postgres(StoreSettings(dsn=server.dsn))
    with pytest.raises(StoreDown, match="cannot be reached") as caught:
        await store.list_flights()
    assert "running" in (caught.value.hint or "")
    began_ns = time.perf_counter_ns()
    store._look_again_ns = began_ns + 10**12
    for _ in range(100):
        with pytest.raises(StoreDown):
            await store.list_flights()
    store._look_again_ns = 0
    assert (await store.figures())["up"] is False
    await server.start()
    await back(store)
    await store.write_flights(as_json(a_flight()), [])
    said = [record.getMessage() for record in caplog.records if record.name == "tidegate.stores"]
    assert len(said) == 2
    assert "cannot be reached" in said[0]
    assert "is back" in said[1]
    await store.close()


async def test_flights_wait_on_disk_while_the_database_is_down(server: Server, tmp_path: Path) -> None:
    """The whole way: spool, drain, real database, killed and started in the middle; each flight arrives once."""
    store = Postgres(StoreSettings(dsn=server.dsn))
    spool = Spool(tmp_path, SpoolSettings(batch_wait_s=0.02, backoff_max_s=0.2))
    drain = asyncio.create_task(Drain(spool, store).run())
    flights = [a_flight(number) for number in range(60)]
    for number, flight in enumerate(flights):
        spool.finished(flight)
        if number == 20:
            await server.stop()
        if number == 40:
            await server.start()
        await asyncio.sleep(0.005)
    deadline_ns = time.perf_counter_ns() + 30 * 10**9
    while spool.figures()["records_waiting"]:
        assert time.perf_counter_ns() < deadline_ns
        await asyncio.sleep(0.02)
    drain.cancel()
    await asyncio.gather(drain, return_exceptions=True)
    assert await store.list_flights(limit=100) == flights[::-1]
    await store.close()


async def test_a_frozen_database_does_not_hold_its_caller_for_ever(server: Server) -> None:
    """A server that accepts but does not answer: StoreDown after the statement's time, and all is well when it wakes."""
    store = Postgres(StoreSettings(dsn=server.dsn, statement_timeout_s=0.1, pool_max=1))
    await store.list_flights()
    assert store._pool is not None
    async with store._pool.connection() as link:
        pid = link.info.backend_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(30):
            with pytest.raises(StoreDown):
                await store.list_flights()
    finally:
        os.kill(pid, signal.SIGCONT)
    await back(store)
    await store.close()


async def test_a_frozen_database_does_not_hold_a_caller_whose_time_is_over(server: Server) -> None:
    """A budget holds also where the server does not answer the request to stop the query; and all is well when it wakes."""
    store = Postgres(StoreSettings(dsn=server.dsn, pool_max=1))
    await store.list_flights()
    assert store._pool is not None
    async with store._pool.connection() as link:
        pid = link.info.backend_pid
    postmaster = server.child.pid if server.child is not None else None
    assert postmaster is not None
    for one in (postmaster, pid):
        os.kill(one, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.list_flights()
        assert store._abandoned, "the query has not come to its end: its caller did not wait for that"
    finally:
        for one in (postmaster, pid):
            os.kill(one, signal.SIGCONT)
    await back(store)
    await store.close()


async def test_a_statement_that_takes_too_long_is_stopped(clean_dsn: str) -> None:
    """By the database itself, so that it does not go on working for nobody."""
    store = Postgres(StoreSettings(dsn=clean_dsn, statement_timeout_s=0.1))
    with pytest.raises(StoreDown, match="too long"):
        await store._run(lambda link: link.execute("select pg_sleep(20)"))
    assert (await store.figures())["up"]
    await store.close()


async def test_a_busy_pool_is_not_a_database_that_is_down(clean_dsn: str) -> None:
    """The error says that all connections are busy; the next call works as soon as one is free."""
    store = Postgres(StoreSettings(dsn=clean_dsn, pool_max=1, connect_timeout_s=1))
    held, release = asyncio.Event(), asyncio.Event()

    async def hold(link: system.Link) -> None:
        held.set()
        await release.wait()

    holder = asyncio.create_task(store._run(hold))
    await held.wait()
    with pytest.raises(StoreDown, match="busy"):
        await store.list_flights()
    release.set()
    await holder
    assert await store.list_flights() == []
    await store.close()


async def test_a_missing_schema_says_to_migrate(empty_dsn: str) -> None:
    """For reads, writes and vectors; and the store works as soon as somebody migrated."""
    store = Postgres(StoreSettings(dsn=empty_dsn))
    for call in (store.list_keys(), store.write_flights(as_json(a_flight()), []), store.search("c", np.ones(384, np.float32), 1)):
        with pytest.raises(StoreDown) as caught:
            await call
        assert "tidegate migrate" in (caught.value.hint or "")
    await asyncio.to_thread(migrate, empty_dsn)
    assert await store.list_keys() == []
    await store.close()


async def test_a_cancelled_call_leaves_a_working_pool(clean_dsn: str) -> None:
    """Many cancelled calls use up no connection."""
    store = Postgres(StoreSettings(dsn=clean_dsn, pool_max=2))
    for _ in range(10):
        task = asyncio.create_task(store._run(lambda link: link.execute("select pg_sleep(20)")))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await store.list_flights() == []
    await store.close()


async def test_searches_see_the_old_document_until_the_new_one_is_whole(clean_dsn: str, postgres: Postgres) -> None:
    """While another transaction holds the last step back, readers find the old passages, all of them."""
    from tidegate.core.document import Document, NewPassage

    document = Document(collection="c", source="a", title="A", sha256="1")
    vectors = np.eye(384, dtype=np.float32)[:3]
    await postgres.replace_document(document, [NewPassage(text) for text in "abc"], vectors)
    async with await psycopg.AsyncConnection.connect(clean_dsn) as blocker:
        await blocker.execute("select * from tidegate.collections for update")  # the writer's last step waits for this
        writer = asyncio.create_task(postgres.replace_document(document, [NewPassage(text) for text in "xyz"], vectors))
        waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
        async with await psycopg.AsyncConnection.connect(clean_dsn, autocommit=True) as watcher:
            deadline_ns = time.perf_counter_ns() + 10 * 10**9
            while await (await watcher.execute(waiting)).fetchone() == (0,):
                assert time.perf_counter_ns() < deadline_ns
        assert {passage.text for passage in (await postgres.search("c", vectors[0], 9)).passages} == set("abc")
        await blocker.rollback()
    await writer
    assert {passage.text for passage in (await postgres.search("c", vectors[0], 9)).passages} == set("xyz")


def test_it_works_on_uvloop(clean_dsn: str) -> None:
    """The loop that the gateway runs on."""

    async def use() -> None:
        store = Postgres(StoreSettings(dsn=clean_dsn))
        await store.write_flights(as_json(a_flight()), [])
        assert len(await store.list_flights()) == 1
        await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())
