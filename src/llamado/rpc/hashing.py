"""FNV-1a, 64 bits, in machine code: the hash that names a weight's bytes in RPC's tensor cache.

Each byte is xored into the hash, which is then multiplied by a prime: a chain of one multiplication per byte that
nothing can shorten, about 4 cycles. Several independent hashes overlap their latencies, so many tensors at once cost a
fraction of one after the other. The loop runs without the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.jit import Jit
from llamado.devices.kernel import kernel
from llamado.devices.simd import I8, I64, Code, Value, Work

Bytes = NDArray[np.uint8]

BASIS = 0xCBF29CE484222325
PRIME = 0x100000001B3
LANES = 4
"""Hashes computed side by side: the latency of a multiplication in cycles. More gained nothing when measured."""
_UNROLL = 8

_lock = threading.Lock()


@kernel("hashes", "addresses", "n")
def fnv1a_lanes(c: Code, a: SimpleNamespace, work: Work, lanes: int) -> None:
    """Advance `lanes` hashes by `n` bytes at as many addresses; both are arrays of i64."""
    starts = [c.load(I64, a.addresses + 8 * i) for i in range(lanes)]
    hashes = [c.var(c.load(I64, a.hashes + 8 * i)) for i in range(lanes)]

    def step(at: list[Value], count: int) -> None:
        now = [h.value for h in hashes]
        for k in range(count):
            now = [(h ^ c.load(I8, p + k).zext(I64)) * PRIME for h, p in zip(now, at, strict=True)]
        for h, value in zip(hashes, now, strict=True):
            h.value = value

    whole = a.n - (a.n & (_UNROLL - 1))
    with c.range(0, whole, _UNROLL) as i:
        step([p + i for p in starts], _UNROLL)
    with c.range(whole, a.n) as i:
        step([p + i for p in starts], 1)
    for lane, h in enumerate(hashes):
        c.store(a.hashes + 8 * lane, h.value)


@cache
def _jit() -> Jit:
    return Jit()


@cache
def _compiled(lanes: int) -> Callable[[int, int, int, int, int], None]:
    return _jit().function(fnv1a_lanes, lanes=lanes)


def _function(lanes: int) -> Callable[[int, int, int, int, int], None]:
    with _lock:  # a Jit serves one caller at a time
        return _compiled(lanes)


def fnv1a(data: Bytes, start: int = BASIS) -> int:
    """Return the hash of contiguous bytes. `start` is the hash of the bytes before them.

    >>> hex(fnv1a(np.frombuffer(b"llamado", np.uint8)))
    '0x605c111ecae63efb'
    """
    hashes = np.array([start], np.uint64)
    _advance(hashes, [data], [0], data.nbytes)
    return int(hashes[0])


def fnv1a_many(arrays: Sequence[Bytes]) -> list[int]:
    """Return the hashes of several arrays of contiguous bytes, `LANES` of them at a time."""
    result = [BASIS] * len(arrays)
    waiting = sorted(range(len(arrays)), key=lambda i: arrays[i].nbytes)  # the longest first, popped from the end
    active: list[int] = []
    done: dict[int, int] = {}
    while waiting or active:
        while waiting and len(active) < LANES:
            i = waiting.pop()
            active.append(i)
            done[i] = 0
        n = min(arrays[i].nbytes - done[i] for i in active)
        hashes = np.array([result[i] for i in active], np.uint64)
        _advance(hashes, [arrays[i] for i in active], [done[i] for i in active], n)
        for i, value in zip(active, hashes.tolist(), strict=True):
            result[i] = value
            done[i] += n
        active = [i for i in active if done[i] < arrays[i].nbytes]
    return result


def _advance(hashes: NDArray[np.uint64], arrays: Sequence[Bytes], at: Sequence[int], n: int) -> None:
    """Advance each hash by `n` bytes of its array from byte `at` on."""
    if not n:
        return
    for array in arrays:
        if array.dtype != np.uint8 or not array.flags.c_contiguous:
            raise ValueError("only contiguous bytes can be hashed")
    addresses = np.array([a.ctypes.data + o for a, o in zip(arrays, at, strict=True)], np.int64)
    fields = np.array(
        fnv1a_lanes.pack({"hashes": hashes.ctypes.data, "addresses": addresses.ctypes.data, "n": n}), np.int64
    )
    _function(len(arrays))(fields.ctypes.data, 0, 1, 0, 0)
