"""What this machine can do: reading memory, which limits decode, and 8-bit products in the cache, which limit prefill.

usage: machine.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from llamado.devices.cpu.jit import Jit, kernel
from llamado.devices.cpu.simd import Code, I8x32, I32x8, Work

THREADS = (1, 2)
_READ_BYTES = 1 << 30
# Four-bit weights, and the places of L1 the loop goes round in.
_PEAK, _ROWS, _PLACES = 15, 8, 16


def fastest(work: Callable[[int], object], threads: int, repeats: int = 5) -> float:
    """Least seconds that `threads` threads need to do `work(number)` at once."""
    seconds = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            began = time.perf_counter()
            list(pool.map(work, range(threads)))
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def read_bandwidth(threads: int) -> float:
    """GB/s of reading 1 GB of memory from end to end, a part by each thread."""
    words = np.ones(_READ_BYTES // 4, np.float32)
    parts = np.array_split(words, threads)
    # Of numpy's reductions the one that is bound by nothing but reading.
    return 1e-9 * _READ_BYTES / fastest(lambda i: parts[i].max(), threads)


@kernel("weights", "activations", "out", "rounds")
def multiply(c: Code, a: SimpleNamespace, work: Work) -> None:
    """The inner loop of our matrix products with nothing around it: integer products of operands in L1."""
    n = c.lowering.columns
    sums = [c.var(c.const(I32x8, 0)) for _ in range(n)]
    with c.range(0, a.rounds) as i:
        place = i % _PLACES
        row = a.weights + place * (32 * _ROWS)
        column = a.activations + place * (4 * n * _ROWS)
        weights = [c.load(I8x32, row + 32 * g) & _PEAK for g in range(_ROWS)]
        addresses = [[column + 4 * (n * g + j) for j in range(n)] for g in range(_ROWS)]
        products = [s.value for s in sums]
        c.lowering.dot(c, products, weights, addresses, _PEAK)
        for s, value in zip(sums, products, strict=True):
            s.value = value
    for j, s in enumerate(sums):
        c.store(a.out + work.thread * (32 * n) + 32 * j, s.value)


def integer_peak(threads: int) -> float:
    """GOP/s (a multiplication and an addition are two) of 8-bit products in the cache."""
    with tempfile.TemporaryDirectory() as folder:
        jit = Jit(folder=Path(folder))
        function = jit.function(multiply)
    n = jit.lowering.columns
    random = np.random.default_rng(0)
    weights = random.integers(0, 256, 32 * _ROWS * _PLACES, dtype=np.uint8)
    activations = random.integers(-127, 128, 4 * n * _ROWS * _PLACES, dtype=np.int8)
    out = np.zeros(8 * n * threads, np.int32)
    rounds = 1_000_000
    fields = np.array([weights.ctypes.data, activations.ctypes.data, out.ctypes.data, rounds], np.int64)
    seconds = fastest(lambda i: function(fields.ctypes.data, i, threads, 0, 0), threads)
    return 1e-9 * 2 * 32 * _ROWS * n * rounds * threads / seconds


def measure() -> dict[str, dict[int, float]]:
    """Both, by number of threads."""
    return {
        "read_gigabytes_per_second": {n: read_bandwidth(n) for n in THREADS},
        "integer_gigaops_per_second": {n: integer_peak(n) for n in THREADS},
    }


def limits() -> dict[str, dict[int, float]]:
    """Both, from a process of its own: the system counts what this one has held as held by all that it starts."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(measure).result()


def describe(measured: dict[str, dict[int, float]]) -> str:
    """One line of each limit."""
    read, computed = measured["read_gigabytes_per_second"], measured["integer_gigaops_per_second"]
    counts = " / ".join(map(str, THREADS))
    return (
        f"reading memory, {counts} threads: {' / '.join(f'{read[n]:.1f}' for n in THREADS)} GB/s\n"
        f"8-bit products in the cache, {counts} threads: {' / '.join(f'{computed[n]:.0f}' for n in THREADS)} GOP/s"
    )


if __name__ == "__main__":
    print(describe(limits()))
