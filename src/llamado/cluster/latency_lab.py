"""Latency lab (`--lab`): slow down the links to workers and kill workers while the server runs."""

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
from llamado.server.model import LabLink

_START_SECONDS = 60.0
_GRACE = 2.0
_KILL_SECONDS = 10.0
_MOST_MS = 10_000.0
_LEAST_BANDWIDTH = 1e4  # bits per second; with less, the state of one token would take more than a minute


class LabError(LlamadoError):
    """An unknown link or worker, invalid link settings, or a worker that does not start."""


class LabWorker:
    """A worker process with one thread on this machine. A restart keeps its port."""

    def __init__(self, guard: Watchdog) -> None:
        self._guard = guard
        self._port = 0
        self._changed = threading.Condition()
        self._process: GuardedProcess | None = None
        self.start()

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def endpoint(self) -> Endpoint:
        """Address of the worker; waits until it listens. Raises LabError."""
        with self._changed:
            if (
                not self._changed.wait_for(lambda: self._port or self._process is None, _START_SECONDS)
                or not self._port
            ):
                raise LabError("a worker of --lab did not start")
        return Endpoint("127.0.0.1", self._port)

    def start(self) -> None:
        """Start the process unless it runs."""
        with self._changed:
            if self._process is None:
                command = own_command("worker", "-p", str(self._port), "-d", "CPU", "-t", "1")
                self._process = GuardedProcess(
                    command, child_environment(), self._guard, on_line=self._read_line, on_exit=self._ended
                )

    def end(self, sig: int) -> None:
        """Send a signal and wait for the end: SIGKILL simulates a power failure, SIGTERM is a clean end."""
        with self._changed:
            if self._process is not None:
                self._process.signal(sig)
            self._changed.wait_for(lambda: self._process is None, 10)

    def _read_line(self, line: str) -> None:
        if found := re.search(r"127\.0\.0\.1:(\d+)", line):
            with self._changed:
                self._port = self._port or int(found[1])
                self._changed.notify_all()

    def _ended(self, code: int) -> None:
        with self._changed:
            self._process = None
            self._changed.notify_all()


class LatencyLab:
    """Links to the workers of `rpc` and to `n_own` more workers that it starts. Thread-safe.

    Raises LabError and TapsError.
    """

    def __init__(self, rpc: Sequence[str], n_own: int) -> None:
        self._lock = threading.Lock()
        self._guard = Watchdog(_GRACE)
        self._own = [LabWorker(self._guard) for _ in range(n_own)]
        try:
            targets = [*map(Endpoint.parse, rpc), *(worker.endpoint for worker in self._own)]
            if encrypted := [str(target) for target in targets if target.tls]:
                raise LabError(f"--lab: the link to {encrypted[0]} is encrypted, so a tap cannot recognize its graphs")
            self._taps = Taps(targets)
        except BaseException:
            self._end_workers()
            raise
        self.endpoints = tuple(self._taps.endpoints)
        self._targets = dict(zip(self.endpoints, map(str, targets), strict=True))
        self._workers = dict(zip(self.endpoints[len(rpc) :], self._own, strict=True))
        self._links = dict.fromkeys(self.endpoints, LinkSettings())

    def view(self) -> list[LabLink]:
        """Return the links for `/lab`: addresses, settings and the worker behind each."""
        cluster = own_cluster()
        watched = {one: found for one in self._links if (found := self._cluster_worker(cluster, one)) is not None}
        runs = {one: worker.is_running for one, worker in self._workers.items()}
        runs |= {one: found.pid != 0 for one, found in watched.items()}
        return [
            LabLink(
                endpoint,
                worker=self._targets[endpoint],
                **settings._asdict(),
                own=endpoint in runs,
                running=runs.get(endpoint, True),
                watched=endpoint in watched,
            )
            for endpoint, settings in self._links.items()
        ]

    def link_to(self, worker: str) -> str:
        """Return the endpoint that the engine uses for the worker at an address; the address if it has no link."""
        return next((endpoint for endpoint, target in self._targets.items() if target == worker), worker)

    def set(self, links: Mapping[str, tuple[float, float, float | None]]) -> None:
        """Set latency (ms), jitter (ms) and bandwidth (bits/s) of links. Raises LabError and TapsError."""
        wanted = {endpoint: LinkSettings(*settings) for endpoint, settings in links.items()}
        for endpoint, settings in wanted.items():
            self._check_endpoint(endpoint)
            if not (0 <= settings.latency_ms <= _MOST_MS and 0 <= settings.jitter_ms <= _MOST_MS):
                raise LabError(f"latency and jitter are 0 to {_MOST_MS:g} milliseconds")
            if settings.bandwidth is not None and not _LEAST_BANDWIDTH <= settings.bandwidth < float("inf"):
                raise LabError(f"bandwidth is {_LEAST_BANDWIDTH:g} bits per second or more")
        with self._lock:
            self._links |= wanted
            self._taps.set([*self._links.values()])

    def kill(self, endpoint: str) -> None:
        """Kill a worker that this lab started, or the `llamado up` that started this server. Raises LabError."""
        self._check_endpoint(endpoint)
        if endpoint in self._workers:
            self._workers[endpoint].end(signal.SIGKILL)
            return
        cluster = own_cluster()
        worker = self._cluster_worker(cluster, endpoint)
        if cluster is None or worker is None:
            raise LabError(f"the worker behind {endpoint} was not started here, so it cannot be killed here")
        # Its parent process ends it: from here, the process id may belong to another process by now.
        folder = StateFolder(cluster.name)
        folder.request_kill(worker.name)
        os.kill(cluster.pid, signal.SIGUSR1)
        until = time.monotonic() + _KILL_SECONDS
        while worker.pid and is_same(worker.pid, worker.mark):
            if time.monotonic() > until:
                raise LabError(f"llamado up did not end {worker.name} within {_KILL_SECONDS:g} s")
            time.sleep(0.01)

    def start(self, endpoint: str) -> None:
        """Restart one of the lab's own workers. Raises LabError."""
        self._check_endpoint(endpoint)
        if endpoint not in self._workers:
            raise LabError(f"the worker behind {endpoint} was not started here: restart it where it was started")
        self._workers[endpoint].start()

    def _cluster_worker(self, cluster: ClusterState | None, endpoint: str) -> ServiceState | None:
        if cluster is None or endpoint in self._workers:
            return None
        return cluster.worker_at(self._targets[endpoint])

    def close(self) -> None:
        """End the taps and the lab's own workers."""
        self._taps.close()
        self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._own:
            worker.end(signal.SIGTERM)
        self._guard.end()

    def _check_endpoint(self, endpoint: str) -> None:
        if endpoint not in self._targets:
            raise LabError(f"{endpoint} is not a link of the lab; the links are {', '.join(self._targets)}")
