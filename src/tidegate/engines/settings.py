"""`[engines.NAME]`: where an engine listens, what it serves, and how long it may take."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator

from tidegate.core.settings import Section


class EngineSettings(Section):
    """One engine of the fleet."""

    adapter: str = Field("openai", description="The engine's dialect: the name of a file in engines/adapters.")
    url: str = Field(
        description="The engine's base address, http or https; without a path, /v1 is added (http://127.0.0.1:8000, https://host/openai/v1)."
    )
    models: dict[str, str] | list[str] = Field(
        description="Model names that callers use: a list, or a table from the public name to the engine's own name."
    )
    slots: int = Field(
        0, ge=0, le=1_000_000,
        description="Requests that the engine is given at once; those beyond wait in the gateway's queue ([admission]). 0: no bound, nothing waits. "
        "Workers share them.",
    )
    api_key: SecretStr | None = Field(None, description="Sent to the engine as a bearer token.")
    ca_file: str | None = Field(None, description="File of CA certificates (PEM) to trust for https; without it the system's own.")
    connect_s: float = Field(5.0, gt=0, description="Seconds that a connection, TLS included, may take.")
    first_token_s: float = Field(
        120.0, gt=0, description="Seconds from the request to the answer's first event: the engine's queue and prefill lie here."
    )
    inter_token_s: float = Field(30.0, gt=0, description="Seconds of silence between two events after which a stream counts as stalled.")
    total_s: float = Field(600.0, gt=0, description="Seconds that one answer may take in all.")
    keepalive_s: float = Field(60.0, ge=0, description="Seconds after which an idle connection is not used again.")
    max_idle: int = Field(256, ge=0, description="Idle connections that are kept for the next request.")
    max_event_bytes: int = Field(4 << 20, gt=0, description="Largest single stream event, in bytes.")
    max_answer_bytes: int = Field(
        64 << 20, gt=0, description="Largest answer, in bytes of the body that the engine sends; of a stream all events together."
    )
    chat_template: str | None = Field(
        None,
        description="How messages become a prompt where the engine does not do it itself: chatml, llama3, or a file (Jinja, or the model's "
        "tokenizer_config.json). Needed by triton, used by tgi and sglang to go on from the middle of an answer.",
    )
    control_tokens: Literal["defuse", "refuse", "pass"] = Field(
        "defuse",
        description="What happens to text in messages that reads as one of the model's control tokens, where the engine would take it for one "
        "(triton, tgi, sglang): a blank is put into it, the request is refused, or it passes as it is.",
    )
    conformance: Literal["must", "warn", "off"] = Field(
        "must",
        description="What the gateway makes of its checks of the engine, at its start and when the engine comes back: an engine that fails a must is "
        "not used, it is only shown, or nothing is checked. See tidegate check.",
    )
    tokenizer: str | None = Field(
        None, description="GGUF file with the vocabulary that the engine should have, plain or gzipped; the checks compare the engine's with it."
    )

    @field_validator("url")
    @classmethod
    def _url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must begin with http:// or https:// and name a host")
        if parts.username or parts.password:
            raise ValueError("must not carry a user or password: use api_key")
        if parts.query or parts.fragment:
            raise ValueError("must not carry a query or fragment")
        if not url.isascii() or any(c <= " " for c in url):
            raise ValueError("must be printable ASCII without blanks")
        _ = parts.port  # raises ValueError where it is no port
        return url.rstrip("/")

    @field_validator("models")
    @classmethod
    def _models(cls, models: dict[str, str] | list[str]) -> dict[str, str] | list[str]:
        if not models:
            raise ValueError("must name at least one model")
        return models

    @field_validator("api_key")
    @classmethod
    def _api_key(cls, key: SecretStr | None) -> SecretStr | None:
        # what cannot stand in a header could end it and begin another
        if key and not (key.get_secret_value().isascii() and key.get_secret_value().isprintable()):
            raise ValueError("must be printable ASCII")
        return key

    @property
    def model_names(self) -> dict[str, str]:
        """Public name -> the engine's own name, in the order of the settings."""
        return self.models if isinstance(self.models, dict) else {model: model for model in self.models}
