"""Metrics are a fold over finished flights, and Prometheus can read what they tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tidegate.core.chunk import Usage
from tidegate.core.flight import FlightRecord
from tidegate.telemetry.described import DESCRIBED, READ
from tidegate.telemetry.exposition import Exposition
from tidegate.telemetry.histogram import Histogram
from tidegate.telemetry.metrics import FOLD_FLIGHTS, FOLD_STAMPS, HELD_STAMPS, MAX_NAMES, OTHER, Metrics

MakeFlight = Callable[..., FlightRecord]


def told(metrics: Metrics, **readers: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus reads: by sample name and sorted labels."""
    text = Exposition(lambda: metrics, readers, process=False).render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(**values: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def test_a_request_is_counted_once_under_what_it_was(flight: MakeFlight) -> None:
    """Two like flights are one series with the value 2."""
    metrics = Metrics()
    metrics.finished(flight(capability="support/answer"))
    metrics.finished(flight(capability="support/answer"))
    key = labels(route="/v1/chat/completions", capability="support/answer", model="smollm2", end="stop", status="200")
    assert told(metrics)["tidegate_requests_total", key] == 2


def test_the_parts_of_the_waterfall_sum_to_the_whole(flight: MakeFlight) -> None:
    """The sums of tidegate_part_seconds over all parts are the sum of tidegate_request_seconds."""
    metrics = Metrics()
    metrics.finished(flight())
    figures = told(metrics)
    parts = sum(value for (name, _), value in figures.items() if name == "tidegate_part_seconds_sum")
    whole = sum(value for (name, _), value in figures.items() if name == "tidegate_request_seconds_sum")
    assert parts == pytest.approx(whole) == pytest.approx(0.1)


def test_time_to_first_token_and_between_tokens_are_told(flight: MakeFlight) -> None:
    """Three tokens at 60, 70 and 100 ms: one first token, gaps of 10 and 30 ms."""
    metrics = Metrics()
    metrics.finished(flight())
    figures = told(metrics)
    assert figures["tidegate_first_token_seconds_sum", labels(route="/v1/chat/completions", capability="")] == pytest.approx(0.06)
    assert figures["tidegate_inter_token_seconds_count", ()] == 2
    assert figures["tidegate_inter_token_seconds_sum", ()] == pytest.approx(0.04)
    assert figures["tidegate_inter_token_seconds_bucket", labels(le="0.01")] == 1


def test_gaps_are_never_lost_between_two_folds(flight: MakeFlight) -> None:
    """However long the streams, the number of gaps is the number of tokens less one per stream."""
    metrics = Metrics()
    for _ in range(20):
        metrics.finished(flight(token_ns=list(range(0, 300_000_000, 1_000_000))))
    assert told(metrics)["tidegate_inter_token_seconds_count", ()] == 20 * 299


@given(st.lists(st.sampled_from([0, 1, 2, FOLD_STAMPS - 1, FOLD_STAMPS + 1, HELD_STAMPS]), max_size=6), st.integers(0, FOLD_FLIGHTS + 2))
def test_however_long_answers_are_each_is_counted_once(tokens: list[int], short: int) -> None:
    """Gaps between tokens are counted apart from their flights, and both once."""
    metrics = Metrics()
    for count in [*[3] * short, *tokens]:
        metrics.finished(FlightRecord("1", 1, 1, [("read", 1)], "/v1", "stop", 200, token_ns=list(range(count))))
    gaps = sum(max(0, count - 1) for count in [*[3] * short, *tokens])
    assert sum(metrics.gaps().counts) == metrics.gaps().sum_ns == gaps
    assert sum(series.count for series in metrics.series.values()) == short + len(tokens)
    assert sum(metrics.gaps().counts) == gaps


def test_recall_in_production_is_what_the_samples_had(flight: MakeFlight) -> None:
    """Added up by collection, also over workers."""
    metrics, other = Metrics(), Metrics()
    sampled = [(1, "recall", {"collection": "c", "found": 4, "of": 5})]
    metrics.finished(flight(decisions=sampled))
    other.finished(flight(decisions=sampled * 2))
    metrics.add(other.counted())
    figures = told(metrics)
    assert figures["tidegate_retrieval_sample_found_total", labels(collection="c")] == 12
    assert figures["tidegate_retrieval_sample_passages_total", labels(collection="c")] == 15


def test_steps_down_the_ladder_are_counted_by_where_they_led(flight: MakeFlight) -> None:
    """Each step once, also where another process counted it."""
    metrics, other = Metrics(), Metrics()
    steps = [(1, "stepped_down", {"rung": "full", "to": "faq", "cause": "engine_down"}), (2, "stepped_down", {"rung": "faq", "to": "message"})]
    metrics.finished(flight(capability="support/answer", decisions=steps))
    metrics.finished(flight(capability="support/answer", decisions=steps[:1]))
    other.add(metrics.counted())
    figures = told(other)
    assert figures["tidegate_steps_down_total", labels(capability="support/answer", to="faq")] == 2
    assert figures["tidegate_steps_down_total", labels(capability="support/answer", to="message")] == 1


def test_tokens_are_told_apart_by_kind_and_exactness(flight: MakeFlight) -> None:
    """Estimated tokens never mix with those that the engine counted."""
    metrics = Metrics()
    metrics.finished(flight(usage=Usage(12, 3, 4, True)))
    metrics.finished(flight(usage=Usage(5, 2, 0, False)))
    figures = told(metrics)
    assert figures["tidegate_tokens_total", labels(kind="prompt", exact="true")] == 12
    assert figures["tidegate_tokens_total", labels(kind="cached", exact="true")] == 4
    assert figures["tidegate_tokens_total", labels(kind="completion", exact="false")] == 2


def test_a_refused_request_is_counted_but_is_no_latency(flight: MakeFlight) -> None:
    """A thousand quick refusals must not make the service look fast."""
    metrics = Metrics()
    metrics.know_routes(["/v1/chat/completions"])
    metrics.finished(flight(end="refused", http_status=429, error_code="rate_limit_exceeded", first_token_ns=0, token_ns=[]))
    figures = told(metrics)
    assert figures["tidegate_errors_total", labels(code="rate_limit_exceeded")] == 1
    assert figures["tidegate_request_seconds_count", labels(route="/v1/chat/completions", capability="")] == 0


def test_a_name_that_a_caller_made_up_never_becomes_a_label(flight: MakeFlight) -> None:
    """Refused flights teach no names: unknown routes, models and capabilities are `other`."""
    metrics = Metrics(models=["smollm2"])
    metrics.know_routes(["/v1/chat/completions"])
    for n in range(1000):
        metrics.finished(flight(route=f"/v1/{n}", model=f"made-up-{n}", capability=f"x/{n}", end="refused", http_status=404))
    metrics.finished(flight(end="refused", http_status=429))
    assert {key[:3] for key in metrics.series} == {(OTHER, OTHER, OTHER), ("/v1/chat/completions", "", "smollm2")}


def test_labels_are_bounded_even_for_served_names(flight: MakeFlight) -> None:
    """An engine that serves any name cannot grow the metrics past the bound."""
    metrics = Metrics()
    for n in range(10 * MAX_NAMES):
        metrics.finished(flight(model=f"model-{n}", error_code=f"code-{n}", laps=[(f"part-{n}", 1)], route=f"/r{n}"))
    assert len({key[2] for key in metrics.series}) == MAX_NAMES + 1
    assert len(metrics.errors) == len(metrics.parts) == MAX_NAMES + 1
    assert sum(series.count for series in metrics.series.values()) == 10 * MAX_NAMES


def test_figures_of_the_rooms_are_read_at_the_scrape() -> None:
    """A gauge tells what its room says when it is scraped, also one value per label."""
    engines = {"local": 1.0, "far": 0.0}
    readers = {"tidegate_requests_in_flight": lambda: 3, "tidegate_engine_up": lambda: engines, "tidegate_spool_lost_total": lambda: 7}
    figures = told(Metrics(), **readers)
    assert figures["tidegate_requests_in_flight", ()] == 3
    assert figures["tidegate_engine_up", labels(engine="far")] == 0
    assert figures["tidegate_spool_lost_total", ()] == 7


def test_a_reader_that_is_not_described_is_refused() -> None:
    """A metric without a sentence in the documentation cannot be exposed."""
    with pytest.raises(ValueError, match="tidegate_engine_up"):
        Exposition(Metrics, {"tidegate_engin_up": lambda: 1.0})


def test_every_metric_that_is_told_is_described(flight: MakeFlight) -> None:
    """/metrics and docs/metrics.md come from one list."""
    metrics = Metrics()
    metrics.finished(flight(error_code="engine_cut", end="cut", thinned=True))
    readers = {described.name: (lambda: 1.0) if not described.labels else dict for described in READ}
    text = Exposition(lambda: metrics, readers, process=False).render()
    families = {family.name for family in text_string_to_metric_families(text.decode())}
    described = {name.removesuffix("_total") for name in DESCRIBED}
    assert families - {"tidegate_build_info"} == described


def test_the_process_tells_its_own_memory() -> None:
    """Prometheus' standard process figures come along."""
    assert b"process_resident_memory_bytes" in Exposition(Metrics).render()


@given(st.lists(st.integers(0, 20_000_000_000)))
def test_many_values_at_once_count_as_one_by_one(values: list[int]) -> None:
    """`add_all` is `add` for each."""
    bounds = (0.001, 0.01, 0.1, 1.0, 10.0)
    one_by_one, at_once = Histogram(bounds), Histogram(bounds)
    for value in values:
        one_by_one.add(value)
    at_once.add_all(np.array(values, dtype=np.int64))
    assert (one_by_one.counts, one_by_one.sum_ns) == (at_once.counts, at_once.sum_ns)
    assert one_by_one.buckets()[-1] == ("+Inf", len(values))
