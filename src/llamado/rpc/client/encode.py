"""Tensors and graphs for the wire, numbered in ggml's order, with the worker's buffers and addresses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import MAX_NAME, MAX_SRC
from llamado.ggml.tensor import Tensor
from llamado.rpc import wire

Memory = Callable[[Tensor], tuple[int, int]]
"""Return a tensor's buffer and address on the worker, (0, 0) without memory."""

_U32 = 0xFFFFFFFF
_PARAMS = wire.TENSOR["op_params"]


def wire_tensor(tensor: Tensor, buffer: int, data: int, id: int = 1) -> wire.WireTensor:
    """Return one tensor without its sources."""
    ne, nb = tensor.ne, tensor.nb
    return wire.WireTensor(
        id=id,
        type=int(tensor.type),
        buffer=buffer,
        ne=ne,
        nb=(nb[0] & _U32, nb[1] & _U32, nb[2] & _U32, nb[3] & _U32),
        data=data,
        op=int(tensor.op),
        op_params=tensor.op_params,
        flags=tensor.flags,
        name=tensor.name.encode(),
    )


def in_order(graph: Graph) -> list[Tensor]:
    """Return all tensors of a graph in ggml's order: each after its sources and the tensor it is a view of."""
    seen: set[Tensor] = set()
    order: list[Tensor] = []
    for node in graph.nodes:
        if node in seen:
            continue
        seen.add(node)
        # A stack instead of recursion: a graph may be deeper than Python's call stack.
        path = [(node, iter((*node.src, node.view_src)))]
        while path:
            tensor, before = path[-1]
            for one in before:
                if one is not None and one not in seen:
                    seen.add(one)
                    if one.src or one.view_src is not None:
                        path.append((one, iter((*one.src, one.view_src))))
                        break
                    order.append(one)
            else:
                path.pop()
                order.append(tensor)
    return order


def wire_graph(device: int, graph: Graph, memory: Memory) -> wire.GraphCompute:
    """Return a graph as a request to one device. Raises DeviceError for strides the wire cannot carry."""
    tensors = in_order(graph)
    ids = {tensor: i for i, tensor in enumerate(tensors, 1)}
    counts = graph.use_counts()
    records = np.zeros(len(tensors), wire.TENSOR)
    records["id"] = np.arange(1, len(tensors) + 1)
    records["type"] = [t.type for t in tensors]
    places = np.array([memory(t) for t in tensors], np.uint64).reshape(-1, 2)
    records["buffer"], records["data"] = places.T
    ne = np.array([t.ne for t in tensors], np.int64).reshape(-1, 4)
    nb = np.array([t.nb for t in tensors], np.int64).reshape(-1, 4)
    for i in np.flatnonzero(((nb > _U32) & (ne > 1)).any(axis=1) | (ne > _U32).any(axis=1)):
        raise DeviceError(f"tensor {tensors[i].name or '?'} is too large for RPC: a size or stride of 4 GiB or more")
    records["ne"] = ne
    records["nb"] = nb & _U32  # a stride that nothing steps over may be cut
    records["op"] = [t.op for t in tensors]
    records["op_params"] = np.frombuffer(b"".join([t.op_params for t in tensors]), _PARAMS)
    records["flags"] = [t.flags for t in tensors]
    sources = np.zeros((len(tensors), MAX_SRC), np.uint64)
    for row, tensor in enumerate(tensors):
        for column, source in enumerate(tensor.src):
            if source is not None:
                sources[row, column] = ids[source]
    records["src"] = sources
    records["view_src"] = [0 if t.view_src is None else ids[t.view_src] for t in tensors]
    records["view_offs"] = [t.view_offs for t in tensors]
    records["name"] = [t.name.encode()[: MAX_NAME - 1] for t in tensors]
    records["use_count"] = [counts.get(t, 0) for t in tensors]
    return wire.graph_request(device, np.array([ids[t] for t in graph.nodes], np.uint64), records)
