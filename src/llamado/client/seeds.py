"""Seeds of jobs: the same for the same job, in every program, on every machine, after every restart."""

from __future__ import annotations

import hashlib


def seed_of(job_id: str | int | bytes) -> int:
    """A seed for `seed=` of a request: SHA-256 of the job's name as 32 bits, big end first.

    Python's own `hash(job_id)` is another one in each process. The value 0xFFFFFFFF, which asks for a random seed, does
    not come.

    >>> seed_of("job-1")
    40547897
    """
    data = job_id if isinstance(job_id, bytes) else str(job_id).encode()
    return int.from_bytes(hashlib.sha256(data).digest()[:4], "big") % 0xFFFF_FFFF
