"""/health tells figures, judges them, and says what a bad one means and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate.core.flight import FlightRecord
from tidegate.stores.settings import SpoolSettings
from tidegate.stores.spool import Spool
from tidegate.telemetry.health import health, percentiles, process_figures

MakeFlight = Callable[..., FlightRecord]
NOW_NS = 1_700_000_000_000_000_000
WELL: dict[str, Any] = {
    "requests_in_flight": 2,
    "database": {"up": True, "round_trip_ms": 0.8},
    "engines": {"local": {"up": True, "slots": 4}},
    "embedder": {"up": True},
    "spool": {"bytes": 10, "max_bytes": 1000, "near": False, "lost": 0, "rejected": 0, "last_drain_error": None},
}
DRAINED: dict[str, Any] = {"up": True, "fleet": {"drained": True}}
REFUSED = {"up": True, "admitted": False, "conformance": "failed", "checks_failed": {"stop": "it is in the answer."}}


def told(figures: dict[str, Any] | None = None, newest: list[FlightRecord] | None = None, ring_limit: int = 512) -> dict[str, Any]:
    return health(WELL | (figures or {}), newest or [], NOW_NS, ring_limit)


def test_all_well_is_ok_and_still_gives_the_figures() -> None:
    """The figures are there, not only a word."""
    document = told()
    assert (document["status"], document["why"]) == ("ok", [])
    assert document["engines"]["local"]["slots"] == 4
    assert document["traffic"]["flights"] == 0


@pytest.mark.parametrize(
    ("figures", "status", "says"),
    [
        ({"engines": {"local": {"up": False, "why": "connection refused"}}}, "down", "connection refused"),
        ({"engines": {"a": {"up": True}, "b": {"up": False}}}, "degraded", "engines.b.url"),
        ({"engines": {"a": REFUSED}}, "down", "'a' failed the check stop (it is in the answer). It is not used"),
        ({"engines": {"a": REFUSED, "b": {"up": True}}}, "degraded", "engines.a.conformance"),
        ({"engines": {"a": REFUSED, "b": {"up": False}}}, "down", "engine_not_admitted"),
        ({"engines": {"a": REFUSED | {"admitted": True}}}, "degraded", "used all the same"),
        (
            {"engines": {"a": {"up": True, "fleet": {"breaker": "open", "last_failure": {"cause": "cut"}}}, "b": {"up": True}}}, "degraded",
            "'a' failed so often lately that its circuit breaker is open",
        ),
        ({"engines": {"a": DRAINED, "b": DRAINED}}, "down", "'a' is drained, and no other takes requests"),
        ({"engines": {"a": {"up": False}, "b": DRAINED}}, "down", "'a' does not answer"),
        ({"engines": {"a": REFUSED, "b": DRAINED}}, "down", "'a' failed the check stop"),
        ({"database": {"up": False, "why": "no route"}}, "degraded", "store.dsn"),
        ({"database": {"up": True, "round_trip_ms": 900.0}}, "degraded", "900 ms"),
        ({"embedder": {"up": False}}, "degraded", "searched"),
        ({"spool": WELL["spool"] | {"bytes": 900, "near": True, "last_drain_error": "no route"}}, "degraded", "90% of its bound"),
        ({"spool": WELL["spool"] | {"lost": 3}}, "degraded", "3 flights were lost"),
        ({"spool": WELL["spool"] | {"rejected": 2}}, "degraded", "refused 2 flights"),
    ],
)
def test_each_bad_figure_says_what_it_means(figures: dict[str, Any], status: str, says: str) -> None:
    """The status falls, and `why` names the part and the way out."""
    document = told(figures)
    assert document["status"] == status
    assert says in document["why"][0]


def test_the_spool_tells_what_health_judges(tmp_path: Path) -> None:
    """The names that the judges read are those that the real spool gives."""
    spool = Spool(tmp_path, SpoolSettings())
    assert WELL["spool"].keys() <= spool.figures().keys()
    assert told({"spool": spool.figures()})["status"] == "ok"
    spool.close()


def test_a_drained_engine_is_well_while_another_takes_its_requests() -> None:
    """It is as its operator wants it: nobody is to be woken for it."""
    document = told({"engines": {"a": DRAINED, "b": {"up": True}}})
    assert (document["status"], document["why"]) == ("ok", [])


def test_without_any_engine_nothing_is_said_about_engines() -> None:
    """A room that gave no figures is left out, never invented."""
    assert health({}, [], NOW_NS, 512)["status"] == "ok"


def at(flight: MakeFlight, age_s: float, **changes: Any) -> FlightRecord:
    return flight(began_unix_ns=NOW_NS - int(age_s * 1e9) - 100_000_000, **changes)


def test_a_high_share_of_failures_degrades(flight: MakeFlight) -> None:
    """Five of 40 requests cut by the engine are a finding."""
    newest = [at(flight, n, end="cut" if n < 5 else "stop") for n in range(40)]
    document = told(newest=newest)
    assert document["status"] == "degraded"
    assert document["traffic"]["error_share"] == 0.125


def test_a_callers_own_mistakes_do_not_degrade(flight: MakeFlight) -> None:
    """Refusals with 4xx and clients that left are not failures of the service."""
    newest = [at(flight, n, end="refused", http_status=401) for n in range(30)] + [at(flight, 30, end="client_gone", http_status=499)]
    document = told(newest=newest)
    assert (document["status"], document["traffic"]["error_share"]) == ("ok", 0)


def test_a_handful_of_flights_is_no_share(flight: MakeFlight) -> None:
    """One failure of one request is not 100 %."""
    assert told(newest=[at(flight, 1, end="cut")])["status"] == "ok"


def test_only_the_last_minute_counts(flight: MakeFlight) -> None:
    """Thirty flights in the last minute are half a flight a second, whatever came before."""
    newest = [at(flight, 2 * n) for n in range(100)]
    traffic = told(newest=newest)["traffic"]
    assert (traffic["flights"], traffic["per_s"], traffic["over_s"]) == (31, 0.517, 60.0)


def test_a_ring_shorter_than_a_minute_does_not_understate_the_rate(flight: MakeFlight) -> None:
    """A full ring of 100 flights over 2 s is 50 a second."""
    newest = [at(flight, n * 0.02) for n in range(1, 101)]
    traffic = told(newest=newest, ring_limit=100)["traffic"]
    assert (traffic["per_s"], traffic["over_s"]) == (50.0, 2.0)


def test_percentiles_are_of_real_values(flight: MakeFlight) -> None:
    """Nearest rank: a percentile is always a time that a request had."""
    assert percentiles(n * 1_000_000 for n in range(1, 101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([7_000_000]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}
    assert percentiles([]) is None
    assert told(newest=[at(flight, 1)])["traffic"]["first_token_ms"]["p50"] == 60.0


def test_a_low_recall_is_told_where_enough_was_sampled() -> None:
    """Below 90 % of at least 200 passages; a few samples say nothing."""
    assert told({"recall": {"c": {"found": 179, "passages": 200}}})["status"] == "degraded"
    assert "had 90% of the 200 passages" in told({"recall": {"c": {"found": 179, "passages": 200}}})["why"][0]
    for well in ({"found": 180, "passages": 200}, {"found": 0, "passages": 199}):
        assert told({"recall": {"c": well}})["status"] == "ok"


def test_passages_in_qdrant_do_not_go_with_the_database() -> None:
    """What is said to fail is what fails."""
    down = {"database": {"up": False, "why": "refused"}}
    assert "without passages" in told(down)["why"][0]
    assert "without passages" not in told(down | {"qdrant": {"up": True}})["why"][0]


def test_qdrant_down_is_told() -> None:
    """With what it said."""
    assert told({"qdrant": {"up": True}})["status"] == "ok"
    down = told({"qdrant": {"up": False, "why": "Qdrant at http://q:1 cannot be used: refused."}})
    assert down["status"] == "degraded"
    assert "http://q:1" in down["why"][0]


def test_the_process_tells_its_memory() -> None:
    """Resident memory of this Python is some ten megabytes at least."""
    assert process_figures()["rss_bytes"] > 10_000_000
