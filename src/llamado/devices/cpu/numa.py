"""Where threads run on machines with several memory nodes (NUMA)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from llamado.devices.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("llamado.devices")

STRATEGIES = ("distribute", "isolate", "numactl")
_FOLDER = Path("/sys/devices/system/node")


class NumaBinding:
    """The CPUs each thread of a team may run on, by ggml's strategies (`ggml_numa_init`).

    `distribute`: thread i on node i mod n; `isolate`: all on the node they were started from; `numactl`: all on the
    CPUs this process was given. None, and any strategy on a machine of one node: wherever the system likes.
    """

    def __init__(self, strategy: str | None, nodes: list[frozenset[int]] | None = None) -> None:
        """Raises DeviceError for a strategy that does not exist."""
        if strategy is not None and strategy not in STRATEGIES:
            raise DeviceError(f"no NUMA strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
        self._choose: Callable[[int], frozenset[int]] | None = None
        if strategy is None:
            return
        nodes = memory_nodes() if nodes is None else nodes
        if len(nodes) < 2 or not hasattr(os, "sched_setaffinity"):
            _say_once(strategy)
            return
        allowed = frozenset(os.sched_getaffinity(0))
        if strategy == "distribute":
            self._choose = lambda thread: nodes[thread % len(nodes)] & allowed or allowed
        elif strategy == "isolate":
            here = _current_cpu()
            home = next((node for node in nodes if here in node), allowed) & allowed or allowed
            self._choose = lambda thread: home
        else:
            self._choose = lambda thread: allowed

    def pin(self, thread: int) -> None:
        """Ties the calling thread, number `thread` of the team, to its CPUs for good."""
        if self._choose is not None:
            _set_affinity(self._choose(thread))

    @contextmanager
    def pinned(self, thread: int) -> Iterator[None]:
        """Ties the calling thread to its CPUs for as long as it is in here: it is not the team's own."""
        if self._choose is None:
            yield
            return
        before = os.sched_getaffinity(0)
        _set_affinity(self._choose(thread))
        try:
            yield
        finally:
            _set_affinity(before)


def memory_nodes(folder: Path = _FOLDER) -> list[frozenset[int]]:
    """The CPUs of each memory node of this machine; nodes without any are left out."""
    found = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = _cpu_list((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found.append(cpus)
    return found


def _cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list as Linux writes it: `0-3,8,10-11`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1))


def _current_cpu() -> int:
    import ctypes

    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        return -1


def _set_affinity(cpus: frozenset[int] | set[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)  # 0: the calling thread
    except OSError as error:
        log.warning("cannot tie a thread to CPUs %s: %s", sorted(cpus), error)


@cache
def _say_once(strategy: str) -> None:
    log.info("numa %s: this machine has one memory node, threads stay where the system puts them", strategy)
