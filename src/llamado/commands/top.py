"""`llamado top`: the machines of a server in a terminal, while they work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from llamado.errors import LlamadoError
from llamado.flags import FlagError, Parsed

_COLOURS = {"ready": "green", "idle": "yellow", "lost": "red", "away": "red"}
_MOST_EVENTS = 12
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
    """The same, from options that are right."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(headers=headers, timeout=10.0) as http:
        if as_json:
            print(json.dumps(cluster(http, url)))
            return 0
        # What is no terminal has no width; a row for each device is what a file or a pipe is read by.
        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED)
        if once:
            console.print(screen(cluster(http, url), time.time()))
            return 0
        with Live(screen(cluster(http, url), time.time()), console=console, auto_refresh=False, screen=True) as live:
            while True:
                time.sleep(interval)
                try:
                    shown = screen(cluster(http, url), time.time())
                except TopError as error:  # it may come back
                    shown = Text(str(error), style="red")
                live.update(shown, refresh=True)


def cluster(http: httpx.Client, url: str) -> dict[str, Any]:
    """`/cluster`. Raises TopError."""
    try:
        answer = http.get(f"{url}/cluster")
        body = answer.json()
    except httpx.HTTPError as error:
        raise TopError(f"{url} cannot be asked: {error}; is a server running there?") from None
    except ValueError:
        raise TopError(f"{url}/cluster answers {answer.status_code}, and no JSON: is it a server of llamado?") from None
    if answer.status_code != 200 or not isinstance(body, dict) or "devices" not in body:
        why = body.get("error", {}).get("message", "") if isinstance(body, dict) else ""
        stage = f" ({body['stage']})" if isinstance(body, dict) and body.get("stage") else ""
        raise TopError(f"{url}/cluster answers {answer.status_code}: {why}{stage}")
    return body


def screen(body: Mapping[str, Any], now: float) -> RenderableType:
    """What is shown of `/cluster` at a time (seconds since 1970)."""
    parts: list[RenderableType] = [_title(body)]
    if body["devices"]:
        parts.append(_devices(body["devices"]))
    else:
        parts.append(Text("The model is not divided: it runs on the server's machine alone."))
    if ring := [f"{one['device']} → {next}" for one in body["devices"] for next in one.get("passes_to", ())]:
        parts.append(Text(f"straight from worker to worker: {', '.join(ring)}"))
    if body["events"]:
        parts.append(_events(body["events"], now))
    return Group(*parts)


def _title(body: Mapping[str, Any]) -> Text:
    text = Text(str(body["model"]), style="bold")
    seconds = body.get("token_seconds")
    if seconds:
        parts = ", ".join(f"{name} {_ms(seconds[name])}" for name in ("compute", "link", "waiting"))
        text.append(f"   {body['tokens_per_second']:.1f} tokens/s   a token: {_ms(seconds['total'])} ({parts})", "")
    return text


def _devices(devices: list[Mapping[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("device", "state", "layers"):
        table.add_column(name, overflow="fold")
    for name in ("memory", "free", "reads", "round trip", "link", "compute", "on link", "waiting"):
        table.add_column(name, justify="right")
    for device in devices:
        memory, link, spent = device["memory"], device["link"], device["token_seconds"]
        used = memory["weights"] + memory["kv"] + memory["compute"]
        trip = link["pulse"] or link["round_trip"]
        table.add_row(
            Text(device["device"]),
            Text(device["state"], style=_COLOURS.get(device["state"], "")),
            Text((device["holds"] or device["why"] or "nothing") + _own_disk(memory)),
            _size(used),
            _size(memory["free"]),
            "" if not device["speed"]["decode"] else f"{_size(device['speed']['decode'])}/s",
            "" if trip is None else _ms(trip),
            "" if not link["bandwidth"] else f"{_size(link['bandwidth'])}/s",
            *(_ms(spent[name]) for name in ("compute", "link", "waiting")),
        )
    return table


def _own_disk(memory: Mapping[str, Any]) -> str:
    """How much of its weights a worker has from its own disk."""
    own = memory.get("own_disk", 0)
    if not own:
        return ""
    return ", from its own disk" if own > 0.99 * memory["weights"] else f", {_size(own)} from its own disk"


def _events(events: list[Mapping[str, Any]], now: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title="the last hour", title_justify="left")
    for event in events[-_MOST_EVENTS:]:
        ago = max(0, round(now - event["at"]))
        table.add_row(f"{ago // 60}:{ago % 60:02d} ago", event["kind"], Text(event["device"]), Text(event["what"]))
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
