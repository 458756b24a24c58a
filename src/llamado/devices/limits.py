"""Memory and cores that this process may use: those of the machine, reduced by control groups and CPU affinity.

A container or a systemd unit is a cgroup with limits of its own (Linux Documentation/admin-guide/cgroup-v2.rst, and
cgroup-v1/memory.rst); limits of the groups above it hold as well. A missing file means no limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")


class MachineMemory(NamedTuple):
    """Bytes: `free` now, `total` that this process may ever use, and `physical`, the machine's RAM.

    `total` is less than `physical` if a control group limits it.
    """

    free: int
    total: int
    physical: int


def memory(root: Path = _ROOT) -> MachineMemory:
    """Return the memory this process may use. `root`: the folder of `proc` and `sys`."""
    free, physical = _system_memory()
    for key, value in _table(root / "proc/meminfo"):
        if key == "MemTotal:":
            physical = 1024 * value
        elif key == "MemAvailable:":
            free = 1024 * value
    total = physical
    for limit, used in _memory_limits(root):
        if limit < physical:  # cgroup v1 writes "no limit" as a huge number
            total = min(total, limit)
            free = min(free, max(0, limit - used))
    return MachineMemory(min(free, total), total, physical)


def _system_memory() -> tuple[int, int]:
    """Return free and total bytes; everything counts as free if the system does not report it."""
    if sys.platform == "win32":
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
        return status.available, status.total
    page = os.sysconf("SC_PAGE_SIZE")
    physical = page * os.sysconf("SC_PHYS_PAGES")
    return page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else physical, physical


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX (sysinfoapi.h)."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 5),
    )


def cores(root: Path = _ROOT) -> int:
    """Number of threads that can compute in parallel: the physical cores among the CPUs this process may run on, at
    most as many as its CPU quota (cgroup `cpu.max`) keeps busy, at least one.
    """
    cpus = _affinity()
    found = len({_siblings(root, cpu) for cpu in cpus})
    for quota in _cpu_quotas(root):
        found = min(found, int(quota))  # one throttled thread would keep all the others waiting
    return max(1, found)


def _affinity() -> frozenset[int]:
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:
        return frozenset(range(os.cpu_count() or 1))


def _siblings(root: Path, cpu: int) -> str:
    """The CPUs of a CPU's core, as the system lists them; the CPU alone if the system has no list."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list") or str(cpu)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of every group this process is in. File cache is not counted as used: it can be
    reclaimed.
    """
    for folder in _groups(root, ""):
        # above memory.high a group is throttled, not killed
        for name in ("memory.max", "memory.high"):
            if limit := _number(folder / name):
                yield limit, _working_set(folder, "memory.current", ("active_file", "inactive_file"))
    for folder in _groups(root, "memory"):
        # limits of the groups above hold, too; if they are not visible, this group's statistics have the smallest
        above = dict(_table(folder / "memory.stat")).get("hierarchical_memory_limit", 0)
        for limit in (_number(folder / "memory.limit_in_bytes"), above):
            if limit:
                files = ("total_active_file", "total_inactive_file")
                yield limit, _working_set(folder, "memory.usage_in_bytes", files)


def _working_set(folder: Path, usage: str, files: tuple[str, ...]) -> int:
    cached = sum(value for key, value in _table(folder / "memory.stat") if key in files)
    return max(0, _number(folder / usage) - cached)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quota of every group that has one, in seconds of CPU time per second."""
    for folder in _groups(root, ""):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield int(quota) / int(period)
    for folder in _groups(root, "cpu"):
        given, every = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if given > 0 and every > 0:
            yield given / every


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of those above it. `controller`: a cgroup v1 controller, or "" for
    v2.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if controller not in names.split(",") or (controller == "") != (number == "0"):
            continue
        mounts = root / "sys/fs/cgroup"
        tops = [mounts / name for name in dict.fromkeys([names, controller])] if controller else [mounts]
        if not controller and (mounts / "unified").is_dir():
            tops.append(mounts / "unified")
        top = next((top for top in tops if top.is_dir()), None)
        if top is None:
            continue
        # inside a container the path may be the one outside: then the mount is the container's own group
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for n in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:n])


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int:
    """Return the number in a file; 0 if there is none ("max", −1)."""
    text = _text(path)
    return int(text) if text.isdecimal() else 0


def _table(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, number) of each line."""
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            yield words[0], int(words[1])
