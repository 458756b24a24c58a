"""`/metrics` for Prometheus, under llama-server's names (`llamacpp:…`)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CollectorRegistry, CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from llamado.engine.request import Counters, EngineSnapshot
from llamado.server.state import ServerState


class Scrape:
    """Writes snapshots as Prometheus text; rates are averages between one scrape and the next."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._last = Counters()
        self._snapshot: EngineSnapshot | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self, snapshot: EngineSnapshot) -> bytes:
        """The exposition text of a snapshot."""
        self._snapshot = snapshot
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Registering must not collect: there is no snapshot yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families; called by `generate_latest`."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        c, last = snapshot.counters, self._last
        self._last = c
        counters = {
            "prompt_tokens": ("Prompt tokens computed, without cached ones", c.prompt_tokens_total),
            "prompt_tokens_cached": ("Prompt tokens reused from the cache", c.prompt_tokens_cached_total),
            "prompt_seconds": ("Time spent on prompts", c.prompt_seconds_total),
            "tokens_predicted": ("Tokens generated", c.tokens_predicted_total),
            "tokens_predicted_seconds": ("Time spent generating", c.tokens_predicted_seconds_total),
            "n_decode": ("Forward passes", c.n_decode_total),
        }
        for name, (help, value) in counters.items():
            yield CounterMetricFamily(f"llamacpp:{name}", help, float(value))
        prompt_rate = _rate(
            c.prompt_tokens_total - last.prompt_tokens_total, c.prompt_seconds_total - last.prompt_seconds_total
        )
        predicted_rate = _rate(
            c.tokens_predicted_steps_total - last.tokens_predicted_steps_total,
            c.tokens_predicted_seconds_total - last.tokens_predicted_seconds_total,
        )
        gauges = {
            "n_tokens_max": ("Longest sequence seen, in tokens", c.n_tokens_max),
            "prompt_tokens_seconds": ("Prompt tokens per second since the last scrape", prompt_rate),
            "predicted_tokens_seconds": ("Generated tokens per second since the last scrape", predicted_rate),
            "requests_processing": ("Requests being answered", snapshot.requests_processing),
            "requests_deferred": ("Requests waiting for a slot", snapshot.requests_deferred),
            "n_busy_slots_per_decode": ("Busy slots per forward pass", c.n_busy_slots_total / max(1, c.n_decode_total)),
            "kv_cache_usage_ratio": (
                "Share of the KV cache in use",
                _rate(snapshot.kv_cells_used, snapshot.kv_cells_total),
            ),
            "kv_cache_tokens": ("Tokens in the KV cache", snapshot.kv_cells_used),
        }
        for name, (help, value) in gauges.items():
            yield GaugeMetricFamily(f"llamacpp:{name}", help, float(value))


def _rate(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
