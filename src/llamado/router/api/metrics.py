"""Prometheus metrics of the router's own HTTP traffic."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.exposition import generate_latest

from llamado.http.monitoring.families import traffic_families
from llamado.http.monitoring.metrics import Traffic


class _Collector:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        """Called by `generate_latest`."""
        yield from traffic_families(self._traffic, "llamado_router_")


def router_metrics(traffic: Traffic) -> str:
    """Return the exposition text of a router's requests."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(traffic))
    return generate_latest(registry).decode()
