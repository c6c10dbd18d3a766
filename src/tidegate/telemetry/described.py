"""Every metric of /metrics with its kind, labels and meaning: the list from which the exposition and docs/metrics.md are made."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Described(NamedTuple):
    """A metric as it is documented."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    help: str


#: Folded from finished flights.
FOLDED = (
    Described(
        "tidegate_requests_total", "counter", ("route", "capability", "model", "end", "status"), "Finished requests by how they ended."
    ),
    Described(
        "tidegate_request_seconds", "histogram", ("route", "capability"),
        "From the first byte in to the last byte handed over, of requests that were not refused.",
    ),
    Described(
        "tidegate_first_token_seconds", "histogram", ("route", "capability"),
        "From the first byte in to the first token read from the engine (TTFT).",
    ),
    Described(
        "tidegate_part_seconds", "histogram", ("part",), "Time that one part of the waterfall owned; a request's parts add up to its whole."
    ),
    Described(
        "tidegate_inter_token_seconds", "histogram", (), "From one event with text to the next, as read from the engine's socket."
    ),
    Described(
        "tidegate_tokens_total", "counter", ("kind", "exact"),
        "Tokens by kind (prompt, completion, cached); exact is false where the engine did not say and they are an estimate.",
    ),
    Described("tidegate_errors_total", "counter", ("code",), "Finished requests that carried an error, by its code."),
    Described(
        "tidegate_admission_forecast_error_seconds", "histogram", ("side",),
        "How far the forecast of the wait was off, of requests that waited for a slot: late where they waited longer than was forecast, else early.",
    ),
    Described(
        "tidegate_retrieval_sample_found_total", "counter", ("collection",),
        "Passages that sampled searches had had, of those in tidegate_retrieval_sample_passages_total: the share is the recall in production.",
    ),
    Described(
        "tidegate_retrieval_sample_passages_total", "counter", ("collection",),
        "Nearest passages of sampled searches, found by comparing everything.",
    ),
    Described(
        "tidegate_steps_down_total", "counter", ("capability", "to"), "Steps down the ladder of a capability, by the rung that they led to."
    ),
    Described(
        "tidegate_flights_thinned_total", "counter", (), "Flights recorded without token stamps because the spool was near its bound."
    ),
)

#: Still running or outside: read from the rooms at a scrape, by callables that the composition root hands over.
READ = (
    Described("tidegate_requests_in_flight", "gauge", (), "Requests between their first byte in and their last byte out."),
    Described("tidegate_spool_bytes", "gauge", (), "Bytes of finished flights that are not in the database yet."),
    Described("tidegate_spool_max_bytes", "gauge", (), "Bytes that the spool may hold."),
    Described("tidegate_spool_lost_total", "counter", (), "Flights lost because the spool was full or could not be written."),
    Described("tidegate_database_up", "gauge", (), "1 where the database answered last time, else 0."),
    Described("tidegate_embedder_up", "gauge", (), "1 where the embedder answered last time, else 0."),
    Described("tidegate_engine_up", "gauge", ("engine",), "1 where the engine answered last time, else 0."),
    Described(
        "tidegate_engine_admitted", "gauge", ("engine",), "1 where requests are sent to the engine, 0 where it failed a check that it must pass."
    ),
    Described("tidegate_engine_requests", "gauge", ("engine",), "Requests of this gateway that an engine works on."),
    Described(
        "tidegate_engine_tokens_in_flight", "gauge", ("engine",),
        "Tokens of their prompts and expected answers, of engines among which somebody chooses.",
    ),
    Described(
        "tidegate_engine_breaker", "gauge", ("engine",),
        "0 where an engine's circuit breaker is closed, 1 where it is open, 0.5 where it is half open.",
    ),
    Described("tidegate_engine_drained", "gauge", ("engine",), "1 where an operator wants no new requests sent to the engine, else 0."),
    Described(
        "tidegate_engine_speculative_acceptance", "gauge", ("engine",),
        "Share of speculated tokens that an engine accepted lately, of engines whose metrics tell it.",
    ),
    Described("tidegate_admission_slots", "gauge", ("model",), "Slots of a model's engines, of models that have a bound."),
    Described("tidegate_admission_running", "gauge", ("model",), "Requests that have a slot."),
    Described("tidegate_admission_waiting", "gauge", ("model",), "Requests that wait for a slot."),
    Described("tidegate_admission_booked", "gauge", ("model",), "Places that are booked for callers who were told to come back."),
    Described("tidegate_limits_subjects", "gauge", (), "Keys, tenants and capabilities whose use is counted."),
    Described("tidegate_limits_shared", "gauge", ("by",), "1 where limits are counted by all machines together, 0 while what they share is gone."),
    Described("tidegate_limits_fallbacks_total", "counter", (), "Requests decided by limits.when_lost, while what the machines share was gone."),
    Described("tidegate_keys", "gauge", ("role",), "API keys that are known and not revoked."),
    Described("tidegate_log_dropped_total", "counter", (), "Log lines of flights left out because stderr was not being read."),
    Described(
        "tidegate_workers_replaced_total", "counter", ("cause",),
        "Workers that were started again, because they ended, were killed, or hung (and were killed by their parent).",
    ),
)

DESCRIBED = {described.name: described for described in (*FOLDED, *READ)}
