"""Screen of `llamado top` for the replicas of a gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from llamado.commands.top.table import FittingTable, add_column

_COLORS = {"ready": "green", "busy": "green", "draining": "yellow", "loading": "yellow"}
_TOKENS = "llamacpp:tokens_predicted_total"

Replica = Mapping[str, Any]
Cell = Callable[[Replica, float | None], str | Text]


def _state(replica: Replica, _: float | None) -> Text:
    state, message = str(replica["state"]), str(replica["message"])
    shown = f"{state}: {message}" if not replica["ready"] and message != state else state
    return Text(f"{shown} (circuit open)" if replica["circuit"] == "open" else shown, style=_COLORS.get(state, "red"))


def _work(replica: Replica, _: float | None) -> str:
    busy = replica["in_flight"] + replica["others"]
    return f"{busy} of {replica['slots']}" if replica["slots"] else str(busy)


def _errors(replica: Replica) -> int:
    answers, losses = replica["answers"], replica["losses"]
    return int(sum(n for status, n in answers.items() if status.startswith("5")) + sum(losses.values()))


CELLS: dict[str, tuple[Cell, Callable[[Replica], Any], bool]] = {
    "replica": (lambda r, _: Text(r["name"]), lambda r: r["name"], False),
    "state": (_state, lambda r: r["state"], False),
    "busy": (_work, lambda r: -r["in_flight"] - r["others"], True),
    "requests": (lambda r, _: str(r["requests"]), lambda r: -r["requests"], True),
    "errors": (lambda r, _: str(_errors(r)), lambda r: -_errors(r), True),
    "requests/s": (lambda r, _: f"{r['requests_per_second']:.2f}", lambda r: -r["requests_per_second"], True),
    "tokens/s": (lambda _, rate: "" if rate is None else f"{rate:.1f}", lambda r: r["name"], True),
    "models": (lambda r, _: Text(", ".join(r["models"])), lambda r: r["models"], False),
}
"""Columns by title: cell, sort key (numbers in descending order), and True for numbers."""


_OPTIONAL = ("requests/s", "models", "requests", "tokens/s", "errors", "busy")
"""Columns to omit on a narrow terminal, in this order."""


class TokenRates:
    """Tokens per second of each replica, between two scrapes of the gateway."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._at = 0.0

    def update(self, text: str, now: float) -> dict[str, float]:
        """Return the rates since the last scrape, for replicas that are in both. `text`: the response of `/metrics`."""
        totals: dict[str, float] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == _TOKENS and "replica" in sample.labels:
                        name = sample.labels["replica"]
                        totals[name] = totals.get(name, 0.0) + sample.value
        except ValueError:
            pass
        seconds, last = now - self._at, self._last
        self._last, self._at = totals, now
        # A smaller counter means a new process.
        return {n: (total - last[n]) / seconds for n, total in totals.items() if total >= last.get(n, total + 1)}


def gateway_screen(
    replicas: Sequence[Replica], rates: Mapping[str, float], *, sort: str = "", reverse: bool = False
) -> RenderableType:
    """Return the screen for `/gateway/status`. `rates`: tokens per second by replica, if known."""
    shown = list(replicas)
    if sort in CELLS:
        shown.sort(key=CELLS[sort][1], reverse=reverse)

    def make(names: Sequence[str], width: int | None) -> Table:
        table = Table(box=None, header_style="bold", pad_edge=False)
        for name in names:
            mark = ("▲" if reverse else "▼") if name == sort else ""
            add_column(table, name + mark, number=CELLS[name][2], wraps=not CELLS[name][2], width=width)
        for replica in shown:
            table.add_row(*(CELLS[name][0](replica, rates.get(replica["name"])) for name in names))
        return table

    ready = sum(bool(replica["ready"]) for replica in replicas)
    at_work = sum(replica["in_flight"] for replica in replicas)
    rate = sum(replica["requests_per_second"] for replica in replicas)
    title = Text("gateway", style="bold")
    title.append(
        f"   {ready} of {len(replicas)} replicas ready   {at_work} requests running   {rate:.2f} requests/s", ""
    )
    if rates:
        title.append(f"   {sum(rates.values()):.1f} tokens/s", "")
    return Group(title, FittingTable([*CELLS], [name for name in _OPTIONAL if name != sort], make))
