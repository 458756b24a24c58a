"""Observation of the devices a model is split over: their parts, and the time they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceError, is_accelerator
from llamado.devices.split.placement import DeviceFigures, describe_parts, predict
from llamado.engine.topology.view import (
    ClusterView,
    DeviceMemory,
    DeviceState,
    DeviceView,
    Link,
    ModelTokenTime,
    PredictedToken,
    ReadSpeed,
    TokenTime,
)

if TYPE_CHECKING:
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.runner import ModelRunner

Mark = tuple[object, ...]


class Observer:
    """Reads the state of a divided model from any thread, without waiting."""

    def __init__(self, pool: DevicePool, runner: ModelRunner) -> None:
        self._pool, self._runner = pool, runner
        self.events = runner.recovery.events

    def mark(self) -> Mark:
        """Return a value that changes whenever a device joins or leaves, or layers move."""
        runner = self._runner
        gone = tuple(device.lost is None for device in runner.devices)
        return runner.placement, gone, self.events.count, len(self._pool.figures), len(self._pool.left)

    def view(self) -> ClusterView:
        """Return the present state."""
        runner, figures = self._runner, self._pool.figures
        placement = runner.placement
        assert placement is not None
        times = runner.times
        batches, parts = times.batches(), times.parts()
        n_rows = sum(batch.n_rows for batch in batches)
        computing = [0.0] * len(figures)
        link, waiting = [0.0] * len(figures), [0.0] * len(figures)
        for part in parts:
            if part.device >= len(figures):
                continue
            known = figures[part.device]
            # If a device reports its computing time, the rest that the link does not explain was spent behind other
            # batches.
            others = part.seconds if part.computed is None else max(0.0, part.seconds - part.computed)
            on_link = min(others, self._link(part.device, known, part.n_bytes, part.trips))
            link[part.device] += on_link
            if part.computed is None:
                computing[part.device] += part.seconds - on_link
                waiting[part.device] += part.waited
            else:
                computing[part.device] += part.seconds - others
                waiting[part.device] += part.waited + others - on_link
        rows = max(1, n_rows)
        prediction = predict(self._pool.fit.sizes, figures, placement)
        shares = prediction.shares
        words, away = describe_parts(placement), {gone.device: gone for gone in runner.recovery.away()}
        idle = self._pool.idle(placement)
        linked = runner.links
        names = {number: known.name for number, known in enumerate(figures)}
        views = []
        for number, known in enumerate(figures):
            device = runner.devices[number] if number < len(runner.devices) else None
            if number in self._pool.left or device is None or device.name != known.name:  # gone, or about to join
                continue
            share = shares[number]
            state: DeviceState = "ready" if number in words or share.weights else "idle"
            why = idle.get(number, "") if state == "idle" else ""
            if known.name in away:
                state, why = "away", away[known.name].why
            elif (lost := device.lost) is not None:
                state, why = "lost", lost.why
            views.append(
                DeviceView(
                    device=known.name,
                    endpoint=None if device.endpoint is None else str(device.endpoint),
                    state=state,
                    why=why or None,
                    layers=share.layers,
                    head=share.head,
                    holds=words.get(number),
                    memory=DeviceMemory(
                        weights=share.weights,
                        # without layers that moved to other devices
                        own_disk=min(device.local_weight_bytes, share.weights),
                        kv=share.kv,
                        compute=share.compute,
                        free=known.free,
                        total=known.total,
                        free_now=_free_now(device),
                    ),
                    speed=ReadSpeed(known.decode, known.prefill),
                    passes_to=tuple(names[b] for a, b in linked if a == number and b in names),
                    link=Link(known.round_trip or None, known.bandwidth, device.heartbeat_seconds),
                    token_seconds=TokenTime(computing[number] / rows, link[number] / rows, waiting[number] / rows),
                    predicted=PredictedToken(
                        seconds=None if share.seconds is None else share.seconds + share.link_seconds,
                        bytes=share.link_bytes,
                        runs=share.runs,
                    ),
                    utilization=device.utilization if device.lost is None else None,
                )
            )
        span = batches[-1].ended - batches[0].ended + batches[0].seconds if batches else 0.0
        return ClusterView(
            devices=tuple(views),
            tokens_per_second=n_rows / span if span > 0 else 0.0,
            token_seconds=ModelTokenTime(
                compute=sum(computing) / rows,
                link=sum(link) / rows,
                waiting=sum(waiting) / rows,
                total=span / rows if n_rows else 0.0,
            ),
            predicted_seconds=prediction.seconds,
            events=self.events.recent(),
        )

    def _link(self, number: int, figures: DeviceFigures, n_bytes: int, trips: float) -> float:
        """Return the seconds of messages with that many bytes to a device and back, `trips` times."""
        if figures.local or number >= len(self._runner.devices):
            return 0.0
        heartbeat = self._runner.devices[number].heartbeat_seconds
        trip = figures.round_trip if heartbeat is None else heartbeat
        return trips * trip + (n_bytes / figures.bandwidth if figures.bandwidth else 0.0)


def _free_now(device: Device) -> int | None:
    """Return the free bytes of an accelerator; None for other devices, and for one that is lost."""
    if not is_accelerator(device) or device.lost is not None:
        return None
    try:
        return device.memory()[0]
    except DeviceError:
        return None
