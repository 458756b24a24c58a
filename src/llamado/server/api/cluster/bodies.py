"""What `/cluster` and its kin tell. Bytes, seconds, bytes per second; null: not known."""

from __future__ import annotations

from typing import Any

from llamado.engine.topology.layout import LayoutPrediction
from llamado.engine.topology.view import ClusterView, DeviceView


def cluster_json(model: str, view: ClusterView | None) -> dict[str, Any]:
    """`/cluster`."""
    if view is None:
        nothing = dict.fromkeys(("tokens_per_second", "token_seconds", "predicted_seconds"))
        return {"model": model, "devices": [], **nothing, "events": []}
    return {
        "model": model,
        "devices": [_device_json(device) for device in view.devices],
        "tokens_per_second": round(view.tokens_per_second, 3),
        "token_seconds": {
            "total": round(view.seconds, 6),
            "compute": round(view.computing, 6),
            "link": round(view.link, 6),
            "waiting": round(view.waiting, 6),
        },
        "predicted_seconds": _rounded(view.predicted),
        "events": [
            {"at": round(event.at, 3), "kind": event.kind, "device": event.device, "what": event.what}
            for event in view.events
        ],
    }


def _device_json(device: DeviceView) -> dict[str, Any]:
    return {
        "device": device.name,
        "endpoint": device.endpoint or None,
        "state": device.state,
        "why": device.why or None,
        "layers": list(device.layers),
        "head": device.head,
        "holds": device.holds or None,
        "memory": {
            "weights": device.weights,
            "own_disk": device.local_weight_bytes,
            "kv": device.kv,
            "compute": device.compute,
            "free": device.memory_free,
            "total": device.memory_total,
        },
        "speed": {"decode": device.decode, "prefill": device.prefill},
        "passes_to": list(device.passes_to),
        "link": {"round_trip": device.round_trip, "bandwidth": device.bandwidth, "pulse": device.heartbeat_seconds},
        "token_seconds": {
            "compute": round(device.computing, 6),
            "link": round(device.link, 6),
            "waiting": round(device.waiting, 6),
        },
        "predicted": {"seconds": _rounded(device.predicted), "bytes": device.link_bytes, "runs": device.runs},
    }


def predicted_json(predicted: LayoutPrediction) -> dict[str, Any]:
    """`/cluster/predict`."""
    return {
        "seconds": _rounded(predicted.seconds),
        "devices": [
            {
                "device": part.device,
                "memory": {
                    "weights": part.weights,
                    "kv": part.kv,
                    "compute": part.compute,
                    "free": part.free,
                    "missing": part.missing,
                },
                "seconds": {"compute": _rounded(part.computing), "link": round(part.link, 6)},
            }
            for part in predicted.parts
        ],
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
