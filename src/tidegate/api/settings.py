"""Settings of the api room."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from tidegate.core.isolation import Isolation, Level
from tidegate.core.settings import Section


class ServerSettings(Section):
    """`[server]`: the gateway's own door."""

    host: str = Field("127.0.0.1", min_length=1, description="Address that the gateway listens on.")
    port: int = Field(8080, ge=0, le=65535, description="Port that the gateway listens on; 0 takes any free one.")
    workers: int = Field(
        1, ge=1, le=64, description="Gateway processes on this port, which are one gateway: limits, kept streams, barge-in and metrics are common."
    )
    hung_worker_s: float = Field(
        15.0, ge=0, allow_inf_nan=False,
        description="With several workers: seconds after which one whose event loop stands still is killed and replaced, at least 1; 0: never, "
        "for a debugger.",
    )
    max_body_bytes: int = Field(4_194_304, ge=1024, description="Largest request body in bytes; a larger one is refused with 413.")
    deadline_s: float = Field(300.0, gt=0, description="Seconds after which a request is ended, whatever it is doing.")
    keep_alive_s: int = Field(75, ge=1, description="Seconds that an idle client connection is kept open.")
    socket_idle_s: float = Field(600.0, gt=0, description="Seconds that a WebSocket on which nothing runs is kept open.")
    grace_s: int = Field(20, ge=0, description="Seconds that running answers get to finish when the gateway is stopped.")
    keys_refresh_s: float = Field(2.0, gt=0, description="Seconds between two readings of the key table: a revoked key works no longer than this.")
    head_wait_s: float = Field(
        2.0, ge=0, description="Seconds that a stream's response head waits for the engine's first event, so that a refusal keeps its status."
    )
    keepalive_s: float = Field(15.0, gt=0, description="Seconds without an event after which a stream carries a comment, so that proxies keep it.")
    backlog: int = Field(2048, ge=1, le=2_147_483_647, description="Connections that may wait to be accepted.")

    @field_validator("hung_worker_s")
    @classmethod
    def _no_usual_pause(cls, seconds: float) -> float:
        if 0 < seconds < 1:
            raise ValueError("must be 0 or at least 1 second: every process stands still now and then")
        return seconds


#: What a run does when its client leaves.
LeavePolicy = Literal["cancel", "drain", "keep"]


class StreamSettings(Section):
    """`[streams]`: what happens when a client leaves in the middle, comes back, or reads slowly."""

    leave: LeavePolicy = Field(
        "cancel",
        description="When the client of a /v1 stream leaves: `cancel` frees the engine at once, `drain` reads up to `drain_tokens` more so that "
        "usage is exact, `keep` goes on and holds the rest for a client that comes back.",
    )
    drain_tokens: int = Field(256, ge=1, description="With `drain`: tokens that are still read after the client left.")
    callers_may: list[LeavePolicy] = Field([], description="Policies that a caller may choose instead, with the header `x-tidegate-leave`.")
    grace_s: float = Field(30.0, gt=0, description="With `keep`: seconds that a stream waits for its client to come back.")
    replay_bytes: int = Field(1_048_576, ge=16_384, description="With `keep`: bytes of events that are held for one stream.")
    replay_total_bytes: int = Field(
        67_108_864, ge=16_384, description="With `keep`: bytes of events that are held for all streams together, a share of them by each worker."
    )
    replay_streams: int = Field(
        1000, ge=1, description="With `keep`: streams that are held at once, a share of them by each worker; one more is not kept."
    )
    slow_reader: Literal["block", "coalesce", "drop"] = Field(
        "block",
        description="When a client reads more slowly than the engine writes: `block` slows the engine, `coalesce` merges what waits into fewer "
        "events, `drop` gives the client up after `slow_reader_s`.",
    )
    slow_reader_s: float = Field(30.0, gt=0, description="Seconds without a byte read after which a client is given up, where that is to happen.")
    buffer_bytes: int = Field(65_536, ge=1024, description="Bytes that may wait for a client before it counts as a slow reader.")
    coalesce_bytes: int = Field(262_144, ge=1024, description="With `coalesce`: bytes that are merged before the engine is slowed after all.")


class TenantSettings(Section):
    """`[tenants.NAME]`: what is kept of a tenant's traffic, and how far it is kept apart from the others."""

    keep: bool = Field(False, description="Keep prompt and answer text, encrypted; otherwise only digests and counts are kept.")
    ttl_s: int = Field(604_800, ge=60, description="Seconds after which kept text is deleted.")
    isolation: Level = Field(
        "shared",
        description="`shared`: its requests wait and run with all others; `slots`: in slots of its own; `instance`: on engines of its own; `device`: "
        "on an engine that `tidegate up` runs for it alone, on cores or a GPU's slice of its own.",
    )
    slots: int = Field(
        0, ge=0, le=1_000_000, description='With `isolation = "slots"`: slots of each engine that are the tenant\'s. They are all that it has.'
    )
    lend: bool = Field(False, description="With `slots`: others may use them while they are idle, all but one.")
    instances: list[str] = Field([], description="With `instance`: the engines, by name, that serve this tenant and nobody else.")
    cores: list[int] = Field(
        [], description="With `device`: numbers of cores for the tenant's engine. Nothing else that `tidegate up` starts runs on them."
    )
    gpu: str = Field(
        "", pattern=r"^[A-Za-z0-9/_.:-]*$",
        description="With `device`: the GPU or its slice for the tenant's engine, as CUDA_VISIBLE_DEVICES names it: MIG-UUID, GPU-UUID or a number.",
    )

    @field_validator("cores")
    @classmethod
    def _cores(cls, cores: list[int]) -> list[int]:
        if any(core < 0 for core in cores) or len(set(cores)) != len(cores):
            raise ValueError("must be different numbers from 0 on")
        return cores

    @model_validator(mode="after")
    def _of_one_level(self) -> TenantSettings:
        own = {"slots": ("slots", "lend"), "instance": ("instances",), "device": ("cores", "gpu", "instances")}.get(self.isolation, ())
        foreign = [name for name in ("slots", "lend", "instances", "cores", "gpu") if getattr(self, name) and name not in own]
        if foreign:
            raise ValueError(f'has {" and ".join(foreign)}, which isolation = "{self.isolation}" has no use for')
        if own and not getattr(self, own[0]) and not (self.isolation == "device" and (self.gpu or self.instances)):
            wants = {"slots": "a number of slots", "instance": "the names of its instances", "device": "cores or gpu"}[self.isolation]
            raise ValueError(f'has isolation = "{self.isolation}", which needs {wants}')
        return self

    @property
    def apart(self) -> Isolation | None:
        """What is the tenant's own; None where nothing is."""
        return Isolation(self.slots, self.lend, tuple(self.instances)) if self.slots or self.instances else None
