"""Limits of this machine: read bandwidth, which bounds generation, and products in the cache, which bound prompts.

Measured by minimal kernels: vector loads over a range of memory, the integer products of the matrix products
(`Lowering.dot`), and float multiply-adds. Operands of the products are in the L1 cache.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from llamado.devices import limits
from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import kernel
from llamado.devices.kernels.activations import TILE
from llamado.devices.kernels.matmul import InterleavedColumns
from llamado.devices.kernels.tiles.matmul import Tiles
from llamado.devices.simd import Code, Type, Work

MEMORY_BYTES = 1 << 30
"""Minimum bytes to read to measure memory instead of a cache."""
_STREAMS = 8  # concurrent loads, each into its own register
_PEAK, _GROUPS, _PLACES = 15, 8, 16  # largest 4-bit weight, vectors of weights per round, and rounds that fit in L1
_CHAINS = 12  # independent sums: enough to hide the latency of an addition
_ROUNDS = 400_000
_TRIES = 5


def caches(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> dict[int, int]:
    """Return the bytes of a core's data caches by level, as reported by Linux; empty if unavailable."""
    found = {}
    for folder in root.glob("index*"):
        try:
            level, kind = int((folder / "level").read_text()), (folder / "type").read_text().strip()
            size = re.fullmatch(r"(\d+)([KMG]?)", (folder / "size").read_text().strip())
        except (OSError, ValueError):
            continue
        if kind != "Instruction" and size is not None:
            found[level] = int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]]
    return dict(sorted(found.items()))


def beyond_caches(found: dict[int, int]) -> int:
    """Return a number of bytes that is too large for any cache: at least twice the largest."""
    return max(MEMORY_BYTES, 2 * max(found.values(), default=0))


@kernel("memory", "n_bytes", "out", "rounds")
def read_through(c: Code, a: SimpleNamespace, work: Work, *, lanes: int) -> None:
    """Load every vector of the thread's own `n_bytes` of memory (a multiple of 8 vectors), `rounds` times."""
    vector = Type("i32", lanes)
    sums = [c.var(c.const(vector, 0)) for _ in range(_STREAMS)]
    start = a.memory + work.thread * a.n_bytes
    with c.range(0, a.rounds), c.range(0, a.n_bytes, _STREAMS * vector.bytes) as at:
        for i, total in enumerate(sums):
            total.value = total.value + c.load(vector, start + at + i * vector.bytes)
    whole = sums[0].value
    for total in sums[1:]:
        whole = whole + total.value
    c.store(a.out + work.thread * vector.bytes, whole)


@kernel("weights", "columns", "out", "rounds")
def multiply_integers(c: Code, a: SimpleNamespace, work: Work, *, lanes: int, columns: int) -> None:
    """Run the inner loop of the matrix products of quantized weights."""
    n, i8, i32 = columns, Type("i8", 4 * lanes), Type("i32", lanes)
    sums = [c.var(c.const(i32, 0)) for _ in range(n)]
    with c.range(0, a.rounds) as i:
        place = i % _PLACES
        row = a.weights + place * (i8.bytes * _GROUPS)
        column = a.columns + place * (4 * n * _GROUPS)
        weights = [c.load(i8, row + i8.bytes * g) & _PEAK for g in range(_GROUPS)]
        addresses = [InterleavedColumns(column, n).cells(g) for g in range(_GROUPS)]
        products = [s.value for s in sums]
        c.lowering.dot(c, products, weights, addresses, _PEAK)
        for s, value in zip(sums, products, strict=True):
            s.value = value
    for j, s in enumerate(sums):
        c.store(a.out + work.thread * (n * i32.bytes) + i32.bytes * j, s.value)


@kernel("numbers", "out", "rounds")
def multiply_floats(c: Code, a: SimpleNamespace, work: Work, *, lanes: int) -> None:
    """Run float multiply-adds of registers, in independent chains."""
    f32 = Type("f32", lanes)
    factor = c.load(f32, a.numbers)
    sums = [c.var(c.const(f32, 0.0)) for _ in range(_CHAINS)]
    with c.range(0, a.rounds):
        for s in sums:
            s.value = c.fma(s.value, factor, factor)
    for j, s in enumerate(sums):
        c.store(a.out + work.thread * (_CHAINS * f32.bytes) + f32.bytes * j, s.value)


@kernel("numbers", "out", "rounds")
def multiply_tiles(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Run integer products of tile registers: 64 · 16 · 16 multiplications each, into four sums in turn."""
    tiles = Tiles(c, dict.fromkeys(range(8), (TILE, 64)))
    for number in range(4):
        tiles.clear(number)
        tiles.load(4 + number, a.numbers)
    with c.range(0, a.rounds):
        for total in range(4):
            tiles.multiply(total, 4 + total % 2, 6 + total // 2, signed=True)
    for number in range(4):
        tiles.store(a.out + work.thread * 1024, number)
    tiles.release()


class Machine:
    """Measures the limits with kernels compiled by `jit`. Each figure is the best of several runs of all threads."""

    def __init__(self, jit: Jit | None = None) -> None:
        self._jit = jit or Jit()
        self.widths = (8, 16) if self._jit.lowering.panel_rows == 16 else (8,)
        """Lanes of four bytes per register: 8 for 256 bits, 16 for 512 bits."""
        self.tiles = self._jit.lowering.tiles
        """True if there are tile registers (AMX)."""

    @property
    def lowering(self) -> str:
        """Name of the instruction set used for integer products."""
        return self._jit.lowering.name

    def read_bandwidth(self, n_bytes: int, threads: int) -> float:
        """Return bytes per second of reading about `n_bytes` repeatedly, split among the threads.

        The better of the load kernel and numpy's fastest reduction.
        """
        part = max(n_bytes // threads // 4096, 1) * 4096
        memory = np.ones(part * threads // 4, np.float32)
        repeats = max(1, (1 << 29) // (part * threads))  # for small sizes, so that the start of threads does not count
        parts = memory.reshape(threads, -1)
        best = _fastest(lambda i: [parts[i].max() for _ in range(repeats)], threads)
        out = np.zeros(16 * threads, np.int32)
        fields = np.array([memory.ctypes.data, part, out.ctypes.data, repeats], np.int64)
        for lanes in self.widths:
            function = self._jit.function(read_through, lanes=lanes)
            best = min(best, _fastest(partial(_call, function, fields.ctypes.data, threads), threads))
        return repeats * part * threads / best

    def integer_products(self, threads: int, lanes: int) -> float:
        """Return operations per second of 8-bit products in the cache; a multiply-add counts as two."""
        return max(self._integer_products(threads, lanes, n) for n in (self._jit.lowering.columns, _CHAINS))

    def _integer_products(self, threads: int, lanes: int, n: int) -> float:
        random = np.random.default_rng(0)
        weights = random.integers(0, 256, 4 * lanes * _GROUPS * _PLACES, dtype=np.uint8)
        columns = random.integers(-127, 128, 4 * n * _GROUPS * _PLACES, dtype=np.int8)
        out = np.zeros(lanes * n * threads, np.int32)
        fields = np.array([weights.ctypes.data, columns.ctypes.data, out.ctypes.data, _ROUNDS], np.int64)
        function = self._jit.function(multiply_integers, lanes=lanes, columns=n)
        seconds = _fastest(partial(_call, function, fields.ctypes.data, threads), threads)
        return 2 * 4 * lanes * _GROUPS * n * _ROUNDS * threads / seconds

    def tile_products(self, threads: int) -> float:
        """Return operations per second of 8-bit products of tile registers; 0 without tile registers."""
        if not self.tiles:
            return 0.0
        numbers, out = np.ones(TILE * 64, np.int8), np.zeros(TILE * TILE * threads, np.int32)
        rounds = _ROUNDS // 4
        fields = np.array([numbers.ctypes.data, out.ctypes.data, rounds], np.int64)
        function = self._jit.function(multiply_tiles)
        seconds = _fastest(partial(_call, function, fields.ctypes.data, threads), threads)
        return 2 * 4 * 64 * TILE * TILE * rounds * threads / seconds

    def float_products(self, threads: int, lanes: int) -> float:
        """Return operations per second of float multiply-adds of registers."""
        numbers, out = np.full(lanes, 0.5, np.float32), np.zeros(lanes * _CHAINS * threads, np.float32)
        rounds = 4 * _ROUNDS
        fields = np.array([numbers.ctypes.data, out.ctypes.data, rounds], np.int64)
        function = self._jit.function(multiply_floats, lanes=lanes)
        seconds = _fastest(partial(_call, function, fields.ctypes.data, threads), threads)
        return 2 * lanes * _CHAINS * rounds * threads / seconds


def _call(function: Callable[..., None], fields: int, threads: int, thread: int) -> None:
    """Run one thread's part of a kernel."""
    function(fields, thread, threads, 0, 0)


def _fastest(work: Callable[[int], object], threads: int) -> float:
    """Return the least seconds in which started threads run `work(number)` concurrently."""
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
        for _ in range(_TRIES):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def thread_counts() -> tuple[int, ...]:
    """Return one thread, and one per core."""
    return tuple(sorted({1, limits.cores()}))
