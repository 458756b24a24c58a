"""`llamado bench --rpc … --latency …`: what slow links cost, by the number of nodes."""

from __future__ import annotations

from llamado.errors import LlamadoError
from llamado.flags import Parsed


class LatencyError(LlamadoError):
    """A measurement over workers that cannot be made."""


def bench_latency(flags: Parsed) -> int:
    """The command. Raises LlamadoError."""
    raise LatencyError("not built yet")
