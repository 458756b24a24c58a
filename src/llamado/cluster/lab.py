"""The latency lab: taps whose links can be made slower while the server runs, and workers to kill."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence

from llamado.cluster.state import ClusterState, ServiceState, StateFolder, own_cluster
from llamado.cluster.taps import LinkSettings, Taps
from llamado.errors import LlamadoError
from llamado.installation import own_command
from llamado.processes.guarded import GuardedProcess, Watchdog
from llamado.processes.identity import is_same
from llamado.processes.secret_values import child_environment
from llamado.rpc.endpoint import Endpoint

_START_SECONDS = 60.0
_GRACE = 2.0
_KILL_SECONDS = 10.0
_MOST_MS = 10_000.0
_LEAST_BANDWIDTH = 1e4  # bits per second: less would not carry a token's state in a minute


class LabError(LlamadoError):
    """A link or a worker that is not of the lab, settings that make no sense, or a worker that does not start."""


class LabWorker:
    """A worker of one thread on this machine; it keeps its port when it is started again."""

    def __init__(self, guard: Watchdog) -> None:
        self._guard = guard
        self._port = 0
        self._said = threading.Condition()
        self._process: GuardedProcess | None = None
        self.start()

    @property
    def running(self) -> bool:
        return self._process is not None

    @property
    def endpoint(self) -> Endpoint:
        """Where it is; waits until it says. Raises LabError."""
        with self._said:
            if not self._said.wait_for(lambda: self._port or self._process is None, _START_SECONDS) or not self._port:
                raise LabError("a worker of --lab does not start")
        return Endpoint("127.0.0.1", self._port)

    def start(self) -> None:
        """Start it, unless it runs."""
        with self._said:
            if self._process is None:
                command = own_command("worker", "-p", str(self._port), "-t", "1")
                self._process = GuardedProcess(
                    command, child_environment(), self._guard, said=self._hear, ended=self._ended
                )

    def end(self, sig: int) -> None:
        """End it by a signal: SIGKILL as a machine ends that loses its power, SIGTERM in order."""
        with self._said:
            if self._process is not None:
                self._process.signal(sig)
            self._said.wait_for(lambda: self._process is None, 10)

    def _hear(self, line: str) -> None:
        if found := re.search(r"127\.0\.0\.1:(\d+)", line):
            with self._said:
                self._port = self._port or int(found[1])
                self._said.notify_all()

    def _ended(self, code: int) -> None:
        with self._said:
            self._process = None
            self._said.notify_all()


class Lab:
    """Links to the workers of `rpc`, and to `n_own` further ones that are started here. Raises LabError and TapsEnded.

    Any thread.
    """

    def __init__(self, rpc: Sequence[str], n_own: int) -> None:
        self._lock = threading.Lock()
        self._guard = Watchdog(_GRACE)
        self._own = [LabWorker(self._guard) for _ in range(n_own)]
        try:
            targets = [*map(Endpoint.parse, rpc), *(worker.endpoint for worker in self._own)]
            if encrypted := [str(target) for target in targets if target.tls]:
                raise LabError(f"--lab: what goes to {encrypted[0]} is encrypted, and no tap can tell its graphs")
            self._taps = Taps(targets)
        except BaseException:
            self._end_workers()
            raise
        self.endpoints = tuple(self._taps.endpoints)
        self._targets = dict(zip(self.endpoints, map(str, targets), strict=True))
        self._workers = dict(zip(self.endpoints[len(rpc) :], self._own, strict=True))
        self._links = dict.fromkeys(self.endpoints, LinkSettings())

    def view(self) -> list[dict[str, object]]:
        """The links as they are; `own`: whether the worker behind one can be killed, `running`: whether it runs.

        `watched`: `llamado up` started it, and starts it again.
        """
        cluster = own_cluster()
        watched = {one: found for one in self._links if (found := self._watched(cluster, one)) is not None}
        runs = {one: worker.running for one, worker in self._workers.items()}
        runs |= {one: found.pid != 0 for one, found in watched.items()}
        return [
            {
                "endpoint": endpoint,
                "worker": self._targets[endpoint],
                **settings._asdict(),
                "own": endpoint in runs,
                "running": runs.get(endpoint, True),
                "watched": endpoint in watched,
            }
            for endpoint, settings in self._links.items()
        ]

    def link_to(self, worker: str) -> str:
        """The link's endpoint, by which the engine knows the worker at an address; the address where there is none."""
        return next((endpoint for endpoint, target in self._targets.items() if target == worker), worker)

    def set(self, links: Mapping[str, tuple[float, float, float | None]]) -> None:
        """Makes links as slow as said, each by a LinkSettings. Raises LabError, TapsEnded."""
        wanted = {endpoint: LinkSettings(*settings) for endpoint, settings in links.items()}
        for endpoint, settings in wanted.items():
            self._known(endpoint)
            if not (0 <= settings.latency_ms <= _MOST_MS and 0 <= settings.jitter_ms <= _MOST_MS):
                raise LabError(f"latency and jitter are 0 to {_MOST_MS:g} milliseconds")
            if settings.bandwidth is not None and not _LEAST_BANDWIDTH <= settings.bandwidth < float("inf"):
                raise LabError(f"bandwidth is {_LEAST_BANDWIDTH:g} bits per second or more")
        with self._lock:
            self._links |= wanted
            self._taps.set([*self._links.values()])

    def kill(self, endpoint: str) -> None:
        """Kills a worker that was started here, or by the `llamado up` that started this server. Raises LabError."""
        self._known(endpoint)
        if endpoint in self._workers:
            self._workers[endpoint].end(signal.SIGKILL)
            return
        cluster = own_cluster()
        worker = self._watched(cluster, endpoint)
        if cluster is None or worker is None:
            raise LabError(f"the worker behind {endpoint} was not started here, and is not ended here")
        # It is ended by who started it: from here, its number might be another process's by now.
        folder = StateFolder(cluster.name)
        folder.ask_kill(worker.name)
        os.kill(cluster.pid, signal.SIGUSR1)
        until = time.monotonic() + _KILL_SECONDS
        while worker.pid and is_same(worker.pid, worker.mark):
            if time.monotonic() > until:
                raise LabError(f"llamado up does not end {worker.name}")
            time.sleep(0.01)

    def start(self, endpoint: str) -> None:
        """Starts one of this server's own again. Raises LabError."""
        self._known(endpoint)
        if endpoint not in self._workers:
            raise LabError(f"the worker behind {endpoint} was not started here: who started it starts it again")
        self._workers[endpoint].start()

    def _watched(self, cluster: ClusterState | None, endpoint: str) -> ServiceState | None:
        if cluster is None or endpoint in self._workers:
            return None
        return cluster.worker_at(self._targets[endpoint])

    def close(self) -> None:
        """Ends all that was started."""
        self._taps.close()
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._own:
            worker.end(signal.SIGTERM)
        self._guard.end()

    def _known(self, endpoint: str) -> None:
        if endpoint not in self._targets:
            raise LabError(f"{endpoint} is no link of the lab: there are {', '.join(self._targets)}")
