"""Random numbers that depend on a request's seed and a place in its sequence, and on nothing else."""

from __future__ import annotations

import hashlib

Seed = int | str
"""What a request may give: a whole number of any size, or any text."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E37_79B9_7F4A_7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


def seed_key(seed: Seed) -> int:
    """The key of a seed's random numbers: itself where it fits 32 bits, else a hash of 63 bits and a bit above them."""
    if isinstance(seed, int) and 0 <= seed < 1 << 32:
        return seed
    text = str(seed) if isinstance(seed, int) else f"text {seed}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") | 1 << 63


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on nothing but its arguments (splitmix64 read at index `position`).

    Each `stream` is a sequence of its own; the token is drawn from the first.
    """
    key = _mix((seed + _GOLDEN) & _MASK)
    if stream:
        key = _mix(key ^ (stream * _GOLDEN & _MASK))
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53
