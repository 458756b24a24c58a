"""The workers of `--rpc` as a back end: connect to all in parallel, wait for missing ones, reconnect lost ones."""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from llamado.devices.device import Device, DeviceLost, WorkerLost
from llamado.devices.registry import DeviceOptions, Unreachable, WaitCallback
from llamado.errors import LlamadoError
from llamado.gguf.types import TensorType
from llamado.rpc.client.connection import REPLY_TIMEOUT, VersionMismatch
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.endpoint import Endpoint, client_tls
from llamado.rpc.known_hashes import SHA256_DIGITS, KnownHashes

log = logging.getLogger("llamado.rpc")

GREETING = 60.0
"""Seconds for the greeting of a worker that is waited for, once it has accepted the connection.

A ggml worker may still be busy with the lost connection. If we closed the next one early, the worker would later
respond on it and die of that (SIGPIPE).
"""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 1.0
"""Shortest and longest pause between two attempts to reach a worker, in seconds. Each is 1.5 times the last."""
_AT_ONCE, _LOOK = 0.3, 0.05
"""Seconds without a log line about a missing worker, and between two checks."""
_SILENT = "it accepts the connection but does not answer"


class WorkersUnreachable(LlamadoError):
    """Workers of `--rpc` do not respond."""

    in_logs = "RPC connection failed"


class Workers:
    """The workers at the endpoints of `--rpc`, as a back end (`devices/registry.py`)."""

    def __init__(self, endpoints: Sequence[str], options: DeviceOptions) -> None:
        """Does not connect yet. Raises EndpointError for certificates that cannot be used."""
        self._endpoints = [Endpoint.parse(text) for text in endpoints]
        self._hashes: MutableMapping[str, int] | None = None
        self._digests: MutableMapping[str, int] | None = None
        if options.files:
            self._hashes, self._digests = KnownHashes(options.files), KnownHashes(options.files, digits=SHA256_DIGITS)
        self._certificates = options.ca, options.cert, options.key
        self._tls: ssl.SSLContext | None = None
        if any(endpoint.tls for endpoint in self._endpoints):
            self._tls = client_tls(*self._certificates)
        self._connect_timeout, self._alive_timeout = options.connect_timeout, options.alive_timeout
        self._links = options.links
        self._latest: dict[Endpoint, list[RemoteDevice]] = {}
        self._attempts: dict[Endpoint, Future[list[RemoteDevice]]] = {}

    def connect(self, timeout: float | None = None) -> list[list[RemoteDevice] | Unreachable]:
        """Connect to all workers and return their devices, numbered over all workers.

        An unreachable worker counts as one device, so that the numbers of the others stay the same.
        """

        def one(endpoint: Endpoint) -> list[RemoteDevice] | Unreachable:
            try:
                return self.reach(endpoint, timeout)
            except LlamadoError as error:
                return Unreachable(str(endpoint), str(error))

        with ThreadPoolExecutor(max(1, len(self._endpoints)), "llamado-connect") as pool:
            return self._numbered(list(pool.map(one, self._endpoints)))

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> list[RemoteDevice]:
        """Return the devices of all workers, after up to `wait` seconds for missing ones.

        Raises WorkersUnreachable, naming all missing workers.
        """
        found = (
            self.connect() if wait <= 0 else self._numbered(self._when_there(wait, waiting or (lambda missing: None)))
        )
        gone = [worker for worker in found if isinstance(worker, Unreachable)]
        devices = [device for worker in found if not isinstance(worker, Unreachable) for device in worker]
        if gone:
            for device in devices:
                device.close()
            raise WorkersUnreachable("; ".join(worker.why for worker in gone))
        return devices

    def reach(
        self, endpoint: Endpoint, timeout: float | None = None, greeting: float | None = None
    ) -> list[RemoteDevice]:
        """Connect to a worker within `timeout` seconds. Raises ConnectError, DeviceError or VersionMismatch."""
        return connect(
            endpoint,
            timeout=self._connect_timeout if timeout is None else timeout,
            greeting=greeting,
            tls=self._tls,
            hashes=self._hashes,
            digests=self._digests,
            alive_timeout=self._alive_timeout,
            links=self._links,
        )

    def _numbered(self, found: list[list[RemoteDevice] | Unreachable]) -> list[list[RemoteDevice] | Unreachable]:
        number = 0
        for endpoint, worker in zip(self._endpoints, found, strict=True):
            if isinstance(worker, Unreachable):
                number += 1
                continue
            self._latest[endpoint] = worker
            for device in worker:
                device.name = f"RPC{number}[{device.endpoint}]"
                number += 1
        return found

    def _when_there(self, wait: float, waiting: WaitCallback) -> list[list[RemoteDevice] | Unreachable]:
        """Return the devices of all workers once all are up at the same time, or after `wait` seconds.

        Raises WorkersUnreachable at once if waiting cannot help: another version, or an untrusted certificate.
        """
        began, logged = time.monotonic(), ""
        deadline = began + wait
        arrivals = [_Arrival(self, endpoint, deadline) for endpoint in self._endpoints]
        try:
            while True:
                # A worker may die while others are awaited.
                arrivals = [_Arrival(self, one.endpoint, deadline) if one.lost else one for one in arrivals]
                missing = [arrival for arrival in arrivals if not arrival.done.is_set()]
                if refused := [arrival.why for arrival in arrivals if arrival.refused]:
                    raise WorkersUnreachable("; ".join(refused))
                now = time.monotonic()
                if not missing or now >= deadline:
                    break
                text = "; ".join(arrival.missing.why for arrival in missing)
                if now - began > _AT_ONCE and text != logged:
                    logged = text
                    log.warning("waiting for workers: %s", text)
                    waiting([arrival.missing for arrival in missing])
                missing[0].done.wait(_LOOK)
        except BaseException:
            for arrival in arrivals:
                for device in arrival.outcome() or ():
                    device.close()
            raise
        found: list[list[RemoteDevice] | Unreachable] = []
        for arrival in arrivals:
            why = f"{arrival.why}; it was waited for {wait:g} s (--rpc-wait)"
            found.append(arrival.outcome() or Unreachable(str(arrival.endpoint), why))
        waiting([])
        return found

    def reconnect(self, lost: Device, timeout: float = 2.0) -> RemoteDevice:
        """Return a new device in place of a lost one, with its name. Raises DeviceLost while the worker is down.

        Takes little more than `timeout` seconds; an attempt with an open connection goes on in the background.
        """
        endpoint = next((known for known in self._latest if known == lost.endpoint), None)
        if endpoint is None:
            raise WorkerLost(lost.name, "it is on none of the workers of --rpc")
        latest = self._latest[endpoint]
        place = next((i for i, device in enumerate(latest) if device.name == lost.name), None)
        if place is None or latest[place].lost is not None:
            names = [device.name for device in latest]
            new = self._attempt(endpoint, lost.name, latest[0].is_ours, timeout)
            if len(new) != len(names):
                for device in new:
                    device.close()
                raise WorkerLost(lost.name, f"it had {len(names)} devices and came back with {len(new)}")
            for device, name in zip(new, names, strict=True):
                device.name = name
            self._latest[endpoint] = new
            place = names.index(lost.name)
        return self._latest[endpoint][place]

    def expect_answers(self, seconds: float | None) -> None:
        """Set the seconds after which a missing response means that a worker is lost. None: the default, for graphs."""
        for devices in self._latest.values():
            devices[0].expect_answers(REPLY_TIMEOUT if seconds is None else seconds)

    def open(self, place: str) -> list[RemoteDevice]:
        """Return the devices of one more worker. Raises EndpointError, ConnectError, DeviceError or VersionMismatch."""
        endpoint = Endpoint.parse(place)
        if endpoint.tls and self._tls is None:
            self._tls = client_tls(*self._certificates)
        return self.reach(endpoint)

    def add(self, place: str, devices: Sequence[Device]) -> None:
        """Add an opened worker, to reconnect it when it is lost."""
        endpoint = Endpoint.parse(place)
        if endpoint not in self._endpoints:
            self._endpoints.append(endpoint)
        self._latest[endpoint] = [device for device in devices if isinstance(device, RemoteDevice)]

    def remove(self, place: str) -> None:
        """Stop reconnecting a worker."""
        endpoint = Endpoint.parse(place)
        self._endpoints = [known for known in self._endpoints if known != endpoint]
        self._latest.pop(endpoint, None)

    def weight_types(self) -> frozenset[TensorType] | None:
        """Return None: a worker rejects an unsupported type when it gets the graph."""
        return None

    def _attempt(self, endpoint: Endpoint, name: str, own: bool, timeout: float) -> list[RemoteDevice]:
        """Return the devices of a worker if it is up in time. `own`: ours, not ggml's. Raises DeviceLost."""
        attempt = self._attempts.get(endpoint)
        if attempt is None:
            attempt = self._attempts[endpoint] = Future()
            work = (endpoint, attempt)
            threading.Thread(target=self._work, args=work, name=f"rpc again {endpoint}", daemon=True).start()
        wait([attempt], timeout + 0.1)
        if not attempt.done():
            hint = "is it frozen?" if own else "is it busy with another client?"
            raise WorkerLost(name, f"{_SILENT}; {hint}")
        del self._attempts[endpoint]
        try:
            return attempt.result()
        except LlamadoError as error:
            why = error.why if isinstance(error, DeviceLost) else str(error)
            raise WorkerLost(name, why) from error

    def _work(self, endpoint: Endpoint, attempt: Future[list[RemoteDevice]]) -> None:
        try:
            attempt.set_result(self.reach(endpoint, greeting=GREETING))
        except BaseException as error:
            attempt.set_exception(error)


class _Arrival:
    """A thread that tries to reach a worker until `deadline` (time.monotonic()).

    `done` is set once the worker is up, or `refused` for a reason that waiting cannot help.
    """

    def __init__(self, workers: Workers, endpoint: Endpoint, deadline: float) -> None:
        self.endpoint = endpoint
        self.done = threading.Event()
        self.refused = False
        self._workers, self._deadline = workers, deadline
        self._since = time.strftime("%H:%M:%S")
        self.why = f"{endpoint} does not answer; is it frozen, or busy with another client?"
        self._devices: list[RemoteDevice] | None = None
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        threading.Thread(target=self._run, name=f"rpc wait {endpoint}", daemon=True).start()

    @property
    def missing(self) -> Unreachable:
        """The missing worker: since when, and the reason."""
        return Unreachable(str(self.endpoint), f"{self.endpoint} is missing since {self._since}: {self.why}")

    @property
    def lost(self) -> bool:
        """True if the worker was up and is gone."""
        return self._devices is not None and self._devices[0].lost is not None

    def outcome(self) -> list[RemoteDevice] | None:
        """Return the devices if the worker is up, and end the attempts."""
        with self._lock:
            self._given_up.set()
            return self._devices

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        while not self._given_up.is_set() and (left := self._deadline - time.monotonic()) > 0:
            try:
                found = self._workers.reach(self.endpoint, greeting=max(left, GREETING))
            except LlamadoError as error:
                self.why = str(error)
                if isinstance(error, VersionMismatch) or isinstance(error.__cause__, ssl.SSLCertVerificationError):
                    self.refused = True
                    self.done.set()
                    return
                self._given_up.wait(min(pause, max(0.0, self._deadline - time.monotonic())))
                pause = min(1.5 * pause, _LONGEST_PAUSE)
                continue
            with self._lock:
                if not self._given_up.is_set():
                    self._devices = found
                    self.done.set()
                    return
            for device in found:
                device.close()
