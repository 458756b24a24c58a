"""Read-ahead and release of pages of mapped files.

The calls are Linux' madvise(2) and posix_fadvise(2). They wait for the disk only if its queue is full, and do not
change the contents of memory: a missing page is read when it is touched.
"""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels.experts import CHOICES, chosen_at, expert_of
from llamado.devices.simd import I32, I64, Code, Value, Work

_WILLNEED, _DONTNEED = 3, 4
"""Of madvise; posix_fadvise has the same numbers."""
_REQUEST = 1 << 17
"""Bytes per request: the system truncates a request to the disk's read-ahead, 128 KiB or more."""


def _prefetch(c: Code, start: Value, size: Value, page: int) -> None:
    first = start & -page
    with c.range(first, start + size, _REQUEST) as at:
        c.intrinsic("madvise", I32, [at, c.min(start + size - at, _REQUEST), c.const(I32, _WILLNEED)])


@kernel("start", "size")
def prefetch(c: Code, a: SimpleNamespace, work: Work, *, page: int) -> None:
    """Read bytes ahead from the disk; one thread does it, the others go on."""
    with c.shares(work, c.i64(1), c.i64(1)):
        _prefetch(c, a.start, a.size, page)


@kernel("w", "expert_bytes", *CHOICES)
def prefetch_chosen(c: Code, a: SimpleNamespace, work: Work, *, page: int) -> None:
    """Read the experts of one token ahead."""
    with c.shares(work, a.n_used, c.i64(1)) as i:
        _prefetch(c, a.w + expert_of(c, a, c.i64(0), i) * a.expert_bytes, a.expert_bytes, page)


@kernel("w", "expert_bytes", "n_experts", "routes")
def prefetch_routed(c: Code, a: SimpleNamespace, work: Work, *, page: int) -> None:
    """Read the experts of many tokens ahead, in the order of the products."""
    with c.shares(work, c.load(I64, a.routes), c.i64(1)) as number:
        _prefetch(c, a.w + chosen_at(c, a, number).expert * a.expert_bytes, a.expert_bytes, page)


@kernel("start", "size", "file", "offset")
def release(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Remove whole pages from this process and from memory; pages that another process maps stay in memory."""
    with c.shares(work, c.i64(1), c.i64(1)):
        c.intrinsic("madvise", I32, [a.start, a.size, c.const(I32, _DONTNEED)])
        c.intrinsic("posix_fadvise", I32, [a.file.to(I32), a.offset, a.size, c.const(I32, _DONTNEED)])
