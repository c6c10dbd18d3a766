"""The document of /health: figures from the rooms and from the newest flights, and what each bad figure means and asks for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidegate.core.flight import FlightRecord

#: Rate, error share and percentiles are taken over this time, or over the time that the ring of newest flights covers where that is less.
WINDOW_S = 60.0
#: Below this many flights a share of errors says nothing.
MIN_FLIGHTS = 20
ERROR_SHARE = 0.05
SLOW_DATABASE_MS = 250.0
#: Recall of sampled searches below this is bad, where so many passages were looked at.
LEAST_RECALL, MIN_SAMPLED = 0.9, 200

#: Ends that are our fault or the engine's, never the caller's.
BAD_ENDS = frozenset({"cut", "stalled", "error", "empty"})

_RANK = {"ok": 0, "degraded": 1, "down": 2}
#: A finding: how bad, and what it means and asks for.
Finding = tuple[str, str]


def health(figures: Mapping[str, Any], newest: Sequence[FlightRecord], now_unix_ns: int, ring_limit: int) -> dict[str, Any]:
    """The /health document. Pure: `figures` come from the rooms, `newest` from the ring (newest first, `ring_limit` long when full).

    `figures` may hold (a missing one is left out of the document, never invented):
    `requests_in_flight` int; `database` {up, round_trip_ms, why}; `engines` {name: {up, why, ...}}; `embedder` {up, why, ...};
    `spool` {bytes, max_bytes, near, lost, rejected, last_drain_error, ...};
    `admission` {model: {slots, waiting, forecast_s, forecast_bound_s, ...}}; `qdrant` {up, why, ...}; `recall` {collection: {found, passages}};
    and anything else, passed on as it is (`process`, `version`, ...).

    Returns `status` (ok, degraded, down), `why` (a sentence per bad figure: what it means, what to do), `traffic`, and the figures.
    """
    traffic = window(newest, now_unix_ns, ring_limit)
    findings = [finding for judge in _JUDGES for finding in judge(figures, traffic)]
    status = max((how_bad for how_bad, _ in findings), key=_RANK.__getitem__, default="ok")
    return {"status": status, "why": [why for _, why in findings], "traffic": traffic, **figures}


def window(newest: Sequence[FlightRecord], now_unix_ns: int, ring_limit: int) -> dict[str, Any]:
    """What the flights that ended within the last WINDOW_S tell. Times in milliseconds; `over_s` is the time that they cover."""
    since_ns = now_unix_ns - int(WINDOW_S * 1e9)
    flights = [record for record in newest if _ended_ns(record) >= since_ns]
    over_s = WINDOW_S
    if flights and len(newest) >= ring_limit and len(flights) == len(newest):
        # The ring holds less than the window: a rate over the whole window would be too low.
        over_s = max((now_unix_ns - _ended_ns(flights[-1])) / 1e9, 1e-3)
    bad = sum(is_bad(record) for record in flights)
    return {
        "flights": len(flights),
        "over_s": round(over_s, 3),
        "per_s": round(len(flights) / over_s, 3),
        "error_share": round(bad / len(flights), 4) if flights else None,
        "whole_ms": percentiles(record.whole_ns for record in flights if record.end != "refused"),
        "first_token_ms": percentiles(record.first_token_ns for record in flights if record.first_token_ns),
    }


def is_bad(record: FlightRecord) -> bool:
    """True where the flight failed through us or an engine, not through its caller."""
    return record.end in BAD_ENDS or (record.end == "refused" and record.http_status >= 500)


def percentiles(values_ns: Iterable[int]) -> dict[str, float] | None:
    """p50, p95 and p99 in milliseconds by the nearest-rank method; None where there is nothing to rank."""
    ordered = sorted(values_ns)
    if not ordered:
        return None
    return {f"p{p}": round(ordered[-(-p * len(ordered) // 100) - 1] / 1e6, 3) for p in (50, 95, 99)}


def _ended_ns(record: FlightRecord) -> int:
    return record.began_unix_ns + record.whole_ns


# -- the judges: from figures to findings --


_NOT_USED = "It is not used: requests for a model that it alone serves end with engine_not_admitted"


def _engines(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    engines: Mapping[str, Mapping[str, Any]] = figures.get("engines", {})
    down = {name: engine for name, engine in engines.items() if not engine.get("up")}
    refused = {name for name, engine in engines.items() if engine.get("admitted") is False}
    drained = [name for name, engine in engines.items() if (engine.get("fleet") or {}).get("drained") and name not in down.keys() | refused]
    how_bad = "down" if engines and len(down.keys() | refused) + len(drained) == len(engines) else "degraded"
    failed = {name: engine for name, engine in engines.items() if engine.get("conformance") == "failed"}
    return [
        (
            how_bad if name in refused else "degraded",
            f"Engine {name!r} failed {_checks(engine)}. "
            f"{_NOT_USED if name in refused else 'It is used all the same'}. "
            f"`tidegate check` shows all checks; engines.{name}.conformance says what a failure means.",
        )
        for name, engine in failed.items()
    ] + [
        (
            how_bad,
            f"Engine {name!r} does not answer{_because(engine)}: requests for its models end with engine_down. "
            f"Look at the engine's log, and at engines.{name}.url.",
        )
        for name, engine in down.items()
    ] + [
        # One that is drained is as its operator wants it, while others take its requests.
        (how_bad, f"Engine {name!r} is drained, and no other takes requests: they end with engine_down. `tidegate drain {name} --undo` helps.")
        for name in drained
        if how_bad == "down"
    ]


def _breakers(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    engines: Mapping[str, Mapping[str, Any]] = figures.get("engines", {})
    return [
        (
            "degraded",
            f"Engine {name!r} failed so often lately that its circuit breaker is {fleet['breaker'].replace('_', ' ')}: requests go to other "
            f"engines of its models where there are any. Last cause: {fleet.get('last_failure', {}).get('cause', 'unknown')}. See its log.",
        )
        for name, engine in engines.items()
        if engine.get("up") and (fleet := engine.get("fleet") or {}).get("breaker", "closed") != "closed"
    ]


def _checks(engine: Mapping[str, Any]) -> str:
    failed: Mapping[str, Any] = engine.get("checks_failed") or {}
    return "; ".join(f"the check {name} ({str(why).rstrip('.')})" for name, why in failed.items()) or "a check"


def _database(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    database: Mapping[str, Any] | None = figures.get("database")
    if database is None:
        return []
    if not database.get("up"):
        passages = "" if "qdrant" in figures else "answers go on without passages, "  # those are in Qdrant then
        return [
            (
                "degraded",
                f"The database does not answer{_because(database)}: {passages}flights wait in the spool, "
                "keys are those last read. Start it, or correct store.dsn.",
            )
        ]
    round_trip_ms = database.get("round_trip_ms") or 0.0
    if round_trip_ms > SLOW_DATABASE_MS:
        return [("degraded", f"The database takes {round_trip_ms:.0f} ms for the smallest query: retrieval is slow. See its load.")]
    return []


def _embedder(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    embedder: Mapping[str, Any] | None = figures.get("embedder")
    if embedder is None or embedder.get("up"):
        return []
    return [
        (
            "degraded",
            f"The embedder does not answer{_because(embedder)}: documents are searched by their words alone, "
            "nothing can be ingested, /v1/embeddings fails. It is restarted by `tidegate up`; look at its lines in the log.",
        )
    ]


def _qdrant(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    qdrant: Mapping[str, Any] | None = figures.get("qdrant")
    if qdrant is None or qdrant.get("up"):
        return []
    return [("degraded", f"Qdrant does not answer{_because(qdrant)}: nothing can be searched or ingested. Start it, or correct qdrant.url.")]


def _recall(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    told: Mapping[str, Mapping[str, int]] = figures.get("recall", {})
    return [
        (
            "degraded",
            f"Searches of {name!r} had {one['found'] / one['passages']:.0%} of the {one['passages']} passages that comparing everything gives: "
            f"answers miss what is there. `tidegate index {name}` builds its indexes; a facet for the tags that are asked for makes them exact.",
        )
        for name, one in told.items()
        if one["passages"] >= MIN_SAMPLED and one["found"] < LEAST_RECALL * one["passages"]
    ]


def _spool(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    spool: Mapping[str, Any] = figures.get("spool", {})
    lost, rejected = spool.get("lost", 0), spool.get("rejected", 0)
    findings: list[Finding] = []
    if spool.get("near"):
        used = spool["bytes"] / spool["max_bytes"]
        error = spool.get("last_drain_error")
        why = f" ({error})" if error else ""
        findings.append(
            (
                "degraded",
                f"The spool holds {used:.0%} of its bound: flights reach the database too slowly or not at all{why}, and token stamps are "
                "left out. Bring the database back, or raise spool.max_bytes.",
            )
        )
    if lost:
        findings.append(
            ("degraded", f"{lost} flights were lost because the spool could not be written: the database counts too few. See the log.")
        )
    if rejected:
        findings.append(
            ("degraded", f"The database refused {rejected} flights; they are set aside beside the spool. The log names the reason.")
        )
    return findings


def _errors(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    share = traffic["error_share"]
    if traffic["flights"] < MIN_FLIGHTS or share <= ERROR_SHARE:
        return []
    return [
        (
            "degraded",
            f"{share:.0%} of the last {traffic['flights']} requests failed through the engine or through us. "
            "`tidegate flights --bad` lists them; each names its error.",
        )
    ]


def _admission(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    lanes: Mapping[str, Mapping[str, Any]] = figures.get("admission", {})
    return [
        (
            "degraded",
            f"All {lane['slots']} slots for {model!r} are taken, {lane['waiting']} requests wait, and a newcomer would wait "
            f"{lane['forecast_s']:.1f} s: requests are refused with busy and told when to come back. Add slots or engines, or raise "
            "admission.forecast_s.",
        )
        for model, lane in lanes.items()
        if lane["waiting"] and lane["forecast_s"] > lane["forecast_bound_s"]
    ]


def _limits(figures: Mapping[str, Any], traffic: Mapping[str, Any]) -> list[Finding]:
    limits: Mapping[str, Any] = figures.get("limits", {})
    if limits.get("shared", True):
        return []
    return [
        (
            "degraded",
            f"The limits that all machines share cannot be reached{_because(limits)}: {limits['means']} (limits.when_lost). "
            "Bring Valkey back; see valkey.url.",
        )
    ]


_JUDGES: tuple[Callable[[Mapping[str, Any], Mapping[str, Any]], list[Finding]], ...] = (
    _engines, _breakers, _database, _embedder, _qdrant, _recall, _spool, _errors, _admission, _limits,
)


def _because(figures: Mapping[str, Any]) -> str:
    return f" ({str(figures['why']).rstrip('.')})" if figures.get("why") else ""


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STARTED_NS = time.perf_counter_ns()


def process_figures() -> dict[str, Any]:
    """This process now: resident memory in bytes (None where /proc is not there), seconds since it started, and its id."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            rss_bytes: int | None = int(statm.read().split()[1]) * _PAGE_BYTES
    except OSError:
        rss_bytes = None
    return {"pid": os.getpid(), "rss_bytes": rss_bytes, "uptime_s": round((time.perf_counter_ns() - _STARTED_NS) / 1e9, 1)}
