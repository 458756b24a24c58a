"""`/metrics` of a gateway: each replica's own series with its labels, and the gateway's.

The labels are those a pipeline before many engines asks for: `engine`, `engine_version`, `model_id`, `replica`, and
what `--metrics-labels` adds (`pool_id=…`).
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
from llamado.http.exposition import merge
from llamado.http.metrics import Traffic
from llamado.http.monitoring.families import traffic_families
from llamado.http.upstream import UpstreamLost

log = logging.getLogger("llamado.gateway")

_OURS = "llamado"
_LLAMA_CPP = "llama.cpp"


class GatewayMetrics:
    """What a scrape gets. `retries`: requests that were sent again, by the reason."""

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
        """All of them; a replica that does not answer in time is left out."""
        ready = [replica for replica in self._balancer.replicas.values() if replica.ready]
        found = await asyncio.gather(*(self._of(replica) for replica in ready))
        texts = [(self.labels(replica), text) for replica, text in zip(ready, found, strict=True) if text is not None]
        return merge([(self._labels, generate_latest(self._registry).decode()), *texts])

    async def _of(self, replica: Replica) -> str | None:
        try:
            return await replica.metrics()
        except (UpstreamLost, TimeoutError) as error:
            log.warning("replica %s: no metrics: %s", replica.name, str(error) or f"none within {METRICS_TIMEOUT:g} s")
            return None

    def labels(self, replica: Replica) -> dict[str, str]:
        """Of a replica's series."""
        _, ours, version = replica.build.partition(f"-{_OURS}-")
        return {
            "engine": _OURS if ours else _LLAMA_CPP,
            "engine_version": version or replica.build,
            "model_id": str(replica.models[0]["id"]) if replica.models else "",
            "replica": replica.name,
            **self._labels,
        }

    def describe(self) -> list[Metric]:
        """Registering must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The gateway's own series; called by `generate_latest`."""
        replicas = list(self._balancer.replicas.values())
        gauges: dict[str, tuple[str, Callable[[Replica], float]]] = {
            "up": ("1 while a replica is ready", lambda r: r.ready),
            "draining": ("1 while a replica gets no new requests", lambda r: r.draining),
            "circuit_open": (
                "1 while a replica is left alone after failures",
                lambda r: r.breaker.state is Circuit.OPEN,
            ),
            "requests_in_flight": ("Requests that a replica has from here", lambda r: r.in_flight),
            "requests_of_others": ("Requests that a replica has from elsewhere", lambda r: r.others),
        }
        for name, (help, value) in gauges.items():
            gauge = GaugeMetricFamily(f"llamado_gateway_replica_{name}", help, labels=["replica"])
            for replica in replicas:
                gauge.add_metric([replica.name], value(replica))
            yield gauge
        answers = CounterMetricFamily("llamado_gateway_answers", "Answers by status", labels=["replica", "status"])
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
        retries = CounterMetricFamily("llamado_gateway_retries", "Requests sent again", labels=["reason"])
        for reason, n in self._retries.items():
            retries.add_metric([reason], n)
        yield retries
        balancer = self._balancer
        yield CounterMetricFamily("llamado_gateway_prompt_bytes", "Of prompts that were sent", balancer.prompt_bytes)
        yield CounterMetricFamily(
            "llamado_gateway_prompt_bytes_known", "Of them, sent where their beginning was before", balancer.known_bytes
        )
        build = GaugeMetricFamily("llamado_gateway_build_info", "Always 1", labels=["version"])
        build.add_metric([__version__], 1.0)
        yield build

    def _keys(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("llamado_gateway_key_requests", "Requests of a key", labels=["key"])
        tokens = CounterMetricFamily("llamado_gateway_key_tokens", "Tokens that a key took", labels=["key"])
        refused = CounterMetricFamily("llamado_gateway_key_refused", "Requests turned away", labels=["key", "limit"])
        for use in self._limits.uses:
            requests.add_metric([use.options.name], use.requests)
            tokens.add_metric([use.options.name], use.tokens)
            for limit, n in use.refused.items():
                refused.add_metric([use.options.name, limit], n)
        yield from (requests, tokens, refused)
