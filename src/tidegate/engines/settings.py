"""`[engines.NAME]`: where an engine listens, what it serves, and how long it may take. `[fleet]`: how the engines of one model share its requests."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

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
    role: Literal["any", "short", "long", "high_value", "fallback"] = Field(
        "any",
        description="Which requests of a model with several engines come here: short or long ones (fleet.long_tokens), those of `high_value_for` "
        "and no others, or those that no other engine can take (fallback).",
    )
    high_value_for: list[str] = Field(
        default_factory=list, description='With role = "high_value": whose requests come here, as GROUP/NAME of a capability or tenant:NAME.'
    )
    weight: float = Field(
        1.0, ge=0.001, le=1000, description="How much this engine can carry beside the others of its models: one of weight 2 twice as much."
    )
    max_tokens_in_flight: int = Field(
        0, ge=0, description="Tokens, of prompts and expected answers, that may be at work here at once: what its KV cache holds. 0: no bound."
    )
    context_tokens: int = Field(
        0, ge=0, description="Longest prompt with its answer, in tokens; a longer one goes to another engine. 0: not said."
    )
    from_requests: int = Field(
        0, ge=0, description="Used only while so many requests run on the model's other engines: a tensor-parallel engine pays off under load alone."
    )
    drain: bool = Field(False, description="Sends no new requests here; those that run end well.")
    metrics_url: str = Field(
        "",
        description="Address of the engine's Prometheus metrics, where it is not /metrics beside its API (triton: http://HOST:8002/metrics); "
        "`off`: they are not read.",
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

    @field_validator("metrics_url")
    @classmethod
    def _metrics_url(cls, url: str) -> str:
        return url if url in ("", "off") else cls._url(url)

    @model_validator(mode="after")
    def _high_value(self) -> EngineSettings:
        if (self.role == "high_value") != bool(self.high_value_for):
            raise ValueError('role = "high_value" and high_value_for go together: whose requests are they?')
        return self

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


class FleetSettings(Section):
    """How the engines of one model share its requests, and when one is left alone for a while."""

    long_tokens: int = Field(4096, ge=1, description="From so many tokens on, prompt and expected answer, a request is a long one.")
    affinity_tokens: int = Field(
        4096, ge=0,
        description="A request goes where its prefix or capability went before (its KV cache is there) unless that engine has more than so many "
        "tokens in flight above the least busy one; a conversation that goes on may stay behind its own prompt's tokens more. 0: only among equals.",
    )
    slow_start_s: float = Field(
        10.0, ge=0, le=3600, description="Seconds over which an engine that came back takes its full share again, from a tenth on."
    )
    breaker_window_s: float = Field(30.0, gt=0, le=3600, description="Seconds of outcomes that an engine's circuit breaker looks at.")
    breaker_min_calls: int = Field(5, ge=1, description="Outcomes in the window below which a breaker does not open.")
    breaker_share: float = Field(0.5, gt=0, le=1, description="Share of failures at which a breaker opens.")
    breaker_open_s: float = Field(
        5.0, gt=0, le=3600, description="Seconds that a breaker is open before probes pass; twice as long when it opens again soon."
    )
    breaker_max_open_s: float = Field(60.0, gt=0, le=86_400, description="Seconds that a breaker is open at most.")
    breaker_probes: int = Field(
        2, ge=1, le=100, description="Requests that may probe an engine at once, and that must end well before it is trusted again."
    )
    max_retry_after_s: float = Field(
        60.0, ge=0, le=86_400, description="Seconds of an engine's Retry-After that are obeyed at most; until then nobody asks it."
    )
    metrics_s: float = Field(
        2.0, ge=0, le=3600,
        description="Seconds between two looks at the metrics of engines that share a model; those of others are looked at rarely. 0: never.",
    )
