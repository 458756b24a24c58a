"""JSON of `/cluster` and its subpaths. Bytes, seconds, bytes per second; null: unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from llamado.engine.forward.events import ClusterEvent
from llamado.engine.topology.view import DeviceView, ModelTokenTime
from llamado.server.model import ServedModel

_DECIMALS = 6  # of every number: microseconds


@dataclass(frozen=True)
class ClusterBody:
    """Body of `GET /cluster`: the `ClusterView` of a model; without devices if the model is not split."""

    model: str
    devices: tuple[DeviceView, ...] = ()
    tokens_per_second: float | None = None
    token_seconds: ModelTokenTime | None = None
    predicted_seconds: float | None = None
    events: tuple[ClusterEvent, ...] = ()


def cluster_body(served: ServedModel) -> ClusterBody:
    """Return the present view of a model's devices."""
    view = None if served.cluster is None else served.cluster.view()
    return ClusterBody(served.info.name, **({} if view is None else vars(view)))


def json_values(record: Any) -> Any:
    """Return a dataclass as JSON values, with rounded numbers."""
    return _rounded(orjson.loads(orjson.dumps(record)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, _DECIMALS) if isinstance(value, float) else value
