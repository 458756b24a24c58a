"""What a worker's clients have it do, and the line about it in the log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

from llamado.devices.split.measure import TRIAL
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op

BEAT_SECONDS = 30.0
"""From one line about the work to the next, while there is some."""


@dataclass(slots=True)
class WorkDone:
    """Sums over what one client, or all, had done."""

    graphs: int = 0
    tokens: int = 0
    received: int = 0
    """Bytes of tensors that were written."""
    sent: int = 0
    """Bytes of tensors that were read."""

    def plus(self, other: WorkDone) -> WorkDone:
        return WorkDone(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def minus(self, other: WorkDone) -> WorkDone:
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
    """Says every so often what was done since the last time; nothing was done: nothing is said."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._total = clock(), WorkDone()

    def beat(self, works: Iterable[WorkDone], holders: int, held: int) -> str | None:
        """The line that is due, if one is. `works`: all work so far; `holders`: clients that hold `held` bytes."""
        seconds = self._clock() - self._last
        if seconds < BEAT_SECONDS:
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
