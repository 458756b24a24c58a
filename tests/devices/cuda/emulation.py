"""Kernels of the SIMD language on the CPU and in the emulation of a GPU, on the same bytes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import Jit
from llamado.devices.cuda.lanes import LaneCode, trace_of
from llamado.devices.cuda.lowerings.emulated import Emulation, Watch
from llamado.devices.cuda.teams import Team, TeamKernel
from llamado.devices.cuda.teams import trace_of as team_trace
from llamado.devices.kernel import Kernel

BASE = 1 << 40


class FlatMemory:
    """A card's memory: buffers in one array, with gaps between them."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.base = BASE
        self.bytes: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.valid: NDArray[np.bool_] = np.zeros(size, np.bool_)
        self._next = 256

    def put(self, data: NDArray[Any]) -> int:
        """Copy an array into new memory and return its address."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        at = self._next
        self.bytes[at : at + raw.size] = raw
        self.valid[at : at + raw.size] = True
        self._next = (at + raw.size + 511) // 256 * 256
        return self.base + at

    def get(self, address: int, like: NDArray[Any]) -> NDArray[Any]:
        """The bytes at an address as an array of the same type and shape as another."""
        at = address - self.base
        found: NDArray[Any] = self.bytes[at : at + like.nbytes].view(like.dtype).reshape(like.shape)
        return found


def on_cpu(
    jit: Jit, kernel: Kernel, arrays: dict[str, NDArray[Any]], numbers: dict[str, int], **parameters: Any
) -> None:
    """Run a kernel with one thread; arrays are changed in place."""
    values = {name: array.ctypes.data for name, array in arrays.items()} | numbers
    fields = np.array(kernel.pack(values), np.int64)
    counters = np.zeros(64, np.int64)
    jit.function(kernel, **parameters)(fields.ctypes.data, 0, 1, counters.ctypes.data, 64)


def emulated(
    kernel: Kernel, arrays: dict[str, NDArray[Any]], numbers: dict[str, int], *, threads: int = 64, blocks: int = 2,
    **parameters: Any,
) -> None:  # fmt: skip
    """Run a kernel in the emulation, with races found; arrays are changed in place."""
    memory, codes = FlatMemory(), list[LaneCode]()
    fields, trace = trace_of(kernel, codes.append)
    emulation = Emulation(trace, fields, parameters)
    step = codes[0].stack_bytes
    stack = memory.put(np.zeros(step * threads // 8 * blocks, np.uint8))
    at = {name: memory.put(array) for name, array in arrays.items()}
    given = [*kernel.pack(at | numbers), stack, step]
    emulation.run(memory, (blocks, 1), threads, 0, given, Watch())
    for name, array in arrays.items():
        array[...] = memory.get(at[name], array)


@lru_cache(maxsize=1)
def _of_team(kernel: Kernel, parameters: tuple[tuple[str, Any], ...], team: Team) -> tuple[Emulation, int]:
    """Record a kernel for a team. Return it, and the bytes of stack that each group needs."""
    codes = list[LaneCode]()
    fields, trace = team_trace(TeamKernel(kernel.name, kernel.fields, kernel.trace), codes.append)
    return Emulation(trace, fields, {**dict(parameters), "team": team}), codes[0].stack_bytes


def in_teams(
    kernel: Kernel, arrays: dict[str, NDArray[Any]], numbers: dict[str, int], team: Team, *, blocks: int = 2,
    teams: int = 1, **parameters: Any,
) -> None:  # fmt: skip
    """Run a kernel in teams, `teams` in each block, with races found; arrays, which may be the same, are changed in
    place.
    """
    memory = FlatMemory()
    emulation, step = _of_team(kernel, tuple(sorted(parameters.items())), team)
    threads = teams * team.threads
    stack = memory.put(np.zeros(max(1, step * threads // 8 * blocks), np.uint8))
    places = {id(array): memory.put(array) for array in arrays.values()}
    at = {name: places[id(array)] for name, array in arrays.items()}
    given = [*kernel.pack(at | numbers), stack, step]
    emulation.run(memory, (blocks, 1), threads, teams * team.shared_bytes, given, Watch())
    for name, array in arrays.items():
        array[...] = memory.get(at[name], array)
