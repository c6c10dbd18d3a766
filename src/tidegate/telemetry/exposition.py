"""Tells Prometheus what Metrics counted and what the rooms say now. Families are built at a scrape only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from tidegate import __version__
from tidegate.core.plugins import nearest
from tidegate.telemetry.described import DESCRIBED, READ, Described
from tidegate.telemetry.histogram import REQUEST_BOUNDS_S, Histogram
from tidegate.telemetry.metrics import Metrics, Series

#: What /metrics is served as.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Reads one figure, or one for each value of the metric's only label. An empty mapping: nothing is known.
Reader = Callable[[], float | Mapping[str, float]]


class Exposition(Collector):
    """The text of /metrics.

    `metrics`: what was counted, asked for at each scrape; `readers`: by the names in described.READ; one that is not given is not exposed.
    `process`: also Prometheus' own figures of this process (CPU, memory, file descriptors).

    Raises ValueError for a reader that READ does not describe.
    """

    def __init__(self, metrics: Callable[[], Metrics], readers: Mapping[str, Reader] | None = None, *, process: bool = True) -> None:
        self._metrics = metrics
        self._readers = dict(readers or {})
        known = {described.name for described in READ}
        for name in self._readers.keys() - known:
            raise ValueError(f"No metric is described as {name!r}. {nearest(name, known)}")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if process:
            ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would otherwise scrape once at start-up, before the rooms are there."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of described.py."""
        metrics = self._metrics()
        yield InfoMetricFamily("tidegate_build", "The running version.", value={"version": __version__})
        yield _counters("tidegate_requests_total", {(*key[:4], str(key[4])): series.count for key, series in metrics.series.items()})
        yield _by_route(metrics, "tidegate_request_seconds", lambda series: series.whole)
        yield _by_route(metrics, "tidegate_first_token_seconds", lambda series: series.first_token)
        yield _histograms("tidegate_part_seconds", {(part,): histogram for part, histogram in metrics.parts.items()})
        yield _histograms("tidegate_inter_token_seconds", {(): metrics.gaps()})
        yield _tokens(metrics)
        yield _counters("tidegate_errors_total", {(code,): count for code, count in metrics.errors.items()})
        yield _histograms("tidegate_admission_forecast_error_seconds", {(side,): histogram for side, histogram in metrics.forecasts.items()})
        yield _counters("tidegate_steps_down_total", metrics.steps)
        for at, name in enumerate(("tidegate_retrieval_sample_found_total", "tidegate_retrieval_sample_passages_total")):
            yield _counters(name, {(collection,): counts[at] for collection, counts in metrics.recall.items()})
        yield _counters("tidegate_flights_thinned_total", {(): metrics.thinned})
        for described in READ:
            if described.name in self._readers:
                yield _read(described, self._readers[described.name])


def _by_route(metrics: Metrics, name: str, pick: Callable[[Series], Histogram]) -> Metric:
    merged: dict[tuple[str, ...], Histogram] = {}
    for (route, capability, *_), series in metrics.series.items():
        merged.setdefault((route, capability), Histogram(REQUEST_BOUNDS_S)).merge(pick(series))
    return _histograms(name, merged)


def _tokens(metrics: Metrics) -> Metric:
    counts: dict[tuple[str, ...], float] = {}
    for exact, by_kind in metrics.tokens.items():
        for kind, count in zip(("prompt", "completion", "cached"), by_kind, strict=True):
            counts[kind, str(exact).lower()] = count
    return _counters("tidegate_tokens_total", counts)


def _counters(name: str, counts: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, DESCRIBED[name].help, labels=DESCRIBED[name].labels)
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


def _histograms(name: str, histograms: Mapping[tuple[str, ...], Histogram]) -> Metric:
    family = HistogramMetricFamily(name, DESCRIBED[name].help, labels=DESCRIBED[name].labels)
    for labels, histogram in histograms.items():
        family.add_metric(labels, histogram.buckets(), histogram.sum_ns / 1e9)
    return family


def _read(described: Described, reader: Reader) -> Metric:
    kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
    family = kind(described.name, described.help, labels=described.labels)
    figures = reader()
    by_label = {(label,): figure for label, figure in figures.items()} if isinstance(figures, Mapping) else {(): figures}
    for labels, figure in by_label.items():
        family.add_metric(labels, float(figure))
    return family
