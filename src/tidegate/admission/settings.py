"""Settings of the admission room."""

from __future__ import annotations

from pydantic import Field

from tidegate.core.settings import Section


class LimitSettings(Section):
    """`[limits]`: what one API key may use, where the key itself carries no limit of its own."""

    requests_per_minute: int = Field(
        0, ge=0, description="Requests that one API key may start per minute; 0 means no limit. A key's own limit wins."
    )
    tokens_per_minute: int = Field(
        0, ge=0, description="Prompt and completion tokens that one API key may use per minute; 0 means no limit. A key's own limit wins."
    )


class AdmissionSettings(Section):
    """`[admission]`: how long requests may wait for a slot of an engine, and how many. Nothing waits where no engine has `slots`."""

    forecast_s: float = Field(
        3.0, gt=0, le=86_400,
        description="Longest forecast wait in seconds. A request that would wait longer is refused with 429, and a place is booked for its caller at "
        "the instant that `Retry-After` names. `tidegate up` sets 60 for its own small engine.",
    )
    queue: int = Field(1024, ge=1, le=1_000_000, description="Requests that may wait for one model's slots.")
    aging: float = Field(
        1.0, gt=0, le=1000,
        description="Inside one tenant's class the shortest predicted work comes first; a second of waiting outweighs this many seconds of work.",
    )
    bookings: int = Field(4096, ge=0, le=1_000_000, description="Places of one tenant's class that may be booked at a time, for each model.")
    booking_lapse_s: float = Field(5.0, gt=0, le=3600, description="Seconds that a booked place is held after the instant that was told.")


class ClassSettings(Section):
    """`[classes.NAME]`: a class of callers with a weight. Who is in it is said here, never by a request; all others are `standard`, weight 1."""

    weight: float = Field(
        2.0, ge=0.01, le=100, description="Share of the slots that a tenant of this class has where tenants wait, compared with one of weight 1."
    )
    tenants: list[str] = Field([], description="Tenants that are in this class.")
    keys: list[str] = Field([], description="API keys by id; a key's class wins over its tenant's.")
    capabilities: list[str] = Field([], description="Capabilities (GROUP/NAME) that are in this class where neither key nor tenant has one.")
