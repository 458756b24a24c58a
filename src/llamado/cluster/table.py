"""Cluster table of `llamado up` and `llamado ps`."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from llamado.cluster.state import ClusterState
from llamado.cluster.supervisor import DRAINED, ENDED, LOOPING, PAUSED, READY

_COLORS = {READY: "green", PAUSED: "red", LOOPING: "bold red", DRAINED: "dim", ENDED: "dim"}


def cluster_table(state: ClusterState, last_lines: Mapping[str, str]) -> Table:
    """Return a table with a row per service; its last column is the service's message, or the last line of its log."""
    table = Table(title=f"{state.name}: {state.phase}, {state.url}", title_justify="left", expand=True)
    for heading in ("service", "state", "pid", "address", "since", "restarts"):
        table.add_column(heading, no_wrap=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for one in state.services:
        table.add_row(
            one.name,
            Text(one.phase, _COLORS.get(one.phase, "yellow")),
            str(one.pid or ""),
            one.address,
            _elapsed(time.time() - one.since),
            str(one.restarts or ""),
            Text(one.message or last_lines.get(one.name, "")),
        )
    return table


def _elapsed(seconds: float) -> str:
    """Return a duration in s, min or h."""
    n = max(0, int(seconds))
    if n < 60:
        return f"{n} s"
    return f"{n // 60} min" if n < 3600 else f"{n // 3600} h {n % 3600 // 60} min"
