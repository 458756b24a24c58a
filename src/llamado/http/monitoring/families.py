"""HTTP traffic as Prometheus metric families; names differ between server, router and gateway by a prefix only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from llamado.engine.request import Histogram
from llamado.http.monitoring.metrics import Traffic


def traffic_families(traffic: Traffic, prefix: str) -> Iterator[Metric]:
    """Yield requests by endpoint and status, their durations, and health probes as a separate family."""
    requests = CounterMetricFamily(
        f"{prefix}http_requests",
        "HTTP requests without health probes, by endpoint and status; 499: the client went away",
        labels=["method", "endpoint", "status"],
    )
    for (method, endpoint, status), n in traffic.requests.items():
        requests.add_metric([method, endpoint, str(status)], float(n))
    yield requests
    probes = CounterMetricFamily(f"{prefix}http_probes", "Health probes by status", labels=["endpoint", "status"])
    for (endpoint, status), n in traffic.probes.items():
        probes.add_metric([endpoint, str(status)], float(n))
    yield probes
    cancelled = "Requests whose clients went away before their answers were complete"
    yield CounterMetricFamily(f"{prefix}http_requests_cancelled", cancelled, float(traffic.cancelled))
    durations = HistogramMetricFamily(
        f"{prefix}http_request_duration_seconds", "From a request to the end of its answer", labels=["endpoint"]
    )
    for endpoint, histogram in traffic.durations.items():
        bounds, total = buckets(histogram)
        durations.add_metric([endpoint], buckets=bounds, sum_value=total)
    yield durations


def buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return Prometheus' cumulative buckets and the sum."""
    bounds = [*(repr(float(bound)) for bound in histogram.bounds), "+Inf"]
    sums: Iterable[int] = accumulate(histogram.counts)
    return list(zip(bounds, map(float, sums), strict=True)), histogram.sum
