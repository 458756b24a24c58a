"""`llamado worker`: a Device behind a socket that speaks ggml RPC."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.errors import LlamadoError


class WorkerError(LlamadoError):
    """The worker cannot start: an unknown device, a port that is taken, a network that is none."""


@dataclass(frozen=True)
class WorkerOptions:
    """What `llamado worker` is told. Port 0: any free one.

    `threads` of the CPU device, None: half of the hardware threads; `devices` by name, empty: all; `mem`: most bytes
    that all clients together get of a device, None: what is free; `allow`: networks that may connect (CIDR), empty:
    all.
    """

    host: str = "127.0.0.1"
    port: int = 50052
    threads: int | None = None
    devices: tuple[str, ...] = ()
    cache: bool = False
    mem: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    allow: tuple[str, ...] = ()


def run_worker(options: WorkerOptions) -> int:
    """The command: serves until SIGINT or SIGTERM. Raises WorkerError."""
    raise WorkerError("not built yet")
