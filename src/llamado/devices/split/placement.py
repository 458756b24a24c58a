"""Layer placement and its costs: arithmetic on sizes and speeds, without models and sockets.

A model is a row of layers with the head (the output matrix and its norm) behind the last one. Each device takes a run
of them, chosen by `rules`; the embedding stays with the CPU, because a token needs only one row of it. Accelerators of
this machine (graphics cards) are devices beside the CPU, with memory of their own and a short link.

Times are those of one sequence in decode: a device reads its weights (only the chosen experts) and the cache once per
token, so its time is their bytes divided by its read rate. Each run on another machine adds a round trip and the
transfer of its inputs (the hidden state, positions, a row of the mask) and outputs (the hidden state, or the logits
behind the head). If workers pass the hidden state straight to the next one, each run adds only the way in, and the last
one also the way back: N + 1 one-way transfers for N runs instead of 2 N.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from llamado.devices.device import DeviceError
from llamado.devices.registry import DeviceOptions
from llamado.ggml.role import ModelPart, Role

ALL_LAYERS = 2**31 - 1
"""As `n_gpu_layers`: every layer and the head go to workers and accelerators."""

_MIB = 1 << 20


class NotEnoughMemory(DeviceError):
    """The model does not fit the devices. `missing`: the bytes each of them lacks, by name.

    `placement`: the placement that was tried, if there is one.
    """

    in_logs = "out of memory"

    def __init__(self, message: str, missing: Mapping[str, int], placement: Placement | None = None) -> None:
        super().__init__(message)
        self.missing = dict(missing)
        self.placement = placement


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """The user's options for dividing a model among devices."""

    rpc: tuple[str, ...] = ()
    """Endpoints of workers, in order."""
    gpus: bool = False
    """True to use the accelerators of this machine."""
    joins: bool = True
    """False if there will be no other devices than those of this machine and of `rpc`: no worker can join."""
    tensor_split: tuple[float, ...] | None = None
    """Proportions; None: the least time per token (auto), empty: by free memory."""
    n_gpu_layers: int | None = None
    """The last layers that go to workers and accelerators, with the head counted as one more; None: as `tensor_split`
    decides.
    """
    devices: tuple[str, ...] = ()
    """Names of the devices that take layers, in order; ("none",): only the CPU; empty: all."""
    main_gpu: int | None = None
    """Number of the only device that takes layers, counted over workers and then accelerators; None: all of them."""
    mode: str = "layer"
    """The value of --split-mode; "row" and "tensor" are rejected where several devices could share layers."""
    kv_offload: bool = True
    """False to keep the KV cache of all layers with the CPU, which then computes attention."""
    given: tuple[str, ...] = ()
    """Flags of the user that have no effect if there is no other device than the CPU."""
    overrides: tuple[tuple[str, str], ...] = ()
    """Regular expressions of tensor names, and the device for the weights they match; the first match counts."""
    failover: float | None = None
    """Seconds after which the layers of a lost worker move to the remaining devices; None: never."""
    wait: float = 0.0
    """Seconds to wait for workers that are unreachable at the start or lost while the model loads."""
    request_wait: float = 30.0
    """Seconds a request waits for a lost worker."""
    connect_timeout: float = 5.0
    """Most seconds for connecting to a worker, and for its handshake, each."""
    alive_timeout: float = 2.0
    """Seconds without a heartbeat after which a worker is lost."""
    ring: bool = True
    """True if workers that can do so pass hidden states straight to the next worker."""
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @property
    def networked(self) -> bool:
        """True if workers have or may get a part of the model."""
        return bool(self.rpc) or self.joins

    def device_options(self, files: Sequence[Path] = ()) -> DeviceOptions:
        """Return the options for connecting to workers. `files`: the files the weights are from."""
        return DeviceOptions(
            files=files,
            ca=self.ca,
            cert=self.cert,
            key=self.key,
            connect_timeout=self.connect_timeout,
            alive_timeout=self.alive_timeout,
            links=self.ring,
        )


MAX_SHARE = 1e15
"""Largest proportion of a device: sums of many stay finite, and bytes of memory can be given."""


def share_problem(shares: Sequence[float]) -> str:
    """Return what is wrong with the proportions of `tensor_split`; empty if they are valid."""
    for share in shares:
        if share < 0:
            return f"the share {share:g} is less than 0 (0 gives a device nothing)"
        if not share <= MAX_SHARE:
            return f"the share {share:g} is no number up to {MAX_SHARE:g}"
    return "" if any(shares) or not shares else "all shares are 0 (memory divides by free memory)"


class WeightSize(NamedTuple):
    """Bytes of a weight: all of them, and those that are read for a token."""

    held: int
    read: int


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Bytes of a model's parts. Tuples have one entry per layer."""

    layers: tuple[int, ...]
    """Weights."""
    layers_read: tuple[int, ...] = ()
    """The part of them that is read for a token; empty: all of it."""
    kv: tuple[int, ...]
    """Keys and values of all cells."""
    kv_read: tuple[int, ...] = ()
    """The part of them that attention reads for a token; empty: negligible."""
    head: int
    """Output matrix and output norm."""
    embedding: int = 0
    """Stays on this machine, mapped from the file, so it takes no memory from other uses."""
    embedding_read: int = 0
    """The part of it that is read for a token: one row."""
    hidden: int
    """Hidden state of a token, as it is sent from device to device."""
    inputs: int = 0
    """Further inputs of a token that every run of layers is sent (position, cell, row of the mask)."""
    logits: int
    """Logits of a token."""
    compute: int = 0
    """Working memory of a device that has layers or the head."""
    head_compute: int = 0
    """Additional working memory for the head."""
    tensors: Mapping[Role, WeightSize] = field(default_factory=dict, hash=False)
    """Size of each weight of the layers and the head by its role; only overrides of single weights need it."""

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def weights(self) -> int:
        """All weights but the embedding."""
        return sum(self.layers) + self.head


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """Memory and speeds of a device; the speeds are None if they were not measured."""

    name: str
    local: bool
    """The CPU of this machine: no link, and the embedding is here."""
    accelerator: bool = False
    """A device of this machine with memory of its own, such as a graphics card."""
    free: int
    total: int
    """Bytes of memory; both 0 if the device does not report them."""
    decode: float | None = None
    """Bytes of weights read per second when computing 1 token."""
    prefill: float | None = None
    """The same when computing 512 tokens at once."""
    round_trip: float = 0.0
    """Seconds from sending a small graph to receiving its result."""
    bandwidth: float | None = None
    """Bytes per second of the link; None: no link."""
    links: bool = False
    """True if it can pass results directly to other devices that can, too."""
    lacks: Mapping[int, str] = field(default_factory=dict, hash=False)
    """Layers that it cannot run, and the reason; the head counts as the layer behind the last one."""

    @property
    def remote(self) -> bool:
        """True for a device of another process."""
        return not (self.local or self.accelerator)

    @property
    def room(self) -> float:
        """Bytes that may be used; infinite if the device does not report its memory."""
        return self.free if self.total or self.free else float("inf")

    def read_seconds(self, n: int) -> float:
        """Seconds for reading `n` bytes of weights for one token."""
        if not self.decode:
            raise ValueError(f"the speed of {self.name} is not known")
        return n / self.decode

    def round_trip_seconds(self, n: int) -> float:
        """Seconds for a round trip with `n` bytes on the link."""
        return self.one_way_seconds(n) + self.one_way_seconds(0)

    def one_way_seconds(self, n: int) -> float:
        """Seconds for `n` bytes to or from it: half of the round trip, because the two directions cannot be measured
        apart.

        The same time is assumed between workers, whose links are not measured.
        """
        return 0.5 * self.round_trip + (n / self.bandwidth if self.bandwidth else 0.0)


class Stage(NamedTuple):
    """Layers from `first` up to but not including `last` on one device. `head`: True if the head follows them."""

    device: int
    first: int
    last: int
    head: bool


@dataclass(frozen=True)
class Placement:
    """Device numbers of each layer (with its part of the cache), the head and the embedding.

    `overrides` are patterns of the names of single weights that are on other devices. `cache`: the device of the whole
    cache, if it is not with the layers.
    """

    layers: tuple[int, ...]
    head: int
    embedding: int = 0
    overrides: tuple[tuple[str, int], ...] = ()
    cache: int | None = None

    def cache_of(self, layer: int) -> int:
        """Return the device of a layer's part of the cache."""
        return self.layers[layer] if self.cache is None else self.cache

    def device_of(self, role: Role) -> int:
        """Return the device of a weight in a role. Shared weights are beside the embedding, and wherever else they are
        used.
        """
        if role.part in (ModelPart.INPUT, ModelPart.SHARED):
            return self.embedding
        for pattern, device in self.overrides:
            if re.search(pattern, role.name):
                return device
        return self.head if role.part is ModelPart.OUTPUT else self.layers[role.layer]

    def home(self, roles: Sequence[Role], *, rows: bool) -> int | None:
        """Return the device on which an operation finds a weight with these roles; None if all devices have it.

        An operation that takes `rows` of an embedding is the input; a product with one makes logits.
        """
        fitting = [role for role in roles if (role.part is ModelPart.INPUT) == rows]
        role = (fitting or roles)[0]
        return None if role.part is ModelPart.SHARED else self.device_of(role)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Runs of layers on the same device, in order; the head is a run of its own if its device differs."""
        bounds = [0, *(i for i in range(1, len(self.layers)) if self.layers[i] != self.layers[i - 1]), len(self.layers)]
        stages = [Stage(self.layers[a], a, b, False) for a, b in pairwise(bounds) if a < b]
        if stages and stages[-1].device == self.head:
            stages[-1] = stages[-1]._replace(head=True)
        else:
            stages.append(Stage(self.head, len(self.layers), len(self.layers), True))
        return tuple(stages)

    @property
    def devices(self) -> tuple[int, ...]:
        """Devices that compute or hold anything, including the embedding, in ascending order."""
        caches = () if self.cache is None else (self.cache,)
        overrides = (device for _, device in self.overrides)
        return tuple(sorted({*self.layers, self.head, self.embedding, *caches, *overrides}))


@dataclass(frozen=True)
class Share:
    """One device's share of a model, and its part in the time of a token."""

    layers: tuple[int, ...]
    head: bool
    weights: int
    """Bytes, without the embedding."""
    kv: int
    compute: int
    seconds: float | None
    """For one token: reading weights and cache; None if the device's speed is unknown."""
    link_seconds: float
    """For one token: round trips and transfers."""
    link_bytes: int = 0
    """For one token: in both directions."""
    runs: int = 0
    """For one token: how many times the device runs."""

    @property
    def memory(self) -> int:
        return self.weights + self.kv + self.compute


@dataclass(frozen=True)
class Prediction:
    """The shares of all devices (in the order of the figures), and total seconds per token; None if unknown."""

    shares: tuple[Share, ...]
    seconds: float | None


def predict(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement) -> Prediction:
    """Predict the memory each device needs for a placement, and the time of a token."""
    n = len(figures)
    weights, kv, read, link = [0] * n, [0] * n, [0] * n, [0.0] * n
    carried, runs = [0] * n, [0] * n
    layers_read = sizes.layers_read or sizes.layers
    kv_read = sizes.kv_read or (0,) * sizes.n_layer
    for layer, device in enumerate(placement.layers):
        weights[device] += sizes.layers[layer]
        read[device] += layers_read[layer]
        kv[placement.cache_of(layer)] += sizes.kv[layer]
        read[placement.cache_of(layer)] += kv_read[layer]
    weights[placement.head] += sizes.head
    read[placement.head] += sizes.head
    stages = placement.stages
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        worker = figures[stage.device]
        runs[stage.device] += 1
        if not worker.local:
            ways = [sizes.hidden + sizes.inputs]
            # the input of the next worker is counted there
            if following is None or not (worker.links and figures[following.device].links):
                ways.append(sizes.logits if stage.head else sizes.hidden)
            link[stage.device] += sum(map(worker.one_way_seconds, ways))
            carried[stage.device] += sum(ways)
    crossings: set[tuple[int, int, int]] = set()
    for role, size in moved_weights(sizes, placement):
        host, other = _host(placement, role), placement.device_of(role)
        for device, sign in ((host, -1), (other, 1)):
            weights[device] += sign * size.held
            read[device] += sign * size.read
        crossings.add((host, other, role.layer))
    for host, other, _ in crossings:
        # The hidden state goes there and comes back, counted once per layer; only the graph has the real number.
        for device in (other, host):
            if not figures[device].local:
                link[device] += figures[device].round_trip_seconds(2 * sizes.hidden)
                carried[device] += 2 * sizes.hidden
                runs[device] += 1
    if figures[placement.embedding].decode:  # too little to require a measured speed
        read[placement.embedding] += sizes.embedding_read
    shares = []
    for i, device_figures in enumerate(figures):
        layers = tuple(layer for layer, device in enumerate(placement.layers) if device == i)
        head = placement.head == i
        compute = (sizes.compute if layers or head or weights[i] or kv[i] else 0) + (sizes.head_compute if head else 0)
        seconds = 0.0 if not read[i] else device_figures.read_seconds(read[i]) if device_figures.decode else None
        shares.append(Share(layers, head, weights[i], kv[i], compute, seconds, link[i], carried[i], runs[i]))
    known = [share.seconds for share in shares if share.seconds is not None]
    total = sum(known) + sum(link) if len(known) == n else None
    return Prediction(tuple(shares), total)


def _host(placement: Placement, role: Role) -> int:
    """Device of the layer, or the head, that a weight is part of."""
    return placement.head if role.part is ModelPart.OUTPUT else placement.layers[role.layer]


def moved_weights(sizes: ModelSizes, placement: Placement) -> list[tuple[Role, WeightSize]]:
    """Return the weights that are not on the device of their layer or head."""
    if not placement.overrides:
        return []
    return [(role, size) for role, size in sizes.tensors.items() if placement.device_of(role) != _host(placement, role)]


def fits(sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement) -> bool:
    """Return True if every device has the memory that a placement needs there."""
    shares = predict(sizes, figures, placement).shares
    return all(share.memory <= device.room for device, share in zip(figures, shares, strict=True))


def check_memory(
    sizes: ModelSizes, figures: Sequence[DeviceFigures], placement: Placement, *, most: int | None = None
) -> None:
    """Raise `NotEnoughMemory` if a device has less memory than a placement needs there.

    `most`: the largest `n_gpu_layers` with which accelerators have room.
    """
    shares = predict(sizes, figures, placement).shares
    short = [(device, share) for device, share in zip(figures, shares, strict=True) if share.memory > device.room]
    if not short:
        return
    alone = len(figures) == 1
    helps = ["another machine (--rpc HOST:PORT)" if alone else "another --tensor-split, one more worker (--rpc)"]
    if most is not None:
        helps = [f"-ngl {most} (the most that fits)"]
    if all(share.weights < device.room for device, share in short):  # otherwise no cache is small enough
        helps = ["a smaller context (-c)", "a smaller K/V cache (-ctk q8_0 -ctv q8_0)", *helps]
    helps.append("a smaller quantization of the model")
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


def describe_parts(placement: Placement) -> dict[int, str]:
    """Describe what each device has, such as "layers 0 to 3 and 8 and the head". Devices that have nothing are left
    out.
    """
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


def describe_layers(layers: Sequence[int]) -> str:
    """Describe ascending layers as runs, such as "layers 0 to 3 and 8"."""
    bounds = [0, *(i for i in range(1, len(layers)) if layers[i] != layers[i - 1] + 1), len(layers)]
    runs = [f"{layers[a]} to {layers[b - 1]}" if b > a + 1 else f"{layers[a]}" for a, b in pairwise(bounds) if a < b]
    return f"layer{'' if len(layers) == 1 else 's'} {' and '.join(runs)}"


def mib(n: float) -> str:
    """Format bytes as MiB."""
    return f"{n / _MIB:,.0f} MiB" if n >= 10 * _MIB or n == 0 else f"{n / _MIB:,.1f} MiB"
