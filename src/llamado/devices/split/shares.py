"""llama.cpp's rules: layers in proportion to given shares, or to free memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamado.devices.split.placement import DeviceFigures, ModelSizes, Placement


def local_device(figures: Sequence[DeviceFigures]) -> int:
    """The device of this machine, which has the embedding; the first device if none is local."""
    return next((i for i, device in enumerate(figures) if device.local), 0)


def workers(figures: Sequence[DeviceFigures]) -> tuple[int, ...]:
    """The devices that take layers by default: workers, then accelerators, as in llama.cpp; the CPU if it is alone."""
    far = (i for i, device in enumerate(figures) if device.remote)
    return (*far, *accelerators(figures)) or tuple(range(len(figures)))


def accelerators(figures: Sequence[DeviceFigures]) -> tuple[int, ...]:
    """The accelerators of this machine."""
    return tuple(i for i, device in enumerate(figures) if device.accelerator)


def by_ratio(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    ratios: Sequence[float],
    order: Sequence[int] | None = None,
    n_gpu_layers: int | None = None,
) -> Placement:
    """Place layers in proportion to `ratios` on the devices `order` (default: the workers, then this machine if there
    is one ratio more).

    The rule is llama.cpp's (`load_tensors` in llama-model.cpp): of the last `n_gpu_layers` of the layers and the head,
    item i of n goes to the first device whose cumulative share is above i / n, in single precision. Missing ratios are
    0, excess ones have no effect. Everything before these items is on this machine.
    """
    home = local_device(figures)
    if order is None:
        order = workers(figures)
        if len(ratios) > len(order) and home not in order:
            order = (*order, home)
    n_items = sizes.n_layer + 1
    n = n_items if n_gpu_layers is None else min(n_gpu_layers, n_items)
    shares = np.zeros(len(order), np.float32)
    given = np.asarray(ratios[: len(order)], np.float32)
    shares[: len(given)] = given
    if not n or not order or not shares.sum():
        return Placement((home,) * sizes.n_layer, home, home)
    bounds = np.cumsum(shares, dtype=np.float32)
    bounds /= bounds[-1]
    items = np.arange(n, dtype=np.float32) / np.float32(n)
    taken = [order[i] for i in np.searchsorted(bounds, items, side="right").tolist()]
    devices = [home] * (n_items - n) + taken
    return Placement(tuple(devices[:-1]), devices[-1], home)


def by_memory(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    order: Sequence[int] | None = None,
    n_gpu_layers: int | None = None,
) -> Placement:
    """Place layers in proportion to free memory, llama.cpp's default (see `by_ratio`).

    A device that does not report its memory counts as having this machine's.
    """
    order = workers(figures) if order is None else order
    here = figures[local_device(figures)].free
    return by_ratio(sizes, figures, [figures[i].free or here for i in order], order, n_gpu_layers)
