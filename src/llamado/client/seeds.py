"""Reproducible seeds: the same job id gives the same seed in every program, on every machine, after every restart."""

from __future__ import annotations

import hashlib


def seed_of(job_id: str | int | bytes) -> int:
    """Return a seed for `seed=` of a request: the first 32 bits of the SHA-256 of the job id, big-endian.

    Python's own `hash(job_id)` differs in each process. The value 0xFFFFFFFF, which requests a random seed, is never
    returned.

    >>> seed_of("job-1")
    40547897
    """
    data = job_id if isinstance(job_id, bytes) else str(job_id).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") % 0xFFFF_FFFF
