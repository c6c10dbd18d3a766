"""`tidegate up`: starts every part on this machine, shows where they are, keeps them running, and stops them in order.

    folder and lock -> left-overs of a killed run -> listening socket
      -> database, migrations, first key | engine | embedder    (at the same time)
      -> gateway | examples                                     (at the same time)
      -> table -> watch until SIGINT, SIGTERM or SIGHUP -> gateway, engine, embedder, database stop

The supervisor is not on the path of any request. It is killed? The kernel tells every child (see leash.py), and the next start waits for
the last of them before it begins.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Iterator

from tidegate.core.errors import TidegateError
from tidegate.local.board import Board, Row
from tidegate.local.child import Child, ChildSpec
from tidegate.local.embedder import LocalEmbedder
from tidegate.local.engine import LocalEngine
from tidegate.local.folder import DataFolder, explained
from tidegate.local.listener import listen, reachable, url_of
from tidegate.local.logfile import LogFile
from tidegate.local.plan import Note, Running, UpPlan
from tidegate.local.postgres import Postgres
from tidegate.local.probe import http_answers
from tidegate.local.process import stop_leftovers
from tidegate.local.slices import cores_left, environment_left, on, take

NAME = "gateway"
_TRIM_LOGS_EVERY_S = 5.0
_UNKNOWN_KEY = "$TIDEGATE_KEY"


async def up(plan: UpPlan, board: Board | None = None) -> int:
    """Run until a signal says stop; 0 after an orderly stop, 1 where a part would not go.

    Must be called in the main thread. Raises TidegateError (mostly LocalPartError) where the start fails; nothing runs then.
    """
    return await _Supervisor(plan, board or Board()).run()


class _Supervisor:
    def __init__(self, plan: UpPlan, board: Board) -> None:
        self._plan = plan
        self._board = board
        self._began_ns = time.perf_counter_ns()
        self._folder = DataFolder(plan.settings.folder)
        self._postgres: Postgres | None = None
        self._engine: LocalEngine | None = None
        self._small: LocalEngine | None = None
        self._own: dict[str, LocalEngine] = {}
        self._usable = frozenset(os.sched_getaffinity(0))
        self._embedder: LocalEmbedder | None = None
        self._gateway: Child | None = None
        self._listener: socket.socket | None = None
        self._key: str | None = None
        self._signalled = self._ending = False
        self._hasten = asyncio.Event()

    async def run(self) -> int:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, task)
        try:
            await self._start()
            self._show()
            await self._watch()
        except asyncio.CancelledError:
            if not self._signalled:
                raise
        except BaseExceptionGroup as group:
            with explained(self._folder.path):
                raise _first_of(group) from group
        finally:
            self._ending = True
            gone = await self._stop()
        return 0 if gone else 1

    def _on_signal(self, task: asyncio.Task[object]) -> None:
        """The first signal ends whatever goes on; the next ones hasten the end."""
        if self._signalled or self._ending:
            self._hasten.set()
            return
        self._signalled = True
        task.cancel()

    async def _start(self) -> None:
        plan = self._plan
        self._folder.open(plan.settings.min_free_disk_mb)
        with self._board.shown(), explained(self._folder.path):
            await stop_leftovers(self._folder.run)
            self._listener = listen(plan.host, plan.port, by_hand=plan.port_by_hand)
            if plan.slices:  # before anything starts: children run where their parent does
                take(cores_left(plan.slices, self._usable))
            env = environment_left(plan.slices, os.environ)
            # What is not installed is said before anything starts.
            self._engine = LocalEngine(self._folder, plan.settings, env=env) if plan.settings.engine else None
            self._small = LocalEngine(self._folder, plan.settings, small=True, env=env) if plan.settings.small_engine else None
            self._own = {own.name: LocalEngine(self._folder, plan.settings, own=own) for own in plan.slices}
            self._embedder = LocalEmbedder(self._folder, plan.settings, plan.embedder) if plan.settings.embedder else None
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._start_database())
                for part in (self._engine, self._small, *self._own.values(), self._embedder):
                    if part is not None:
                        parts.create_task(self._start_child(part.child))
            async with asyncio.TaskGroup() as parts:
                self._gateway = Child(self._gateway_spec(self._listener))
                parts.create_task(self._start_child(self._gateway))
                parts.create_task(self._load_examples())

    async def _start_database(self) -> None:
        plan = self._plan
        if plan.settings.postgres:
            with self._board.step("database") as row:
                self._postgres = Postgres(self._folder, plan.settings)
                await self._postgres.start(_note(row))
        with self._board.step("migrations") as row:
            await plan.migrate(self._running(), _note(row))
        self._key = await plan.first_key(self._running(), lambda _: None)

    async def _start_child(self, child: Child) -> None:
        with self._board.step(child.spec.name):
            await child.start()

    async def _load_examples(self) -> None:
        with self._board.step("examples") as row:
            row.note = "loading"
            await self._plan.examples(self._running(), _note(row))

    def _running(self) -> Running:
        return Running(
            data=self._folder.path, dsn=self._postgres.dsn if self._postgres else None,
            engine=self._engine.address if self._engine else None, embedder=self._embedder.socket if self._embedder else None,
            small=self._small.address if self._small else None, own={name: engine.address for name, engine in self._own.items()},
        )

    def _gateway_spec(self, listener: socket.socket) -> ChildSpec:
        settings = self._plan.settings
        command = self._plan.gateway(self._running(), listener.fileno())
        host, port = reachable(listener)

        async def answers() -> bool:
            return await http_answers(host, port, self._plan.health_path)

        return ChildSpec(
            name=NAME, argv=command.argv, env={**os.environ, **command.env}, pass_fds=(listener.fileno(),), ready=answers,
            log=LogFile(self._folder.log / "gateway.log", settings.log_max_mb * 1_000_000), pid_file=self._folder.run / "gateway.pid",
            # Told to end when we are killed, not killed with us: running answers still get their end and their record.
            death_signal=signal.SIGTERM, stop_steps=((signal.SIGTERM, settings.drain_s + 5.0), (signal.SIGKILL, 5.0)),
        )

    def _show(self) -> None:
        assert self._listener is not None
        url, running, say = url_of(self._listener), self._running(), self._board.say
        took_s = (time.perf_counter_ns() - self._began_ns) / 1e9
        if self._plan.port and url.rpartition(":")[2] != str(self._plan.port):
            say(f"Port {self._plan.port} is taken by another program; serving on {url.rpartition(':')[2]} instead.")
        say(f"\nTidegate is up after {took_s:.1f} s. Ctrl-C stops everything.\n")
        rows = [("page", self._plan.page(url, running)), ("API", f"{url}/v1")]
        engines = [address for address in (running.engine, running.small) if address]
        rows += [("engine", f"{one.url}  {one.model}, {one.slots} slots of {one.context} tokens") for one in engines]
        rows += [("engine", f"{running.own[own.name].url}  for the tenant {own.tenant} alone, on {on(own)}") for own in self._plan.slices]
        if running.embedder:
            rows.append(("embedder", str(running.embedder)))
        if running.dsn:
            rows.append(("database", running.dsn))
        rows.append(("data", f"{running.data}  (logs in {self._folder.log})"))
        rows.append(("key", self._key or "made at an earlier start; another one: tidegate keys create"))
        for name, value in rows:
            say(f"  {name:<9} {value}")
        say(f"\n{self._plan.curl(url, self._key or _UNKNOWN_KEY, running)}\n")

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as keeping:
            for child in self._children():
                keeping.create_task(child.keep(self._board.say))
            keeping.create_task(self._trim_logs())

    async def _trim_logs(self) -> None:
        while True:
            for child in self._children():
                child.spec.log.trim()
            await asyncio.sleep(_TRIM_LOGS_EVERY_S)

    def _children(self) -> list[Child]:
        """In the order in which they are stopped: nobody loses what it stands on."""
        holders = (self._engine, self._small, *self._own.values(), self._embedder, self._postgres)
        children = [self._gateway, *(holder.child for holder in holders if holder is not None)]
        return [child for child in children if child is not None]

    async def _stop(self) -> bool:
        if self._listener is not None:
            self._listener.close()  # the gateway's own copy is the last: when that closes, callers are refused and not kept waiting
        gone = True
        for child in self._children():
            if child.pid is None:
                continue
            self._board.say(f"stopping {child.spec.name}")
            # The database alone is not hastened: its fast stop is quick, and the next step would cost a recovery.
            if not await child.stop(None if self._postgres and child is self._postgres.child else self._hasten):
                gone = False
                self._board.say(f"{child.spec.name} (pid {child.pid}) does not stop.")
        if self._postgres is not None:
            await self._postgres.stop()
        for engine in (self._engine, self._small, *self._own.values()):
            if engine is not None:
                engine.release()
        if self._plan.slices:
            take(self._usable)
        self._folder.close()
        if self._signalled and gone:
            self._board.say("Everything is stopped.")
        return gone


def _note(row: Row) -> Note:
    def note(text: str) -> None:
        row.note = text

    return note


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: ours where there is one, for it says what to do."""
    errors = list(_leaves(group))
    return next((error for error in errors if isinstance(error, TidegateError)), errors[0])


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
