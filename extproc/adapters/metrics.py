"""Prometheus figures, computed when somebody asks: a request pays nothing for them but the counts it makes anyway.

Names carry units; labels are bounded by the policy (classes, tenants, sites, models).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.accounting import TTFT_BOUNDS_S, Counts, Key
from extproc.adapters.server import Stats
from extproc.dispatcher import Dispatcher

_LABELS = ["class", "tenant", "site", "model"]
_SUMS: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    ("tokenfleet_requests_offered", "Requests that reached a verdict and ended, or were refused", lambda c: c.offered),
    ("tokenfleet_requests_on_target", "Requests completed within their class's targets", lambda c: c.on_target),
    ("tokenfleet_requests_late", "Requests completed outside their class's targets", lambda c: c.late),
    ("tokenfleet_on_target_tokens", "Output tokens of requests on target", lambda c: c.on_target_tokens),
    ("tokenfleet_late_tokens", "Output tokens of late requests", lambda c: c.late_tokens),
    ("tokenfleet_wasted_tokens", "Output tokens of requests that never completed", lambda c: c.wasted_tokens),
    ("tokenfleet_prompt_tokens", "Prompt tokens that engines reported", lambda c: c.prompt_tokens),
    ("tokenfleet_cached_tokens", "Prompt tokens that engines took from their prefix caches", lambda c: c.cached_tokens),
    ("tokenfleet_held_seconds", "Time that requests were held at the gateway", lambda c: c.held_s),
)


class DispatcherFigures(Collector):
    """What the dispatcher knows. *clock* is its monotonic seconds."""

    def __init__(self, dispatcher: Callable[[], Dispatcher], clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """Yield the families of this moment."""
        dispatcher = self._dispatcher()
        counts = dispatcher.accounts.counts
        for name, text, value in _SUMS:
            yield _labelled(
                CounterMetricFamily(name, text, labels=_LABELS), ((key, value(c)) for key, c in counts.items())
            )
        yield _by("tokenfleet_requests_refused", "Requests told no", "reason", counts, lambda c: c.refused)
        yield _by("tokenfleet_requests_ended", "Requests by how they ended", "ending", counts, lambda c: c.endings)
        yield _ttft(counts)
        yield _labelled(
            CounterMetricFamily(
                "tokenfleet_shadow_verdicts",
                "What would have been done outside the steered share",
                labels=["class", "would"],
            ),
            dispatcher.accounts.shadow.items(),
        )
        yield _labelled(
            GaugeMetricFamily("tokenfleet_requests_held", "Requests waiting at the gateway", labels=["class"]),
            (((klass,), count) for klass, count in dispatcher.waiting().items()),
        )
        yield from self._instances(dispatcher)

    def _instances(self, dispatcher: Dispatcher) -> Iterator[Metric]:
        in_flight = dispatcher.in_flight()
        resting = set(dispatcher.resting(self._clock()))
        flights = GaugeMetricFamily(
            "tokenfleet_instance_in_flight_requests",
            "Requests of this gateway on an instance",
            labels=["site", "instance"],
        )
        states = GaugeMetricFamily(
            "tokenfleet_instance_state", "1 for the state an instance is in", labels=["site", "instance", "state"]
        )
        usage = GaugeMetricFamily(
            "tokenfleet_instance_kv_usage_ratio", "KV blocks held by live requests", labels=["site", "instance"]
        )
        for site in dispatcher.fleet.sites:
            for row, (one, state) in enumerate(zip(site.instances, site.states, strict=True)):
                flights.add_metric([site.name, one.name], in_flight.get(one.name, 0))
                states.add_metric([site.name, one.name, "resting" if one.name in resting else state], 1)
                usage.add_metric([site.name, one.name], float(site.kv_usage[row]))
        yield from (flights, states, usage)
        yield GaugeMetricFamily(
            "tokenfleet_requests_in_flight", "Requests running on any instance", value=dispatcher.total_in_flight()
        )
        yield GaugeMetricFamily(
            "tokenfleet_fleet_blind", "1 while no telemetry is recent", value=float(dispatcher.fleet.blind)
        )
        yield GaugeMetricFamily(
            "tokenfleet_prefix_blocks", "Distinct prefix blocks believed cached", value=dispatcher.index_blocks()
        )


class StreamFigures(Collector):
    """What the gRPC server of this process has seen."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """Yield the families of this moment."""
        stats = self._stats
        yield CounterMetricFamily("tokenfleet_streams", "ext_proc streams opened", value=stats.streams)
        yield GaugeMetricFamily("tokenfleet_streams_open", "ext_proc streams open now", value=stats.open_streams)
        yield CounterMetricFamily("tokenfleet_streams_broken", "Streams ended by an internal error", value=stats.broken)
        yield CounterMetricFamily(
            "tokenfleet_requests_passed", "Requests on paths that are not ours", value=stats.passed
        )
        yield _labelled(
            CounterMetricFamily(
                "tokenfleet_requests_unreadable", "Requests answered 4xx before a verdict", labels=["status"]
            ),
            (((str(status),), count) for status, count in stats.unreadable.items()),
        )
        yield _labelled(
            CounterMetricFamily("tokenfleet_verdicts", "Verdicts given", labels=["verdict", "class"]),
            stats.verdicts.items(),
        )


class Figures(Collector):
    """Single values that a function computes: name, text, value."""

    def __init__(self, gauges: Callable[[], Iterable[tuple[str, str, float]]]) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        """Yield one gauge each."""
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(name, text, value=value)


def _labelled(family: Any, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:  # noqa: ANN401 - either family
    for labels, value in samples:
        family.add_metric(list(labels), value)
    return family  # type: ignore[no-any-return]


def _by(name: str, text: str, label: str, counts: dict[Key, Counts], of: Callable[[Counts], dict[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*_LABELS, label])
    for key, one in counts.items():
        for value, count in of(one).items():
            family.add_metric([*key, value], count)
    return family


def _ttft(counts: dict[Key, Counts]) -> Metric:
    family = HistogramMetricFamily("tokenfleet_ttft_seconds", "Arrival to first token, at the gateway", labels=_LABELS)
    for key, one in counts.items():
        total, buckets = 0, []
        for bound, count in zip([*map(str, TTFT_BOUNDS_S), "+Inf"], one.ttft_buckets, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric(list(key), buckets, one.ttft_s)
    return family
