"""Limits of a process on CPUs and memory, read from sample trees of /proc and /sys of machines and containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamado.devices import limits
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit

GIB = 1 << 30
V1_NONE = "9223372036854771712"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A machine of 16 GiB, 10 of them available, with these files."""
    files = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 1 kB\nMemAvailable: {10 << 20} kB\n", **files}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v2(path: str, **files: str) -> dict[str, str]:
    return {f"sys/fs/cgroup{path}/{name.replace('_', '.', 1)}": text for name, text in files.items()}


CASES = {
    "no groups": ({}, (10, 16)),
    "v2 without a limit": ({"proc/self/cgroup": "0::/a", **v2("/a", memory_max="max", memory_current="5")}, (10, 16)),
    "v2, a container sees its own group as the top": (
        {"proc/self/cgroup": "0::/", **v2("", memory_max=str(4 * GIB), memory_current=str(GIB))}, (3, 4),
    ),
    "v2, what caches files is free": (
        {"proc/self/cgroup": "0::/", **v2("", memory_max=str(4 * GIB), memory_current=str(3 * GIB),
         memory_stat=f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}")}, (3, 4),
    ),
    "v2, the tightest group of all above it": (
        {"proc/self/cgroup": "0::/a/b/c", **v2("/a", memory_max=str(2 * GIB), memory_current=str(GIB)),
         **v2("/a/b", memory_max="max"), **v2("/a/b/c", memory_max=str(8 * GIB), memory_current="0")}, (1, 2),
    ),
    "v2, a path of the machine outside": (
        {"proc/self/cgroup": "0::/system.slice/docker-1", **v2("", memory_max=str(GIB), memory_current="0")}, (1, 1),
    ),
    "v2, more used than allowed": (
        {"proc/self/cgroup": "0::/", **v2("", memory_max=str(GIB), memory_current=str(2 * GIB))}, (0, 1),
    ),
    "v2, above which a group is slowed down": (
        {"proc/self/cgroup": "0::/a", **v2("/a", memory_max=str(4 * GIB), memory_high=str(3 * GIB),
         memory_current=str(GIB))}, (2, 3),
    ),
    "v1, groups above it": (
        {"proc/self/cgroup": "3:memory:/a/b", "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(3 * GIB),
         "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(2 * GIB),
         "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": V1_NONE}, (1, 3),
    ),
    "v1, groups above it that a container does not see": (
        {"proc/self/cgroup": "3:memory:/outside/box", "sys/fs/cgroup/memory/memory.limit_in_bytes": V1_NONE,
         "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
         "sys/fs/cgroup/memory/memory.stat": f"hierarchical_memory_limit {2 * GIB}"}, (1, 2),
    ),
    "v1": (
        {"proc/self/cgroup": "3:memory:/m\n2:cpu,cpuacct:/",
         "sys/fs/cgroup/memory/m/memory.limit_in_bytes": str(2 * GIB),
         "sys/fs/cgroup/memory/m/memory.usage_in_bytes": str(2 * GIB),
         "sys/fs/cgroup/memory/m/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}"}, (1, 2),
    ),
    "v1 without a limit": (
        {"proc/self/cgroup": "3:memory:/m", "sys/fs/cgroup/memory/m/memory.limit_in_bytes": V1_NONE}, (10, 16),
    ),
    "v1 with an empty v2 beside it": (
        {"proc/self/cgroup": "3:memory:/m\n0::/", "sys/fs/cgroup/memory/m/memory.limit_in_bytes": str(GIB),
         "sys/fs/cgroup/unified/cgroup.procs": "", "sys/fs/cgroup/memory/m/memory.usage_in_bytes": "0"}, (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_memory(case: str, tmp_path: Path) -> None:
    files, (free, total) = CASES[case]
    found = limits.memory(tree(tmp_path, files))
    assert found == (free * GIB, total * GIB, 16 * GIB)


def test_memory_of_this_machine() -> None:
    free, total, physical = limits.memory()
    assert 0 < free <= total <= physical
    assert physical // os.sysconf("SC_PAGE_SIZE") == pytest.approx(os.sysconf("SC_PHYS_PAGES"), rel=0.01)


def topology(*cores: str) -> dict[str, str]:
    """CPUs 0, 1, … and who shares a core with each."""
    return {f"sys/devices/system/cpu/cpu{i}/topology/core_cpus_list": core for i, core in enumerate(cores)}


QUOTA_V1 = {"proc/self/cgroup": "2:cpu,cpuacct:/k", "sys/fs/cgroup/cpu,cpuacct/k/cpu.cfs_period_us": "100000"}
CORES = {
    "nothing is known": (4, {}, 4),
    "two threads a core": (4, topology("0,2", "1,3", "0,2", "1,3"), 2),
    "older systems' name": (
        2, {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": "0-1" for i in (0, 1)}, 1,
    ),
    "v2 quota": (8, {"proc/self/cgroup": "0::/", **v2("", cpu_max="250000 100000")}, 2),
    "v2 quota of less than a core": (8, {"proc/self/cgroup": "0::/", **v2("", cpu_max="50000 100000")}, 1),
    "v2 quota of a group above": (
        8, {"proc/self/cgroup": "0::/a/b", **v2("/a", cpu_max="300000 100000"), **v2("/a/b", cpu_max="max 100000")}, 3,
    ),
    "v2 without a quota": (8, {"proc/self/cgroup": "0::/", **v2("", cpu_max="max 100000")}, 8),
    "v1 quota": (8, {**QUOTA_V1, "sys/fs/cgroup/cpu,cpuacct/k/cpu.cfs_quota_us": "600000"}, 6),
    "v1 mounted by its plain name": (
        8, {"proc/self/cgroup": "1:cpu:/", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 2,
    ),
    "v1 without a quota": (8, {**QUOTA_V1, "sys/fs/cgroup/cpu,cpuacct/k/cpu.cfs_quota_us": "-1"}, 8),
    "more quota than cores": (2, {"proc/self/cgroup": "0::/", **v2("", cpu_max="900000 100000")}, 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CORES)
def test_cores(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n, files, expected = CORES[case]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(n)), raising=False)
    assert limits.cores(tree(tmp_path, files)) == expected


def test_cores_are_those_this_process_may_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(tmp_path, topology("0-1", "0-1", "2-3", "2-3"))
    for cpus, expected in (({0, 1}, 1), ({1, 2}, 2), ({3}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cpus=cpus: cpus, raising=False)
        assert limits.cores(root) == expected
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert limits.cores(root) == 2


def test_a_device_has_the_cores_and_memory_of_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 3)
    monkeypatch.setattr(limits, "memory", lambda: limits.MachineMemory(5, 7, 9))
    device = CpuDevice(jit=Jit())
    try:
        assert device.n_threads == device.team.n == 3
        assert device.memory() == (5, 7)
    finally:
        device.close()
