"""Encoder graphs in segments: between two of them the engine's thread can do something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamado.devices.device import Buffer, Device
from llamado.devices.split.partition import GraphPart, crossing_bytes, cut, operations
from llamado.ggml.graph import Graph, new_tensor
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_OTHER = 16
"""Cost of an element of other operations, in floating-point operations of a product."""
_MOST_SEGMENTS = 256
_LEAST_COST = 2e9
"""Least cost of a segment: some hundredths of a second on a slow machine."""


def cost_of(node: Tensor) -> int:
    """Return about how many floating-point operations an operation takes."""
    a, b = node.source(0), node.source(1)
    if node.op is Op.MUL_MAT and a is not None:
        return 2 * a.ne[0] * node.nelements
    if node.op is Op.FLASH_ATTN_EXT and a is not None and b is not None:
        return 4 * a.nelements * b.ne[1]
    return _OTHER * node.nelements


def cut_points(costs: Sequence[int], crossing: Sequence[int], most: float) -> list[int]:
    """Return the number of the segment of each operation. A segment costs at most `most`, unless it is one operation.

    `crossing[k]`: bytes that cross a cut before operation k. Each segment ends where the fewest do, in its second half.
    """
    numbers: list[int] = []
    while len(numbers) < len(costs):
        start, total = len(numbers), 0
        ends: list[int] = []
        for end in range(start + 1, len(costs) + 1):
            total += costs[end - 1]
            if total > most and end > start + 1:
                break
            if 2 * total < most:
                ends.clear()
            ends.append(end)
        stop = ends[-1] if ends[-1] == len(costs) else min(ends, key=lambda end: (crossing[end], -end))
        numbers += [numbers[-1] + 1 if numbers else 0] * (stop - start)
    return numbers


class SegmentedGraph:
    """A graph on a device, cut into segments; `costs` are theirs.

    `inputs` and `outputs` are bound tensors by name. The memory is allocated once; `free` releases it.
    """

    def __init__(self, device: Device, graph: Graph) -> None:
        self._device = device
        nodes = operations(graph)
        costs = [cost_of(node) for node in nodes]
        most = max(sum(costs) / _MOST_SEGMENTS, _LEAST_COST)
        numbers = cut_points(costs, crossing_bytes(nodes), most)
        self.costs = [0] * (numbers[-1] + 1)
        for number, cost in zip(numbers, costs, strict=True):
            self.costs[number] += cost
        parts = cut(graph, numbers)
        self.graphs = [part.graph for part in parts]
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        for part in parts:
            part.graph.compact()
            for name, tensor in part.graph.inputs.items():
                self.inputs.setdefault(name, tensor)
            self.outputs |= {name: tensor for name, tensor in part.graph.outputs.items() if name in graph.outputs}
        places, place_of = _crossing_places(parts, self.outputs)
        self._buffers: list[Buffer] = device.place([*self.inputs.values(), *self.outputs.values(), *places])
        for part in parts:
            for name, tensor in part.graph.inputs.items():
                _bind(tensor, self.inputs[name])
            for name, tensor in (*part.gives.items(), *part.takes.items()):
                _bind(tensor, place_of[name])

    def prepare(self) -> None:
        """Do the one-time work of the first run."""
        for graph in self.graphs:
            self._device.prepare(graph)

    def free(self) -> None:
        """Release the memory."""
        self._device.drop_graphs(self.graphs)
        for buffer in self._buffers:
            buffer.free()


def _crossing_places(
    parts: Sequence[GraphPart], outputs: Mapping[str, Tensor]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return places for the results that cross cuts, and the place of each by name.

    A place is used again once no later segment needs its contents. An output of the whole graph has its own.
    """
    last = {name: i for i, part in enumerate(parts) for name in part.takes}
    kept = {id(tensor): tensor for tensor in outputs.values()}
    sizes: list[int] = []
    free_after: list[int] = []
    numbers: dict[str, int] = {}
    place_of: dict[str, Tensor] = {}
    for i, part in enumerate(parts):
        for name, tensor in part.gives.items():
            if id(tensor) in kept:
                place_of[name] = tensor
                continue
            free = [k for k, end in enumerate(free_after) if end < i]
            k = min(free, key=lambda k: abs(sizes[k] - tensor.nbytes), default=len(sizes))
            if k == len(sizes):
                sizes.append(0)
                free_after.append(0)
            sizes[k], free_after[k], numbers[name] = max(sizes[k], tensor.nbytes), last[name], k
    places = [new_tensor(TensorType.I8, size) for size in sizes]
    return places, place_of | {name: places[k] for name, k in numbers.items()}


def _bind(tensor: Tensor, owner: Tensor) -> None:
    """Bind a tensor to the memory of another one."""
    tensor.buffer, tensor.offset = owner.buffer, owner.offset
