"""Where the layers of a lost device go: to the devices left, none of which gives up what it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from llamado.devices.placement import DeviceFigures, ModelSizes, Placement, check_memory, predict


def without(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> Placement:
    """The placement with everything of devices that are not `alive` moved to those that are.

    Each run of lost layers is divided between two devices (or given to one), as makes a token fastest within memory, or
    where speeds are not known leaves most memory free. `figures` are those from before the model was loaded. Raises
    NotEnoughMemory.
    """
    kept = tuple((pattern, device) for pattern, device in placement.overrides if device in alive)
    best = replace(placement, overrides=kept)
    lost = [i for i, device in enumerate(placement.layers) if device not in alive]
    bounds = [0, *(n for n, (a, b) in enumerate(pairwise(lost), 1) if b != a + 1), len(lost)]
    for first, last in pairwise(bounds):
        run = lost[first:last]
        if run:
            moves = [
                _moved(best, run, cut, before, after)
                for before in alive
                for after in alive
                for cut in (range(1, len(run)) if before != after else (len(run),))
            ]
            best = min(moves, key=lambda move: _cost(sizes, figures, move, alive))
    if best.head not in alive:
        best = min((replace(best, head=i) for i in alive), key=lambda move: _cost(sizes, figures, move, alive))
    check_memory(sizes, figures, best)
    return best


def _moved(placement: Placement, run: Sequence[int], cut: int, before: int, after: int) -> Placement:
    layers = list(placement.layers)
    for n, layer in enumerate(run):
        layers[layer] = before if n < cut else after
    return replace(placement, layers=tuple(layers))


def _cost(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, alive: Sequence[int]
) -> tuple[float, int, float]:
    """Bytes missing, runs of layers, seconds of a token (or the smaller, the more memory stays free)."""
    shares = [(figures[i], share) for i, share in enumerate(predict(sizes, figures, placement).shares) if i in alive]
    missing = sum(max(0.0, share.memory - device.room) for device, share in shares)
    used = [(device, share) for device, share in shares if share.memory]
    if all(share.seconds is not None for _, share in used):
        speed = sum((share.seconds or 0.0) + share.link_seconds for _, share in used)
    else:
        speed = -min((device.room - share.memory for device, share in used), default=0.0)
    return missing, len(placement.stages), speed
