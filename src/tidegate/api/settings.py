"""Settings of the api room."""

from __future__ import annotations

from pydantic import Field

from tidegate.core.settings import Section


class ServerSettings(Section):
    """`[server]`: the gateway's own door."""

    host: str = Field("127.0.0.1", description="Address that the gateway listens on.")
    port: int = Field(8080, ge=0, le=65535, description="Port that the gateway listens on; 0 takes any free one.")
    workers: int = Field(
        1, ge=1, le=64, description="Gateway processes on this port. Limits are counted in each of them; metrics are the sum of all."
    )
    max_body_bytes: int = Field(4_194_304, ge=1024, description="Largest request body in bytes; a larger one is refused with 413.")
    deadline_s: float = Field(300.0, gt=0, description="Seconds after which a request is ended, whatever it is doing.")
    keep_alive_s: int = Field(75, ge=1, description="Seconds that an idle client connection is kept open.")
    grace_s: int = Field(20, ge=0, description="Seconds that running answers get to finish when the gateway is stopped.")
    keys_refresh_s: float = Field(2.0, gt=0, description="Seconds between two readings of the key table: a revoked key works no longer than this.")
    backlog: int = Field(2048, ge=1, description="Connections that may wait to be accepted.")


class TenantSettings(Section):
    """`[tenants.NAME]`: what is kept of a tenant's traffic."""

    keep: bool = Field(False, description="Keep prompt and answer text, encrypted; otherwise only digests and counts are kept.")
    ttl_s: int = Field(604_800, ge=60, description="Seconds after which kept text is deleted.")
