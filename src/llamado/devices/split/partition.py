"""Partitioning of one graph into parts for several devices.

Operations with weights or caches run on the device that holds them. Operations between them (a sum, a norm) may run on
either side; the cut goes where the fewest bytes cross it, as at a layer's end, where only the hidden state goes on.
Tensors that cross are outputs of one part and leafs of another; the caller that runs the parts moves their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import VIEW_OPS, Op, TensorFlag
from llamado.ggml.tensor import Tensor, contiguous_strides


@dataclass(eq=False)
class GraphPart:
    """Operations that one device runs in one go, on tensors of its own.

    `device` is its number, or the number of the part if all run on one device (see `cut`). `graph.inputs` are the
    inputs of the whole graph that this part uses. `takes` are leafs to be filled with results of earlier parts, `gives`
    results that later parts take; both use the same names. `graph.outputs` holds the results in `gives` and those
    outputs of the whole graph that are computed here.
    """

    device: int
    graph: Graph = field(default_factory=Graph)
    takes: dict[str, Tensor] = field(default_factory=dict)
    gives: dict[str, Tensor] = field(default_factory=dict)


Home = Callable[[Tensor, Tensor], int | None]
"""Return the device of a weight or cache (the first tensor) that an operation (the second) reads; None for a graph
input.
"""

Own = Callable[[Tensor, int], Tensor]
"""Return the tensor that stands for a weight or cache on its device."""


def split(graph: Graph, home: Home, own: Own, first: int) -> list[GraphPart]:
    """Return the parts of a graph in execution order. Device `first` runs the operations before any weight."""
    nodes = operations(graph)
    places = _places(nodes, home, first)
    return _Partitioner(graph, nodes, places, own).parts


def operations(graph: Graph) -> list[Tensor]:
    """Return the operations of a graph in order, without views."""
    return [node for node in graph.nodes if not node.is_noop]


def cut(graph: Graph, numbers: list[int]) -> list[GraphPart]:
    """Return the parts of a graph for one device, with these ascending numbers for its `operations`.

    The parts share its weights; the caller binds the inputs of equal names, and what one part gives and another takes,
    to the same memory.
    """
    return _Partitioner(graph, operations(graph), numbers, lambda leaf, _: leaf).parts


def _data(tensor: Tensor) -> Tensor:
    """Return the operation or leaf whose result a view shows."""
    while tensor.op in VIEW_OPS or (tensor.op is Op.NONE and tensor.view_src is not None):
        source = next((s for s in tensor.src if s is not None), tensor.view_src)
        assert source is not None
        tensor = source
    return tensor


def _places(nodes: list[Tensor], home: Home, first: int) -> list[int]:
    """Return the device of each operation."""
    fixed: list[int | None] = []
    for node in nodes:
        found = {home(leaf, node) for s in node.src if s is not None for leaf in (_data(s),) if leaf.op is Op.NONE}
        devices = sorted(d for d in found if d is not None)
        if len(devices) > 1:
            raise DeviceError(f"{node.op.name} (tensor {node.name or '?'}) needs weights of two devices")
        fixed.append(devices[0] if devices else None)
    sizes = crossing_bytes(nodes)
    places: list[int] = []
    at = first
    start = 0  # first of a run of operations without weights
    for i, device in enumerate([*fixed, None]):
        if device is None and i < len(nodes):
            continue
        free = range(start, i)
        if device is None or device == at:
            places += [at for _ in free]
        else:
            # sizes[k]: bytes that cross a cut before operation k
            cut = min(range(start, i + 1), key=lambda k: (sizes[k], k))
            places += [at if k < cut else device for k in free]
        if device is not None:
            places.append(device)
            at = device
        start = i + 1
    return places


def crossing_bytes(nodes: list[Tensor]) -> list[int]:
    """Return for each k the bytes of results made before operation k and used by operation k or later."""
    number = {node: i for i, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 2)
    last: dict[Tensor, int] = {}
    for i, node in enumerate(nodes):
        for source in node.src:
            if source is not None:
                last[_data(source)] = i
    for node, i in number.items():
        if node in last:
            change[i + 1] += node.nbytes
            change[last[node] + 1] -= node.nbytes
    sizes, total = [], 0
    for delta in change[: len(nodes) + 1]:
        total += delta
        sizes.append(total)
    return sizes


class _Partitioner:
    """Copies operations into parts, each with tensors of its own."""

    def __init__(self, graph: Graph, nodes: list[Tensor], places: list[int], own: Own) -> None:
        self.parts: list[GraphPart] = []
        self._own = own
        self._inputs = {tensor: name for name, tensor in graph.inputs.items()}
        self._made: dict[Tensor, tuple[int, Tensor]] = {}  # operation → number of its part, and its copy there
        self._names: dict[Tensor, str] = {}  # operation → its name as a crossing tensor
        self._here: dict[Tensor, Tensor] = {}  # the current part's copies of leafs, views and operations
        outputs = {_data(tensor): name for name, tensor in graph.outputs.items()}
        for node, device in zip(nodes, places, strict=True):
            if not self.parts or self.parts[-1].device != device:
                self.parts.append(GraphPart(device))
                self._here = {}
            copy = self._copy(node)
            self._made[node] = len(self.parts) - 1, copy
            part = self.parts[-1].graph
            part.expand(copy)
            if node in outputs:
                part.output(outputs[node], copy)

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy an operation or view into the current part, on the current part's sources."""
        # A cast is its own second source.
        sources = [None if s is None or s is tensor else self._tensor(s) for s in tensor.src]
        copy = Tensor(
            tensor.type, tensor.ne, tensor.nb, tensor.op, tuple(sources), tensor.op_params,
            None if tensor.view_src is None else self._tensor(tensor.view_src), tensor.view_offs, tensor.name,
        )  # fmt: skip
        copy.src = tuple(copy if s is tensor else mine for s, mine in zip(tensor.src, sources, strict=True))
        copy.flags = tensor.flags & ~int(TensorFlag.OUTPUT)
        self._here[tensor] = copy
        return copy

    def _tensor(self, tensor: Tensor) -> Tensor:
        """Return the tensor that represents `tensor` in the current part."""
        found = self._here.get(tensor)
        if found is not None:
            return found
        part = self.parts[-1]
        if tensor in self._made:
            found = self._cross(tensor)
        elif tensor.src or tensor.view_src is not None:
            return self._copy(tensor)
        elif tensor in self._inputs:
            found = part.graph.input(self._inputs[tensor], tensor.type, *tensor.ne)
        else:
            found = self._own(tensor, part.device)
        self._here[tensor] = found
        return found

    def _cross(self, tensor: Tensor) -> Tensor:
        """Make a leaf of the current part for the result of an operation in an earlier part."""
        maker, copy = self._made[tensor]
        if not tensor.is_contiguous():
            raise DeviceError(f"tensor {tensor.name or '?'} has gaps and cannot go to another device")
        name = self._names.get(tensor)
        if name is None:
            giver = self.parts[maker]
            name = self._names[tensor] = f"{maker}.{len(giver.gives)}"
            giver.gives[name] = copy
            giver.graph.output(name, copy)
        leaf = Tensor(tensor.type, tensor.ne, contiguous_strides(tensor.type, tensor.ne), name=tensor.name)
        leaf.flags = int(TensorFlag.INPUT)
        self.parts[-1].takes[name] = leaf
        return leaf
