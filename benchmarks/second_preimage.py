"""Other bytes with the same FNV-1a hash: a non-cryptographic hash must not identify what untrusted clients upload.

One step of FNV-1a xors a byte into the low eight bits and multiplies by a prime. Written as a difference d to the hash
instead, n steps are linear: h·Pⁿ + Σ dᵢ·Pⁿ⁻ⁱ (mod 2⁶⁴). Small differences that lead from one hash to another are a
short vector of a lattice, which the algorithm of Lenstra, Lenstra and Lovász (1982) finds in a second; a difference is
a byte where the low eight bits do not overflow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction

from llamado.rpc.hashing import BASIS, PRIME

_MODULUS = 1 << 64
_N = 14
"""Bytes that are chosen: differences of about 20."""
_WEIGHT = 1 << 20
_MARK = 20

Rows = list[list[int]]


def fnv1a(data: bytes, start: int = BASIS) -> int:
    """The hash, byte by byte."""
    value = start
    for byte in data:
        value = (value ^ byte) * PRIME % _MODULUS
    return value


def second_preimage(target: int, size: int, seed: int = 1) -> bytes:
    """`size` bytes (at least 64), most of them drawn by lot, whose hash is `target`."""
    draw = random.Random(seed)
    steps = [pow(PRIME, _N - i, _MODULUS) for i in range(_N)]
    lattice = [[int(i == j) for j in range(_N)] + [0, _WEIGHT * step] for i, step in enumerate(steps)]
    kernel = _reduced([*lattice, [0] * (_N + 1) + [_WEIGHT * _MODULUS]])
    while True:
        head = draw.randbytes(size - _N)
        begun = fnv1a(head)
        missing = (target - begun * pow(PRIME, _N, _MODULUS)) % _MODULUS
        for vector in _reduced([*kernel, [0] * _N + [_MARK, -_WEIGHT * missing]]):
            if abs(vector[_N]) == _MARK and not vector[-1]:
                sign = vector[_N] // _MARK
                tail = _as_bytes(begun, [sign * difference for difference in vector[:_N]])
                if tail is not None:
                    return head + tail


def _as_bytes(value: int, differences: Sequence[int]) -> bytes | None:
    tail = bytearray()
    for difference in differences:
        low = value & 255
        if not 0 <= low + difference < 256:
            return None
        tail.append(low ^ (low + difference))
        value = (value + difference) * PRIME % _MODULUS
    return bytes(tail)


def _dot(a: Sequence[int | Fraction], b: Sequence[int | Fraction]) -> Fraction:
    return Fraction(sum(x * y for x, y in zip(a, b, strict=True)))


def _reduced(rows: Rows) -> Rows:
    """An LLL-reduced basis of the lattice that `rows` span."""
    basis = [list(row) for row in rows]
    n = len(basis)
    shares = [[Fraction(0)] * n for _ in range(n)]
    sizes: list[Fraction] = []
    orthogonal: list[list[Fraction]] = []
    for i in range(n):
        vector = [Fraction(x) for x in basis[i]]
        for j in range(i):
            shares[i][j] = _dot(basis[i], orthogonal[j]) / sizes[j]
            vector = [x - shares[i][j] * y for x, y in zip(vector, orthogonal[j], strict=True)]
        orthogonal.append(vector)
        sizes.append(_dot(vector, vector))
    k = 1
    while k < n:
        for j in range(k - 1, -1, -1):
            times = round(shares[k][j])
            if times:
                basis[k] = [x - times * y for x, y in zip(basis[k], basis[j], strict=True)]
                for i in range(j):
                    shares[k][i] -= times * shares[j][i]
                shares[k][j] -= times
        share = shares[k][k - 1]
        if sizes[k] >= (Fraction(3, 4) - share**2) * sizes[k - 1]:
            k += 1
            continue
        size = sizes[k] + share**2 * sizes[k - 1]
        shares[k][k - 1] = share * sizes[k - 1] / size
        sizes[k - 1], sizes[k] = size, sizes[k - 1] * sizes[k] / size
        basis[k - 1], basis[k] = basis[k], basis[k - 1]
        for j in range(k - 1):
            shares[k - 1][j], shares[k][j] = shares[k][j], shares[k - 1][j]
        for i in range(k + 1, n):
            kept = shares[i][k]
            shares[i][k] = shares[i][k - 1] - share * kept
            shares[i][k - 1] = kept + shares[k][k - 1] * shares[i][k]
        k = max(k - 1, 1)
    return basis
