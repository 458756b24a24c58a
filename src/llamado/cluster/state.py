"""What a running cluster tells other terminals: a folder with its state and a lock, held as long as it runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from llamado.errors import LlamadoError
from llamado.gguf.sources.resolve import cache_dir
from llamado.processes.identity import is_same, start_mark

if sys.platform != "win32":
    import fcntl

READY, STARTING, STOPPING, GONE = "ready", "starting", "stopping", "gone"
_LEFTOVER_GRACE = 15.0  # seconds


class ClusterStateError(LlamadoError):
    """No cluster of that name, more than one, or one that runs already."""


@dataclass
class ServiceState:
    """One service as it is told."""

    name: str
    role: str
    address: str
    phase: str = "waiting"
    pid: int = 0
    mark: str = ""
    """When the process started (`start_mark`)."""
    since: float = 0.0
    """When the phase began, seconds since 1970."""
    restarts: int = 0
    message: str = ""
    log: str = ""


@dataclass
class ClusterState:
    """A cluster as it is told."""

    name: str
    url: str
    log_folder: str
    pid: int = field(default_factory=os.getpid)
    mark: str = field(default_factory=lambda: start_mark(os.getpid()))
    phase: str = STARTING
    services: list[ServiceState] = field(default_factory=list)

    def worker_at(self, address: str) -> ServiceState | None:
        """The worker that this cluster started and that is reached at an address, by itself or behind its tap."""
        found = next((one for one in self.services if one.address == address), None)
        if found is not None and found.role == "tap":
            name = "worker" + found.name.removeprefix("tap")
            found = next((one for one in self.services if one.name == name), None)
        # One that was started elsewhere has no log here.
        return found if found is not None and found.role == "worker" and found.log else None


def root() -> Path:
    """The folder of all clusters' folders."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "llamado" if runtime else cache_dir() / "clusters"


class StateFolder:
    """One cluster's folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = root() / name
        self._state, self._lock = self.path / "state.json", self.path / "lock"
        self._drains, self._kills, self._resumes = (self.path / name for name in ("drain", "kill", "resume"))

    @contextmanager
    def held(self) -> Iterator[None]:
        """This process is the cluster of this name. Raises ClusterStateError when another is."""
        if sys.platform == "win32":
            raise ClusterStateError(
                "a cluster of processes needs Linux or macOS; here, start llamado worker and llamado serve --rpc, "
                "each by itself"
            )
        for asked in (self._drains, self._kills, self._resumes):
            asked.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self._lock, "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise self._taken() from None
            for request in (*self._drains.iterdir(), *self._kills.iterdir(), *self._resumes.iterdir()):
                request.unlink()
            self._end_leftovers()
            try:
                yield
            finally:
                self._state.unlink(missing_ok=True)

    def _taken(self) -> ClusterStateError:
        return ClusterStateError(
            f"a cluster named {self.name!r} runs already: llamado ps shows it, llamado down {self.name} ends it, and "
            "--name starts another beside it"
        )

    def check_free(self) -> None:
        """Raises ClusterStateError when a cluster of this name runs."""
        if self.running():
            raise self._taken()

    def running(self) -> bool:
        """Whether a process holds it."""
        if sys.platform == "win32":  # where `held` is refused
            return False
        try:
            with open(self._lock, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def write(self, state: ClusterState) -> None:
        """Tell the state; who reads sees the old one or the new one."""
        new = self._state.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(state)))
        new.replace(self._state)

    def read(self) -> ClusterState | None:
        """The state that was told last; `phase` is GONE when the cluster was killed. None where there is none."""
        try:
            told: dict[str, Any] = orjson.loads(self._state.read_bytes())
            told["services"] = [ServiceState(**service) for service in told["services"]]
            state = ClusterState(**told)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if not (self.running() and is_same(state.pid, state.mark)):
            state.phase = GONE
        return state

    def ask_drain(self, service: str) -> None:
        """Ask the cluster's process to drain a service."""
        (self._drains / service).touch()

    def drains(self) -> Iterator[str]:
        """The services that others asked to drain; each is asked for until the next one is taken."""
        yield from _taken(self._drains)

    def ask_resume(self, service: str) -> None:
        """Ask the cluster's process to start a drained server again."""
        (self._resumes / service).touch()

    def resumes(self) -> Iterator[str]:
        """Yield the servers that are to be started again."""
        yield from _taken(self._resumes)

    def ask_kill(self, service: str) -> None:
        """Ask the cluster's process to kill a worker that it started."""
        (self._kills / service).touch()

    def kills(self) -> Iterator[str]:
        """The workers that others asked to kill."""
        yield from _taken(self._kills)

    def asks(self, service: str) -> bool:
        """Return True if the cluster's process has not yet taken what was asked for a service."""
        return (self._drains / service).exists() or (self._resumes / service).exists()

    def _end_leftovers(self) -> None:
        """End what a killed cluster of this name has left, if its watchdog was killed as well."""
        state = self.read()
        left = [] if state is None else state.services
        end_processes([(service.pid, service.mark) for service in left], _LEFTOVER_GRACE)
        self._state.unlink(missing_ok=True)


def _taken(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        yield path.name
        path.unlink(missing_ok=True)


def end_processes(processes: Sequence[tuple[int, str]], grace: float) -> None:
    """SIGTERM to the groups of processes that still are the ones that they were, SIGKILL after `grace` seconds."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace
        left = [pid for pid, mark in processes if is_same(pid, mark)]
        for pid in left:
            try:
                os.killpg(pid, sig)
            except (ProcessLookupError, PermissionError):
                pass
        while any(is_same(pid, mark) for pid, mark in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


def all_clusters() -> list[ClusterState]:
    """The clusters that have a state, those that were killed as well."""
    folders = sorted(root().iterdir()) if root().is_dir() else []
    return [state for path in folders if (state := StateFolder(path.name).read()) is not None]


def own_cluster() -> ClusterState | None:
    """The running cluster of which this process is a service."""
    own = os.getpid(), start_mark(os.getpid())
    return next(
        (state for state in all_clusters() if state.phase != GONE and own in ((s.pid, s.mark) for s in state.services)),
        None,
    )


def find_cluster(name: str | None) -> ClusterState:
    """The cluster of a name, or the only one that runs. Raises ClusterStateError."""
    running = [state for state in all_clusters() if state.phase != GONE]
    found = [state for state in running if name is None or state.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(state.name for state in running)
    if not found:
        there = f"there are {names}" if names else "none runs on this machine for this user; llamado up starts one"
        raise ClusterStateError(f"no cluster{'' if name is None else f' named {name!r}'}: {there}")
    raise ClusterStateError(f"which cluster? --cluster NAME, one of {names}")
