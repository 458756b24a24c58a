"""The work of a worker, and its periodic log line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

from llamado.devices.split.measure import TRIAL
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op

LOG_INTERVAL = 30.0
"""Seconds between two log lines while there is work."""


@dataclass(slots=True)
class WorkDone:
    """Totals of one client, or of all."""

    graphs: int = 0
    tokens: int = 0
    received: int = 0
    """Bytes written to tensors."""
    sent: int = 0
    """Bytes read from tensors."""

    def plus(self, other: WorkDone) -> WorkDone:
        """Return the sum of two totals."""
        return WorkDone(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def minus(self, other: WorkDone) -> WorkDone:
        """Return the difference of two totals."""
        return WorkDone(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


def tokens_of(graph: Graph) -> int:
    """Return the tokens that a graph of a model computes: the columns of its first product with a matrix of weights.

    Measurements of a device's speed compute none.
    """
    for node in graph.nodes:
        if node.op in (Op.MUL_MAT, Op.MUL_MAT_ID) and node.src[1] is not None:
            if node.src[0] is not None and node.src[0].name.startswith(TRIAL):
                return 0
            return int(node.src[1].ne[1 if node.op is Op.MUL_MAT else 2])
    return 0


class WorkLog:
    """Builds the periodic log line about the work since the last one, if there was any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._total = clock(), WorkDone()

    def next_line(self, works: Iterable[WorkDone], holders: int, held: int) -> str | None:
        """Return the line if one is due. `works`: all work so far; `holders`: clients that hold `held` bytes."""
        seconds = self._clock() - self._last
        if seconds < LOG_INTERVAL:
            return None
        total = WorkDone()
        for work in works:
            total = total.plus(work)
        done, self._total = total.minus(self._total), total
        self._last += seconds
        if not (done.graphs or done.received or done.sent):
            return None
        clients = f"{holders} client{'s' * (holders != 1)}"
        return (
            f"in {seconds:.0f} s: {done.graphs} graphs, {done.tokens} tokens, {done.received / 1e6:.1f} MB received, "
            f"{done.sent / 1e6:.1f} MB sent; {clients} hold{'s' * (holders == 1)} {held / 1e6:.1f} MB"
        )
