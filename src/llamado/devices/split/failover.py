"""Failover placement: move the layers of a lost device to the remaining devices, which keep all they have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from llamado.devices.split.filling import supported
from llamado.devices.split.placement import DeviceFigures, ModelSizes, Placement, check_memory, predict


def replace_lost(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> Placement:
    """Return the placement with everything on lost devices moved to those that are `alive`.

    Each run of lost layers goes to one device or is cut between two: the choice with the least time per token that fits
    memory, or the most free memory left if speeds are unknown. If no such choice fits, layers move one by one to any
    device with room. `figures` are those from before the model was loaded. Raises NotEnoughMemory.
    """
    kept = tuple((pattern, device) for pattern, device in placement.overrides if device in alive)
    start = replace(placement, overrides=kept)
    lost = [i for i, device in enumerate(placement.layers) if device not in alive]
    bounds = [0, *(n for n, (a, b) in enumerate(pairwise(lost), 1) if b != a + 1), len(lost)]
    best = start
    for first, last in pairwise(bounds):
        best = _move_run(sizes, figures, best, lost[first:last], alive)
    best = _move_head(sizes, figures, best, alive)
    if _cost(sizes, figures, best, alive)[0]:
        spread = _move_head(sizes, figures, start, alive)
        for layer in lost:
            spread = _move_run(sizes, figures, spread, [layer], alive)
        best = min(best, spread, key=lambda move: _cost(sizes, figures, move, alive))
    best = supported(figures, best)
    check_memory(sizes, figures, best)
    return best


def _move_run(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, run: Sequence[int], alive: Sequence[int]
) -> Placement:
    """Return the best way to move adjacent layers."""
    if not run:
        return placement
    moves = [
        _moved(placement, run, cut, before, after)
        for before in alive
        for after in alive
        for cut in (range(1, len(run)) if before != after else (len(run),))
    ]
    return min(moves, key=lambda move: _cost(sizes, figures, move, alive))


def _moved(placement: Placement, run: Sequence[int], cut: int, before: int, after: int) -> Placement:
    layers = list(placement.layers)
    for n, layer in enumerate(run):
        layers[layer] = before if n < cut else after
    return replace(placement, layers=tuple(layers))


def _move_head(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> Placement:
    """Move the head to the best device, if its own is lost."""
    if placement.head in alive:
        return placement
    return min((replace(placement, head=i) for i in alive), key=lambda move: _cost(sizes, figures, move, alive))


def _cost(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> tuple[float, float, float, float]:
    """Cost of a placement, compared in order: missing bytes; then seconds per token and runs, or, if speeds are
    unknown, the parts that are with the CPU although there are accelerators, runs, and the negated least free memory.
    """
    shares = [(figures[i], share) for i, share in enumerate(predict(sizes, figures, placement).shares) if i in alive]
    missing = sum(max(0.0, share.memory - device.room) for device, share in shares)
    n_runs = len(placement.stages)
    if all(figures[i].decode for i in alive):
        return missing, sum((share.seconds or 0.0) + share.link_seconds for _, share in shares), n_runs, 0.0
    free = min((device.room - share.memory for device, share in shares if share.memory), default=0.0)
    on_cpu = 0
    if any(figures[i].accelerator for i in alive):
        on_cpu = sum(figures[i].local for i in (*placement.layers, placement.head))
    return missing, on_cpu, n_runs, -free
