"""The engines of this gateway, by the name of the model that they serve; and which of them are used: those that passed their checks.

A member whose checks have not run yet is used: a gateway that starts, or whose engine restarts, refuses nobody for want of a proof. It is no
longer used as soon as a check that it must pass has failed, and again as soon as all have passed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from tidegate.core.errors import EngineDown, EngineNotAdmitted, NotFound, SettingsError, TidegateError
from tidegate.core.plugins import load, nearest
from tidegate.core.ports import Engine
from tidegate.engines.conformance import Report, run_checks
from tidegate.engines.probe import Probe
from tidegate.engines.settings import EngineSettings
from tidegate.engines.vocabulary import Vocabulary, read_vocabulary

log = logging.getLogger(__name__)

_ADAPTERS = "tidegate.engines.adapters"
#: Seconds between two looks at a member that is up, and at one that is not.
UP_S = 10.0
DOWN_S = 2.0
#: Seconds after which a member that failed is checked again.
AGAIN_S = 60.0

State = Literal["unknown", "passed", "failed", "off"]


class Member:
    """One engine of the fleet, and what its checks said. `up` is None before the first look."""

    def __init__(self, engine: Engine, section: EngineSettings) -> None:
        self.engine = engine
        self.section = section
        self.state: State = "off" if section.conformance == "off" else "unknown"
        self.report: Report | None = None
        self.up: bool | None = None
        self.checked_ns = 0
        self.checked_unix_s = 0.0

    @property
    def admitted(self) -> bool:
        """Whether requests are sent to it."""
        return self.state != "failed" or self.section.conformance == "warn"

    @property
    def why(self) -> str:
        """The first check that it failed, and how; empty where it failed none."""
        failed = self.report.failed_musts if self.report is not None and self.state == "failed" else []
        return f"{failed[0].name}: {failed[0].evidence}" if failed else ""

    def figures(self) -> dict[str, Any]:
        """What /health says of it beside the engine's own figures."""
        said: dict[str, Any] = {"admitted": self.admitted, "conformance": self.state}
        if self.report is not None:
            said["checked_unix_s"] = round(self.checked_unix_s, 3)
            failed = [one for one in self.report.findings if one.verdict == "fail"]
            if failed:
                said["checks_failed"] = {one.name: one.evidence for one in failed}
        return said


class Fleet:
    """Builds each engine of the settings; the first model of the first engine is the default. Several engines may serve one model."""

    def __init__(self, settings: Mapping[str, EngineSettings]) -> None:
        """Raises SettingsError for an unknown adapter, or an unreadable ca_file."""
        self.members: dict[str, Member] = {}
        self._routes: dict[str, list[tuple[Member, str]]] = {}
        for name, section in settings.items():
            member = self.members[name] = Member(_build(name, section), section)
            for public, own in section.model_names.items():
                self._routes.setdefault(public, []).append((member, own))
        self.engines = [member.engine for member in self.members.values()]
        #: Model -> those that may be asked, the best first. Made anew when a member changes, so that a request only looks.
        self._usable: dict[str, list[tuple[Engine, str]]] = {}
        self._route()

    def find(self, model: str | None) -> tuple[Engine, str]:
        """The engine that serves a model, and the engine's own name for it; None is the default model.

        Raises NotFound, and EngineNotAdmitted where all that serve it failed their checks.
        """
        if model is None:
            model = next(iter(self._routes), None)
        usable = self._usable.get(model) if model is not None else None
        return usable[0] if usable else self._refuse(model)

    def instances(self, model: str | None) -> list[tuple[Engine, str]]:
        """All engines that may be asked for a model, with their own names for it, the best first: an answer that broke off on one may go on on
        another. Raises as `find` does.
        """
        self.find(model)
        return list(self._usable[next(iter(self._routes)) if model is None else model])

    def models(self) -> list[str]:
        """Public names of all models, default first."""
        return list(self._routes)

    def figures(self) -> dict[str, dict[str, Any]]:
        """By engine, whether it is used, and what its checks found."""
        return {name: member.figures() for name, member in self.members.items()}

    async def watch(self) -> None:
        """Look whether every member is up, and check it at the start and when it comes back, unless its conformance is "off". Runs until it is
        cancelled.
        """
        await asyncio.gather(*(self._watch(member) for member in self.members.values()))

    async def close(self) -> None:
        """Close every engine's connections."""
        await asyncio.gather(*(engine.close() for engine in self.engines))

    # --

    def _refuse(self, model: str | None) -> tuple[Engine, str]:
        if model is None:
            raise NotFound("No engine is set up.", hint="Add a section [engines.NAME] to tidegate.toml.")
        if model not in self._routes:
            raise NotFound(f"There is no model {model[:200]!r}.", hint=nearest(model[:200], self._routes), param="model")
        member = self._routes[model][0][0]
        raise EngineNotAdmitted(
            f"No engine that serves {model!r} is admitted: {member.engine.name!r} failed the check {member.why}.",
            hint=f"`tidegate check {member.section.url}` shows all checks; it is checked again every {AGAIN_S:g} s. "
            f'engines.{member.engine.name}.conformance = "warn" uses it all the same.',
            retry_after_s=AGAIN_S,
        )

    def _route(self) -> None:
        """Who may be asked: those that are not known to be down come first, otherwise the order of the settings."""
        for model, routes in self._routes.items():
            usable = [(member, own) for member, own in routes if member.admitted]
            usable.sort(key=lambda one: one[0].up is False)
            self._usable[model] = [(member.engine, own) for member, own in usable]

    async def _watch(self, member: Member) -> None:
        checks = due = member.state != "off"
        while True:
            up = bool((await member.engine.figures()).get("up"))
            due = due or (checks and up and member.up is False)
            if up != member.up:
                member.up = up
                self._route()
            if up and (due or self._again(member)):
                due = not await self.check(member)
            await asyncio.sleep(UP_S if member.up and not due else DOWN_S)

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
        self._route()
        if member.state == "passed":
            log.info("engine %r is admitted: %d checks in %.1f s", name, len(report.findings), report.seconds)
        elif before != "failed":
            used = "it is used all the same (conformance = warn)" if member.admitted else "it is not used"
            log.warning("engine %r failed the check %s; %s", name, member.why, used)
        return True


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
