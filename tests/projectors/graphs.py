"""Graphs of parts of encoders, computed on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass


def run(step: EncoderPass, y: Tensor, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return the rows of `y`, with the contents of the inputs, of which weights are some: float32 [ne1, ne0]."""
    device, graph = CpuDevice(1), step.graph
    graph.output("y", y)
    device.place([*graph.inputs.values(), y])
    for name, tensor in graph.inputs.items():
        array = np.ascontiguousarray(arrays[name])
        assert array.nbytes == tensor.nbytes, (name, array.shape, tensor)
        device.write(tensor, array.reshape(-1).view(np.uint8))
    device.submit(graph)
    return device.read(y, 0, y.nbytes).result().view(np.float32).reshape(-1, y.ne[0]).copy()
