"""`/metrics` for Prometheus, under llama-server's names (`llamacpp:…`), or vLLM's where llama-server has none.

Everything comes from the engine's last snapshot and from counters of the event loop: a scrape never waits for the
engine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest

from llamado import __version__
from llamado.engine.request import Counters, EngineSnapshot
from llamado.engine.topology.view import ClusterView, DeviceView
from llamado.http.monitoring.families import buckets, traffic_families
from llamado.server.state import ServerState

# llama-server has the longest sequence as a counter without `_total`, for which the library has no family.
_LONGEST = b"llamacpp:n_tokens_max"
_NOT_LOADED = EngineSnapshot((), Counters(), 0, 0, 0, 0)


class Scrape:
    """Writer of snapshots as Prometheus text; rates are averages since the last scrape.

    With `metrics_labels`, every sample gets `engine`, `engine_version`, `model_id` and those labels.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._last = Counters()
        self._snapshot: EngineSnapshot | None = None
        self._labels: Mapping[str, str] | None = None
        self._process = ProcessCollector(registry=None)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self, snapshot: EngineSnapshot | None) -> bytes:
        """Return the exposition text of a snapshot. None: the model is not loaded yet."""
        self._snapshot = snapshot or _NOT_LOADED
        given, served = self._state.switches.metrics_labels, self._state.served
        if given is not None and served is not None:
            self._labels = {
                "engine": "llamado",
                "engine_version": __version__,
                "model_id": served.info.name,
                **dict(given),
            }
        return generate_latest(self._registry).replace(_LONGEST + b"_total", _LONGEST)

    def describe(self) -> list[Metric]:
        """Return no families, so that registering does not collect: there is no snapshot yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families; called by `generate_latest`."""
        if self._snapshot is None:
            return
        for family in self._families(self._snapshot):
            if self._labels:
                family.samples = [s._replace(labels={**self._labels, **s.labels}) for s in family.samples]
            yield family

    def _families(self, snapshot: EngineSnapshot) -> Iterator[Metric]:
        last, self._last = self._last, snapshot.counters
        yield from _totals(snapshot.counters)
        yield from _gauges(snapshot, last)
        yield from _caches(snapshot)
        yield from _histograms(snapshot.counters)
        yield from traffic_families(self._state.traffic, "llamacpp:")
        build = GaugeMetricFamily(
            "llamado_build_info",
            "Always 1; the labels have the versions and the machine",
            labels=["version", "python", "machine"],
        )
        build.add_metric([__version__, platform.python_version(), platform.machine()], 1.0)
        yield build
        cluster = None if self._state.served is None else self._state.served.cluster
        if cluster is not None:
            yield from _devices(cluster.view())
        sleep = self._state.sleep
        asleep = sleep is not None and sleep.asleep
        loading = float(self._state.served is None)
        yield GaugeMetricFamily("llamado_is_loading", "1 until the model is loaded for the first time", loading)
        yield GaugeMetricFamily("llamado_is_sleeping", "1 while the model is unloaded", float(asleep))
        processes: Iterable[Metric] = self._process.collect()
        yield from processes


def _totals(c: Counters) -> Iterator[Metric]:
    counters = {
        "prompt_tokens": ("Prompt tokens computed, without cached ones", c.prompt_tokens_total),
        "prompt_tokens_cached": ("Prompt tokens reused from the cache", c.prompt_tokens_cached_total),
        "prompt_seconds": ("Time spent on prompts", c.prompt_seconds_total),
        "tokens_predicted": ("Tokens generated", c.tokens_predicted_total),
        "tokens_predicted_seconds": ("Time spent generating", c.tokens_predicted_seconds_total),
        "n_decode": ("Forward passes", c.n_decode_total),
        "n_busy_slots": ("Busy slots, summed over the forward passes", c.n_busy_slots_total),
        "spec_decode_num_draft_tokens": ("Draft tokens", c.n_drafted),
        "spec_decode_num_accepted_tokens": ("Accepted draft tokens", c.n_accepted),
        "spec_decode_num_drafts": ("Drafts evaluated", c.n_drafts),
    }
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(f"llamacpp:{name}", help, float(value))
    longest = Metric("llamacpp:n_tokens_max", "Longest sequence seen, in tokens", "counter")
    longest.add_sample("llamacpp:n_tokens_max", {}, float(c.n_tokens_max))
    yield longest
    accepted = CounterMetricFamily(
        "llamacpp:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by position in the draft",
        labels=["position"],
    )
    for place, n in enumerate(c.accepted_at):
        accepted.add_metric([str(place)], float(n))
    yield accepted
    for name, help, values in (
        ("draft_tokens", "Draft tokens", [kind.n_drafted for kind in c.drafts]),
        ("accepted_tokens", "Accepted draft tokens", [kind.n_accepted for kind in c.drafts]),
    ):
        by_kind = CounterMetricFamily(
            f"llamacpp:spec_decode_num_{name}_per_kind", f"{help}, by draft source", labels=["kind"]
        )
        for kind, n in zip(c.drafts, values, strict=True):
            by_kind.add_metric([kind.name], float(n))
        yield by_kind


def _gauges(snapshot: EngineSnapshot, last: Counters) -> Iterator[Metric]:
    """Yield current values, and rates since the `last` scrape."""
    c = snapshot.counters
    prompt_rate = _rate(
        c.prompt_tokens_total - last.prompt_tokens_total, c.prompt_seconds_total - last.prompt_seconds_total
    )
    predicted_rate = _rate(
        c.tokens_predicted_steps_total - last.tokens_predicted_steps_total,
        c.tokens_predicted_seconds_total - last.tokens_predicted_seconds_total,
    )
    gauges = {
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


def _caches(snapshot: EngineSnapshot) -> Iterator[Metric]:
    """Yield the prompt cache in memory and on disk, and the KV cells that slots share."""
    gauges: dict[str, tuple[str, float]] = {
        "shared_cells": ("KV cells with a token that several slots share", snapshot.kv_cells_shared),
        "ram_prompts": ("Prompts stored in memory (--cache-ram)", snapshot.n_stored_prompts),
        "ram_bytes": ("Bytes of prompts and snapshots stored in memory", snapshot.stored_prompt_bytes),
    }
    disk = snapshot.disk
    counters: dict[str, tuple[str, float]] = {}
    if disk is not None:
        gauges["disk_files"] = "Files in --cache-disk", disk.files
        gauges["disk_bytes"] = "Bytes of the files in --cache-disk", disk.bytes
        counters = {
            "disk_hits": ("Prompts whose beginning was read from disk", disk.hits),
            "disk_tokens_read": ("Tokens read from disk instead of computed", disk.tokens_read),
            "disk_bytes_read": ("Bytes read from disk", disk.bytes_read),
            "disk_writes": ("Files written to disk", disk.writes),
            "disk_bytes_written": ("Bytes written to disk", disk.bytes_written),
            "disk_failures": ("Damaged files, failed writes, and prompts that were not written", disk.failures),
        }
    for name, (help, value) in gauges.items():
        yield GaugeMetricFamily(f"llamado_cache_{name}", help, float(value))
    for name, (help, value) in counters.items():
        yield CounterMetricFamily(f"llamado_cache_{name}", help, float(value))


def _devices(view: ClusterView) -> Iterator[Metric]:
    """Yield memory, timings and state of each device of a model that is split among several."""
    gauges: dict[str, tuple[str, Callable[[DeviceView], float | None]]] = {
        "up": ("1 while the device is available", lambda d: float(d.state in ("ready", "idle"))),
        "layers": ("Layers on the device", lambda d: float(len(d.layers))),
        "bytes": ("Bytes of its weights, KV cache and working memory", _used),
        "free_bytes": ("Free bytes before the model was loaded", lambda d: float(d.memory.free)),
        "free_now_bytes": ("Free bytes of a graphics card of this machine", lambda d: d.memory.free_now),
        "utilization_ratio": ("Share of the last moments in which a graphics card computed", lambda d: d.utilization),
        "round_trip_seconds": (
            "Round trip of the last heartbeat, or of a small graph",
            lambda d: d.link.pulse or d.link.round_trip,
        ),
        "bandwidth_bytes_per_second": ("Bandwidth of the link to the device", lambda d: d.link.bandwidth),
        "read_bytes_per_second": ("Rate of reading weights during decode", lambda d: d.speed.decode),
        "token_compute_seconds": (
            "Part of a token's time in the device's operations",
            lambda d: d.token_seconds.compute,
        ),
        "token_link_seconds": ("Part of a token's time on the link to the device", lambda d: d.token_seconds.link),
        "token_waiting_seconds": ("Part of a token's time behind other batches", lambda d: d.token_seconds.waiting),
    }
    for name, (help, read) in gauges.items():
        family = GaugeMetricFamily(f"llamado_worker_{name}", help, labels=["endpoint", "device"])
        for device in view.devices:
            if (value := read(device)) is not None:
                family.add_metric([device.endpoint or "", device.device], value)
        yield family
    states = GaugeMetricFamily(
        "llamado_worker_state", "1 for the current state", labels=["endpoint", "device", "state"]
    )
    for device in view.devices:
        for state in ("ready", "idle", "lost", "away"):
            states.add_metric([device.endpoint or "", device.device, state], float(device.state == state))
    yield states


def _used(device: DeviceView) -> float:
    memory = device.memory
    return float(memory.weights + memory.kv + memory.compute)


def _histograms(c: Counters) -> Iterator[Metric]:
    histograms = {
        "time_to_first_token_seconds": ("From a request's arrival to its first token", c.first_token_seconds),
        "inter_token_latency_seconds": ("From one token of an answer to its next", c.inter_token_seconds),
        "request_queue_time_seconds": ("From a request's arrival to its slot", c.queue_seconds),
        "batch_tokens": ("Tokens of a forward pass", c.batch_tokens),
    }
    for name, (help, histogram) in histograms.items():
        bounds, total = buckets(histogram)
        yield HistogramMetricFamily(f"llamacpp:{name}", help, buckets=bounds, sum_value=total)


def _rate(amount: float, whole: float) -> float:
    return amount / whole if whole > 0 else 0.0
