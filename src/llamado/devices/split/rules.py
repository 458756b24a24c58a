"""Rules that divide a model's layers among devices: by free memory, by given proportions, or by the time of a token.

`place` applies the user's options; see `placement` for the parts of a model and their costs, and `filling` for the rule
of graphics cards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.devices.split.filling import filled, supported
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    NotEnoughMemory,
    Placement,
    SplitOptions,
    check_memory,
    mib,
    moved_weights,
)
from llamado.devices.split.shares import by_memory, by_ratio, local_device, workers


class UnknownDevice(DeviceError):
    """A flag names a device that does not exist."""


def fastest(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    order: Sequence[int] | None = None,
    n_gpu_layers: int | None = None,
) -> Placement:
    """Return the placement with the least predicted time per token that fits each device's memory. Raise
    `NotEnoughMemory` if none fits.

    Exact among placements that give each device of `order` (default: all) one run of layers or none, in that order, and
    the head to the last of them, to a later one, or to this machine wherever its layers are. With `n_gpu_layers` the
    items before the last `n_gpu_layers` are on this machine and the others on the workers.

    Dynamic programming over devices: the least time of the first l layers on the first d devices, for all l at once.
    """
    home = local_device(figures)
    n_layer = sizes.n_layer
    if order is None:
        order = tuple(range(len(figures)))
    # a device without memory for the speed measurement has none for a layer
    order = [i for i in order if figures[i].decode] or order
    start = 0
    if n_gpu_layers is not None:
        start = max(n_layer + 1 - n_gpu_layers, 0)
        order = [i for i in order if not figures[i].local]
    if start == n_layer + 1 or not order:
        placement = Placement((home,) * n_layer, home, home)
        check_memory(sizes, figures, placement)
        return placement
    candidates = [_runs(sizes, figures, order, start, None)]
    candidates += [_runs(sizes, figures, order, start, i) for i in order if figures[i].local]
    seconds, devices = min(candidates, key=lambda candidate: candidate[0])
    if seconds == float("inf"):
        raise _no_room(sizes, figures, order, n_gpu_layers)
    devices = [home] * start + devices
    placement = Placement(tuple(devices[:n_layer]), devices[n_layer], home)
    check_memory(sizes, figures, placement)  # of the items before `start`
    return placement


def _runs(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], order: Sequence[int], start: int, head: int | None
) -> tuple[float, list[int]]:
    """Return the least seconds, and the devices of the items from `start` on: layers, then the head.

    `head`: the device that has the head, independent of its layers; None: the head is the last item of the last run.
    """
    n_layer = sizes.n_layer
    n_items = n_layer + 1 if head is None else n_layer
    # prefix sums of the memory that items take, and of the bytes read for a token
    held, read_before = (
        np.cumsum([0, *(a + b for a, b in zip(weights, kv, strict=True)), sizes.head][: n_items + 1], dtype=np.float64)
        for weights, kv in (
            (sizes.layers, sizes.kv),
            (sizes.layers_read or sizes.layers, sizes.kv_read or (0,) * n_layer),
        )
    )
    # [l0, l1]: a run of items l0 up to but not including l1
    first, last = np.arange(n_items + 1)[:, None], np.arange(n_items + 1)[None, :]
    some = (last > first) & (first >= start)
    with_head = (last == n_layer + 1) & some
    memory = held[None, :] - held[:, None] + sizes.compute + np.where(with_head, sizes.head_compute, 0)
    read = read_before[None, :] - read_before[:, None]
    out = np.where(with_head, sizes.logits, sizes.hidden)

    # For the first items: the least seconds if their output is on this machine, and if it is on a worker that can pass
    # it to the next one. `came_from`: for each device the first item of its run and where that run's input was.
    best, passing = np.full(n_items + 1, np.inf), np.full(n_items + 1, np.inf)
    best[start] = 0.0
    came_from: list[tuple[_Origins, _Origins]] = []
    skipped = [np.stack([np.arange(n_items + 1), np.full(n_items + 1, state)]) for state in (0, 1)]
    for i in order:
        device = figures[i]
        seconds = read * device.read_seconds(1)
        room = device.room
        if i == head:
            room -= sizes.head + sizes.head_compute
        back = np.zeros_like(seconds)
        if not device.local:
            seconds = seconds + device.one_way_seconds(sizes.hidden + sizes.inputs)
            back = back + 0.5 * device.round_trip + (out / device.bandwidth if device.bandwidth else 0.0)
        seconds = np.where(some & (memory <= room), seconds, np.inf)
        # [where the input is, first item, last item]
        totals = np.stack([best[:, None] + seconds, (passing[:, None] if device.links else np.inf) + seconds])
        here, origin_here = _least(totals + back)
        there, origin_there = _least(totals if device.links else np.full_like(totals, np.inf))
        # leave a device out if it gains nothing
        came_from.append(
            (
                np.where(best <= here, skipped[0], origin_here),
                np.where(passing <= there, skipped[1], origin_there),
            )
        )
        best, passing = np.minimum(best, here), np.minimum(passing, there)
    total = float(best[n_items])
    if head is not None:
        total += figures[head].read_seconds(sizes.head)
        if sizes.head + sizes.head_compute + sizes.compute > figures[head].room:
            total = float("inf")
    devices: list[int] = []
    at = n_items
    if total != float("inf"):
        state = 0
        for i, origins in zip(reversed(order), reversed(came_from), strict=True):
            first_item, state = origins[state][:, at].tolist()
            devices = [i] * (at - first_item) + devices
            at = first_item
        if head is not None:
            devices.append(head)
    return total, devices


_Origins = NDArray[np.intp]
"""[0]: first item of a run; [1]: 1 if its input was on a worker."""


def _least(totals: NDArray[np.float64]) -> tuple[NDArray[np.float64], _Origins]:
    """For each last item of [state, first, last]: the least total, and its first item and state."""
    n = totals.shape[1]
    flat = totals.reshape(2 * n, -1)
    at = flat.argmin(axis=0)
    return flat.min(axis=0), np.stack([at % n, at // n])


def _no_room(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], order: Sequence[int], n_gpu_layers: int | None
) -> NotEnoughMemory:
    """Return the error that says what is missing, with layers placed by free memory."""
    try:
        check_memory(sizes, figures, by_memory(sizes, figures, order, n_gpu_layers))
    except NotEnoughMemory as error:
        return error
    # It would fit, but only with a device in two places.
    have = sum(figures[i].free for i in order)
    need = sizes.weights + sum(sizes.kv) + len(order) * sizes.compute + sizes.head_compute
    return NotEnoughMemory(
        f"not enough memory: the model needs {mib(need)}, and {', '.join(figures[i].name for i in order)} have "
        f"{mib(have)} free, in pieces that its layers do not fit",
        {figures[i].name: 0 for i in order},
    )


# --- user options -----------------------------------------------------------------------------------------------------


def place(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, among: Sequence[int] | None = None
) -> Placement:
    """Return the placement that the options request, on the devices `among` (default: all).

    Raises UnknownDevice for names and shares of devices that do not exist, NotEnoughMemory if the model does not fit.
    Only `fastest` (no `tensor_split`) needs speeds. After the loss of a device, `figures` are those from the start and
    `among` the numbers of the remaining devices: overrides to other devices have no effect, and the proportions are
    those of the remaining devices.
    """
    present = tuple(range(len(figures))) if among is None else tuple(among)
    home = local_device(figures)
    overrides = tuple(
        (pattern, device) for pattern, name in options.overrides if (device := selected(figures, [name])[0]) in present
    )
    base = Placement((home,) * sizes.n_layer, home, home, overrides, None if options.kv_offload else home)
    ratios = options.tensor_split
    n_gpu_layers = options.n_gpu_layers
    chosen = sharing(figures, options)
    if ratios and chosen and len(ratios) > len(chosen):
        given = ",".join(f"{share:g}" for share in ratios)
        names = ", ".join(figures[i].name for i in chosen)
        raise UnknownDevice(
            f"--tensor-split {given}: {len(ratios)} shares for {len(chosen)} device{'s'[: len(chosen) > 1]} ({names}); "
            "give each device of a worker one, and this machine one more if it is to have layers"
        )
    order = tuple(i for i in chosen if i in present)
    if not order:
        placement = base
    elif ratios is None and not any(figures[i].remote for i in order):
        placement = filled(sizes, figures, order, n_gpu_layers, base)
    elif ratios is None:
        placement = fastest(sizes, figures, order, n_gpu_layers)
    elif not ratios:
        placement = by_memory(sizes, figures, order, n_gpu_layers)
    else:
        padded = [*ratios, *(0.0 for _ in chosen)]
        kept = [padded[place] for place, i in enumerate(chosen) if i in present]
        # If only devices with share 0 remain, they share evenly.
        placement = by_ratio(sizes, figures, kept if any(kept) else [1.0] * len(kept), order, n_gpu_layers)
    placement = replace(supported(figures, placement), cache=base.cache)
    if overrides:
        placement = override(sizes, placement, overrides)
    check_memory(sizes, figures, placement)
    return placement


def override(sizes: ModelSizes, placement: Placement, overrides: Sequence[tuple[str, int]]) -> Placement:
    """Return the placement with weights whose names match a pattern moved to other devices.

    If all weights of a layer, or of the head, go to one device, the layer itself moves, with its cache.
    """
    if not overrides:
        return placement
    moved = replace(placement, overrides=tuple(overrides))
    devices: dict[int, set[int]] = {}
    for role in sizes.tensors:
        devices.setdefault(role.layer, set()).add(moved.device_of(role))
    # the device that all weights of a layer have in common; key −1 is the head
    common = {layer: next(iter(places)) for layer, places in devices.items() if len(places) == 1}
    layers = tuple(common.get(layer, device) for layer, device in enumerate(placement.layers))
    whole = replace(placement, layers=layers, head=common.get(-1, placement.head))
    moved = replace(whole, overrides=tuple(overrides))
    return moved if moved_weights(sizes, moved) else whole


def sharing(figures: Sequence[DeviceFigures], options: SplitOptions) -> tuple[int, ...]:
    """The devices that layers may go to, in the order of their shares. If there is one share more than workers, this
    machine comes last.

    Layers that `n_gpu_layers` keeps on this machine count for no share.
    """
    if options.devices:
        return selected(figures, options.devices)
    if options.main_gpu is not None:
        far = workers(figures)
        if options.main_gpu >= len(far):
            names = ", ".join(figures[i].name for i in far)
            raise UnknownDevice(f"--main-gpu {options.main_gpu}: there is no such device, counted from 0 in {names}")
        return (far[options.main_gpu],)
    if options.tensor_split is None:
        return tuple(range(len(figures)))
    far, home = workers(figures), local_device(figures)
    return (*far, home) if len(options.tensor_split) > len(far) and home not in far else far


def selected(figures: Sequence[DeviceFigures], names: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of devices by name: "RPC0", "RPC0[host:port]", "host:port" (all devices of a worker), "CUDA0",
    "CPU", "none".
    """
    found: list[int] = []
    for name in names:
        if name.lower() == "none":
            continue
        wanted = name.lower()
        matches = [
            i
            for i, device in enumerate(figures)
            if wanted in (device.name.lower(), *(part.lower() for part in _name_parts(device.name)))
        ]
        if not matches:
            known = ", ".join(device.name for device in figures)
            raise UnknownDevice(f"there is no device {name!r}; there are {known} (see --list-devices)")
        found += [i for i in matches if i not in found]
    return tuple(found)


def _name_parts(name: str) -> tuple[str, ...]:
    """ "RPC0" and "host:port" of "RPC0[host:port]"."""
    short, bracket, rest = name.partition("[")
    return (short, rest.removesuffix("]")) if bracket else (name,)
