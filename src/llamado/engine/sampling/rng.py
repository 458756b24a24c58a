"""Random numbers that depend only on a request's seed and a position in its sequence."""

from __future__ import annotations

import hashlib

Seed = int | str
"""Seeds of requests: an integer of any size, or any text."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E37_79B9_7F4A_7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK
    return z ^ (z >> 31)


def seed_key(seed: Seed) -> int:
    """Return the key of a seed's random numbers: the seed if it fits 32 bits, otherwise a 63-bit hash with bit
    63 set.
    """
    if isinstance(seed, int) and 0 <= seed < 1 << 32:
        return seed
    text = str(seed) if isinstance(seed, int) else f"text {seed}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "little") | 1 << 63


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """Return a number in [0, 1) that depends only on its arguments (splitmix64 read at index `position`).

    Each `stream` is an independent sequence; the token is drawn from the first.
    """
    key = _mix((seed + _GOLDEN) & _MASK)
    if stream:
        key = _mix(key ^ (stream * _GOLDEN & _MASK))
    return (_mix((key + (position + 1) * _GOLDEN) & _MASK) >> 11) * 2.0**-53
