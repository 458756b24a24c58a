"""The command `llamado top`: fetch the state of a server's machines or a gateway's replicas, and show it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx

from llamado.commands.top.gateway import CELLS, TokenRates, gateway_screen
from llamado.commands.top.screen import COLUMNS, Snapshot, screen
from llamado.errors import LlamadoError
from llamado.flags import FlagError, ParsedFlags
from llamado.outgoing import fit, open_client, read_json
from llamado.terminal.console import Console
from llamado.terminal.text import print

_PIPE_WIDTH = 160
"""Columns of output to a file or pipe."""


class TopError(LlamadoError):
    """A server does not report its machines."""


class _NoClusterError(TopError):
    """The address has no `/cluster`."""


def top(flags: ParsedFlags, url: str) -> int:
    """Show a server's machines, or a gateway's replicas, until the user quits; once with --once or --json.

    Raises TopError.
    """
    if not 0.1 <= flags.interval <= 3600:
        raise FlagError(f"--interval: expected seconds, 0.1 to 3600, got {flags.interval}")
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    key = flags.api_key[0] if flags.api_key else None
    return show(url, key=key, interval=flags.interval, once=flags.once, as_json=flags.json)


def show(url: str, *, key: str | None, interval: float, once: bool, as_json: bool) -> int:
    """Run the command with checked options. Output to a file or pipe is printed once. Raises TopError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with open_client(headers=headers, timeout=10.0) as http:
        source, body = _connect(http, url)
        if as_json:
            print(json.dumps(body))
            return 0
        first = source.snapshot(body)
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            # A file or pipe has no width to adapt to.
            console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
            console.print(first.draw("", False))
            return 0
        from llamado.commands.top.view import View

        View(first, lambda: source.snapshot(source.body()), interval).run()
    return 0


class _Server:
    """Source of snapshots: a server of one model, with its machines, slots and requests."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http, self._url = http, url

    def body(self) -> dict[str, Any]:
        """Return `/cluster`. Raises TopError."""
        return cluster(self._http, self._url)

    def snapshot(self, body: Mapping[str, Any]) -> Snapshot:
        """Return the current state. `body`: the response of `body()`."""
        at = time.time()
        busy, counts = slots(self._http, self._url), requests(self._http, self._url)
        return Snapshot(
            at,
            [column.name for column in COLUMNS],
            lambda sort, reverse: screen(body, at, busy, counts, sort=sort, reverse=reverse),
        )


class _Gateway:
    """Source of snapshots: a gateway, with its replicas."""

    def __init__(self, http: httpx.Client, url: str) -> None:
        self._http, self._url = http, url
        self._rates = TokenRates()

    def body(self) -> dict[str, Any]:
        """Return `/gateway/status`. Raises TopError."""
        try:
            answer = self._http.get(f"{self._url}/gateway/status")
            body = read_json(answer)
        except (httpx.HTTPError, ValueError) as error:
            raise TopError(f"{self._url} cannot be reached: {error}") from None
        if answer.status_code != 200 or not isinstance(body, dict) or not isinstance(body.get("replicas"), list):
            raise TopError(f"{self._url}/gateway/status answers {answer.status_code}")
        return body

    def snapshot(self, body: Mapping[str, Any]) -> Snapshot:
        """Return the current state. `body`: the response of `body()`."""
        replicas = body["replicas"]
        try:
            scraped = self._http.get(f"{self._url}/metrics")
            rates = self._rates.update(scraped.text if scraped.status_code == 200 else "", time.monotonic())
        except httpx.HTTPError:
            rates = {}
        return Snapshot(
            time.time(),
            list(CELLS),
            lambda sort, reverse: gateway_screen(replicas, rates, sort=sort, reverse=reverse),
        )


def _connect(http: httpx.Client, url: str) -> tuple[_Server | _Gateway, dict[str, Any]]:
    """Return the server or gateway at an address, and its first response. Raises TopError."""
    server = _Server(http, url)
    try:
        return server, server.body()
    except _NoClusterError as error:
        gateway = _Gateway(http, url)
        try:
            return gateway, gateway.body()
        except TopError:
            raise error from None


def cluster(http: httpx.Client, url: str) -> dict[str, Any]:
    """Return the response of `/cluster`. Raises TopError."""
    try:
        answer = http.get(f"{url}/cluster")
        body = read_json(answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TopError(f"{url} cannot be reached: {error}; is a server running there?") from None
    except ValueError:
        raise TopError(f"{url}/cluster answers {answer.status_code} without JSON: is it a llamado server?") from None
    if answer.status_code == 404:  # for example a router, whose models have their own servers
        raise _NoClusterError(f"{url} is neither a server of one model nor a gateway; llamado ps lists local servers")
    if answer.status_code != 200 or not isinstance(body, dict) or "devices" not in body:
        reason = fit(body, {"error": {"message": ""}, "stage": ""})
        why, stage = reason["error"]["message"], f" ({reason['stage']})" if reason["stage"] else ""
        key = " (--api-key KEY, or LLAMA_API_KEY)" if answer.status_code == 401 else ""
        raise TopError(f"{url}/cluster answers {answer.status_code}: {why}{stage}{key}")
    return body


def requests(http: httpx.Client, url: str) -> dict[str, Any]:
    """Return the response of `/live/requests`, or {} if it is not available."""
    try:
        answer = http.get(f"{url}/live/requests")
        body = read_json(answer)
    except (httpx.HTTPError, ValueError):
        return {}
    return body if answer.status_code == 200 and isinstance(body, dict) else {}


def slots(http: httpx.Client, url: str) -> list[dict[str, Any]]:
    """Return the response of `/slots`, or [] if it is not available."""
    try:
        answer = http.get(f"{url}/slots")
        body = read_json(answer)
    except (httpx.HTTPError, ValueError):
        return []
    return body if answer.status_code == 200 and isinstance(body, list) else []
