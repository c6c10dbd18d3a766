"""What the workers of a machine share, made before the fork, and whether its settings allow it."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.admission import pool
from tidegate.admission.shared import SharedBook
from tidegate.api.settings import StreamSettings
from tidegate.api.whereabouts import Whereabouts
from tidegate.core.errors import SettingsError
from tidegate.core.memory import Shared as Memory
from tidegate.engines.homes import PLACES
from tidegate.engines.ledger import clear as clear_worker
from tidegate.engines.ledger import words_for
from tidegate.engines.settings import EngineSettings
from tidegate.local.lives import Lives
from tidegate.pipeline.retry import WORDS as BUDGET_WORDS
from tidegate.settings import Settings


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
    #: What workers tell their parent.
    lives: Lives

    @classmethod
    def of(cls, settings: Settings) -> Common:
        """Raises SettingsError where this system has no such memory, and where workers cannot share the slots of a model."""
        _need_slots(settings)
        workers, engines = settings.server.workers, len(settings.engines)
        tenants = sum(1 for one in settings.tenants.values() if one.slots)
        return cls(
            SharedBook(settings.limits.most_subjects, workers), Whereabouts(workers, of_one(settings.streams, workers).replay_streams),
            Memory(BUDGET_WORDS, workers), Memory(pool.words_for(_most_lanes(settings), workers), workers),
            Memory(words_for(engines, workers, tenants), workers), Memory(PLACES * max(1, _most_lanes(settings)), workers), engines, tenants,
            Lives(workers),
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


def of_one(streams: StreamSettings, workers: int) -> StreamSettings:
    """One worker's share of what all kept streams together may take."""
    if workers == 1:
        return streams
    return streams.model_copy(update={
        "replay_streams": max(1, streams.replay_streams // workers), "replay_total_bytes": max(16_384, streams.replay_total_bytes // workers),
    })
