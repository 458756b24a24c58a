"""A simulated network link, one direction: times at which bytes leave its far end. No sockets."""

from __future__ import annotations

import random
import threading


class Link:
    """Delay and bandwidth, shared by all connections that go through the link.

    `latency` and `jitter` in seconds: a delayed message takes `latency` and, evenly distributed, up to `jitter` more.
    `bandwidth` in bits per second, shared by all senders; None: no limit.
    """

    def __init__(
        self, latency: float = 0.0, jitter: float = 0.0, bandwidth: float | None = None, seed: int | None = None
    ) -> None:
        self.latency = latency
        self.jitter = jitter
        self.bandwidth = bandwidth
        self._random = random.Random(seed)
        self._free = 0.0  # when the last byte accepted so far has left
        self._lock = threading.Lock()

    def due(self, n: int, arrived: float, *, delayed: bool) -> float:
        """Return the time at which `n` bytes that arrived at time `arrived` leave; the latency counts if `delayed`.

        Jitter may reorder messages; `Lane` keeps the order within a connection.
        """
        at = arrived
        if self.bandwidth is not None:
            with self._lock:
                at = self._free = max(arrived, self._free) + 8 * n / self.bandwidth
        if delayed:
            at += self.latency + (self.jitter * self._random.random() if self.jitter else 0.0)
        return at
