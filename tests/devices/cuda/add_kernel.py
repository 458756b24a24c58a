"""The only kernel of the stand-in library in these tests: it adds a number to 64-bit integers."""

from __future__ import annotations

import numpy as np

from cuda.fake_libcuda import FakeMemory


def add(
    image: bytes,
    symbol: str,
    memory: FakeMemory,
    grid: tuple[int, int],
    threads: int,
    shared_bytes: int,
    arguments: tuple[int, ...],
) -> None:
    """Add the last argument to each of the blocks' elements: one for each thread of the grid."""
    address, value = arguments
    numbers = memory.view(address, 8 * grid[0] * grid[1] * threads).view(np.uint64)
    numbers += np.uint64(value)
