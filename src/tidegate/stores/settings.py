"""The sections [store] and [spool]."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from tidegate.core.settings import Section


class StoreSettings(Section):
    """[store]: the one durable database."""

    dsn: str = Field("", description="PostgreSQL DSN in any of libpq's forms; empty: the database that `tidegate up` starts.")
    pool_min: int = Field(1, ge=0, le=1000, description="Connections kept open by each gateway process.")
    pool_max: int = Field(8, ge=1, le=1000, description="Most connections of each gateway process.")
    connect_timeout_s: float = Field(
        2.0, ge=1, le=60, description="Seconds to wait for a connection before the database counts as down."
    )
    statement_timeout_s: float = Field(10.0, gt=0, le=3600, description="Seconds that one statement may run before the database stops it.")


class SpoolSettings(Section):
    """[spool]: finished flights on local disk, on their way to the database."""

    folder: str = Field("", description="Folder of the flight spool; empty: `spool` in the data folder.")
    max_bytes: int = Field(
        256 * 1024 * 1024,
        ge=4096,
        description="Most bytes of waiting flights on disk; at the bound new flights are counted as lost, answers go on.",
    )
    near_share: float = Field(0.9, gt=0, le=1, description="Share of `max_bytes` above which token stamps are left out of new flights.")
    segment_bytes: int = Field(4 * 1024 * 1024, ge=1024, description="Size at which a spool file is closed and a new one begun.")
    batch_flights: int = Field(2000, ge=1, le=10_000, description="Most flights written to the database in one transaction.")
    batch_wait_s: float = Field(0.5, gt=0, le=60, description="Seconds between two looks at the spool.")
    backoff_max_s: float = Field(5.0, gt=0, le=300, description="Longest pause between two tries while the database is down.")


class ValkeySettings(Section):
    """[valkey]: what several machines share."""

    url: str = Field(
        "", description="Valkey or Redis server: valkey://[user:password@]host:6379/0, rediss:// with TLS, unix:///path; empty: none."
    )
    timeout_s: float = Field(0.25, gt=0, le=10, description="Seconds to wait for an answer, before the server counts as gone.")
    prefix: str = Field("tidegate:limits:", max_length=200, description="What the names of all its keys begin with; one for all that share.")


class QdrantSettings(Section):
    """[qdrant]: where passages are, if not in the database."""

    url: str = Field(
        "", description="Qdrant server: http(s)://host:6333; empty: passages are in the database. `:memory:` is the client's own, gone when it is."
    )
    api_key: SecretStr | None = Field(None, description="Sent to Qdrant.")
    timeout_s: float = Field(5.0, gt=0, le=600, description="Seconds to wait for an answer, before Qdrant counts as down.")
    prefix: str = Field("tidegate_", pattern=r"^[A-Za-z0-9_-]{1,100}$", description="What the names of all its collections begin with.")

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        parts = urlsplit(url)
        if url not in ("", ":memory:") and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("must not carry a user or password: use api_key")
        return url.rstrip("/")
