"""Which layer goes to which device: arithmetic on sizes and speeds, without models, sockets or devices.

A model is a row of layers with the head (the output matrix and its norm) behind the last one. Each device takes a run
of them; the embedding stays on this machine, where a row of it is all that a token needs. Three rules divide the row:
by free memory (llama.cpp's rule), by given proportions, and `fastest`, by the predicted time of a token.

Times are those of one sequence generating: a device reads its weights and the cache once for each token, so its time is
their bytes over the rate at which it reads. Each run on another machine costs a round trip and the transfer of
what goes in (the hidden state, positions, a row of the mask) and out (the hidden state, or behind the head the logits).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceError
from llamado.ggml.role import ModelPart, Role

ALL_LAYERS = 2**31 - 1
"""As `n_gpu_layers`: every layer and the head go to the workers."""

_MIB = 1 << 20


class NotEnoughMemory(DeviceError):
    """The model does not fit the devices; `missing` says how many bytes each of them (by name) lacks.

    `placement` is one that was tried.
    """

    in_logs = "out of memory"

    def __init__(self, message: str, missing: Mapping[str, int], placement: Placement | None = None) -> None:
        super().__init__(message)
        self.missing = dict(missing)
        self.placement = placement


class UnknownDevice(DeviceError):
    """A device that a flag names is not there."""


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """How the user wants a model divided among machines."""

    rpc: tuple[str, ...] = ()
    """Endpoints of workers, in order."""
    tensor_split: tuple[float, ...] | None = None
    """Proportions; None: the least time per token (auto), empty: by free memory."""
    n_gpu_layers: int | None = None
    """The last so many layers, the head counted as one more, go to workers; None: as `tensor_split` has it."""
    devices: tuple[str, ...] = ()
    """Names of the devices that take layers, in order; ("none",): no worker; empty: all."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Regular expressions of tensor names, and the device that gets those weights; the first that matches counts."""
    failover: float | None = None
    """Seconds after which the layers of a lost worker go to the devices left; None: never."""
    wait: float = 30.0
    """Seconds a request waits for a lost worker."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None


class WeightSize(NamedTuple):
    """Bytes of a weight: those it holds, and those of them that are read for a token."""

    held: int
    read: int


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Bytes of a model's parts. Tuples have one entry per layer."""

    layers: tuple[int, ...]
    """Weights."""
    layers_read: tuple[int, ...] = ()
    """Of those, what is read for a token; empty: all of them."""
    kv: tuple[int, ...]
    """Keys and values of all cells."""
    kv_read: tuple[int, ...] = ()
    """Of those, what attention reads for a token; empty: nothing to speak of."""
    head: int
    """Output matrix and output norm."""
    embedding: int = 0
    """Stays on this machine, mapped from the file: it takes no memory that others could not have."""
    embedding_read: int = 0
    """Of that, what is read for a token: its row."""
    hidden: int
    """Hidden state of a token, as it goes from device to device."""
    inputs: int = 0
    """Further inputs of a token that every run of layers is sent (position, cell, row of the mask)."""
    logits: int
    """Logits of a token."""
    compute: int = 0
    """Working memory of a device that has layers or the head."""
    head_compute: int = 0
    """Working memory that the head takes in addition."""
    tensors: Mapping[Role, WeightSize] = field(default_factory=dict, hash=False)
    """Each weight of the layers and the head by its role there; only overrides of single weights need them."""

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def weights(self) -> int:
        """All weights but the embedding."""
        return sum(self.layers) + self.head


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What is known of a device; the speeds are None where nobody measured them."""

    name: str
    local: bool
    """On this machine: no link, and the embedding is here."""
    free: int
    total: int
    """Bytes of memory; both 0 where the device does not say."""
    decode: float | None = None
    """Bytes of weights read per second when computing 1 token."""
    prefill: float | None = None
    """The same when computing 512 tokens at once."""
    round_trip: float = 0.0
    """Seconds from sending a small graph to having its result."""
    bandwidth: float | None = None
    """Bytes per second of the link; None: no link."""

    @property
    def room(self) -> float:
        """Bytes that may be used: infinite where the device does not say."""
        return self.free if self.total or self.free else float("inf")

    def reads(self, n: int) -> float:
        """Seconds for reading `n` bytes of weights for one token."""
        if not self.decode:
            raise ValueError(f"the speed of {self.name} is not known")
        return n / self.decode

    def carries(self, n: int) -> float:
        """Seconds for a round trip with `n` bytes on the link."""
        return self.round_trip + (n / self.bandwidth if self.bandwidth else 0.0)


class Stage(NamedTuple):
    """A run of layers `first` up to but not including `last` on one device, with or without the head behind it."""

    device: int
    first: int
    last: int
    head: bool


@dataclass(frozen=True)
class Placement:
    """Where everything is, by numbers of devices: each layer (with its part of the cache), the head, the embedding.

    `overrides` are patterns of names of single weights that lie elsewhere.
    """

    layers: tuple[int, ...]
    head: int
    embedding: int = 0
    overrides: tuple[tuple[str, int], ...] = ()

    def device_of(self, role: Role) -> int:
        """Device of a weight in a role; what is shared lies beside the embedding, and wherever else it is used."""
        if role.part in (ModelPart.INPUT, ModelPart.SHARED):
            return self.embedding
        for pattern, device in self.overrides:
            if re.search(pattern, role.name):
                return device
        return self.head if role.part is ModelPart.OUTPUT else self.layers[role.layer]

    def home(self, roles: Sequence[Role], *, rows: bool) -> int | None:
        """Device on which an operation finds a weight with these roles; None where all devices have it.

        What takes `rows` of an embedding is the input; a product with one makes logits.
        """
        fitting = [role for role in roles if (role.part is ModelPart.INPUT) == rows]
        role = (fitting or roles)[0]
        return None if role.part is ModelPart.SHARED else self.device_of(role)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Runs of layers on the same device, in order; the head is a run of its own where its device differs."""
        bounds = [0, *(i for i in range(1, len(self.layers)) if self.layers[i] != self.layers[i - 1]), len(self.layers)]
        stages = [Stage(self.layers[a], a, b, False) for a, b in pairwise(bounds) if a < b]
        if stages and stages[-1].device == self.head:
            stages[-1] = stages[-1]._replace(head=True)
        else:
            stages.append(Stage(self.head, len(self.layers), len(self.layers), True))
        return tuple(stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that have anything to compute or hold, the embedding's among them, in ascending order."""
        return tuple(sorted({*self.layers, self.head, self.embedding, *(device for _, device in self.overrides)}))


@dataclass(frozen=True)
class Share:
    """What one device holds of a model, and its part in the time of a token."""

    layers: tuple[int, ...]
    head: bool
    weights: int
    """Bytes, without the embedding."""
    kv: int
    compute: int
    seconds: float | None
    """For one token: reading weights and cache; None where the device's speed is not known."""
    link_seconds: float
    """For one token: round trips and transfers."""

    @property
    def memory(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True)
class Prediction:
    """The shares of all devices (in the order of the figures), and seconds per token in all, None if not known."""

    shares: tuple[Share, ...]
    seconds: float | None


def predict(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement) -> Prediction:
    """What a placement takes of each device, and how long a token takes."""
    n = len(figures)
    weights, kv, read, link = [0] * n, [0] * n, [0] * n, [0.0] * n
    layers_read = sizes.layers_read or sizes.layers
    kv_read = sizes.kv_read or (0,) * sizes.n_layer
    for layer, device in enumerate(placement.layers):
        weights[device] += sizes.layers[layer]
        kv[device] += sizes.kv[layer]
        read[device] += layers_read[layer] + kv_read[layer]
    weights[placement.head] += sizes.head
    read[placement.head] += sizes.head
    for stage in placement.stages:
        if not figures[stage.device].local:
            out = sizes.logits if stage.head else sizes.hidden
            link[stage.device] += figures[stage.device].carries(sizes.hidden + sizes.inputs + out)
    guests: set[tuple[int, int, int]] = set()
    for role, size in _elsewhere(sizes, placement):
        host, guest = _host(placement, role), placement.device_of(role)
        for device, sign in ((host, -1), (guest, 1)):
            weights[device] += sign * size.held
            read[device] += sign * size.read
        guests.add((host, guest, role.layer))
    for host, guest, _ in guests:
        # The hidden state goes there and comes back; how often within a layer, only the graph knows.
        for device in (guest, host):
            if not figures[device].local:
                link[device] += figures[device].carries(2 * sizes.hidden)
    if figures[placement.embedding].decode:  # too little to need a speed that is not known
        read[placement.embedding] += sizes.embedding_read
    shares = []
    for i, device_figures in enumerate(figures):
        layers = tuple(layer for layer, device in enumerate(placement.layers) if device == i)
        head = placement.head == i
        compute = (sizes.compute if layers or head or weights[i] else 0) + (sizes.head_compute if head else 0)
        seconds = 0.0 if not read[i] else device_figures.reads(read[i]) if device_figures.decode else None
        shares.append(Share(layers, head, weights[i], kv[i], compute, seconds, link[i]))
    known = [share.seconds for share in shares if share.seconds is not None]
    total = sum(known) + sum(link) if len(known) == n else None
    return Prediction(tuple(shares), total)


def _host(placement: Placement, role: Role) -> int:
    """Device of the layer, or the head, that a weight is part of."""
    return placement.head if role.part is ModelPart.OUTPUT else placement.layers[role.layer]


def _elsewhere(sizes: ModelSizes, placement: Placement) -> list[tuple[Role, WeightSize]]:
    """Weights that are not with their layer or the head."""
    if not placement.overrides:
        return []
    return [(role, size) for role, size in sizes.tensors.items() if placement.device_of(role) != _host(placement, role)]


def check_memory(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement) -> None:
    """Raises NotEnoughMemory where a device has less memory than a placement needs there."""
    shares = predict(sizes, figures, placement).shares
    short = [(device, share) for device, share in zip(figures, shares, strict=True) if share.memory > device.room]
    if not short:
        return
    alone = len(figures) == 1
    helps = ["another machine (--rpc HOST:PORT)" if alone else "another --tensor-split, one more worker (--rpc)"]
    if all(share.weights < device.room for device, share in short):  # else no cache is small enough
        helps = ["a smaller context (-c)", "a smaller K/V cache (-ctk q8_0 -ctv q8_0)", *helps]
    helps.append("a smaller quantisation of the model")
    where = "; ".join(
        f"{device.name} needs {mib(share.memory)} (weights {mib(share.weights)}, K/V cache {mib(share.kv)}, "
        f"compute {mib(share.compute)}) and has {mib(device.free)} free: {mib(share.memory - device.free)} missing"
        for device, share in short
    )
    raise NotEnoughMemory(
        f"not enough memory: {where}. What helps: {', '.join(helps[:-1])} or {helps[-1]}",
        {device.name: share.memory - device.free for device, share in short},
        placement,
    )


def held(placement: Placement) -> dict[int, str]:
    """What each device has, in words: "layers 0 to 3 and 8 and the head"; no entry for one that has nothing."""
    found: dict[int, list[str]] = {}
    heads: set[int] = set()
    for stage in placement.stages:
        if stage.last > stage.first:
            run = f"{stage.first} to {stage.last - 1}" if stage.last > stage.first + 1 else f"{stage.first}"
            found.setdefault(stage.device, []).append(run)
        if stage.head:
            heads.add(stage.device)
    texts = {}
    for device in sorted({*found, *heads}):
        runs = found.get(device, [])
        one = len(runs) == 1 and " " not in runs[0]
        parts = [f"layer{'' if one else 's'} {' and '.join(runs)}"] if runs else []
        texts[device] = " and ".join([*parts, *(["the head"] if device in heads else [])])
    return texts


def mib(n: float) -> str:
    """Bytes as a text in MiB."""
    return f"{n / _MIB:,.0f} MiB" if n >= 10 * _MIB or n == 0 else f"{n / _MIB:,.1f} MiB"


# --- rules ------------------------------------------------------------------------------------------------------------


def local_device(figures: Sequence[DeviceFigures]) -> int:
    """The device of this machine, where the embedding lies; the first one where none is local."""
    return next((i for i, device in enumerate(figures) if device.local), 0)


def workers(figures: Sequence[DeviceFigures]) -> tuple[int, ...]:
    """The devices that take layers unless the user says otherwise: those of other machines, or if none is there all."""
    return tuple(i for i, device in enumerate(figures) if not device.local) or tuple(range(len(figures)))


def by_ratio(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    ratios: Sequence[float],
    order: Sequence[int] | None = None,
    n_gpu_layers: int | None = None,
) -> Placement:
    """Layers in proportion to `ratios` over the devices `order` (default: the workers, one ratio more: this machine).

    The rule is llama.cpp's (`load_tensors` in llama-model.cpp): of the last `n_gpu_layers` of the layers and the head,
    item i of n goes to the first device whose cumulated share is above i / n, in single precision. Ratios that are not
    given are 0, those too many have no effect. What comes before these items is on this machine.
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
    """Layers in proportion to free memory, as llama.cpp places them where nothing else is said (see `by_ratio`).

    A device that does not say what it has counts as having this machine's memory.
    """
    order = workers(figures) if order is None else order
    here = figures[local_device(figures)].free
    return by_ratio(sizes, figures, [figures[i].free or here for i in order], order, n_gpu_layers)


def fastest(
    sizes: ModelSizes,
    figures: Sequence[DeviceFigures],
    order: Sequence[int] | None = None,
    n_gpu_layers: int | None = None,
) -> Placement:
    """The placement with the least predicted time of a token within each device's memory; NotEnoughMemory if none is.

    Exact among placements that give each device of `order` (default: all) one run of layers or none, in that order, and
    the head to the last of them, to a later one, or to this machine's wherever its layers are. With `n_gpu_layers` the
    items before the last so many are on this machine and the others on the workers.

    Dynamic programming over devices: the least time of the first l layers on the first d devices, for all l at once.
    """
    home = local_device(figures)
    n_layer = sizes.n_layer
    if order is None:
        order = tuple(range(len(figures)))
    # One that had no memory for measuring its speed has none for a layer.
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
    check_memory(sizes, figures, placement)  # of what comes before `start`
    return placement


def _runs(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], order: Sequence[int], start: int, head: int | None
) -> tuple[float, list[int]]:
    """Least seconds, and the devices of the items from `start` on: layers, then the head.

    `head`: the device that has the head, whatever else it has; None: the head is the last item of the last run.
    """
    n_layer = sizes.n_layer
    n_items = n_layer + 1 if head is None else n_layer
    # What the items before each one take of memory, and read for a token.
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
    link = sizes.hidden + sizes.inputs + np.where(with_head, sizes.logits, sizes.hidden)

    best = np.full(n_items + 1, np.inf)
    best[start] = 0.0
    came_from: list[NDArray[np.intp]] = []
    for i in order:
        device = figures[i]
        seconds = read * device.reads(1)
        room = device.room
        if not device.local:
            seconds = seconds + device.round_trip + (link / device.bandwidth if device.bandwidth else 0.0)
        if i == head:
            room -= sizes.head + sizes.head_compute
        seconds = np.where(some & (memory <= room), seconds, np.inf)
        np.fill_diagonal(seconds, 0.0)  # no run here
        totals = best[:, None] + seconds
        without, best = best, totals.min(axis=0)
        # Where a device gains nothing it is left out.
        came_from.append(np.where(without <= best, last[0], totals.argmin(axis=0)))
    total = float(best[n_items])
    if head is not None:
        total += figures[head].reads(sizes.head)
        if sizes.head + sizes.head_compute + sizes.compute > figures[head].room:
            total = float("inf")
    devices: list[int] = []
    at = n_items
    if total != float("inf"):
        for i, origin in zip(reversed(order), reversed(came_from), strict=True):
            devices = [i] * (at - int(origin[at])) + devices
            at = int(origin[at])
        if head is not None:
            devices.append(head)
    return total, devices


def _no_room(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], order: Sequence[int], n_gpu_layers: int | None
) -> NotEnoughMemory:
    """What is missing where if layers went by free memory."""
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


# --- all of it --------------------------------------------------------------------------------------------------------


def place(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, among: Sequence[int] | None = None
) -> Placement:
    """The placement that the options ask for, on the devices `among` (default: all).

    Raises UnknownDevice for names of devices that are not there, NotEnoughMemory where the model does not fit. Only
    `fastest` (no `tensor_split`) needs speeds. After the loss of a device, `figures` are those from the start and
    `among` the numbers of the devices left: overrides to others have no effect, and the proportions are those of the
    devices left.
    """
    present = tuple(range(len(figures))) if among is None else tuple(among)
    home = local_device(figures)
    ratios = options.tensor_split
    n_gpu_layers = options.n_gpu_layers
    if options.devices:
        chosen = selected(figures, options.devices)
    elif ratios is None:
        chosen = tuple(range(len(figures)))
    else:
        chosen = workers(figures)
        if len(ratios) > len(chosen) and home not in chosen:
            chosen = (*chosen, home)
    order = tuple(i for i in chosen if i in present)
    if not order:
        placement = Placement((home,) * sizes.n_layer, home, home)
    elif ratios is None:
        placement = fastest(sizes, figures, order, n_gpu_layers)
    elif not ratios:
        placement = by_memory(sizes, figures, order, n_gpu_layers)
    else:
        padded = [*ratios, *(0.0 for _ in chosen)]
        kept = [padded[place] for place, i in enumerate(chosen) if i in present]
        # Devices that were to have nothing share evenly once those that were to have something are gone.
        placement = by_ratio(sizes, figures, kept if any(kept) else [1.0] * len(kept), order, n_gpu_layers)
    overrides = [(pattern, selected(figures, [name])[0]) for pattern, name in options.overrides]
    placement = override(sizes, placement, [(p, i) for p, i in overrides if i in present])
    check_memory(sizes, figures, placement)
    return placement


def idle(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], options: SplitOptions, placement: Placement
) -> dict[int, str]:
    """Why workers have nothing, in words, by their numbers."""
    chosen = selected(figures, options.devices) if options.devices else workers(figures)
    used = {*placement.layers, placement.head, *(device for _, device in placement.overrides)}
    found = {}
    for number in workers(figures):
        if number in used:
            continue
        if number not in chosen:
            found[number] = "--device does not name it"
        elif options.n_gpu_layers == 0:
            found[number] = "--n-gpu-layers 0 leaves everything on this machine"
        elif options.tensor_split:
            found[number] = "its part of --tensor-split is none, or less than a layer"
        else:
            found[number] = _why_idle(sizes, figures, placement, number)
    return found


def _why_idle(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, number: int) -> str:
    """What a token would take if it had a layer, or what it has no room for."""
    device = figures[number]
    layer = min(range(sizes.n_layer), key=lambda i: sizes.layers[i] + sizes.kv[i], default=None)
    if layer is None:
        return "the model has no layers"
    need = sizes.layers[layer] + sizes.kv[layer] + sizes.compute
    if need > device.room:
        return f"a layer takes {mib(need)}, and it has {mib(device.free)} free"
    now = predict(sizes, figures, placement).seconds
    moved = [
        replace(placement, layers=(*placement.layers[:i], number, *placement.layers[i + 1 :]))
        for i in range(sizes.n_layer)
    ]
    with_it = [seconds for move in moved if (seconds := predict(sizes, figures, move).seconds) is not None]
    if now is None or not with_it or not device.decode:
        return f"by free memory nothing is left for it: it has {mib(device.free)}"
    return (
        f"it would make answers slower: a token takes {1e3 * now:.2f} ms without it and {1e3 * min(with_it):.2f} ms "
        f"with a layer on it (it reads {device.decode / 1e9:.1f} GB/s, a round trip takes "
        f"{1e3 * device.round_trip:.2f} ms); --tensor-split gives it a part all the same"
    )


def override(sizes: ModelSizes, placement: Placement, overrides: Sequence[tuple[str, int]]) -> Placement:
    """A placement with weights whose names match a pattern on other devices.

    Where all weights of a layer, or of the head, go to one device, the layer itself moves, with its cache.
    """
    if not overrides:
        return placement
    moved = replace(placement, overrides=tuple(overrides))
    devices: dict[int, set[int]] = {}
    for role in sizes.tensors:
        devices.setdefault(role.layer, set()).add(moved.device_of(role))
    # Of a layer, or (without a number) of the head, what all of its weights have in common.
    common = {layer: next(iter(places)) for layer, places in devices.items() if len(places) == 1}
    layers = tuple(common.get(layer, device) for layer, device in enumerate(placement.layers))
    whole = replace(placement, layers=layers, head=common.get(-1, placement.head))
    moved = replace(whole, overrides=tuple(overrides))
    return moved if _elsewhere(sizes, moved) else whole


def selected(figures: Sequence[DeviceFigures], names: Sequence[str]) -> tuple[int, ...]:
    """Numbers of devices by name: "RPC0", "RPC0[host:port]", "host:port" (all devices of a worker), "CPU", "none"."""
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
