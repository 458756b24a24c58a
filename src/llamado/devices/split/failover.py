"""Where the layers of a lost device go: to the devices left, none of which gives up what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from llamado.devices.split.placement import DeviceFigures, ModelSizes, Placement, check_memory, predict


def without(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> Placement:
    """The placement with everything of devices that are not `alive` moved to those that are.

    Each run of lost layers is divided between two devices (or given to one), as makes a token fastest within memory, or
    where speeds are not known leaves most memory free; where that does not fit, layers go one by one to whoever has
    room. `figures` are those from before the model was loaded. Raises NotEnoughMemory.
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
    check_memory(sizes, figures, best)
    return best


def _move_run(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, run: Sequence[int], alive: Sequence[int]
) -> Placement:
    """The best way to move layers that follow each other."""
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
    """The best device for the head, where its own is lost."""
    if placement.head in alive:
        return placement
    return min((replace(placement, head=i) for i in alive), key=lambda move: _cost(sizes, figures, move, alive))


def _cost(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> tuple[float, float, float]:
    """Bytes missing; then seconds of a token and runs, or runs and the least free memory where speeds are not known."""
    shares = [(figures[i], share) for i, share in enumerate(predict(sizes, figures, placement).shares) if i in alive]
    missing = sum(max(0.0, share.memory - device.room) for device, share in shares)
    n_runs = len(placement.stages)
    if all(figures[i].decode for i in alive):
        return missing, sum((share.seconds or 0.0) + share.link_seconds for _, share in shares), n_runs
    free = min((device.room - share.memory for device, share in shares if share.memory), default=0.0)
    return missing, n_runs, -free
