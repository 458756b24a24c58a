"""`llamado tap`: a proxy in front of a worker that decodes the traffic and delays the graphs, as a slow link would."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.errors import LlamadoError


class TapError(LlamadoError):
    """The tap cannot start: an option that makes no sense, a port that is taken, a trace that cannot be written."""


@dataclass(frozen=True)
class TapOptions:
    """What `llamado tap` is told. Port 0: any free one; `bandwidth` in bits per second, None: no limit."""

    listen_host: str = "127.0.0.1"
    listen_port: int = 60052
    target_host: str = "127.0.0.1"
    target_port: int = 50052
    latency_ms: float = 0.0
    jitter_ms: float = 0.0
    bandwidth: float | None = None
    all: bool = False
    trace: str | None = None


def parse_bandwidth(text: str) -> float:
    """Bits per second from "1G", "100M", "64k" or plain digits. Raises TapError."""
    units = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
    number, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        bits = float(number) * unit
    except ValueError:
        bits = 0.0
    if not 0 < bits < float("inf"):
        raise TapError(f"--bandwidth {text}: expected bits per second, as 1G, 100M or 64k")
    return bits


def run_tap(options: TapOptions) -> int:
    """The command: runs until SIGINT or SIGTERM, then prints what passed. Raises TapError."""
    raise TapError("not built yet")
