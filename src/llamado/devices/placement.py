"""Which layer goes to which device."""

from __future__ import annotations

from dataclasses import dataclass

ALL_LAYERS = 2**31 - 1
"""As `n_gpu_layers`: every layer and the head go to the workers."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How the user wants a model divided among machines."""

    rpc: tuple[str, ...]
    """Endpoints of workers, in order."""
    tensor_split: tuple[float, ...] | None = None
    """Proportions; None: the least time per token (auto), empty: by free memory."""
    n_gpu_layers: int | None = None
    """The last so many layers, the head counted as one more, go to workers; None: as `tensor_split` has it."""
    devices: tuple[str, ...] = ()
    """Names of the devices that take layers, in order; ("none",): no worker; empty: all."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Regular expressions of tensor names, and the device that gets those weights; the first that matches counts."""
    failover: float | None = None
    """Seconds after which the layers of a lost worker go to the devices left; None: never."""
    wait: float = 30.0
    """Seconds a request waits for a lost worker."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
