"""State of running clusters for other terminals: a folder per cluster with its state and a lock held while it runs."""

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
    """No cluster of that name, several clusters to choose from, or one of that name that runs already."""


@dataclass
class ServiceState:
    """State of one service, as stored in state.json."""

    name: str
    role: str
    address: str
    phase: str = "waiting"
    pid: int = 0
    mark: str = ""
    """Start time of the process (`start_mark`)."""
    since: float = 0.0
    """Start of the phase, seconds since 1970."""
    restarts: int = 0
    message: str = ""
    log: str = ""


@dataclass
class ClusterState:
    """State of a cluster, as stored in state.json."""

    name: str
    url: str
    log_folder: str
    pid: int = field(default_factory=os.getpid)
    mark: str = field(default_factory=lambda: start_mark(os.getpid()))
    phase: str = STARTING
    services: list[ServiceState] = field(default_factory=list)

    def worker_at(self, address: str) -> ServiceState | None:
        """Return the worker at an address, directly or behind its tap, if this cluster started it."""
        found = next((one for one in self.services if one.address == address), None)
        if found is not None and found.role == "tap":
            name = "worker" + found.name.removeprefix("tap")
            found = next((one for one in self.services if one.name == name), None)
        # A worker that another program started has no log here.
        return found if found is not None and found.role == "worker" and found.log else None


def clusters_folder() -> Path:
    """Return the folder that has a folder for each cluster."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "llamado" if runtime else cache_dir() / "clusters"


class StateFolder:
    """Folder of one cluster: its state, its lock, and requests to its process from other terminals."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = clusters_folder() / name
        self._state, self._lock = self.path / "state.json", self.path / "lock"
        self._drains, self._kills, self._resumes = (self.path / name for name in ("drain", "kill", "resume"))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock: this process runs the cluster. Raises ClusterStateError if another process does.

        Leftovers of a killed cluster of this name are ended first.
        """
        if sys.platform == "win32":
            raise ClusterStateError(
                "llamado up needs Linux or macOS; on Windows start llamado worker and llamado serve --rpc separately"
            )
        for folder in (self._drains, self._kills, self._resumes):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
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
            f"a cluster named {self.name!r} runs already: llamado ps shows it, llamado down {self.name} ends it, "
            "--name starts a second one"
        )

    def check_free(self) -> None:
        """Raise ClusterStateError if a cluster of this name runs."""
        if self.is_running():
            raise self._taken()

    def is_running(self) -> bool:
        """Return True if a process runs the cluster of this name."""
        if sys.platform == "win32":  # `locked` fails there
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
        """Store the state atomically: readers see the old state or the new one."""
        new = self._state.with_suffix(".new")
        new.write_bytes(orjson.dumps(asdict(state)))
        new.replace(self._state)

    def read(self) -> ClusterState | None:
        """Return the stored state, None if there is none. `phase` is GONE if the cluster was killed."""
        try:
            fields: dict[str, Any] = orjson.loads(self._state.read_bytes())
            fields["services"] = [ServiceState(**service) for service in fields["services"]]
            state = ClusterState(**fields)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if not (self.is_running() and is_same(state.pid, state.mark)):
            state.phase = GONE
        return state

    def request_drain(self, service: str) -> None:
        """Request the drain of a service from the cluster's process, which reads requests on SIGUSR1."""
        (self._drains / service).touch()

    def take_drains(self) -> Iterator[str]:
        """Yield the services to drain. A request is pending until the next one is taken."""
        yield from _taken(self._drains)

    def request_resume(self, service: str) -> None:
        """Request the restart of a drained server."""
        (self._resumes / service).touch()

    def take_resumes(self) -> Iterator[str]:
        """Yield the drained servers to restart."""
        yield from _taken(self._resumes)

    def request_kill(self, service: str) -> None:
        """Request that the cluster's process kills a worker that it started."""
        (self._kills / service).touch()

    def take_kills(self) -> Iterator[str]:
        """Yield the workers to kill."""
        yield from _taken(self._kills)

    def is_pending(self, service: str) -> bool:
        """Return True if the cluster's process has not yet taken a request to drain or restart a service."""
        return (self._drains / service).exists() or (self._resumes / service).exists()

    def _end_leftovers(self) -> None:
        """End processes of a killed cluster of this name; there are some if its watchdog was killed too."""
        state = self.read()
        left = [] if state is None else state.services
        end_processes([(service.pid, service.mark) for service in left], _LEFTOVER_GRACE)
        self._state.unlink(missing_ok=True)


def _taken(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        yield path.name
        path.unlink(missing_ok=True)


def end_processes(processes: Sequence[tuple[int, str]], grace: float) -> None:
    """Send SIGTERM to process groups, and SIGKILL after `grace` seconds.

    `processes`: process ids with their start marks; a process id that was reused since is left alone.
    """
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
    """Return all clusters that have a state, including killed ones."""
    folders = sorted(clusters_folder().iterdir()) if clusters_folder().is_dir() else []
    return [state for path in folders if (state := StateFolder(path.name).read()) is not None]


def own_cluster() -> ClusterState | None:
    """Return the running cluster that has this process as a service, None if there is none."""
    own = os.getpid(), start_mark(os.getpid())
    return next(
        (state for state in all_clusters() if state.phase != GONE and own in ((s.pid, s.mark) for s in state.services)),
        None,
    )


def find_cluster(name: str | None) -> ClusterState:
    """Return the running cluster of a name, or the only one that runs. Raises ClusterStateError."""
    running = [state for state in all_clusters() if state.phase != GONE]
    found = [state for state in running if name is None or state.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(state.name for state in running)
    if not found:
        there = f"running: {names}" if names else "you have none running on this machine; llamado up starts one"
        raise ClusterStateError(f"no cluster{'' if name is None else f' named {name!r}'}: {there}")
    raise ClusterStateError(f"several clusters are running; give --cluster NAME, one of {names}")
