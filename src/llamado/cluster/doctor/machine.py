"""Checks of this machine: port, cores, locked memory, the cache folder and its disk, open files."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from llamado.cluster.doctor.probes import is_local
from llamado.cluster.doctor.symptoms import Finding, finding
from llamado.devices import limits
from llamado.gguf.sources.resolve import cache_dir

_LEAST_DISK = 1 << 30
_LEAST_FILES = 1024
_LISTENING = "0A"
"""State TCP_LISTEN in /proc/net/tcp (Linux Documentation/networking/proc_net_tcp.rst)."""


@dataclass(frozen=True)
class MachineOptions:
    """Planned options of a server on this machine. None: not given, not checked."""

    host: str = "127.0.0.1"
    port: int | None = None
    threads: int | None = None
    mlock: bool = False


def examine_machine(options: MachineOptions) -> list[Finding]:
    """Return the findings of this machine for the planned options."""
    return [*_port(options), *_threads(options), *_locking(options), *_cache(), *_open_files()]


def _port(options: MachineOptions) -> Iterator[Finding]:
    if options.port is None:
        return
    where = f"{options.host}:{options.port}"
    try:
        family, kind, _, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except socket.gaierror as error:
        yield finding("unknown-host", where, f"{options.host}: {error.strerror}", host=options.host)
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            listener = find_listener(options.port)
            by = "by a process of another user" if listener is None else f"by {listener[1]} (process {listener[0]})"
            pid, program = listener or (f"$(sudo lsof -ti :{options.port})", "a process of another user")
            text = f"{reason}: {by}"
            yield finding("port-taken", where, text, pid=pid, program=program, free=free_port(options.host))
        elif error.errno == errno.EACCES:
            yield finding("port-forbidden", where, reason)
        else:
            yield finding("not-this-machine", where, reason)


def free_port(host: str) -> int:
    """Return a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1" if ":" in host else host, 0))
        port: int = probe.getsockname()[1]
    return port


def find_listener(port: int, root: Path = Path("/")) -> tuple[int, str] | None:
    """Return id and command of the process that listens on a port; None if the system does not show it."""
    wanted = set(_inodes(port, root))
    if not wanted:
        return None
    for process in (root / "proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(descriptor) in wanted:
                        words = (process / "cmdline").read_bytes().split(b"\0")
                        return int(process.name), b" ".join(words).decode(errors="replace").strip()[:80]
    return None


def find_stopped_listener(host: str, port: int, root: Path = Path("/")) -> tuple[int, str] | None:
    """Return the stopped process that listens on a port of this machine, and its command; None if none is stopped."""
    if not is_local(host):
        return None
    listener = find_listener(port, root)
    if listener is None:
        return None
    try:
        state = (root / "proc" / str(listener[0]) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    return listener if state == "T" else None  # proc(5), field 3


def stopped_finding(host: str, port: int, where: str) -> Finding | None:
    """Return the finding of a stopped process behind a port of this machine."""
    listener = find_stopped_listener(host, port)
    if listener is None:
        return None
    pid, program = listener
    return finding("stopped", where, f"process {pid} ({program}) listens there and is stopped", pid=pid)


def _inodes(port: int, root: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (root / "proc/net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if len(words) > 9 and words[3] == _LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield f"socket:[{words[9]}]"


def _threads(options: MachineOptions) -> Iterator[Finding]:
    cores = limits.cores()
    if options.threads is not None and options.threads > cores:
        parent = os.cpu_count() or cores
        text = f"-t {options.threads}, but this process can use {cores} cores"
        if parent > cores:
            text += f" (of {parent} CPUs: affinity, a container's limit, or two hardware threads per core)"
        yield finding("too-many-threads", "-t", text, cores=cores)


def _locking(options: MachineOptions) -> Iterator[Finding]:
    if not options.mlock:
        return
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        if limit != resource.RLIM_INFINITY and os.geteuid() != 0:
            yield finding("lock-limit", "--mlock", f"{limit / 1e6:.1f} MB may be locked")


def _cache() -> Iterator[Finding]:
    folder = cache_dir()
    parent = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        symptom = "disk-full" if error.errno == errno.ENOSPC else "cache-not-writable"
        yield finding(symptom, str(folder), f"{parent}: {error.strerror or error}", folder=folder)
        return
    free = shutil.disk_usage(parent).free
    if free < _LEAST_DISK:
        yield finding("disk-full", str(folder), f"{free / 1e6:.0f} MB are free", folder=folder)


def _open_files() -> Iterator[Finding]:
    with suppress(ImportError, OSError, ValueError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if limit != resource.RLIM_INFINITY and limit < _LEAST_FILES:
            yield finding("open-files", "this machine", f"at most {limit} open files are allowed")
