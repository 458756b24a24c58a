"""Screen of `llamado top` for the machines and slots of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llamado.commands.top.table import FittingTable, add_column
from llamado.outgoing import Maybe, fit

_COLORS = {"ready": "green", "idle": "yellow", "lost": "red", "away": "red"}
_MOST_EVENTS = 12
Device = Mapping[str, Any]

_TOKEN = {"total": 0.0, "compute": 0.0, "link": 0.0, "waiting": 0.0}
_CLUSTER = {
    "model": "?",
    "tokens_per_second": 0.0,
    "token_seconds": Maybe(_TOKEN),
    "devices": [
        {
            "device": "?",
            "state": "?",
            "holds": "",
            "why": "",
            "layers": [0],
            "memory": {"weights": 0.0, "kv": 0.0, "compute": 0.0, "own_disk": 0.0, "free": 0.0, "free_now": Maybe(0.0)},
            "speed": {"decode": Maybe(0.0)},
            "link": {"pulse": Maybe(0.0), "round_trip": Maybe(0.0), "bandwidth": Maybe(0.0)},
            "token_seconds": _TOKEN,
            "passes_to": ["?"],
            "utilization": Maybe(0.0),
        }
    ],
    "events": [{"at": 0.0, "kind": "?", "device": "?", "what": ""}],
}
"""Expected forms (see `outgoing.fit`) of `/cluster`, `/live/requests` and `/slots`."""
_REQUESTS = dict.fromkeys(("running", "waiting", "ended", "errors", "cancelled"), Maybe(0))
_SLOT = {
    "id": 0,
    "n_ctx": 0,
    "is_processing": False,
    "n_prompt_tokens": 0,
    "n_prompt_tokens_processed": 0,
    "n_prompt_tokens_cache": 0,
    "next_token": [{"n_decoded": 0}],
}


@dataclass(frozen=True)
class Snapshot:
    """State of the server at a time (Unix seconds).

    `draw` takes the column to sort by ("" for none), and True to reverse the order.
    """

    at: float
    columns: Sequence[str]
    draw: Callable[[str, bool], RenderableType]


@dataclass(frozen=True)
class Column:
    """Column of the table of devices: text of a cell, and sort key."""

    name: str
    cell: Callable[[Device], str | Text]
    order: Callable[[Device], Any]
    right: bool = True


def screen(
    body: Mapping[str, Any],
    now: float,
    slots: Sequence[Mapping[str, Any]] = (),
    requests: Mapping[str, Any] | None = None,
    *,
    sort: str = "",
    reverse: bool = False,
) -> RenderableType:
    """Return the screen for the responses of `/cluster`, `/slots` and `/live/requests` at a time (Unix seconds).

    `sort`: name of the column to sort the devices by; "": in the order of the server.
    """
    body, slots = fit(body, _CLUSTER), fit(slots, [_SLOT])
    counted = {name: n for name, n in fit(requests, _REQUESTS).items() if n is not None}
    parts: list[RenderableType] = [_title(body)]
    if body["devices"]:
        parts.append(_devices(body["devices"], sort, reverse))
    else:
        parts.append(Text("The model is not split: it runs on the server's machine only."))
    if counted:
        parts.append(Text("requests: " + ", ".join(f"{n} {name}" for name, n in counted.items())))
    if slots:
        parts.append(_slots(slots))
    if ring := [f"{one['device']} → {next}" for one in body["devices"] for next in one["passes_to"]]:
        parts.append(Text(f"worker ring: {', '.join(ring)}"))
    if body["events"]:
        parts.append(_events(body["events"], now))
    return Group(*parts)


def _title(body: Mapping[str, Any]) -> Text:
    text = Text(body["model"], style="bold")
    seconds = body["token_seconds"]
    if seconds and not seconds["total"]:
        text.append("   no token yet", "")  # the measurements of the start are not the time of a token
    elif seconds:
        parts = ", ".join(f"{name} {_ms(seconds[name])}" for name in ("compute", "link", "waiting"))
        text.append(f"   {body['tokens_per_second']:.1f} tokens/s   a token: {_ms(seconds['total'])} ({parts})", "")
    return text


def _used(device: Device) -> float:
    memory = device["memory"]
    return float(memory["weights"] + memory["kv"] + memory["compute"])


def _trip(device: Device) -> float | None:
    trip: float | None = device["link"]["pulse"] or device["link"]["round_trip"]
    return trip


def _free(device: Device) -> float:
    """Return the free bytes: at present where they are known, otherwise before the model was loaded."""
    memory = device["memory"]
    return float(memory["free"] if memory["free_now"] is None else memory["free_now"])


def _busy(device: Device) -> str:
    return "" if device["utilization"] is None else f"{device['utilization']:.0%}"


def _state(device: Device) -> Text:
    return Text(device["state"], style=_COLORS.get(device["state"], ""))


def _holds(device: Device) -> Text:
    return Text((device["holds"] or device["why"] or "nothing") + _own_disk(device["memory"]))


def _or_nothing(value: float | None, shown: Callable[[float], str]) -> str:
    return shown(value) if value else ""


def _spent(name: str) -> Column:
    label = {"link": "on link"}.get(name, name)
    return Column(label, lambda d: _ms(d["token_seconds"][name]), lambda d: -d["token_seconds"][name])


COLUMNS = (
    Column("device", lambda d: Text(d["device"]), lambda d: d["device"], right=False),
    Column("state", _state, lambda d: d["state"], right=False),
    Column("layers", _holds, lambda d: d["layers"] or [1 << 30], right=False),
    Column("memory", lambda d: _size(_used(d)), lambda d: -_used(d)),
    Column("free", lambda d: _size(_free(d)), lambda d: -_free(d)),
    Column("busy", _busy, lambda d: -(d["utilization"] or 0.0)),
    Column("reads", lambda d: _or_nothing(d["speed"]["decode"], _rate), lambda d: -(d["speed"]["decode"] or 0)),
    Column("round trip", lambda d: "" if _trip(d) is None else _ms(_trip(d) or 0.0), lambda d: -(_trip(d) or 0)),
    Column("link", lambda d: _or_nothing(d["link"]["bandwidth"], _rate), lambda d: -(d["link"]["bandwidth"] or 0)),
    _spent("compute"),
    _spent("link"),
    _spent("waiting"),
)
"""Columns of the table of devices. Numbers sort in descending order."""


_OPTIONAL = ("busy", "reads", "link", "free", "round trip", "memory", "waiting", "on link", "compute")
"""Columns to omit on a narrow terminal, in this order."""


def _devices(devices: Sequence[Device], sort: str, reverse: bool) -> FittingTable:
    is_metered = any(device["utilization"] is not None for device in devices)
    columns = {column.name: column for column in COLUMNS if column.name != "busy" or is_metered}
    if sort in columns:
        devices = sorted(devices, key=columns[sort].order, reverse=reverse)

    def make(names: Sequence[str], width: int | None) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in names:
            mark = ("▲" if reverse else "▼") if name == sort else ""
            add_column(table, name + mark, number=columns[name].right, wraps=name == "layers", width=width)
        for device in devices:
            table.add_row(*(columns[name].cell(device) for name in names))
        return table

    return FittingTable([*columns], [name for name in _OPTIONAL if name != sort], make)


_SLOT_COLUMNS = ("slot", "state", "prompt", "cached", "generated", "context")


def _slots(slots: Sequence[Mapping[str, Any]]) -> FittingTable:
    rows = [dict(zip(_SLOT_COLUMNS, _slot_cells(slot), strict=True)) for slot in slots]

    def make(names: Sequence[str], width: int | None) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False, title="slots", title_justify="left")
        for name in names:
            add_column(table, name, number=name != "state")
        for row in rows:
            table.add_row(*(row[name] for name in names))
        return table

    return FittingTable(_SLOT_COLUMNS, ("context", "cached", "prompt"), make)


def _slot_cells(slot: Mapping[str, Any]) -> tuple[str | Text, ...]:
    n_prompt, done = slot["n_prompt_tokens"], slot["n_prompt_tokens_processed"]
    n_decoded = slot["next_token"][0]["n_decoded"] if slot["next_token"] else 0
    busy = slot["is_processing"]
    state = "idle" if not busy else "decoding" if n_decoded else "prompt"
    return (
        str(slot["id"]),
        Text(state, style="green" if busy else "dim"),
        f"{done}" if busy and not n_decoded else f"{n_prompt}",
        str(slot["n_prompt_tokens_cache"]),
        str(n_decoded),
        str(slot["n_ctx"]),
    )


def _own_disk(memory: Mapping[str, Any]) -> str:
    """Return a text for the part of a worker's weights that is from its own disk."""
    own = memory.get("own_disk", 0)
    if not own:
        return ""
    return ", from its own disk" if own > 0.99 * memory["weights"] else f", {_size(own)} from its own disk"


def _events(events: list[Mapping[str, Any]], now: float) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, title="events of the last hour", title_justify="left")
    for event in events[-_MOST_EVENTS:]:
        ago = max(0, round(now - event["at"]))
        table.add_row(
            f"{ago // 60}:{ago % 60:02d} ago", Text(event["kind"]), Text(event["device"]), Text(event["what"])
        )
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _size(n: float) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"


def _rate(n: float) -> str:
    return f"{_size(n)}/s"
