"""`/metrics` of a gateway: its own series, and those of each replica with labels.

The labels follow metrics pipelines for several engines: `engine`, `engine_version`, `model_id`, `replica`, and those
added by `--metrics-labels` (`pool_id=…`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from llamado import __version__
from llamado.gateway.balance import Balancer
from llamado.gateway.breaker import Circuit
from llamado.gateway.limits import KeyLimits
from llamado.gateway.replica import METRICS_TIMEOUT, Replica
from llamado.http.monitoring.exposition import merge
from llamado.http.monitoring.families import traffic_families
from llamado.http.monitoring.metrics import Traffic
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

_OURS = "llamado"
_LLAMA_CPP = "llama.cpp"


class GatewayMetrics:
    """Collects the response to a scrape. `retries`: retried requests, by reason."""

    def __init__(
        self,
        balancer: Balancer,
        limits: KeyLimits,
        retries: Counter[str],
        traffic: Traffic,
        labels: Mapping[str, str],
    ) -> None:
        self._balancer = balancer
        self._traffic = traffic
        self._limits = limits
        self._retries = retries
        self._labels = labels
        self._registry = CollectorRegistry()
        self._registry.register(self)

    async def text(self) -> str:
        """Return all metrics; replicas that do not respond in time are left out."""
        ready = [replica for replica in self._balancer.replicas.values() if replica.ready]
        found = await asyncio.gather(*(self._replica_text(replica) for replica in ready))
        texts = [(self.labels(replica), text) for replica, text in zip(ready, found, strict=True) if text is not None]
        return merge([(self._labels, generate_latest(self._registry).decode()), *texts])

    async def _replica_text(self, replica: Replica) -> str | None:
        try:
            return await replica.metrics()
        except (UpstreamLost, TimeoutError) as error:
            reason = str(error) or f"no answer within {METRICS_TIMEOUT:g} s"
            log.warning("replica %s: no metrics: %s", replica.name, reason)
            return None

    def labels(self, replica: Replica) -> dict[str, str]:
        """Return the labels of a replica's series."""
        _, ours, version = replica.build.partition(f"-{_OURS}-")
        return {
            "engine": _OURS if ours else _LLAMA_CPP,
            "engine_version": version or replica.build,
            "model_id": str(replica.models[0]["id"]) if replica.models else "",
            "replica": replica.name,
            **self._labels,
        }

    def describe(self) -> list[Metric]:
        """Return nothing: registration must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the gateway's own series; called by `generate_latest`."""
        replicas = list(self._balancer.replicas.values())
        gauges: dict[str, tuple[str, Callable[[Replica], float]]] = {
            "up": ("1 while a replica is ready", lambda r: r.ready),
            "draining": ("1 while a replica gets no new requests", lambda r: r.draining),
            "circuit_open": (
                "1 while a replica gets no requests after failures",
                lambda r: r.breaker.state is Circuit.OPEN,
            ),
            "requests_in_flight": ("Requests of this gateway that a replica is processing", lambda r: r.in_flight),
            "requests_of_others": ("Requests of others that a replica is processing", lambda r: r.others),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(f"llamado_gateway_replica_{name}", help, labels=["replica"])
            for replica in replicas:
                gauge.add_metric([replica.name], value(replica))
            yield gauge
        answers = CounterMetricFamily("llamado_gateway_answers", "Responses by status", labels=["replica", "status"])
        losses = CounterMetricFamily(
            "llamado_gateway_losses", "Requests that a replica did not answer", labels=["replica", "reason"]
        )
        for replica in replicas:
            for status, n in replica.statuses.items():
                answers.add_metric([replica.name, str(status)], n)
            for reason, n in replica.losses.items():
                losses.add_metric([replica.name, reason], n)
        yield answers
        yield losses
        yield from traffic_families(self._traffic, "llamado_gateway_")
        yield from self._totals()
        yield from self._keys()

    def _totals(self) -> Iterator[Metric]:
        retries = CounterMetricFamily("llamado_gateway_retries", "Retried requests", labels=["reason"])
        for reason, n in self._retries.items():
            retries.add_metric([reason], n)
        yield retries
        balancer = self._balancer
        yield CounterMetricFamily("llamado_gateway_prompt_bytes", "Bytes of prompts sent", balancer.prompt_bytes)
        yield CounterMetricFamily(
            "llamado_gateway_prompt_bytes_known",
            "Bytes of prompts cached by their replica",
            balancer.known_bytes,
        )
        build = GaugeMetricFamily("llamado_gateway_build_info", "Always 1", labels=["version"])
        build.add_metric([__version__], 1.0)
        yield build

    def _keys(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("llamado_gateway_key_requests", "Requests of a key", labels=["key"])
        tokens = CounterMetricFamily("llamado_gateway_key_tokens", "Tokens charged to a key", labels=["key"])
        refused = CounterMetricFamily("llamado_gateway_key_refused", "Requests rejected", labels=["key", "limit"])
        for use in self._limits.usages:
            requests.add_metric([use.options.name], use.requests)
            tokens.add_metric([use.options.name], use.tokens)
            for limit, n in use.refused.items():
                refused.add_metric([use.options.name, limit], n)
        yield from (requests, tokens, refused)
