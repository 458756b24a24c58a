"""Records of a model that is split over devices, as `GET /cluster` returns them.

Bytes, seconds, and bytes per second; None: unknown. The web page's TypeScript types are generated from these fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamado.engine.forward.events import ClusterEvent

DeviceState = Literal["ready", "idle", "lost", "away"]
"""ready: has layers; idle: has none; lost: gone and waited for; away: gone, its layers moved to other devices."""


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of a device, in use by its part of the model and before the model was loaded."""

    weights: int
    own_disk: int
    """Bytes of the weights that it loaded from its own machine's disk, so that they were not sent."""
    kv: int
    compute: int
    free: int
    """Before the model was loaded; 0 if the device does not report it."""
    total: int
    free_now: int | None = None
    """At present, of an accelerator of this machine; other processes may use it, too."""


@dataclass(frozen=True)
class ReadSpeed:
    """Bytes of weights that a device reads per second, for one token and for 512 tokens at once."""

    decode: float | None
    prefill: float | None


@dataclass(frozen=True)
class Link:
    """The network between the server and a device."""

    round_trip: float | None
    """Seconds of a small graph, when it was measured."""
    bandwidth: float | None
    pulse: float | None
    """Seconds of the device's latest heartbeat."""


@dataclass(frozen=True)
class TokenTime:
    """Seconds of a token, averaged over the last minute: in operations, on links, waiting behind other batches."""

    compute: float
    link: float
    waiting: float


@dataclass(frozen=True)
class ModelTokenTime(TokenTime):
    """The time of a token over all devices; `total` is measured, not the sum of the others."""

    total: float


@dataclass(frozen=True)
class PredictedToken:
    """The predicted cost of a token on a device."""

    seconds: float | None
    """Computing and on the link; None if the device's speed is unknown."""
    bytes: int
    """Bytes over the link, in both directions."""
    runs: int
    """Times that the device runs for a token."""


@dataclass(frozen=True)
class DeviceView:
    """One device and its part of the model."""

    device: str
    """Its name."""
    endpoint: str | None
    """Its address; None in this process."""
    state: DeviceState
    why: str | None
    """The reason why it has no layers, or is gone."""
    layers: tuple[int, ...]
    head: bool
    holds: str | None
    """A description of its part."""
    memory: DeviceMemory
    speed: ReadSpeed
    passes_to: tuple[str, ...]
    """The devices that receive its results directly."""
    link: Link
    token_seconds: TokenTime
    predicted: PredictedToken
    utilization: float | None = None
    """Share of the last moments in which it computed, for any process; known of accelerators only."""


@dataclass(frozen=True)
class ClusterView:
    """All devices, the time of a token over the last minute, and the events of the last hour."""

    devices: tuple[DeviceView, ...]
    tokens_per_second: float
    """Rows of logits: tokens of answers, and draft tokens."""
    token_seconds: ModelTokenTime
    predicted_seconds: float | None
    """Predicted seconds of a token; None if a speed is unknown."""
    events: tuple[ClusterEvent, ...]
