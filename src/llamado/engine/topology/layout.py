"""Layouts that a client requests, and their predicted memory and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamado.devices.split.placement import Placement, predict
from llamado.errors import LlamadoError

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner


class BadLayout(LlamadoError):
    """A layout has an unknown device, or does not have each layer and the head exactly once."""


@dataclass(frozen=True)
class LayoutPart:
    """The part of one device in a layout."""

    device: str
    layers: tuple[int, ...]
    head: bool = False


@dataclass(frozen=True)
class PartMemory:
    """Bytes that a device would hold."""

    weights: int
    kv: int
    compute: int
    free: int
    """Before the model was loaded; 0 if the device does not report it."""
    missing: int
    """Bytes that it lacks."""


@dataclass(frozen=True)
class PartTime:
    """Seconds that a device would take for a token; `compute` is None if its speed is unknown."""

    compute: float | None
    link: float


@dataclass(frozen=True)
class PartPrediction:
    """The memory and time of one device in a layout."""

    device: str
    memory: PartMemory
    seconds: PartTime


@dataclass(frozen=True)
class LayoutPrediction:
    """The memory and time of a layout, as `POST /cluster/predict` returns it; `seconds` per token, None if unknown."""

    seconds: float | None
    devices: tuple[PartPrediction, ...]


class Layouts:
    """Converts layouts to placements, and predicts their memory and time with the arithmetic of `llamado plan`."""

    def __init__(self, pool: DevicePool, runner: ModelRunner) -> None:
        self._pool, self._runner = pool, runner

    def placement(self, parts: Sequence[LayoutPart]) -> Placement:
        """Return the placement for a layout; single weights stay. Raises BadLayout."""
        now = self._runner.placement
        assert now is not None
        places = {self._pool.figures[number].name: number for number in self._pool.members}
        layers: dict[int, int] = {}
        heads: list[int] = []
        n_layer = len(now.layers)
        for part in parts:
            number = places.get(part.device)
            if number is None:
                raise BadLayout(f"there is no device {part.device}: there are {', '.join(places)}")
            for layer in part.layers:
                if not 0 <= layer < n_layer:
                    raise BadLayout(f"there is no layer {layer}: the model has 0 to {n_layer - 1}")
                if layer in layers:
                    raise BadLayout(f"layer {layer} is named twice")
                layers[layer] = number
            if part.head:
                heads.append(number)
        if missing := [layer for layer in range(n_layer) if layer not in layers]:
            raise BadLayout(f"layer {missing[0]} is on no device ({len(missing)} of {n_layer} are not)")
        if len(heads) != 1:
            raise BadLayout(f"the head is on {len(heads) or 'no'} device{'s' if len(heads) > 1 else ''}")
        return replace(now, layers=tuple(layers[layer] for layer in range(n_layer)), head=heads[0])

    def predict(self, parts: Sequence[LayoutPart]) -> LayoutPrediction:
        """Predict the memory and time of a layout. Raises BadLayout."""
        placement = self.placement(parts)
        figures = self._pool.figures
        prediction = predict(self._pool.fit.sizes, figures, placement)
        found = tuple(
            PartPrediction(
                known.name,
                PartMemory(
                    weights=share.weights,
                    kv=share.kv,
                    compute=share.compute,
                    free=known.free,
                    missing=max(0, int(share.memory - known.room)) if known.total else 0,
                ),
                PartTime(share.seconds, share.link_seconds),
            )
            for number, (known, share) in enumerate(zip(figures, prediction.shares, strict=True))
            if number in self._pool.members
        )
        # Devices that left have no speed, and take no time.
        known = all(part.seconds.compute is not None for part in found)
        seconds = sum((part.seconds.compute or 0.0) + part.seconds.link for part in found) if known else None
        return LayoutPrediction(seconds, found)
