"""Sequences of kernel launches that run again and again, as CUDA graphs.

Launching a kernel from Python takes about 12 µs of the CPU, launching a graph of any number about 27.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple
from weakref import WeakSet

from llamado.devices.cuda.api import CudaError
from llamado.devices.cuda.driver import Card, Event, Function, Graph, Stream
from llamado.devices.device import DeviceFull

log = logging.getLogger("llamado.devices")

_LEAST = 3
"""Fewest launches for which a graph is faster."""

_refused: WeakSet[Card] = WeakSet()
"""Cards whose refusal of a graph was logged."""


class Launch(NamedTuple):
    """A kernel with its grid and arguments; see `Card.launch`."""

    function: Function
    grid: tuple[int, int]
    arguments: Sequence[int]
    chained: bool = False


class LaunchSequence:
    """Launches that run in order.

    The first run launches each kernel, because many sequences run only once, and a kernel cannot be captured before the
    driver has loaded it. The second run captures them as a graph, which later runs replay. If the driver refuses, every
    run launches each kernel.
    """

    def __init__(self, card: Card, launches: Sequence[Launch]) -> None:
        self._card, self._launches = card, tuple(launches)
        self._graph: Graph | None = None
        self._runs = 0

    def run(self) -> None:
        """Submit the launches to the card's stream."""
        self._runs += 1
        if self._runs == 2 and len(self._launches) >= _LEAST:
            self._graph = self._capture()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._launch(self._card.stream)

    def _launch(self, stream: Stream) -> None:
        for function, grid, arguments, chained in self._launches:
            self._card.launch(function, grid, arguments, chained, stream)

    def _capture(self) -> Graph | None:
        """Return a graph of the launches; None if the driver refuses."""
        try:
            return self._card.capture(self._launch)
        except (CudaError, DeviceFull) as error:
            if self._card not in _refused:
                _refused.add(self._card)
                log.warning(
                    "%s: no CUDA graphs, kernels are launched one by one, which is slower: %s", self._card.name, error
                )
        return None

    def profile(self, repeats: int) -> list[float]:
        """Return the seconds of each launch: medians over `repeats` runs, one launch after the other."""
        events = [Event(self._card, timed=True) for _ in range(len(self._launches) + 1)]
        runs = []
        for _ in range(repeats):
            events[0].record()
            for (function, grid, arguments, _), event in zip(self._launches, events[1:], strict=True):
                self._card.launch(function, grid, arguments)
                event.record()
            events[-1].synchronize()
            runs.append([after.seconds_since(before) for before, after in pairwise(events)])
        for event in events:
            event.free()
        return [median(times) for times in zip(*runs, strict=True)]

    def free(self) -> None:
        """Release the graph, once it has run if it was submitted. The next runs launch each kernel."""
        if self._graph is not None:
            self._graph.free()
            self._graph = None
