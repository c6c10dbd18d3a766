"""The engines of this gateway, by the name of the model that they serve; which of them are used, and which one a request is given (see `routing`).

A member whose checks have not run yet is used: a gateway that starts, or whose engine restarts, refuses nobody for want of a proof. It is no
longer used as soon as a check that it must pass has failed, and again as soon as all have passed.

A tenant with instances of its own has routes of its own, on which nobody else's requests are, and its own requests are on no others: whatever is
chosen anew (a retry, a hedge, an answer that goes on, a rung of a ladder) is chosen on them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidegate.core.ask import Ask
from tidegate.core.errors import EngineDown, EngineError, EngineNotAdmitted, NotFound, SettingsError, TidegateError
from tidegate.core.isolation import Isolation
from tidegate.core.memory import Own
from tidegate.core.plugins import load, nearest
from tidegate.core.ports import Engine
from tidegate.engines.cause import Cause
from tidegate.engines.conformance import Report, run_checks
from tidegate.engines.homes import PLACES
from tidegate.engines.ledger import ledgers
from tidegate.engines.member import Member
from tidegate.engines.probe import Probe
from tidegate.engines.routing import AGAIN_S, Route
from tidegate.engines.settings import EngineSettings, FleetSettings
from tidegate.engines.vocabulary import Vocabulary, read_vocabulary

log = logging.getLogger(__name__)

_ADAPTERS = "tidegate.engines.adapters"
#: Seconds between two looks at a member that is up, and at one that is not.
UP_S = 10.0
DOWN_S = 2.0
#: Seconds between two looks at the metrics of an engine that shares its models with no other, at least.
ALONE_S = 15.0
#: Seconds between two looks at what time alone changes.
TICK_S = 0.25


class Fleet:
    """Builds each engine of the settings; the first model of the first engine is the default. Several engines may serve one model."""

    def __init__(
        self, settings: Mapping[str, EngineSettings], fleet: FleetSettings | None = None, *, orders: Path | None = None,
        tenants: Mapping[str, Isolation] | None = None, memory: Own | None = None,
        homes: Own | None = None,
    ) -> None:
        """`orders`: the file that keeps which engines their operator drains, for all workers and for the next start; `tenants`: those that have
        slots or instances of their own; `memory`: what workers know together, `words_for` them; `homes`: PLACES for each model, of each tenant too.

        Raises SettingsError for an unknown adapter, an unreadable ca_file, and for what tenants cannot have.
        """
        self.settings = fleet = fleet if fleet is not None else FleetSettings.model_validate({})
        self.tenants = {} if tenants is None else dict(tenants)
        owners = owners_of(settings, self.tenants)
        self.members: dict[str, Member] = {}
        entries: dict[str, dict[str, list[tuple[Member, str]]]] = {owner: {} for owner in ("", *owners.values())}
        known = ledgers(settings, memory, sum(1 for one in self.tenants.values() if one.slots))
        for name, section in settings.items():
            member = self.members[name] = Member(_build(name, section), section, fleet, self._changed, known[name])
            owner = member.owner = owners.get(name, "")
            if not owner:
                member.keep({tenant: one.slots for tenant, one in self.tenants.items() if one.slots and not one.lend})
            for public, own in section.model_names.items():
                entries[owner].setdefault(public, []).append((member, own))
        self.engines = [member.engine for member in self.members.values()]
        tables = itertools.count()

        def route(owner: str, model: str, of_model: list[tuple[Member, str]]) -> Route:
            first = next(tables) * PLACES
            return Route(
                model, of_model, fleet.long_tokens, fleet.affinity_tokens, owner, homes.words[first : first + PLACES] if homes is not None else None
            )

        #: By tenant and model; what nobody owns under "".
        self._own = {owner: {model: route(owner, model, of_model) for model, of_model in of_owner.items()} for owner, of_owner in entries.items()}
        self._routes = self._own.pop("")
        self._all = [route for routes in (self._routes, *self._own.values()) for route in routes.values()]
        self._default = next((route.model for route in self._all), None)
        #: Told (model, slots, tenant) whenever the slots of a model change; see `slots`.
        self.on_change: Callable[[str, int, str], None] | None = None
        self._slots: dict[tuple[str, str], int] = {}
        self._orders = orders
        self._orders_read: tuple[int, int] | None = None
        self._read_orders()
        self._refresh(self._all)

    def find(self, model: str | None, ask: Ask | None = None) -> tuple[Member, str]:
        """The engine for a request, and the engine's own name for the model; None is the default model.

        Raises NotFound, EngineNotAdmitted where all that serve it failed their checks, EngineRefused (429) where all asked to be left alone or have
        no room, EngineDown where all are drained.
        """
        route = self._route(model, ask)
        return route.choose(ask)

    def instances(self, model: str | None, ask: Ask | None = None) -> list[tuple[Member, str]]:
        """All engines that may be asked for a model, with their own names for it, the best first: an answer that broke off on one may go on on
        another. Raises as `find` does.
        """
        return self._route(model, ask).instances(ask)

    def another(self, model: str | None, ask: Ask, tried: Sequence[Engine], cause: Cause, *, free: bool = False) -> tuple[Member, str] | None:
        """A new plan: one that was not tried yet and that may do better, where the last of `tried` failed by `cause`. What failed is remembered with
        that instance already, so those that are left come in the order of the choice. What is too long goes to a longer context alone.
        `free`: only one with a free slot.
        """
        try:
            route = self._route(model, ask)
            if len(route.entries) == 1:
                return None
            listed = route.instances(ask)
        except (EngineError, NotFound):
            return None
        left = [entry for entry in listed if entry[0] not in tried]
        if cause == "length" and isinstance(last := tried[-1], Member):
            left = [entry for entry in left if _is_longer(entry[0], last)]
        if free:
            left = [entry for entry in left if entry[0].has_slot(ask.caller.tenant)]
        return left[0] if left else None

    def models(self, tenant: str | None = None) -> list[str]:
        """Public names of all models, default first; with `tenant`, of those that it may ask."""
        if tenant is not None:
            return list(self._own.get(tenant, self._routes))
        return list(dict.fromkeys(([self._default] if self._default else []) + [route.model for route in self._all]))

    @property
    def default(self) -> str:
        """The public name of the model that is meant where none is named; empty without engines."""
        return self._default or ""

    def lanes(self) -> Iterator[tuple[str, list[str]]]:
        """Whose requests wait together, and for which models: "" are all that have no slots and no instances of their own. Models that the same
        engines serve share their slots."""
        for tenant in ("", *self.tenants):
            together: dict[tuple[str, ...], list[str]] = {}
            for model, route in self._own.get(tenant, self._routes).items():
                together.setdefault(tuple(member.name for member, _ in route.entries), []).append(model)
            yield from ((tenant, models) for models in together.values())

    def slots(self, model: str, tenant: str = "") -> int:
        """Requests that may run at once on the engines of a model that can be asked now; 0: no bound, or nobody serves it. `tenant`: one that has
        slots or instances of its own; else those of all others."""
        route = self._own.get(tenant, self._routes).get(model)
        if route is None:
            return 0
        self._refresh([route])
        return self._slots[model, tenant]

    def blame(self, engine: Engine) -> None:
        """Its caller gave a call of this engine up, because it took longer than the caller could wait."""
        if isinstance(engine, Member):
            engine.blame()

    def drain(self, name: str, on: bool) -> None:
        """An operator's order: no new requests to an engine, or (off) requests again. Those that run end well. It holds for all workers, and after
        the next start. Raises NotFound.
        """
        member = self.members.get(name)
        if member is None:
            raise NotFound(f"There is no engine {name[:200]!r}.", hint=nearest(name[:200], self.members))
        self._order(member, on)
        if self._orders is not None:
            names = sorted(one.name for one in self.members.values() if one.ordered_out)
            written = self._orders.with_suffix(".new")
            self._orders.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            written.write_bytes(msgspec.json.encode(names))
            written.replace(self._orders)

    def figures(self) -> dict[str, dict[str, Any]]:
        """By engine, whether it is used, what its checks found, and what the fleet knows of it."""
        return {name: member.figures_beside() for name, member in self.members.items()}

    async def watch(self) -> None:
        """Look whether every member is up, and check it at the start and when it comes back, unless its conformance is "off". Runs until it is
        cancelled.
        """
        told = [member for member in self.members.values() if member.watch.url] if self.settings.metrics_s else []
        await asyncio.gather(
            self._keep_time(), *(self._watch(member) for member in self.members.values()), *(self._watch_load(member) for member in told)
        )

    async def close(self) -> None:
        """Close every engine's connections."""
        await asyncio.gather(*(member.close() for member in self.members.values()))

    # --

    def _route(self, model: str | None, ask: Ask | None) -> Route:
        """The route of a request: on its tenant's own instances, or on those of nobody. Raises NotFound, EngineNotAdmitted."""
        routes = self._routes if ask is None or not self._own else self._own.get(ask.caller.tenant, self._routes)
        route = routes.get(self._default or "" if model is None else model)
        if route is None:
            raise self._unknown(model, routes)
        return route

    def _unknown(self, model: str | None, routes: Mapping[str, Route]) -> TidegateError:
        if self._default is None:
            return NotFound("No engine is set up.", hint="Add a section [engines.NAME] to tidegate.toml.")
        model = self._default if model is None else model
        if any(route.model == model for route in self._all):
            return EngineNotAdmitted(
                f"No engine that serves {model[:200]!r} is there for this tenant.",
                hint=f"It may ask for {', '.join(map(repr, routes)) or 'no model'}. tenants.NAME.isolation says whose engines are whose.",
            )
        return NotFound(f"There is no model {model[:200]!r}.", hint=nearest(model[:200], routes), param="model")

    def _changed(self, member: Member) -> None:
        self._refresh(route for route in self._all if any(entry[0] is member for entry in route.entries))

    def _refresh(self, routes: Iterable[Route]) -> None:
        now_ns = time.perf_counter_ns()
        for route in routes:
            route.refresh(now_ns)
            self._tell(route)

    def _tell(self, route: Route) -> None:
        model, owner = route.model, route.owner
        keepers = {} if owner else {tenant: one.slots for tenant, one in self.tenants.items() if one.slots}
        for tenant, slots in route.slots_of(keepers).items() if keepers else ((owner, route.slots()),):
            if self._slots.get((model, tenant)) != slots:
                self._slots[model, tenant] = slots
                if self.on_change is not None:
                    self.on_change(model, slots, tenant)

    async def _keep_time(self) -> None:
        """What changes with time alone (a Retry-After that is over, a breaker that may be probed, a slow start) is told also where nobody asks."""
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = time.perf_counter_ns()
            for route in self._all:
                if route.is_stale(now_ns):
                    route.refresh(now_ns)
                self._tell(route)  # a request that came first has refreshed it already
            self._read_orders()

    def _order(self, member: Member, out: bool) -> None:
        if member.ordered_out != out:
            member.ordered_out = out
            log.info("engine %r %s", member.name, "is drained: no new requests" if out else "takes requests again")
            if out:
                member.changed()
            else:
                self._came_back(member)

    def _read_orders(self) -> None:
        if self._orders is None:
            return
        try:
            stat = self._orders.stat()
            seen = (stat.st_mtime_ns, stat.st_ino)
            if seen == self._orders_read:
                return
            names = msgspec.json.decode(self._orders.read_bytes(), type=list[str])
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("the orders of %s cannot be read: %s", self._orders, error)
            return
        self._orders_read = seen
        for member in self.members.values():
            self._order(member, member.name in names)

    def _came_back(self, member: Member) -> None:
        for route in self._all:
            route.forget(member)
        member.came_back()

    async def _watch_load(self, member: Member) -> None:
        # of one among which nobody chooses only the acceptance is of interest
        period_s = self.settings.metrics_s if member.counts else max(self.settings.metrics_s, ALONE_S)
        while True:
            await member.watch.look(member.under_way()[0], period_s)
            member.look_at_load()
            await asyncio.sleep(member.watch.pause_s)

    async def _watch(self, member: Member) -> None:
        checks = due = member.state != "off"
        while True:
            member.wake.clear()
            up = bool((await member.engine.figures()).get("up"))
            due = due or (checks and up and member.up is False)
            if up != member.up or (up and member.suspect):
                back = up and member.up is False
                member.up, member.suspect = up, member.suspect and not up
                if back:
                    self._came_back(member)
                else:
                    member.changed()
            if up and (due or self._again(member)):
                due = not await self.check(member)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(UP_S if member.up and not due and not member.suspect else DOWN_S):
                    await member.wake.wait()

    def _again(self, member: Member) -> bool:
        return member.state == "failed" and time.perf_counter_ns() - member.checked_ns > AGAIN_S * 1e9

    async def check(self, member: Member) -> bool:
        """Run the checks of a registration; what they find decides whether the member is used. False where the engine was not there to be checked."""
        name = member.engine.name
        own = next(iter(member.section.model_names.values()))
        try:
            vocabulary = await _vocabulary(member.section)
            report = await _run(member, own, vocabulary)
            if report.failed_musts:
                report = _in_both(report, await _run(member, own, vocabulary))
        except EngineDown:
            return False
        except TidegateError as error:
            log.warning("engine %r could not be checked: %s", name, error.message)
            return True
        before = member.state
        member.report = report
        member.state = "failed" if report.failed_musts else "passed"
        member.checked_ns, member.checked_unix_s = time.perf_counter_ns(), time.time_ns() / 1e9
        if before == "failed" and member.state == "passed":
            self._came_back(member)
        else:
            member.changed()
        if member.state == "passed":
            log.info("engine %r is admitted: %d checks in %.1f s", name, len(report.findings), report.seconds)
        elif before != "failed":
            used = "it is used all the same (conformance = warn)" if member.admitted else "it is not used"
            log.warning("engine %r failed the check %s; %s", name, member.why, used)
        return True


def owners_of(settings: Mapping[str, EngineSettings], tenants: Mapping[str, Isolation]) -> dict[str, str]:
    """Engine -> the tenant that owns it. Raises SettingsError where tenants cannot all have what they are to have."""
    owners: dict[str, str] = {}
    for tenant, isolation in tenants.items():
        for name in isolation.instances:
            if name not in settings:
                raise SettingsError(f"tenants.{tenant}.instances names {name!r}, but there is no such engine.", hint=nearest(name, settings))
            if (other := owners.setdefault(name, tenant)) != tenant:
                raise SettingsError(
                    f"The engine {name!r} is owned by two tenants, {other!r} and {tenant!r}.",
                    hint=f"Leave it in the instances of one of [tenants.{other}] and [tenants.{tenant}].",
                )
            if settings[name].role == "high_value":
                raise SettingsError(
                    f"The engine {name!r} is owned by the tenant {tenant!r}, so its role = \"high_value\" keeps it from nobody.",
                    hint=f"Remove engines.{name}.role, or name it in no tenant's instances.",
                )
    shared = [one for name, one in settings.items() if name not in owners]
    default = next((model for one in shared or settings.values() for model in one.model_names), None)
    for tenant, isolation in tenants.items():
        if isolation.instances and default is not None and not any(default in settings[name].model_names for name in isolation.instances):
            raise SettingsError(
                f"The instances of the tenant {tenant!r} ({', '.join(isolation.instances)}) do not serve {default!r}, the model that callers get "
                "who name none.",
                hint="Add that model to one of them, or put an engine whose model they serve first among [engines].",
            )
    _check_kept(settings, owners, {tenant: one for tenant, one in tenants.items() if one.slots})
    return owners


def _check_kept(settings: Mapping[str, EngineSettings], owners: Mapping[str, str], keepers: Mapping[str, Isolation]) -> None:
    kept = sum(one.slots for one in keepers.values())
    some = ", ".join(map(repr, keepers))
    for name, section in settings.items():
        if not keepers or name in owners:
            continue
        if not section.slots:
            raise SettingsError(
                f"The engine {name!r} has no number of slots, so none of them can be kept for {some}.", hint=f"Set engines.{name}.slots."
            )
        if kept > section.slots:
            raise SettingsError(
                f"{kept} slots of each engine are kept for {some}, but {name!r} has {section.slots}.",
                hint=f"Keep fewer (tenants.NAME.slots), or raise engines.{name}.slots.",
            )
        if kept == section.slots:
            raise SettingsError(
                f"All {kept} slots of the engine {name!r} are kept for {some}: nobody else could ever use it.",
                hint='Keep fewer, or give one tenant the whole engine: isolation = "instance".',
            )


def _is_longer(member: Member, than: Member) -> bool:
    mine, other = member.section.context_tokens, than.section.context_tokens
    return mine > other if mine and other else member.section.role == "long" and than.section.role != "long"


async def _run(member: Member, own: str, vocabulary: Vocabulary | None) -> Report:
    probe = Probe(member.engine, member.section.adapter, own, vocabulary)
    try:
        return await run_checks(probe, member.section.url, quick=True)
    finally:
        await probe.close()


async def _vocabulary(section: EngineSettings) -> Vocabulary | None:
    return await asyncio.to_thread(_read, section.tokenizer) if section.tokenizer else None


def _read(file: str) -> Vocabulary:
    return read_vocabulary(Path(file).expanduser())


def _in_both(first: Report, second: Report) -> Report:
    """The second report, where a check that failed only once has not failed: an engine that restarts in the middle is not ill."""
    failed = {one.name for one in first.failed_musts}
    for one in second.failed_musts:
        if one.name not in failed:
            one.verdict = "not proven"
    return second


def _build(name: str, section: EngineSettings) -> Engine:
    try:
        engine: Engine = load(_ADAPTERS, section.adapter).build(name, section)
    except OSError as error:
        raise SettingsError(
            f"ca_file of [engines.{name}] cannot be read: {section.ca_file!r} ({error.strerror or error}).",
            hint="Name a file with PEM certificates.",
        ) from None
    file = Path(section.tokenizer).expanduser() if section.tokenizer else None
    if file is not None and not (os.path.isfile(file) and os.access(file, os.R_OK)):
        raise SettingsError(
            f"tokenizer of [engines.{name}] cannot be read: {section.tokenizer!r}.", hint="Name a GGUF file with the engine's vocabulary."
        )
    return engine
