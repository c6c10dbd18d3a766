"""The policy `tidegate`: the gateway's own gate, the very same code, under the simulator's clock.

It is told what the gateway is told: tenant, key and the length of the prompt. Every tenant has one key. How long answers are it learns as the
gateway does, from those that ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tidegate.admission.gate import Gate, Place
from tidegate.admission.settings import AdmissionSettings, ClassSettings
from tidegate.core.ask import Caller
from tidegate.core.errors import TidegateError
from tidegate.sizing.job import Job
from tidegate.sizing.policies import Build, Refused

_MODEL = "model"


class Gated:
    """One lane of the gate."""

    patient: bool = False
    next_ns: int | None = None

    def __init__(self, slots: int, settings: AdmissionSettings, classes: Mapping[str, ClassSettings]) -> None:
        self._now_ns = 0
        self._gate = Gate(settings, classes, clock_ns=lambda: self._now_ns)
        self._gate.open([_MODEL], slots)
        self._places: dict[Job, Place] = {}
        self._ready: list[Job] = []
        self._dropped: list[tuple[Job, Refused]] = []

    def come(self, job: Job, now_ns: int) -> Refused | None:
        self._now_ns = now_ns
        caller = Caller(key_id=f"key of {job.tenant}", tenant=job.tenant)
        try:
            place = self._gate.enter(
                _MODEL, caller, prompt_tokens=job.guessed or job.prompt, answer_tokens=job.told, request=str(job.number), tells=True
            )
        except TidegateError as error:
            return Refused(error.retry_after_s)
        self._places[job] = place
        if place.waits:
            place.on_turn = partial(self._turn, job, place)
        else:
            self._ready.append(job)
        return None

    def take(self, now_ns: int) -> Job | None:
        return self._ready.pop(0) if self._ready else None

    def first(self, job: Job, now_ns: int) -> None:
        self._now_ns = now_ns
        self._places[job].first_token()

    def leave(self, job: Job, now_ns: int) -> None:
        self._now_ns = now_ns
        self._places.pop(job).leave(job.prompt + job.output, job.output)

    def dropped(self) -> list[tuple[Job, Refused]]:
        dropped, self._dropped = self._dropped, []
        return dropped

    def _turn(self, job: Job, place: Place) -> None:
        if place.error is None:
            self._ready.append(job)
        else:
            del self._places[job]
            self._dropped.append((job, Refused(place.error.retry_after_s)))


def tidegate(settings: AdmissionSettings | None = None, classes: Mapping[str, ClassSettings] | None = None) -> dict[str, tuple[Build, ...]]:
    """The policy by its name, with the gateway's own settings."""
    return {"tidegate": (lambda speed, slo_s: Gated(speed.slots, settings or AdmissionSettings(), classes or {}),)}
