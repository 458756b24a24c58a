"""The check of a card when it is opened: a small graph must give the CPU's bytes.

A card, or a driver, that computes other bytes would change answers when layers move. It is not used then.
"""

from __future__ import annotations

from contextlib import closing
from functools import cache

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import Device, DeviceError
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_K, _ROWS, _COLUMNS = 512, 40, 12
"""Shape of the products: two units of weights, rows and columns that fill no tile."""
_HEAD, _HEADS, _HEADS_KV, _CELLS = 64, 4, 2, 96


def check(card: Device) -> None:
    """Raise `DeviceError` if a card fails, or computes other bytes than the CPU."""
    found = _run(card)
    wrong = [name for name, result in _expected().items() if found[name] != result]
    if wrong:
        raise DeviceError(
            f"{card.name} ({card.details}) computes other bytes than the CPU: {', '.join(wrong)}; update the NVIDIA "
            "driver, and report this with the output of `llamado doctor`"
        )


@cache
def _expected() -> dict[str, bytes]:
    """Return the bytes of the outputs that the CPU computes."""
    with closing(CpuDevice(1)) as cpu:
        return _run(cpu)


def _run(device: Device) -> dict[str, bytes]:
    """Compute the graph on a device. Return the bytes of its outputs."""
    graph, inputs = _graph()
    buffers = device.place([*inputs])
    for tensor, data in inputs.items():
        device.write(tensor, data)
    try:
        device.submit(graph)
        return {
            name: device.read(tensor, 0, tensor.nbytes).result().tobytes() for name, tensor in graph.outputs.items()
        }
    finally:
        device.drop_graphs([graph])
        for buffer in buffers:
            buffer.free()


def _graph() -> tuple[Graph, dict[Tensor, NDArray[np.uint8]]]:
    """Return the graph, and the bytes of its inputs: norms, products of few and many columns, and attention."""
    rng = np.random.default_rng(1)
    inputs: dict[Tensor, NDArray[np.uint8]] = {}

    def numbers(type: TensorType, *ne: int) -> Tensor:
        tensor = g.new_tensor(type, *ne)
        values = rng.standard_normal(tensor.nelements).astype(np.float16 if type == TensorType.F16 else np.float32)
        inputs[tensor] = values.view(np.uint8)
        return tensor

    def weights(type: TensorType, scales: int) -> Tensor:
        """Random blocks that begin with `scales` small f16."""
        tensor = g.new_tensor(type, _K, _ROWS)
        blocks = rng.integers(0, 256, (tensor.nbytes // type.block_bytes, type.block_bytes), np.uint8)
        blocks[:, : 2 * scales] = rng.uniform(0.01, 0.1, (len(blocks), scales)).astype(np.float16).view(np.uint8)
        inputs[tensor] = blocks.reshape(-1)
        return tensor

    graph = Graph()
    normed = g.mul(g.rms_norm(numbers(TensorType.F32, _K, _COLUMNS), 1e-5), numbers(TensorType.F32, _K))
    graph.output("RMS_NORM", normed)
    single = g.view_2d(numbers(TensorType.F32, _K, 1), _K, 1, 4 * _K)
    for w in (weights(TensorType.Q4_K, 2), weights(TensorType.Q8_0, 1), numbers(TensorType.F16, _K, _ROWS)):
        graph.output(f"{w.type.name} with many columns", g.mul_mat(w, normed))
        graph.output(f"{w.type.name} with one column", g.mul_mat(w, single))
    q = numbers(TensorType.F32, _HEAD, 3, _HEADS)
    k, v = (numbers(TensorType.F16, _HEAD, _CELLS, _HEADS_KV) for _ in range(2))
    graph.output("attention", g.flash_attn_ext(q, k, v, None, 0.125))
    return graph, inputs
