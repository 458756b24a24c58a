"""The workers of `--rpc`: all of them connected at the same time, and again when one was lost."""

from __future__ import annotations

import ssl
import threading
from collections.abc import MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from llamado.devices.device import Device, DeviceLost
from llamado.devices.registry import DeviceOptions, Unreachable
from llamado.errors import LlamadoError
from llamado.gguf.types import TensorType
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.client.known_hashes import KnownHashes
from llamado.rpc.endpoint import Endpoint, client_tls

GREETING = 60.0
"""Seconds that a lost worker gets for greeting, once it has accepted the connection.

ggml's worker may still be busy with the connection that was lost. If we gave up on the next one it would answer it
later, closed as it is, and die of that (SIGPIPE).
"""


class WorkersUnreachable(LlamadoError):
    """Workers that do not answer."""

    in_logs = "RPC connection failed"


class Workers:
    """The workers at some endpoints (as `--rpc` spells them) as a back end (`devices/registry.py`)."""

    def __init__(self, endpoints: Sequence[str], options: DeviceOptions) -> None:
        """Raises EndpointError for certificates that cannot be used; nothing is connected yet."""
        self._endpoints = [Endpoint.parse(text) for text in endpoints]
        self._hashes: MutableMapping[str, int] | None = KnownHashes(options.files) if options.files else None
        self._tls: ssl.SSLContext | None = None
        if any(endpoint.tls for endpoint in self._endpoints):
            self._tls = client_tls(options.ca, options.cert, options.key)
        self._latest: dict[Endpoint, list[RemoteDevice]] = {}
        self._attempts: dict[Endpoint, Future[list[RemoteDevice]]] = {}

    def connect(self, timeout: float = 5.0) -> list[list[RemoteDevice] | Unreachable]:
        """The devices of every worker, numbered over all of them.

        A worker that does not answer counts as one device, so that the others' numbers stay as they are.
        """

        def one(endpoint: Endpoint) -> list[RemoteDevice] | Unreachable:
            try:
                devices = connect(endpoint, timeout=timeout, tls=self._tls, hashes=self._hashes)
                self._latest[endpoint] = devices
                return devices
            except LlamadoError as error:
                return Unreachable(str(endpoint), str(error))

        with ThreadPoolExecutor(len(self._endpoints), "llamado-connect") as pool:
            found = list(pool.map(one, self._endpoints))
        number = 0
        for worker in found:
            if isinstance(worker, Unreachable):
                number += 1
                continue
            for device in worker:
                device.name = f"RPC{number}[{device.endpoint}]"
                number += 1
        return found

    def devices(self, timeout: float = 5.0) -> list[RemoteDevice]:
        """The devices of all workers. Raises WorkersUnreachable, naming all that do not answer."""
        found = self.connect(timeout)
        gone = [worker for worker in found if isinstance(worker, Unreachable)]
        devices = [device for worker in found if not isinstance(worker, Unreachable) for device in worker]
        if gone:
            for device in devices:
                device.close()
            raise WorkersUnreachable("\n".join(worker.why for worker in gone))
        return devices

    def reconnect(self, lost: Device, timeout: float = 2.0) -> RemoteDevice:
        """A new device in the place of a lost one, under its name. Raises DeviceLost while the worker is not there.

        Takes little more than `timeout` seconds; an attempt that got as far as a connection goes on behind that.
        """
        endpoint = next((known for known in self._latest if known == lost.endpoint), None)
        if endpoint is None:
            raise DeviceLost(lost.name, "it is on none of the workers of --rpc")
        latest = self._latest[endpoint]
        place = next((i for i, device in enumerate(latest) if device.name == lost.name), None)
        if place is None or latest[place].lost is not None:
            names = [device.name for device in latest]
            new = self._attempt(endpoint, lost.name, latest[0].own, timeout)
            if len(new) != len(names):
                for device in new:
                    device.close()
                raise DeviceLost(lost.name, f"it had {len(names)} devices and came back with {len(new)}")
            for device, name in zip(new, names, strict=True):
                device.name = name
            self._latest[endpoint] = new
            place = names.index(lost.name)
        return self._latest[endpoint][place]

    def weight_types(self) -> frozenset[TensorType] | None:
        """A worker says what it cannot do when it gets a graph."""
        return None

    def _attempt(self, endpoint: Endpoint, name: str, own: bool, timeout: float) -> list[RemoteDevice]:
        """The devices of a worker (`own`: ours, not ggml's), if they are there in time; raises DeviceLost."""
        attempt = self._attempts.get(endpoint)
        if attempt is None:
            attempt = self._attempts[endpoint] = Future()
            work = (endpoint, timeout, attempt)
            threading.Thread(target=self._work, args=work, name=f"rpc again {endpoint}", daemon=True).start()
        wait([attempt], timeout + 0.1)
        if not attempt.done():
            hint = "is it frozen?" if own else "is it busy with another client?"
            raise DeviceLost(name, f"it accepts the connection but does not answer; {hint}")
        del self._attempts[endpoint]
        try:
            return attempt.result()
        except LlamadoError as error:
            why = error.why if isinstance(error, DeviceLost) else str(error)
            raise DeviceLost(name, why) from error

    def _work(self, endpoint: Endpoint, timeout: float, attempt: Future[list[RemoteDevice]]) -> None:
        try:
            found = connect(endpoint, timeout=timeout, greeting=GREETING, tls=self._tls, hashes=self._hashes)
            attempt.set_result(found)
        except BaseException as error:
            attempt.set_exception(error)
