"""Membership in servers: a worker joins them at its start and leaves them before it ends."""

from __future__ import annotations

import ipaddress
import logging
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from llamado.devices.device import Device
from llamado.devices.split.measure import measure
from llamado.errors import LlamadoError
from llamado.outgoing import Maybe, fit, open_client, read_json
from llamado.rpc.endpoint import Endpoint

log = logging.getLogger("llamado.rpc.worker.join")

TOKEN_HEADER = "x-cluster-token"
"""Header of the token, as in the server's `--cluster-token`."""
_RETRY = 2.0
"""Seconds between two attempts to join a server that is down or not ready."""
_AGAIN = 10.0
"""Seconds after which a joined server gets the request again: it may have restarted."""
_TIMEOUT = httpx.Timeout(10.0, read=600.0)
"""Seconds. A server responds once the weights have moved here, or away from here."""

_JOINED = {"endpoint": "", "devices": [{"device": "", "holds": "", "why": ""}]}
"""Form of a server's response to a joining worker."""


class JoinError(LlamadoError):
    """An invalid server address."""


def server_url(text: str) -> str:
    """Return the root URL of a server's API from `HOST:PORT` or a URL. Raises JoinError.

    >>> server_url("10.0.0.1:8080")
    'http://10.0.0.1:8080'
    """
    url = text if "://" in text else f"http://{text}"
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise JoinError(f"--join {text}: expected HOST:PORT, or http://… or https://… of a server")
    return url.rstrip("/")


def join_body(endpoint: Endpoint, devices: Sequence[Device], share: float) -> dict[str, Any]:
    """Return the body of a join request: address, memory and speed of a worker. The speed is measured here."""
    figures_of: list[dict[str, Any]] = []
    for device in devices:
        figures = measure(device)
        figures_of.append({"name": device.name, "free": figures.free, "total": figures.total, "decode": figures.decode,
                     "prefill": figures.prefill})  # fmt: skip
    where: dict[str, Any] = {"endpoint": str(endpoint)}
    if _is_any(endpoint.host):  # the server fills in the address it sees
        where = {"port": endpoint.port, "tls": endpoint.tls}
    return {**where, "share": share, "devices": figures_of}


def _is_any(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


class ServerMembership(threading.Thread):
    """A thread that keeps a worker joined to one server. `body`: see `join_body`."""

    def __init__(self, server: str, token: str, body: Mapping[str, Any], ca: str | None) -> None:
        super().__init__(name=f"join {server}", daemon=True)
        self._url, self._body = server, dict(body)
        verify = ssl.create_default_context(cafile=ca) if server.startswith("https:") else True
        self._http = open_client(headers={TOKEN_HEADER: token}, timeout=_TIMEOUT, verify=verify)
        self._leaving = threading.Event()
        self._logged = ""
        self._endpoint: str | None = None

    def run(self) -> None:
        while not self._leaving.is_set():
            try:
                answer = self._http.post(f"{self._url}/cluster/join", json=self._body)
                found = _status(answer)
                if answer.status_code == 200:
                    body = fit(read_json(answer), _JOINED)
                    if not body["endpoint"]:
                        raise ValueError("its answer names no endpoint; is it a server of llamado?")
                    self._endpoint = body["endpoint"]
                    holds = ", ".join(f"{d['device']}: {d['holds']}{_because(d['why'])}" for d in body["devices"])
                    found = f"joined; {holds}"
            except (httpx.HTTPError, ValueError) as error:
                found = f"cannot be joined: {error}"
            if self._endpoint is None:
                found += f"; retrying every {_RETRY:g} s"
            if found != self._logged and not self._leaving.is_set():
                self._logged = found
                log.info("%s: %s", self._url, found)
            self._leaving.wait(_RETRY if self._endpoint is None else _AGAIN)

    def leave(self) -> None:
        """Wait until the server has moved this worker's layers to other devices, or cannot."""
        self._leaving.set()
        if self._endpoint is None:
            return
        try:
            answer = self._http.post(f"{self._url}/cluster/drain", json={"endpoint": self._endpoint})
            log.info("%s: %s", self._url, "left" if answer.status_code == 200 else _status(answer))
        except httpx.HTTPError as error:
            log.warning("%s: cannot leave: %s", self._url, error)


def _status(answer: httpx.Response) -> str:
    try:
        message = fit(read_json(answer), {"error": {"message": Maybe("")}})["error"]["message"]
    except ValueError:
        message = None
    if message is not None:
        return f"{answer.status_code}: {message}"
    return f"answers {answer.status_code}; is it a server of llamado?"


def _because(why: str) -> str:
    return f" ({why})" if why else ""
