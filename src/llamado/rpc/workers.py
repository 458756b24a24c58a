"""The workers of `--rpc`: all of them connected at the same time, and again when one was lost."""

from __future__ import annotations

import ssl
from collections.abc import MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from llamado.devices.device import Device, DeviceLost
from llamado.devices.placement import SplitOptions
from llamado.errors import LlamadoError
from llamado.rpc.client import RemoteDevice, connect
from llamado.rpc.endpoint import Endpoint, client_tls


class WorkersUnreachable(LlamadoError):
    """Workers that do not answer."""


class Unreachable(NamedTuple):
    """A worker that does not answer, and why."""

    endpoint: str
    why: str


class Workers:
    """The workers that the options name. `hashes`: those of weights by name, kept between starts."""

    def __init__(self, split: SplitOptions, hashes: MutableMapping[str, int] | None = None) -> None:
        """Raises EndpointError for certificates that cannot be used; nothing is connected yet."""
        self._endpoints = [Endpoint.parse(text) for text in split.rpc]
        self._hashes = hashes
        self._tls: ssl.SSLContext | None = None
        if any(endpoint.tls for endpoint in self._endpoints):
            self._tls = client_tls(split.ca, split.cert, split.key)
        self._latest: dict[Endpoint, list[RemoteDevice]] = {}

    def _connect(self, endpoint: Endpoint, timeout: float) -> list[RemoteDevice]:
        devices = connect(endpoint, timeout=timeout, tls=self._tls, hashes=self._hashes)
        self._latest[endpoint] = devices
        return devices

    def connect(self, timeout: float = 5.0) -> list[list[RemoteDevice] | Unreachable]:
        """The devices of every worker, numbered over all of them.

        A worker that does not answer counts as one device, so that the others' numbers stay as they are.
        """

        def one(endpoint: Endpoint) -> list[RemoteDevice] | Unreachable:
            try:
                return self._connect(endpoint, timeout)
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
        """A new device in the place of a lost one, under its name. Raises DeviceLost while the worker is not there."""
        assert isinstance(lost, RemoteDevice)
        latest = self._latest[lost.endpoint]
        place = next((i for i, device in enumerate(latest) if device.name == lost.name), None)
        if place is None or latest[place].lost is not None:
            names = [device.name for device in latest]
            try:
                new = self._connect(lost.endpoint, timeout)
            except LlamadoError as error:
                why = error.why if isinstance(error, DeviceLost) else str(error)
                raise DeviceLost(lost.name, why) from error
            if len(new) != len(names):
                for device in new:
                    device.close()
                raise DeviceLost(lost.name, f"it had {len(names)} devices and came back with {len(new)}")
            for device, name in zip(new, names, strict=True):
                device.name = name
            place = names.index(lost.name)
        return self._latest[lost.endpoint][place]
