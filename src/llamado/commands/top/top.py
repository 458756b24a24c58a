"""`llamado top`: asks a server what its machines do, and shows it."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import httpx

from llamado.commands.top.screen import screen
from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed
from llamado.outgoing import fit, open_client, read_json
from llamado.terminal.console import Console
from llamado.terminal.text import print

_PIPED = 160
"""Columns of what goes to a file or a pipe."""


class TopError(LlamadoError):
    """A server that does not tell of its machines."""


def top(flags: Parsed, url: str) -> int:
    """Show `/cluster` of the server at `url` until interrupted; once with --once or --json. Raises TopError."""
    if not 0.1 <= flags.interval <= 3600:
        raise FlagError(f"--interval: expected seconds, 0.1 to 3600, got {flags.interval}")
    url = (url if "://" in url else f"http://{url}").rstrip("/")
    key = flags.api_key[0] if flags.api_key else None
    return show(url, key=key, interval=flags.interval, once=flags.once, as_json=flags.json)


def show(url: str, *, key: str | None, interval: float, once: bool, as_json: bool) -> int:
    """The same, from options that are right. Once is also enough for a file or a pipe."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with open_client(headers=headers, timeout=10.0) as http:
        if as_json:
            print(json.dumps(cluster(http, url)))
            return 0
        first = cluster(http, url)
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            # What is no terminal has no width; a row for each device is what a file or a pipe is read by.
            console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED)
            console.print(screen(first, time.time(), slots(http, url), requests(http, url)))
            return 0
        from llamado.commands.top.view import Look, View

        def look() -> Look:
            return Look(cluster(http, url), slots(http, url), requests(http, url), time.time())

        View(Look(first, slots(http, url), requests(http, url), time.time()), look, interval).run()
    return 0


def cluster(http: httpx.Client, url: str) -> dict[str, Any]:
    """`/cluster`. Raises TopError."""
    try:
        answer = http.get(f"{url}/cluster")
        body = read_json(answer)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TopError(f"{url} cannot be asked: {error}; is a server running there?") from None
    except ValueError:
        raise TopError(f"{url}/cluster answers {answer.status_code}, and no JSON: is it a server of llamado?") from None
    if answer.status_code == 404:  # as routers and gateways answer, whose models have servers of their own
        raise TopError(f"{url} is no server of one model, with machines to show; llamado ps lists those that run here")
    if answer.status_code != 200 or not isinstance(body, dict) or "devices" not in body:
        said = fit(body, {"error": {"message": ""}, "stage": ""})
        why, stage = said["error"]["message"], f" ({said['stage']})" if said["stage"] else ""
        key = " (--api-key KEY, or LLAMA_API_KEY)" if answer.status_code == 401 else ""
        raise TopError(f"{url}/cluster answers {answer.status_code}: {why}{stage}{key}")
    return body


def requests(http: httpx.Client, url: str) -> dict[str, Any]:
    """`/live/requests`; nothing where the server does not tell."""
    try:
        answer = http.get(f"{url}/live/requests")
        body = read_json(answer)
    except (httpx.HTTPError, ValueError):
        return {}
    return body if answer.status_code == 200 and isinstance(body, dict) else {}


def slots(http: httpx.Client, url: str) -> list[dict[str, Any]]:
    """`/slots`; nothing where the server does not tell."""
    try:
        answer = http.get(f"{url}/slots")
        body = read_json(answer)
    except (httpx.HTTPError, ValueError):
        return []
    return body if answer.status_code == 200 and isinstance(body, list) else []
