"""Servers of this machine for `llamado ps`: their state files, and the responses of their APIs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.table import Table
from rich.text import Text

from llamado.gguf.inspect import size_text
from llamado.http.running import RunningServer
from llamado.outgoing import fit, open_client, read_json

_INTERVAL = 0.3  # seconds between two token counts, for the rate
_TIMEOUT = 2.0
_SLOT = {"id_task": 0, "is_processing": False, "next_token": [{"n_decoded": 0}]}
_COLORS = {"ready": "green", "busy": "green", "loading": "yellow"}


def servers_json(servers: Sequence[RunningServer], key: str | None = None) -> list[dict[str, Any]]:
    """Return role, model, address, state and tokens per second of each server. `key`: their API key."""
    clients = [_client(server, key) for server in servers]
    try:
        health = [_health(http, server.role) for http, server in zip(clients, servers, strict=True)]
        before = [_tokens(http) if one.busy else one.tokens for http, one in zip(clients, health, strict=True)]
        if any(tokens is not None and tokens for tokens in before):
            time.sleep(_INTERVAL)
        after = [_tokens(http) if tokens else tokens for http, tokens in zip(clients, before, strict=True)]
    finally:
        for http in clients:
            http.close()
    return [
        {
            "role": server.role,
            "model": server.model,
            "path": server.path,
            "address": server.addresses[0] if server.addresses else "",
            "state": "busy" if one.state == "ready" and (now or (one.busy and server.role == "server")) else one.state,
            "pid": server.pid,
            "since": server.since,
            "memory": server.memory,
            "tokens_per_second": _rate(then, now),
        }
        for server, then, now, one in zip(servers, before, after, health, strict=True)
    ]


def servers_table(servers: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row for each server."""
    table = Table(title="servers", title_justify="left")
    for heading in ("model", "address", "state", "since", "pid"):
        table.add_column(heading, no_wrap=True)
    for heading in ("memory", "tokens/s"):
        table.add_column(heading, no_wrap=True, justify="right")
    for one in servers:
        rate = one["tokens_per_second"]
        table.add_row(
            Text(one["model"] or f"({one['role']})"),
            Text(one["address"]),
            Text(one["state"], _COLORS.get(one["state"], "red")),
            time.strftime("%F %T", time.localtime(one["since"])),
            str(one["pid"]),
            "" if one["memory"] is None else size_text(one["memory"]),
            "" if rate is None else f"{rate:.1f}",
        )
    return table


def _client(server: RunningServer, key: str | None) -> httpx.Client:
    address = server.addresses[0] if server.addresses else ""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    unix = None if "://" in address else httpx.HTTPTransport(uds=address)
    url = (address if unix is None else "http://localhost") + server.prefix
    # The process is known to be local, and its certificate need not be for the name of this machine.
    return open_client(base_url=url, headers=headers, timeout=_TIMEOUT, verify=False, transport=unix, trust_env=False)


@dataclass(frozen=True)
class _Health:
    """State of a server by `/health`, which needs no key and is not logged."""

    state: str
    busy: bool = False
    """True if slots are busy, so that `/slots` has token counts."""
    tokens: dict[int, int] | None = None
    """Tokens by task; None if the server does not report slots."""


def _health(http: httpx.Client, role: str) -> _Health:
    try:
        answer = http.get("/health", params={"include_slots": "1"})
        body = read_json(answer)
        if answer.status_code == 200:
            busy = body.get("slots_processing")
            if busy is None and role != "server":  # routers and gateways have no slots of their own
                return _Health("ready", True)
            return _Health("ready", bool(busy), None if busy is None else {})
        return _Health("loading" if "progress" in body else str(body["error"]["message"])[:60])
    except httpx.HTTPError:
        return _Health("no answer")
    except (ValueError, KeyError, TypeError, AttributeError):
        return _Health(f"status {answer.status_code}")


def _tokens(http: httpx.Client) -> dict[int, int] | None:
    """Return the number of tokens of each task by its ID; None if the server does not report slots."""
    try:
        answer = http.get("/slots")
        slots = read_json(answer) if answer.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None
    if not isinstance(slots, list):
        return None
    busy = [slot for slot in fit(slots, [_SLOT]) if slot["is_processing"] and slot["next_token"]]
    return {slot["id_task"]: slot["next_token"][0]["n_decoded"] for slot in busy}


def _rate(then: dict[int, int] | None, now: dict[int, int] | None) -> float | None:
    if then is None or now is None:
        return None
    return sum(max(0, n - then.get(task, 0)) for task, n in now.items()) / _INTERVAL
