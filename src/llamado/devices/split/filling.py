"""The rule of graphics cards: as much of a model as fits goes to accelerators, the rest stays with the CPU.

The order of attempts is llama.cpp's (common/fit.cpp): everything, divided by free memory; otherwise, in a mixture of
experts, everything but as many experts as necessary; otherwise the last layers, from the last accelerator back to the
first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    Placement,
    check_memory,
    fits,
    moved_weights,
    predict,
)
from llamado.devices.split.shares import by_memory, local_device
from llamado.ggml.role import ModelPart, Role


def filled(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    order: Sequence[int],
    n_gpu_layers: int | None = None,
    base: Placement | None = None,
) -> Placement:
    """Return the placement with the most layers, and the head, on the accelerators of `order`.

    With `n_gpu_layers` exactly so many of the last ones are there. `base` has the user's overrides and the device of
    the cache; experts are moved only if it has no overrides. Raises NotEnoughMemory.
    """
    problem = _FillPlan(sizes, figures, tuple(i for i in order if figures[i].accelerator), base)
    n_items = sizes.n_layer + 1
    n = n_items if n_gpu_layers is None else min(n_gpu_layers, n_items)
    if not problem.gpus or not n:
        placement = problem.last_layers(0)
    elif fits(sizes, figures, whole := problem.by_memory(n)):
        return whole
    elif n_gpu_layers is None and problem.experts and not problem.base.overrides:
        placement = problem.without_experts()
    else:
        placement = problem.last_layers(n)
        if n_gpu_layers is not None and problem.n_taken < n:
            check_memory(sizes, figures, problem.by_memory(n), most=problem.n_taken)
    check_memory(sizes, figures, placement)
    return placement


class _FillPlan:
    """A model and the accelerators that it fills. `n_taken`: items that `last_layers` has placed there."""

    def __init__(
        self, sizes: ModelSizes, figures: Sequence[DeviceFigures], gpus: tuple[int, ...], base: Placement | None
    ) -> None:
        self.sizes, self.figures, self.gpus = sizes, figures, gpus
        self.home = local_device(figures)
        self.base = base or Placement((self.home,) * sizes.n_layer, self.home, self.home)
        self.n_taken = 0
        self.experts: dict[int, list[Role]] = {}
        for role in sizes.tensors:
            if role.experts > 1 and role.part is ModelPart.LAYER:
                self.experts.setdefault(role.layer, []).append(role)

    def by_memory(self, n: int) -> Placement:
        """Divide the last `n` items by free memory."""
        found = by_memory(self.sizes, self.figures, self.gpus, n)
        return self._complete(found.layers, found.head)

    def last_layers(self, n: int) -> Placement:
        """Give the last accelerator as many of the last `n` items as fit, and so on to the first one."""
        n_layer = self.sizes.n_layer
        held = [*self.sizes.layers, self.sizes.head]
        extra = dict.fromkeys(self.gpus, 0)
        for role, size in self._overridden():
            held[role.layer] -= size  # the head is item −1
            if (device := self.base.device_of(role)) in extra:
                extra[device] += size
        cost = [n_bytes + kv for n_bytes, kv in zip(held, [*self.sizes.kv, self.sizes.head_compute], strict=True)]
        if self.base.cache is not None:
            cost[:-1] = held[:-1]
        devices = [self.home] * (n_layer + 1)
        at, end = n_layer, n_layer - n
        for i in reversed(self.gpus):
            room = self.figures[i].room - self.sizes.compute - extra[i]
            while at > end and (needed := 0 if at in self.figures[i].lacks else cost[at]) <= room:
                room -= needed
                devices[at] = i
                at -= 1
        self.n_taken = n_layer - at
        return self._complete(tuple(devices[:-1]), devices[-1])

    def without_experts(self) -> Placement:
        """Place all layers on accelerators, with as many experts as fit; if not even the rest fits, the last layers
        without their experts.
        """
        away = set(self.experts)
        found = by_memory(self.sizes, self.figures, self.gpus)
        bare = self._with_experts_away(self._complete(found.layers, found.head), away)
        shares = predict(self.sizes, self.figures, bare).shares
        room = {i: self.figures[i].room - shares[i].memory for i in self.gpus}
        if min(room.values()) < 0:
            self.base = self._with_experts_away(self.base, away)
            return self.last_layers(self.sizes.n_layer + 1)
        for layer in sorted(self.experts, reverse=True):
            device = found.layers[layer]
            held = sum(self.sizes.tensors[role].held for role in self.experts[layer])
            if layer not in self.figures[device].lacks and held <= room[device]:
                room[device] -= held
                away.discard(layer)
        return self._with_experts_away(bare, away)

    def _overridden(self) -> Iterable[tuple[Role, int]]:
        """Yield the weights that the base has away from their layer, and their sizes."""
        patterns = [pattern for pattern, _ in self.base.overrides]
        for role, size in self.sizes.tensors.items():
            if any(re.search(pattern, role.name) for pattern in patterns):
                yield role, size.held

    def _with_experts_away(self, placement: Placement, layers: set[int]) -> Placement:
        """Return the placement with the experts of these layers, and no others, moved to the CPU."""
        names = [re.escape(role.name) for layer in sorted(layers) for role in self.experts[layer]]
        overrides = ((f"^({'|'.join(names)})$", self.home),) if names else ()
        return replace(placement, overrides=overrides)

    def _complete(self, layers: tuple[int, ...], head: int) -> Placement:
        """Return the base with these layers; what a device cannot run is moved to the CPU."""
        return supported(self.figures, replace(self.base, layers=layers, head=head))


def supported(figures: Sequence[DeviceFigures], placement: Placement) -> Placement:
    """Return the placement with layers that their device cannot run moved to the CPU."""
    home, n_layer = local_device(figures), len(placement.layers)
    layers = tuple(home if i in figures[device].lacks else device for i, device in enumerate(placement.layers))
    head = home if n_layer in figures[placement.head].lacks else placement.head
    return replace(placement, layers=layers, head=head)


def moved_experts(sizes: ModelSizes, placement: Placement, device: int) -> list[int]:
    """Return the layers whose experts are on a device that does not have the layer."""
    moved = moved_weights(sizes, placement)
    return sorted({role.layer for role, _ in moved if role.experts > 1 and placement.device_of(role) == device})
