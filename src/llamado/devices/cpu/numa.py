"""Pinning of threads, and placement of weights, on machines with several memory nodes (NUMA)."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamado.devices.device import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("llamado.devices")

STRATEGIES = ("distribute", "isolate", "numactl")
_FOLDER = Path("/sys/devices/system/node")
_POPULATE_READ = 22  # madvise(2), Linux 5.14
# unlike mbind(2), move_pages(2) does not split the mapping
_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}.get(platform.machine())
_MOVE = 2
_AT_ONCE = 1 << 16


class MemoryNode(NamedTuple):
    """A memory node: the system's number of it, and its CPUs."""

    number: int
    cpus: frozenset[int]


class Matrix(NamedTuple):
    """Weights in memory: `n` matrices of `n_rows` rows each, stored consecutively."""

    address: int
    n_rows: int
    row_bytes: int
    n: int = 1


class NumaBinding:
    """The CPUs that each thread of a team may run on, by ggml's strategies (`ggml_numa_init`).

    `distribute`: equally many threads on each node; neighboring threads share a node, because they read neighboring
    rows of weights. `isolate`: all on the node of the calling thread. `numactl`: all on the CPUs this process was
    given. None, and any strategy on a machine with one node: the system decides.
    """

    def __init__(self, strategy: str | None, n_threads: int = 1, nodes: list[MemoryNode] | None = None) -> None:
        """`n_threads`: threads of the smallest programs; the team may have more. Raises DeviceError for an unknown
        strategy.
        """
        if strategy is not None and strategy not in STRATEGIES:
            raise DeviceError(f"no NUMA strategy {strategy!r}; there are {', '.join(STRATEGIES)}")
        self._choose: Callable[[int], frozenset[int]] | None = None
        self._nodes: list[MemoryNode] = []
        if strategy is None:
            return
        nodes = memory_nodes() if nodes is None else nodes
        if len(nodes) < 2 or not hasattr(os, "sched_setaffinity"):
            _log_single_node(strategy)
            return
        allowed = frozenset(os.sched_getaffinity(0))
        if strategy == "distribute":
            self._nodes = nodes
            self._choose = lambda thread: nodes[thread % n_threads * len(nodes) // n_threads].cpus & allowed or allowed
        elif strategy == "isolate":
            here = _current_cpu()
            home = next((node.cpus for node in nodes if here in node.cpus), allowed) & allowed or allowed
            self._choose = lambda thread: home
        else:
            self._choose = lambda thread: allowed

    def pin(self, thread: int) -> None:
        """Bind the calling thread, number `thread` of the team, to its CPUs permanently."""
        if self._choose is not None:
            _set_affinity(self._choose(thread))

    @contextmanager
    def pinned(self, thread: int) -> Iterator[None]:
        """Bind the calling thread, which is not the team's own, to its CPUs inside this context."""
        if self._choose is None:
            yield
            return
        before = os.sched_getaffinity(0)
        _set_affinity(self._choose(thread))
        try:
            yield
        finally:
            _set_affinity(before)

    def spread(self, weights: Iterable[Matrix]) -> None:
        """Move every row of weights to the node whose threads will read it, if the strategy is `distribute`.

        All nodes work at once, each in a thread of its own: a page that is not in memory yet is allocated on the node
        of the thread that reads it first, and other pages are moved if the system allows it.
        """
        matrices = list(weights)
        threads = [
            threading.Thread(target=self._place_rows, args=(node, i, matrices), name=f"llamado-node-{node.number}")
            for i, node in enumerate(self._nodes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _place_rows(self, node: MemoryNode, i: int, matrices: list[Matrix]) -> None:
        """Bring the rows of the i-th node, of all matrices, to that node."""
        _set_affinity(node.cpus & os.sched_getaffinity(0) or node.cpus)
        of = len(self._nodes)
        for address, n_rows, row_bytes, n in matrices:
            for matrix in range(n):
                begin = address + matrix * n_rows * row_bytes
                start, stop = (begin + n_rows * k // of * row_bytes for k in (i, i + 1))
                _load_and_move(start, stop, node.number)


def _load_and_move(start: int, stop: int, node: int) -> None:
    """Load the pages that begin in this range, and move them to a node."""
    page = mmap.PAGESIZE
    start, stop = -(-start // page) * page, -(-stop // page) * page
    if start >= stop:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(stop - start)
    if libc.madvise(address, size, _POPULATE_READ):
        log.debug("weights: not read ahead, pages load on first use: %s", os.strerror(ctypes.get_errno()))
    if _MOVE_PAGES is None:
        return
    for first in range(start, stop, page * _AT_ONCE):
        pages = np.arange(first, min(first + page * _AT_ONCE, stop), page, dtype=np.uint64)
        nodes, status = np.full(pages.size, node, np.int32), np.zeros(pages.size, np.int32)
        addresses = (ctypes.c_void_p(array.ctypes.data) for array in (pages, nodes, status))
        if libc.syscall(_MOVE_PAGES, 0, ctypes.c_ulong(pages.size), *addresses, _MOVE) < 0:
            log.debug("weights: pages not moved to their node: %s", os.strerror(ctypes.get_errno()))
            return


def memory_nodes(folder: Path = _FOLDER) -> list[MemoryNode]:
    """Return the memory nodes of this machine that have CPUs."""
    found = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            cpus = _cpu_list((path / "cpulist").read_text())
        except (OSError, ValueError):
            continue
        if cpus:
            found.append(MemoryNode(int(path.name[4:]), cpus))
    return found


def _cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list as Linux writes it: `0-3,8,10-11`."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for low, _, high in ranges for cpu in range(int(low), int(high or low) + 1))


def _current_cpu() -> int:
    try:
        return int(ctypes.CDLL(None).sched_getcpu())
    except (AttributeError, OSError):
        return -1


def _set_affinity(cpus: frozenset[int] | set[int]) -> None:
    try:
        os.sched_setaffinity(0, cpus)  # 0: the calling thread
    except OSError as error:
        log.warning("cannot bind a thread to CPUs %s: %s", sorted(cpus), error)


@cache
def _log_single_node(strategy: str) -> None:
    log.info("numa %s: this machine has one memory node, threads stay where the system puts them", strategy)
