"""Measurement of devices: how fast they read weights, and the latency and bandwidth of their link.

Weights like the model's (zeros, so that nothing has to be sent) are multiplied with one token and with 512. The time of
a nearly empty graph is the round trip and is subtracted: every delay on the way then counts once for each run of
layers, as it does during decoding. The least of several times is used, because disturbances only make a measurement
longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from llamado.devices.device import Buffer, Device, is_accelerator
from llamado.devices.split.placement import DeviceFigures
from llamado.ggml.graph import Graph, mul_mat, new_tensor, view_1d
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

TRIAL = "speed."
"""Names of a measurement's weights begin so: the tokens that they are multiplied with belong to no client."""
WEIGHTS = 64 << 20
"""Bytes of weights read for one token: more than most caches hold."""
_PROMPT = 512
_PROMPT_WORK = 4e9  # multiplications and additions for 512 tokens: 15 to 200 ms of a CPU
_LEAST_WEIGHTS = 1 << 20
_LARGEST_WRITE = 4 << 20
_FIRST_WRITE = 256 << 10
_LONG_WRITE = 0.05  # seconds; a write that takes this long measures the link well enough
_LEAST_SHARE = 0.02  # least part of a time that counts as work after the round trip is subtracted
_THIS_MACHINE = ""


def figures_of(device: Device) -> DeviceFigures:
    """Name and memory of a device, without speeds."""
    free, total = device.memory()
    return DeviceFigures(
        name=device.name,
        local=device.local,
        accelerator=is_accelerator(device),
        free=free,
        total=total,
        links=device.links,
    )


def measure_all(
    devices: Sequence[Device], *, type: TensorType = TensorType.Q4_K, width: int = 2048, budget: float = 2.0
) -> list[DeviceFigures]:
    """Measure all devices within about `budget` seconds, plus the time of compiling kernels that do not exist yet.

    `type` and `width` (the length of rows) should resemble the model's weights. Devices of one machine share its memory
    bandwidth and are measured one after the other; different machines at the same time. Raises DeviceError.
    """
    machines: dict[str, list[int]] = {}
    for i, device in enumerate(devices):
        machines.setdefault(_machine(device), []).append(i)

    def one_machine(numbers: list[int]) -> list[tuple[int, DeviceFigures]]:
        share = budget / len(numbers)
        return [(i, measure(devices[i], type=type, width=width, budget=share)) for i in numbers]

    with ThreadPoolExecutor(max(1, len(machines)), "llamado-measure") as pool:
        found = dict(pair for pairs in pool.map(one_machine, machines.values()) for pair in pairs)
    return [found[i] for i in range(len(devices))]


def measure(
    device: Device, *, type: TensorType = TensorType.Q4_K, width: int = 2048, budget: float = 2.0
) -> DeviceFigures:
    """Measure one device; the result has no speeds if the device has too little free memory. Raises DeviceError."""
    figures = figures_of(device)
    width = -(-width // type.block_size) * type.block_size
    row = type.row_bytes(width)
    size = WEIGHTS if not figures.total else min(WEIGHTS, figures.free // 4)
    if size < max(_LEAST_WEIGHTS, 64 * row):
        return figures
    deadline = time.perf_counter() + budget
    trial = _Measurement(device, type, width, size)
    try:
        bandwidth = None if figures.local else trial.bandwidth()
        trial.touch()
        # About a third of the time for each of the three graphs, at least one run after the first.
        began = time.perf_counter()
        nothing = trial.least(trial.none, began + (deadline - began) * 0.25)
        decode = trial.least(trial.one, began + (deadline - began) * 0.6)
        prefill = trial.least(trial.many, deadline - 0.1 * budget)
    finally:
        trial.free()

    def rate(n_bytes: int, seconds: float) -> float:
        return n_bytes / max(seconds - nothing, _LEAST_SHARE * seconds, 1e-9)

    return replace(
        figures,
        decode=rate(trial.one_bytes, decode),
        prefill=rate(trial.many_bytes, prefill),
        round_trip=0.0 if figures.local else nothing,
        bandwidth=bandwidth,
    )


class _Measurement:
    """The graphs of a measurement, and their memory on a device."""

    def __init__(self, device: Device, type: TensorType, width: int, size: int) -> None:
        self._device = device
        row = type.row_bytes(width)
        rows = max(32, min(2 * width, size // row) // 32 * 32)
        self._weights = [new_tensor(type, width, rows, name=f"{TRIAL}{i}") for i in range(max(1, size // (rows * row)))]
        few = new_tensor(type, width, 32, name=f"{TRIAL}few")
        prompt_rows = max(32, min(rows, int(_PROMPT_WORK / (2 * width * _PROMPT))) // 32 * 32)
        n_prompt = max(1, min(len(self._weights), int(_PROMPT_WORK / (2 * width * _PROMPT * prompt_rows))))
        partial = [new_tensor(type, width, prompt_rows, name=f"{TRIAL}prompt.{i}") for i in range(n_prompt)]
        self._raw = new_tensor(TensorType.I8, _LARGEST_WRITE, name=f"{TRIAL}raw")
        self.none, none_bound = _graph([few], 1)
        self.one, one_bound = _graph(self._weights, 1)
        self.many, many_bound = _graph(partial, _PROMPT)
        self.one_bytes = sum(t.nbytes for t in self._weights)
        self.many_bytes = sum(t.nbytes for t in partial)
        self._touched = [*self._weights, *partial]
        self._buffers: list[Buffer] = []
        self._hidden = np.zeros(width, np.float32)
        try:
            for tensors in ([few, self._raw, *self._touched], [*none_bound, *one_bound, *many_bound]):
                self._buffers += device.place(tensors)
        except BaseException:
            self.free()
            raise

    def touch(self) -> None:
        """Make the device write to the weights: fresh memory may be one page of zeros mapped many times."""
        if self._device.zeroes_memory:
            return
        for tensor in self._touched:
            for at in range(0, tensor.nbytes, _LARGEST_WRITE):
                n = min(_LARGEST_WRITE, tensor.nbytes - at)
                self._device.copy(view_1d(self._raw, n), _raw_view(tensor, at, n))
        self._device.read(self._raw, 0, 4).result()

    def bandwidth(self) -> float:
        """Return bytes per second to the device, from writes that double in size until they take long enough."""
        device, data = self._device, np.zeros(_LARGEST_WRITE, np.uint8)
        round_trip = min(self._time(lambda: device.read(self._raw, 0, 4).result()) for _ in range(3))
        size, seconds = _FIRST_WRITE, 0.0
        while True:

            def write_and_wait(n: int = size) -> None:
                device.write(self._raw, data[:n])
                device.read(self._raw, 0, 4).result()

            seconds = max(self._time(write_and_wait) - round_trip, 1e-6)
            if seconds > _LONG_WRITE or size >= _LARGEST_WRITE:
                return size / seconds
            size *= 2

    def least(self, graph: Graph, deadline: float) -> float:
        """Return the least seconds of a graph from write to read, over at most eight runs after a first one."""
        device = self._device
        hidden, output = graph.inputs["hidden"], graph.outputs["y"]

        def run() -> None:
            # the input has to change, because a client that compares inputs would send nothing
            self._hidden[0] += 1
            device.write(hidden, self._hidden)
            device.submit(graph)
            device.read(output, 0, 4).result()

        device.prepare(graph)
        run()
        times = [self._time(run)]
        while len(times) < 8 and time.perf_counter() + times[-1] < deadline:
            times.append(self._time(run))
        return min(times)

    @staticmethod
    def _time(work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def free(self) -> None:
        for buffer in self._buffers:
            buffer.free()
        self._buffers = []


def _graph(weights: Sequence[Tensor], n_tokens: int) -> tuple[Graph, list[Tensor]]:
    """Build the graph that multiplies each weight with the same `n_tokens` columns. Return it and the tensors that need
    memory.
    """
    graph = Graph()
    # devices find the number of tokens by this name
    x = graph.input("hidden", TensorType.F32, weights[0].ne[0], n_tokens)
    y = x
    for weight in weights:
        y = graph.expand(mul_mat(weight, x, name="y"))
    graph.output("y", y)
    return graph, [x, y]


def _raw_view(tensor: Tensor, at: int, n: int) -> Tensor:
    """View `n` bytes of a bound tensor of any type."""
    raw = new_tensor(TensorType.I8, n, name=tensor.name)
    raw.buffer, raw.offset = tensor.buffer, tensor.offset + at
    return raw


def _machine(device: Device) -> str:
    host = _THIS_MACHINE if device.endpoint is None else device.endpoint.host.lower()
    return _THIS_MACHINE if host in ("localhost", "::1") or host.startswith("127.") else host
