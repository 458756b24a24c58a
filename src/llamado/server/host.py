"""What the operating system is asked for around loading: memory that stays, processors of one node."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from pathlib import Path

from llamado.gguf.reader import GGUFFile

log = logging.getLogger("llamado.server")

_NODES = Path("/sys/devices/system/node")


def lock_weights(file: GGUFFile) -> bool:
    """Keep a model's file in RAM (`--mlock`); says why where the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mlock"):
        log.warning("--mlock: this system has no mlock")
        return False
    for shard in range(file.n_shards):
        memory = file.shard_data(shard)
        if libc.mlock(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes)) != 0:
            number = ctypes.get_errno()
            hint = "; raise the limit (ulimit -l)" if number in (errno.ENOMEM, errno.EPERM, errno.EAGAIN) else ""
            log.warning("--mlock: %s for %d bytes%s", os.strerror(number), memory.nbytes, hint)
            return False
    return True


def cpu_list(text: str) -> set[int]:
    """Processors of a list as the kernel writes it: `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus |= set(range(int(low), int(high or low) + 1))
    return cpus


def place_threads(numa: str) -> None:
    """`--numa`: `isolate` keeps this process on the node it started on; `distribute` lets it use all, `numactl` what
    it was given. Threads made later inherit the choice.
    """
    if not hasattr(os, "sched_setaffinity"):
        log.warning("--numa %s: this system does not place threads", numa)
        return
    nodes = [cpu_list((node / "cpulist").read_text()) for node in sorted(_NODES.glob("node[0-9]*"))]
    if len(nodes) < 2:
        log.info("--numa %s: this machine has one node; nothing to place", numa)
        return
    if numa == "isolate":
        here = ctypes.CDLL(None).sched_getcpu()
        os.sched_setaffinity(0, next((node for node in nodes if here in node), os.sched_getaffinity(0)))
    elif numa == "distribute":
        os.sched_setaffinity(0, set().union(*nodes))
