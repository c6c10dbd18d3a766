"""The rooms of one gateway process, wired: each gets what it needs from here, and knows nothing of the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tidegate.api.server import Door, Route
from tidegate.app.common import Common, of_one
from tidegate.app.parts import make_passages
from tidegate.core import plugins
from tidegate.core.ask import DEFAULT, Caller
from tidegate.core.errors import SettingsError
from tidegate.core.ports import Embedder, FlightSink
from tidegate.engines.counting import Counter
from tidegate.engines.fleet import Fleet
from tidegate.engines.member import Member
from tidegate.guard.settings import DoorSettings
from tidegate.local.folder import DataFolder, explained, own_folder
from tidegate.pipeline.beside import Beside
from tidegate.pipeline.capability import Capability, load_all
from tidegate.pipeline.control import Ban, Control
from tidegate.pipeline.entrance import Entrance, settings_of, v1_door
from tidegate.pipeline.ladder import Ladder
from tidegate.pipeline.parts import Parts
from tidegate.pipeline.retry import Retries
from tidegate.pipeline.stages.fit import fit
from tidegate.pipeline.stages.generate import GenerateStage
from tidegate.retrieval.embedder_client import EmbedderClient
from tidegate.retrieval.picture import Pictures
from tidegate.retrieval.rerank import RerankerParts, open_rerankers
from tidegate.retrieval.search import Search
from tidegate.settings import Settings
from tidegate.stores.drain import Drain
from tidegate.stores.seal import Seal
from tidegate.stores.spool import Spool
from tidegate.stores.systems.postgres import Postgres
from tidegate.stores.systems.valkey import Valkey
from tidegate.telemetry.exposition import CONTENT_TYPE, Exposition
from tidegate.telemetry.health import health as judge_health
from tidegate.telemetry.health import process_figures
from tidegate.telemetry.log import FlightLog
from tidegate.telemetry.metrics import Metrics
from tidegate.telemetry.recent import RecentFlights
from tidegate.telemetry.workers import Counts, Shared

log = logging.getLogger(__name__)

_LAST_DRAIN_S = 5.0
_FIGURES_KEPT_NS = 500_000_000
#: Seconds between two looks at the slots that workers share.
_SLOTS_S = 0.05
_BREAKER = {"closed": 0.0, "half_open": 0.5, "open": 1.0}
#: Engines that their operator drains, below the data folder: for all workers.
ORDERS = "run/drained.json"
#: Where workers tell each other what they counted, below the data folder.
WORKERS = "run/workers"


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
        self.passages = make_passages(settings)
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
            of_one(settings.streams, settings.server.workers), settings.server.head_wait_s, settings.server.keepalive_s, self.gate, self.peers,
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
        if self.search is not None:
            await self.search.close()
        await self.fleet.close()
        if self.passages is not None:
            await self.passages.close()
        await self.store.close()

    # -- wiring

    def _build_door(self) -> Door:
        settings = self.settings
        limits = self.limits
        search = self.search = self._build_search()
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
            version=__version__, files=None if settings.qdrant.url else self.store, pictures=Pictures(self.store),
        ))
        control.include_router(self.page.router)
        return Door(self.house, hot, capabilities, control)

    def _build_search(self) -> Search | None:
        """With every reranker that the settings or a capability name. Raises SettingsError for one that cannot be had."""
        if self.embedder is None:
            return None
        retrieves = [item.manifest.retrieve.rerank for item in self.capabilities.values() if "retrieve" in item.manifest.stages]
        wanted = {self.settings.retrieval.rerank, *filter(None, retrieves)}
        parts = RerankerParts(self.settings.retrieval, Beside(self.fleet, self.gate))
        return Search(self.embedder, self.passages or self.store, self.settings.retrieval, open_rerankers(wanted, parts))

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
                **({"workers": self._common.lives.figures()} if self._common is not None else {}),
                **({"qdrant": await self.passages.figures()} if self.passages is not None else {}),
                **({"recall": recall} if (recall := self._recall()) else {}),
            }
            self._figures_ns = time.perf_counter_ns()
        return {**self._figures, "requests_in_flight": self._counts().in_flight}

    async def _embedder_figures(self) -> dict[str, Any] | None:
        if not isinstance(self.embedder, EmbedderClient):
            return None
        return await self.embedder.figures()

    def _recall(self) -> dict[str, dict[str, int]]:
        counted = self.shared.sum() if self.shared is not None else self.metrics
        return {collection: {"found": found, "passages": of} for collection, (found, of) in counted.recall.items()}

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
            "tidegate_workers_replaced_total": lambda: self._common.lives.replaced() if self._common is not None else {},
        }


def _capability_route(capability: Capability, parts: Parts, limits: Limits, door: DoorSettings) -> CapabilityRoute:
    stages = _stages(capability, parts)
    ladder = Ladder(capability, stages, parts) if capability.manifest.ladder else None
    return CapabilityRoute(capability, stages, limits, ladder, Entrance(settings_of(door, capability.manifest.door)))


def _stages(capability: Capability, parts: Parts) -> list[Any]:
    return [plugins.load("tidegate.pipeline.stages", name).build(capability, parts) for name in capability.manifest.stages]
