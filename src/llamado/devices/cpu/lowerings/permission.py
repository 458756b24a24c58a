"""Permission to use tile registers (AMX), which Linux grants to a process on request."""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from functools import cache

log = logging.getLogger("llamado.devices")

_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18
"""ARCH_REQ_XCOMP_PERM, and the number of the state component (Linux, Documentation/arch/x86/xstate.rst)."""


@cache
def tiles_permitted() -> bool:
    """Return True if this process may use tile registers. Requests it once, for all present and future threads."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    number, request, component = (ctypes.c_long(n) for n in (_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA))
    if libc.syscall(number, request, component) == 0:
        return True
    log.debug("the CPU has AMX, but the system does not allow it (errno %d)", ctypes.get_errno())
    return False
