"""Builds the rooms and hands each what it needs: the only place that knows everybody."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tidegate import __version__
from tidegate.admission import pool
from tidegate.admission.gate import Gate, Lane
from tidegate.admission.leases import Leases
from tidegate.admission.limits import Limits
from tidegate.admission.plan import money_is_limited
from tidegate.admission.prices import Prices
from tidegate.admission.shared import SharedBook
from tidegate.api.auth import KeyRing
from tidegate.api.capabilities import CapabilityRoute
from tidegate.api.connection import MAX_HEAD_BYTES
from tidegate.api.control import ControlDeps, create_control
from tidegate.api.exchange import House
from tidegate.api.leave import STREAMS, streams_route
from tidegate.api.openai import EmbeddingRoute, GenerationRoute, models_route
from tidegate.api.page.deps import CapabilityView, PageDeps
from tidegate.api.page.routes import Page
from tidegate.api.page.tokens import TokenFolder
from tidegate.api.peers import Peers
from tidegate.api.server import Door, Route, listening_socket
from tidegate.api.server import serve as serve_door
from tidegate.api.settings import StreamSettings
from tidegate.api.whereabouts import Whereabouts
from tidegate.core import plugins
from tidegate.core.ask import Caller
from tidegate.core.errors import SettingsError, TidegateError
from tidegate.core.memory import Shared as Memory
from tidegate.core.ports import Embedder, FlightSink, KeyStore
from tidegate.core.search import Filter, IndexProgress
from tidegate.engines.counting import Counter
from tidegate.engines.fleet import Fleet
from tidegate.engines.homes import PLACES
from tidegate.engines.ledger import clear as clear_worker
from tidegate.engines.ledger import words_for
from tidegate.engines.member import Member
from tidegate.engines.settings import EngineSettings
from tidegate.guard.settings import DoorSettings
from tidegate.local.child import Child
from tidegate.local.embedder import LocalEmbedder
from tidegate.local.folder import DataFolder, explained, own_folder, take_lock
from tidegate.local.listener import url_of
from tidegate.local.workers import Workers
from tidegate.pipeline.capability import Capability, load_all
from tidegate.pipeline.control import Ban, Control
from tidegate.pipeline.entrance import Entrance, settings_of, v1_door
from tidegate.pipeline.ladder import Ladder
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.retry import WORDS as BUDGET_WORDS
from tidegate.pipeline.retry import Retries
from tidegate.pipeline.stages.fit import fit
from tidegate.pipeline.stages.generate import DEFAULT, GenerateStage
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.retrieval.ingest import IngestReport, Progress
from tidegate.retrieval.ingest import ingest as ingest_paths
from tidegate.retrieval.search import Search
from tidegate.retrieval.structure import Rules
from tidegate.settings import Settings
from tidegate.stores.drain import Drain
from tidegate.stores.migrate import migrate
from tidegate.stores.seal import Seal
from tidegate.stores.spool import Spool
from tidegate.stores.systems.postgres import Postgres
from tidegate.stores.systems.valkey import Valkey
from tidegate.telemetry.exposition import CONTENT_TYPE, Exposition
from tidegate.telemetry.health import health as judge_health
from tidegate.telemetry.health import process_figures
from tidegate.telemetry.log import FlightLog, configure
from tidegate.telemetry.metrics import Metrics
from tidegate.telemetry.recent import RecentFlights
from tidegate.telemetry.workers import Counts, Shared, clear

log = logging.getLogger(__name__)

_LAST_DRAIN_S = 5.0
_MOST_FILES = 65_536
_SWITCH_S = 0.0005
#: Names of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_FIGURES_KEPT_NS = 500_000_000
#: Seconds between two looks at the slots that workers share.
_SLOTS_S = 0.05
_BREAKER = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
PARTS = "run/parts.json"
#: Engines that their operator drains, below the data folder: for all workers.
ORDERS = "run/drained.json"
#: Where workers tell each other what they counted, below the data folder.
WORKERS = "run/workers"


@dataclass(frozen=True, slots=True)
class Common:
    """What the workers of a machine share: made before the fork."""

    book: SharedBook
    whereabouts: Whereabouts
    #: Budgets of new plans (see pipeline/retry.py), slots of each lane, and what is known of each engine.
    budgets: Memory
    slots: Memory
    fleet: Memory
    homes: Memory
    engines: int
    tenants: int

    @classmethod
    def of(cls, settings: Settings) -> Common:
        """Raises SettingsError where this system has no such memory, and where workers cannot share the slots of a model."""
        _need_slots(settings)
        workers, engines = settings.server.workers, len(settings.engines)
        tenants = sum(1 for one in settings.tenants.values() if one.slots)
        return cls(
            SharedBook(settings.limits.most_subjects, workers), Whereabouts(workers, _of_one(settings.streams, workers).replay_streams),
            Memory(BUDGET_WORDS, workers), Memory(pool.words_for(_most_lanes(settings), workers), workers),
            Memory(words_for(engines, workers, tenants), workers), Memory(PLACES * max(1, _most_lanes(settings)), workers), engines, tenants,
        )

    def join(self, worker: int) -> None:
        """This process is the worker with this number, from now on."""
        self.book.join(worker)
        self.whereabouts.join(worker)
        self.budgets.join(worker)
        self.slots.join(worker)
        self.fleet.join(worker)
        self.homes.join(worker)

    def reclaim(self, worker: int) -> None:
        """The worker with this number is dead: what it held comes back."""
        self.whereabouts.clear(worker)
        clear_worker(self.fleet, self.engines, worker, self.tenants)
        pool.clear(self.slots, worker)
        self.book.reclaim(worker)


def _most_lanes(settings: Settings) -> int:
    """Lanes that the gate may have: for each model one of all, and one of each tenant that is kept apart."""
    models = {model for one in settings.engines.values() for model in one.model_names}
    return len(models) * (1 + sum(one.apart is not None for one in settings.tenants.values()))


def _need_slots(settings: Settings) -> None:
    """Each worker has a share of the slots of each lane, and nobody can have less than one. What the settings say counts, not which engines can be
    asked now: a worker that begins while an engine is away serves all the same."""
    workers = settings.server.workers
    apart = {name: own for name, one in settings.tenants.items() if (own := one.apart) is not None}
    owners = {instance: name for name, own in apart.items() for instance in own.instances}
    lanes: dict[tuple[str, str], list[EngineSettings]] = {}
    for name, section in settings.engines.items():
        for model in section.model_names:
            lanes.setdefault((owners.get(name, ""), model), []).append(section)
    for (owner, model), sections in lanes.items():
        counted = [one for one in sections if one.role != "fallback"] or sections
        slots = [one.slots for one in counted]
        if not all(slots) or (not owner and sum(own.slots for own in apart.values()) >= min(slots)):
            continue  # no bound; or more is kept than there is, which the fleet refuses by name
        kept = {} if owner else {tenant: sum(min(own.slots, most) for most in slots) for tenant, own in apart.items() if own.slots}
        for tenant, own_slots in kept.items():
            if own_slots < workers:
                raise SettingsError(
                    f"{own_slots} slots for {model!r} are those of the tenant {tenant!r}, fewer than the {workers} workers that share them.",
                    hint=f"Raise tenants.{tenant}.slots, or lower server.workers.",
                )
        if (left := sum(slots) - sum(kept.values())) < workers:
            whose, others = f"of the tenant {owner!r} " if owner else "", " for all other tenants" if kept else ""
            raise SettingsError(
                f"The engines {whose}that serve {model!r} have {left} slots{others}, fewer than the {workers} workers that share them.",
                hint="Lower server.workers, or raise the engines' slots where they have more.",
            )


def _of_one(streams: StreamSettings, workers: int) -> StreamSettings:
    """One worker's share of what all kept streams together may take."""
    if workers == 1:
        return streams
    return streams.model_copy(update={
        "replay_streams": max(1, streams.replay_streams // workers), "replay_total_bytes": max(16_384, streams.replay_total_bytes // workers),
    })


class Gateway:
    """The rooms of one gateway process, wired. `start`, serve `door`, `stop`."""

    def __init__(self, settings: Settings, embedder: Embedder | None = None, *, index: int = 0, common: Common | None = None) -> None:
        """`index`: which of the workers this is; `common`: what they share.

        Raises SettingsError for whatever a request should not be the first to find out."""
        if not settings.store.dsn:
            raise SettingsError(
                "There is no database: store.dsn is empty.", hint="Set store.dsn (postgres://...), or use `tidegate up`, which brings its own."
            )
        self.settings = settings
        data = settings.local.folder
        with explained(data):
            own_folder(data, 0o700)
        self.store = Postgres(settings.store)
        if nowhere := [name for name, one in settings.tenants.items() if one.isolation == "device" and not one.instances]:
            raise SettingsError(
                f"[tenants.{nowhere[0]}] is to have an engine on a device of its own, but the gateway alone starts no engines.",
                hint=f"`tidegate up` starts it. Or start one there yourself, and name it in tenants.{nowhere[0]}.instances.",
            )
        apart = {name: own for name, one in settings.tenants.items() if (own := one.apart) is not None}
        shared = {"memory": common.fleet, "homes": common.homes} if common is not None else {}
        self.fleet = Fleet(settings.engines, settings.fleet, orders=data / ORDERS, tenants=apart, **shared)
        self.capabilities = load_all(settings.capabilities.folders, settings.budgets)
        self.embedder = embedder
        self.limits = self._build_limits(common.book if common is not None else None)
        self.seal = Seal(data / "secret")
        self.spool = Spool(Path(settings.spool.folder) if settings.spool.folder else data / "spool", settings.spool)
        self.drain = Drain(self.spool, self.store)
        self.recent = RecentFlights(settings.log.recent_flights)
        self.metrics = Metrics(capabilities=self.capabilities, models=self.fleet.models())
        self.flight_log = FlightLog(settings.log.flights)
        self.keys = KeyRing(
            self.store, settings.tenants, refresh_s=settings.server.keys_refresh_s, snapshot=data / "keys.msgpack"
        )
        sinks: list[FlightSink] = [self.spool, self.metrics, self.recent, self.flight_log]
        self.shared = self._share_counts() if settings.server.workers > 1 else None
        if self.shared is not None:
            sinks.append(self.shared)
        self._common = common
        self._pools: dict[tuple[str, str], tuple[pool.Pool, Lane]] = {}
        self._retries = Retries(settings.generation, common.budgets if common is not None else None)
        self.gate = Gate(settings.admission, settings.classes)
        self._open_lanes()
        self.peers = Peers(self._sockets(), index, settings.server.max_body_bytes + 2 * MAX_HEAD_BYTES) if common is not None else None
        self.house = House(
            self.keys, sinks, self.seal.derive("page sessions"), self.seal.seal, settings.server.max_body_bytes, settings.server.deadline_s,
            _of_one(settings.streams, settings.server.workers), settings.server.head_wait_s, settings.server.keepalive_s, self.gate, self.peers,
            common.whereabouts if common is not None else None,
        )
        self._figures: dict[str, Any] = {}
        self._figures_ns = 0
        self._figures_lock = asyncio.Lock()
        self.exposition = Exposition(self.shared.sum if self.shared else lambda: self.metrics, self._readers())
        self.door = self._build_door()
        self.metrics.know_routes(self.door.paths)
        self._tasks: list[asyncio.Task[None]] = []

    def _share_counts(self) -> Shared:
        folder = self.settings.local.folder / WORKERS
        try:
            return Shared(folder, self.metrics, self._own_counts)
        except OSError as error:
            raise SettingsError(
                f"Workers cannot share what they count in {folder}: {error.strerror or error}.",
                hint="Make room on the disk, or set local.data to another folder.",
            ) from None

    def _open_lanes(self) -> None:
        """The lanes of each model, those of tenants with slots or engines of their own apart."""
        for number, (tenant, models) in enumerate(self.fleet.lanes()):
            slots = self.fleet.slots(models[0], tenant)
            own = self.fleet.tenants.get(tenant)
            shared = pool.Pool(self._common.slots, number) if self._common is not None else None
            lane = self.gate.open(models, shared.resize(slots, None) if shared is not None else slots, tenant, lends=own is not None and own.lend)
            lane.engines = sum(models[0] in member.models for member in self.fleet.members.values()) or 1
            if shared is not None:
                self._pools |= {(model, tenant): (shared, lane) for model in models}
        self.gate.alias(DEFAULT, self.fleet.default)
        self.fleet.on_change = self._resize

    def _resize(self, model: str, slots: int, tenant: str) -> None:
        if (found := self._pools.get((model, tenant))) is not None:
            slots = found[0].resize(slots, found[1])
        self.gate.resize(model, slots, tenant)

    async def _keep_slots(self) -> None:
        """Give other workers the slots that are idle here, and take those that are idle there. Runs until cancelled."""
        while True:
            await asyncio.sleep(_SLOTS_S)
            for (model, tenant), (shared, lane) in self._pools.items():
                before, claimed, slots = shared.held, lane.claimed, shared.settle(lane)
                if (slots, lane.claimed) != (before, claimed):
                    self.gate.resize(model, slots, tenant)

    def _sockets(self) -> Path:
        """The folder of the sockets by which workers reach each other: ours alone."""
        folder = DataFolder(self.settings.local.folder)
        own_folder(folder.run, 0o700)
        return folder.sockets()

    def _build_limits(self, book: SharedBook | None) -> Limits:
        """Raises SettingsError for limits of what is not there, and for money that nobody could count."""
        settings = self.settings
        for path in settings.limits.capabilities:
            if path not in self.capabilities:
                raise SettingsError(
                    f"[limits.capabilities] limits {path!r}, but there is no such capability.", hint=plugins.nearest(path, self.capabilities)
                )
        prices = Prices(settings.prices, [self.embedder.model] if self.embedder is not None else [])
        if money_is_limited(settings.limits):
            prices.need(self.fleet.models())
        leases = Leases(Valkey(settings.valkey), settings.limits.when_lost, settings.limits.machines) if settings.valkey.url else None
        limits = Limits(settings.limits, prices=prices, book=book, leases=leases)
        limits.unpriced = next(iter(prices.missing(self.fleet.models())), "")
        return limits

    async def start(self) -> None:
        """Begin with the keys of the last run, then keep keys fresh and bring flights to the database."""
        self.keys.load_snapshot()
        await self.keys.refresh()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(work) for work in (self.keys.keep_fresh(), self.drain.run(), self.house.keep_time(), self.fleet.watch())
        ]
        self._tasks.append(loop.create_task(self.limits.keep()))
        if self.shared is not None:
            self._tasks.append(loop.create_task(self.shared.keep_telling()))
        if self._pools:
            self._tasks.append(loop.create_task(self._keep_slots()))
        if self.peers is not None:
            self.peers.listen()
            self._tasks.append(loop.create_task(self.peers.serve()))

    def stopping(self) -> None:
        """The stop begins: what would hold it open for the whole grace time ends now."""
        self.page.close()
        self.house.kept.stopping = True
        if self.peers is not None:
            self.peers.adopt = None  # streams that are kept end

    async def stop(self) -> None:
        """Bring what is spooled to the database, within a bound; what is left is drained by the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.limits.close()
        await self.drain.drain_now(_LAST_DRAIN_S)
        self.spool.close()
        if self.shared is not None:
            self.shared.tell()
        await self.fleet.close()
        await self.store.close()

    # -- wiring

    def _build_door(self) -> Door:
        settings = self.settings
        limits = self.limits
        search = Search(self.embedder, self.store, settings.retrieval) if self.embedder is not None else None
        ban, generation = Ban.of(settings.guard), settings.generation
        parts = Parts(
            self.fleet, search, ban, generation.max_resumes, generation.resume_wait_s, self._retries, Counter(settings.engines), self.gate
        )
        fitting = fit(parts, settings.length) if settings.length.policy != "off" else None
        watching = Control(ban.terms, on_term=ban.on_term, max_step_backs=ban.max_step_backs)
        generate = GenerateStage(
            self.fleet, control=watching, max_resumes=generation.max_resumes, resume_wait_s=generation.resume_wait_s, retries=parts.retries,
            gate=self.gate,
        )
        at_v1, unread = v1_door(settings.door)
        hot: dict[str, Route] = {
            "/v1/chat/completions": GenerationRoute("chat", limits, generate, at_v1, fitting),
            "/v1/completions": GenerationRoute("completion", limits, generate, at_v1, fitting),
            "/v1/embeddings": EmbeddingRoute(limits, self.embedder, unread),
            "/v1/models": models_route(self.fleet),
            STREAMS: streams_route,
        }
        capabilities: dict[str, Route] = {
            path: _capability_route(capability, parts, limits, settings.door) for path, capability in self.capabilities.items()
        }
        control = create_control(ControlDeps(
            self.keys, self.store, self.recent, self.store, self.health, self._metrics, self.capabilities, self.seal.open, self.house.secret,
            self.fleet.figures, self.fleet.drain,
        ))
        self.page = Page(PageDeps(
            callers=self.keys, live=self.recent, flights=self.store, health=self.health, capabilities=self._capability_views,
            secret=self.house.secret, one_time_tokens=TokenFolder(settings.local.folder / "run" / "links"), current=self._current,
            version=__version__,
        ))
        control.include_router(self.page.router)
        return Door(self.house, hot, capabilities, control)

    def _capability_views(self) -> list[CapabilityView]:
        return [
            CapabilityView(item.path, item.manifest.description, item.input_schema, item.streams) for item in self.capabilities.values()
        ]

    def _current(self, caller: Caller) -> Caller | None:
        return self.keys.by_id(caller.key_id)

    # -- figures

    async def health(self) -> dict[str, Any]:
        """The /health document; the rooms are asked at most twice a second, however often it is read."""
        figures = await self._ask_rooms()
        return judge_health(figures, self.recent.recent(None, self.settings.log.recent_flights), time.time_ns(), self.settings.log.recent_flights)

    async def _ask_rooms(self) -> dict[str, Any]:
        async with self._figures_lock:
            now_ns = time.perf_counter_ns()
            if self._figures and now_ns - self._figures_ns < _FIGURES_KEPT_NS:
                return {**self._figures, "requests_in_flight": self._counts().in_flight}
            engines, of_fleet = self.fleet.engines, self.fleet.figures()
            database, embedder, *told = await asyncio.gather(
                self.store.figures(), self._embedder_figures(), *(engine.figures() for engine in engines)
            )
            self._figures = {
                "version": __version__, "process": process_figures(), "database": database, "embedder": embedder,
                "engines": {engine.name: figures | of_fleet[engine.name] for engine, figures in zip(engines, told, strict=True)},
                "budgets": {**self.settings.budgets.model_dump(), "forecast_s": self.settings.admission.forecast_s},
                "admission": self.gate.figures(), "spool": self.spool.figures(),
                "limits": self.limits.figures(), "capabilities": sorted(self.capabilities),
            }
            self._figures_ns = time.perf_counter_ns()
        return {**self._figures, "requests_in_flight": self._counts().in_flight}

    async def _embedder_figures(self) -> dict[str, Any] | None:
        if not isinstance(self.embedder, EmbedderClient):
            return None
        return await self.embedder.figures()

    async def _metrics(self) -> tuple[bytes, str]:
        await self._ask_rooms()
        return self.exposition.render(), CONTENT_TYPE

    def _own_counts(self) -> Counts:
        return Counts(len(self.house.running), self.spool.lost, self.flight_log.dropped, self.gate.counts())

    def _counts(self) -> Counts:
        """Of all workers."""
        return self.shared.counts() if self.shared is not None else self._own_counts()

    def _readers(self) -> dict[str, Callable[[], Any]]:
        def spool(name: str) -> Callable[[], float]:
            return lambda: float(self.spool.figures().get(name, 0))

        def up(part: str) -> Callable[[], float]:
            return lambda: float(bool((self._figures.get(part) or {}).get("up")))

        def of_members(figure: Callable[[Member], float | None]) -> Callable[[], dict[str, float]]:
            return lambda: {name: float(said) for name, member in self.fleet.members.items() if (said := figure(member)) is not None}

        def lanes(which: int) -> Callable[[], dict[str, float]]:
            return lambda: {model: float(figures[which]) for model, figures in self._counts().lanes.items()}

        return {
            **{f"tidegate_admission_{what}": lanes(which) for which, what in enumerate(("slots", "running", "waiting", "booked"))},
            "tidegate_requests_in_flight": lambda: float(self._counts().in_flight),
            "tidegate_spool_bytes": spool("bytes"),
            "tidegate_spool_max_bytes": spool("max_bytes"),
            "tidegate_spool_lost_total": lambda: float(self._counts().spool_lost),
            "tidegate_database_up": up("database"),
            "tidegate_embedder_up": up("embedder"),
            "tidegate_engine_up": lambda: {name: float(bool(told.get("up"))) for name, told in self._figures.get("engines", {}).items()},
            "tidegate_engine_admitted": of_members(lambda member: member.admitted),
            "tidegate_engine_requests": of_members(lambda member: member.under_way()[0]),
            "tidegate_engine_tokens_in_flight": of_members(lambda member: member.under_way()[1] if member.counts else None),
            "tidegate_engine_breaker": of_members(lambda member: _BREAKER[member.breaker.state]),
            "tidegate_engine_drained": of_members(lambda member: member.drained),
            "tidegate_engine_speculative_acceptance": of_members(lambda member: member.watch.acceptance),
            "tidegate_limits_subjects": lambda: float(self.limits.book.count()),
            "tidegate_limits_shared": lambda: {"valkey": float(self.limits.shared)} if self.limits.shared is not None else {},
            "tidegate_limits_fallbacks_total": lambda: float(self.limits.book.fallbacks),
            "tidegate_keys": self.keys.counts,
            "tidegate_log_dropped_total": lambda: float(self._counts().log_dropped),
        }


def _capability_route(capability: Capability, parts: Parts, limits: Limits, door: DoorSettings) -> CapabilityRoute:
    stages = _stages(capability, parts)
    ladder = Ladder(capability, stages, parts) if capability.manifest.ladder else None
    return CapabilityRoute(capability, stages, limits, ladder, Entrance(settings_of(door, capability.manifest.door)))


def _stages(capability: Capability, parts: Parts) -> list[Any]:
    return [plugins.load("tidegate.pipeline.stages", name).build(capability, parts) for name in capability.manifest.stages]


# -- the doors that the command line knocks at


def serve(settings: Settings, fd: int | None = None) -> int:
    """`tidegate serve`: the gateway alone, until SIGINT or SIGTERM. `fd`: a listening socket that a supervisor hands over."""
    configure(settings.log)
    _allow_many_connections()
    _keep_freed_memory()
    sockets = _listening(settings, fd)
    if len(sockets) == 1:
        uvloop.run(_serve(settings, sockets[0]))
        return 0
    with explained(settings.local.folder):
        run = settings.local.folder / "run"
        own_folder(run, 0o700)
        # Sockets and figures of workers have fixed names there: a second gateway would take those of the first away.
        lock = take_lock(run / "workers.lock", f"The data folder {settings.local.folder} is in use by another gateway with several workers")
        clear(settings.local.folder / WORKERS)
    common = Common.of(settings)

    def work(index: int, ready: Callable[[], None]) -> int:
        os.close(lock)  # it goes with the first process, whatever becomes of this one
        for other in sockets:
            if other is not sockets[index]:
                other.close()
        common.join(index)
        try:
            uvloop.run(_serve(settings, sockets[index], index, ready, common))
        except TidegateError as error:
            print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
            return 2 if isinstance(error, SettingsError) else 1
        return 0

    return Workers(len(sockets), work, common.reclaim).run()


def _keep_freed_memory() -> None:
    """Have the C library keep the room of large request bodies for the next ones. Given back and fetched anew each time, a body of 200 kB costs
    a hundred page faults, a third of all that it costs. Nothing where the C library is not glibc."""
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 4 << 20)
        mallopt(_M_TRIM_THRESHOLD, 32 << 20)


def _listening(settings: Settings, fd: int | None) -> list[socket.socket]:
    """One socket for each worker; of a socket that was handed over, a copy for each. Raises SettingsError."""
    server = settings.server
    if fd is not None:
        handed = socket.socket(fileno=fd)
        return [handed, *(handed.dup() for _ in range(server.workers - 1))]
    try:
        first = listening_socket(server.host, server.port, server.backlog)
        if server.workers == 1:
            return [first]
        # Others may share a port only with us, so it was taken alone before: a port in use must be an error, not half of somebody's traffic.
        port = first.getsockname()[1]
        first.close()
        return [listening_socket(server.host, port, server.backlog, shared=True) for _ in range(server.workers)]
    except OSError as error:
        raise SettingsError(
            f"The gateway cannot listen on {server.host}:{server.port}: {error.strerror}.", hint="Set server.port to a free port, or 0 for any."
        ) from None


def _allow_many_connections() -> None:
    """A stream takes two file descriptors, and the usual soft limit of 1024 is there for programs that use `select`, which we do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(
    settings: Settings, bound: socket.socket, index: int = 0, ready: Callable[[], None] | None = None, common: Common | None = None
) -> None:
    """One gateway process: the only one, or the worker with this number, which says when it is `ready`."""
    async with _embedder(settings, own=index == 0) as embedder:
        gateway = Gateway(settings, embedder, index=index, common=common)
        await gateway.start()
        # What lives as long as the process need not be looked at by every collection, and requests leave few cycles behind.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        # The drain's thread works beside the event loop: a token must not wait for it for Python's usual 5 ms.
        sys.setswitchinterval(_SWITCH_S)
        if index == 0:
            url = url_of(bound)
            _note_running(settings.local.folder, url, os.getpid() if ready is None else os.getppid())
            log.info("serving on %s", url)
        if ready is not None:
            ready()
        try:
            await serve_door(gateway.door, settings.server, bound, gateway.stopping, gateway.peers)
        finally:
            await gateway.stop()


@contextlib.asynccontextmanager
async def _embedder(settings: Settings, *, own: bool = True) -> AsyncIterator[Embedder | None]:
    """The embedder that the settings ask for: a supervisor's child, one of our own, one in this process, or none. Where `own` is false
    another worker runs the child."""
    wanted = settings.embedder
    if wanted.mode == "in_process":
        from tidegate.retrieval.embedder import LocalEmbedder as InProcess  # loads the model runtime, which the gateway else never does

        inside = InProcess(
            settings.local.folder / "cache", threads=wanted.threads, max_length=wanted.max_length, batch_tokens=wanted.batch_tokens
        )
        try:
            yield inside
        finally:
            await inside.close()
        return
    async with contextlib.AsyncExitStack() as stack:
        path = wanted.socket
        if path is None and settings.local.embedder:
            if own:
                path = await stack.enter_async_context(_own_embedder(settings))
            else:
                path = LocalEmbedder(DataFolder(settings.local.folder), settings.local, wanted).socket
        if path is None:
            yield None
            return
        client = EmbedderClient(path)
        stack.push_async_callback(client.close)
        yield client


@contextlib.asynccontextmanager
async def closing(client: EmbedderClient) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _own_embedder(settings: Settings) -> AsyncIterator[Path]:
    folder = DataFolder(settings.local.folder)
    folder.open(settings.local.min_free_disk_mb)
    child: Child | None = None
    keeping: asyncio.Task[None] | None = None
    try:
        embedder = LocalEmbedder(folder, settings.local, settings.embedder)
        child = embedder.child
        await child.start()
        keeping = asyncio.get_running_loop().create_task(child.keep(log.warning))
        yield embedder.socket
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        if child is not None:
            await child.stop()
        folder.close()


def _note_running(data: Path, url: str, pid: int) -> None:
    """Where this gateway is, for `tidegate flight` on the same machine; `pid` is whom to ask to stop."""
    run = data / "run"
    run.mkdir(mode=0o700, exist_ok=True)
    written = run / "gateway.json.new"
    written.write_bytes(msgspec.json.encode({"url": url, "pid": pid}))
    written.replace(run / "gateway.json")  # whoever reads sees it whole


def migrate_store(settings: Settings) -> list[str]:
    """`tidegate migrate`: bring the database's schema up to date; returns what was applied."""
    return migrate(settings.store.dsn)


async def ingest(
    settings: Settings, paths: Sequence[Path], *, collection: str, tags: Mapping[str, str], base: Path | None, prune: bool,
    rules: Rules | None, progress: Callable[[Progress], None],
) -> IngestReport:
    """`tidegate ingest`: into the database of the settings, or of the `tidegate up` that runs on this machine."""
    reached = reach(settings)
    async with _embedder(reached) as embedder, open_store(reached) as store:
        if embedder is None:
            raise SettingsError("There is no embedder.", hint='Set embedder.socket, or embedder.mode = "in_process".')
        return await ingest_paths(
            paths, collection=collection, tags=tags, embedder=embedder, store=store, base=base, progress=progress, prune=prune,
            settings=settings.retrieval, rules=rules,
        )


async def build_indexes(
    settings: Settings, collection: str, *, facets: Sequence[str] | None, graph: bool | None, progress: Callable[[IndexProgress], None]
) -> None:
    """`tidegate index`: the indexes of a collection."""
    async with open_store(reach(settings)) as store:
        await store.build_indexes(collection, facets=facets, graph=graph, progress=progress)


async def explain_search(settings: Settings, question: str, *, collection: str, k: int, wanted: Filter) -> list[str]:
    """`tidegate explain`: the way of a search and the database's plan for it."""
    reached = reach(settings)
    async with _embedder(reached) as embedder, open_store(reached) as store:
        if embedder is None:
            raise SettingsError("There is no embedder.", hint='Set embedder.socket, or embedder.mode = "in_process".')
        (vector,) = await embedder.embed([question], "query")
        return await store.explain(collection, vector, k, wanted)


class LocalParts(msgspec.Struct):
    """What `tidegate up` leaves in its data folder for the other commands on this machine."""

    dsn: str = ""
    embedder: str = ""


def reach(settings: Settings) -> Settings:
    """The settings with the database and embedder of the `tidegate up` of this data folder, where none are set."""
    if settings.store.dsn:
        return settings
    file = settings.local.folder / PARTS
    try:
        parts = msgspec.json.decode(file.read_bytes(), type=LocalParts)
    except (OSError, msgspec.MsgspecError):
        raise SettingsError(
            f"There is no database: store.dsn is empty, and no `tidegate up` has run with the data folder {settings.local.folder}.",
            hint="Set store.dsn, or local.data to the folder of the `tidegate up` that is meant.",
        ) from None
    return with_parts(settings, parts)


def with_parts(settings: Settings, parts: LocalParts) -> Settings:
    embedder = settings.embedder
    if parts.embedder and embedder.socket is None:
        embedder = embedder.model_copy(update={"socket": Path(parts.embedder)})
    store = settings.store.model_copy(update={"dsn": parts.dsn or settings.store.dsn})
    return settings.model_copy(update={"store": store, "embedder": embedder})


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Postgres]:
    store = Postgres(settings.store)
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def key_store(settings: Settings) -> AsyncIterator[KeyStore]:
    """The keys, for `tidegate keys`."""
    async with open_store(reach(settings)) as store:
        yield store


def write_private(file: Path, content: bytes) -> None:
    """A file that only its owner reads."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
        out.write(content)
