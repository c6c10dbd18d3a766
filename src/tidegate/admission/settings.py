"""Settings of the admission room."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tidegate.core.settings import Section

#: The most that a limit may say. A limit of none is 0, not a number that nobody reaches.
MOST_PER_MINUTE = 2**31 - 1
MOST_CONCURRENT = 1_000_000
MOST_MONEY = 100_000.0

PerMinute = Annotated[int, Field(ge=0, le=MOST_PER_MINUTE)]
AtATime = Annotated[int, Field(ge=0, le=MOST_CONCURRENT)]
Money = Annotated[float, Field(ge=0, le=MOST_MONEY, allow_inf_nan=False)]


class Allowance(Section):
    """What one subject may use; 0 is no limit, or the limit that holds for all of its kind."""

    requests_per_minute: PerMinute = Field(0, description="Requests that it may start per minute; 0: as for all others.")
    tokens_per_minute: PerMinute = Field(0, description="Prompt and completion tokens that it may use per minute; 0: as for all others.")
    concurrent: AtATime = Field(0, description="Requests of it that may run at the same time; 0: as for all others.")
    money_per_day: Money = Field(0.0, description="Money that it may use per day, by `[prices]`; 0: as for all others.")


class EachTenant(Allowance):
    """`[limits.each_tenant]`: what all keys of one tenant may use together, where the tenant has no limits of its own."""

    requests_per_minute: PerMinute = Field(0, description="Requests that all keys of one tenant may start per minute; 0 means no limit.")
    tokens_per_minute: PerMinute = Field(0, description="Tokens that all keys of one tenant may use per minute; 0 means no limit.")
    concurrent: AtATime = Field(0, description="Requests of one tenant that may run at the same time; 0 means no limit.")
    money_per_day: Money = Field(0.0, description="Money that one tenant may use per day, by `[prices]`; 0 means no limit.")


class LimitSettings(Allowance):
    """`[limits]`: what one API key may use, where the key itself carries no limit of its own."""

    requests_per_minute: PerMinute = Field(0, description="Requests that one API key may start per minute; 0 means no limit. A key's own limit wins.")
    tokens_per_minute: PerMinute = Field(
        0, description="Prompt and completion tokens that one API key may use per minute; 0 means no limit. A key's own limit wins."
    )
    concurrent: AtATime = Field(0, description="Requests of one API key that may run at the same time; 0 means no limit.")
    money_per_day: Money = Field(0.0, description="Money that one API key may use per day, in the currency of `[prices]`; 0 means no limit.")
    keys: dict[str, Allowance] = Field({}, description="Limits of single keys, by the key's id.")
    tenants: dict[str, Allowance] = Field({}, description="What all keys of a tenant may use together, by the tenant's name.")
    each_tenant: EachTenant = Field(default_factory=EachTenant, description="What all keys of one tenant may use together.")
    capabilities: dict[str, Allowance] = Field({}, description="What all callers of a capability may use together, by its GROUP/NAME.")
    most_subjects: int = Field(
        131_072, ge=16, le=4_194_304,
        description="Keys, tenants and capabilities that are counted at once, about 280 bytes each. One more is refused until another has been idle.",
    )
    machines: int = Field(
        2, ge=1, le=1000, description="With `valkey.url`: machines that share the limits. While Valkey is gone each counts its share of them alone."
    )
    when_lost: Literal["share", "refuse", "pass"] = Field(
        "share",
        description="While Valkey is gone: `share` lets each machine use 1/`machines` of every limit, `refuse` refuses what is limited with 503, "
        "`pass` lets everything pass uncounted.",
    )


class PriceSettings(Section):
    """`[prices.NAME]`: what a model costs, by the model's public name."""

    input: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False, description="Price of a million prompt tokens.")
    cached_input: float | None = Field(
        None, ge=0, le=1e6, allow_inf_nan=False, description="Price of a million prompt tokens that the engine had cached; unset: as `input`."
    )
    output: float = Field(0.0, ge=0, le=1e6, allow_inf_nan=False, description="Price of a million completion tokens.")
    currency: str = Field("USD", pattern=r"^[A-Z]{3}$", description="ISO 4217 code of the currency; one for all models.")


class AdmissionSettings(Section):
    """`[admission]`: how long requests may wait for a slot of an engine, and how many. Nothing waits where no engine has `slots`."""

    forecast_s: float = Field(
        3.0, gt=0, le=86_400,
        description="Longest forecast wait in seconds. A request that would wait longer is refused with 429, and a place is booked for its caller at "
        "the instant that `Retry-After` names. `budgets.profile` sets it where it is not set here.",
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
