"""GRAPH_COMPUTE: a graph as bytes, without a copy of its arrays.

`payload` is always protocol 7.0's: `device u32 | n_nodes u32 | nodes u64[] | n_tensors u32 | TENSOR[]`. On the wire 8.0
has the graph's `uid u64` behind the device.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.rpc.wire.messages import TENSOR, Command, GraphCompute, WireError

__all__ = ["graph_pieces", "graph_request", "read_graph"]

HEAD = struct.Struct("<BQ")
"""Command and payload size in front of every request."""
_COUNTS = struct.Struct("<II")
_U32 = struct.Struct("<I")
_UID = struct.Struct("<Q")


def graph_request(device: int, nodes: NDArray[np.uint64], tensors: NDArray[Any], uid: int = 0) -> GraphCompute:
    """Return a GRAPH_COMPUTE of ids u64[n_nodes] and TENSOR[n_tensors]."""
    payload = b"".join(
        (_COUNTS.pack(device, len(nodes)), nodes.astype("<u8").tobytes(), _U32.pack(len(tensors)), tensors.tobytes())
    )
    return read_graph(payload, uid)


def read_graph(payload: bytes, uid: int = 0) -> GraphCompute:
    """Return the graph in a payload, without a copy. Raises WireError if its counts do not fit its size."""
    size = len(payload)
    if size < _COUNTS.size + _U32.size:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes is too short")
    device, n_nodes = _COUNTS.unpack_from(payload)
    at = _COUNTS.size + 8 * n_nodes
    if size < at + _U32.size:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes cannot hold {n_nodes} nodes")
    n_tensors = _U32.unpack_from(payload, at)[0]
    if size != at + _U32.size + n_tensors * TENSOR.itemsize:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes does not hold {n_nodes} nodes and {n_tensors} tensors")
    nodes = np.frombuffer(payload, "<u8", n_nodes, _COUNTS.size)
    tensors = np.frombuffer(payload, TENSOR, n_tensors, at + _U32.size)
    return GraphCompute(device, nodes, tensors, payload, uid)


def graph_pieces(payload: bytes, uid: int, *, has_uid: bool) -> tuple[bytes | memoryview, ...]:
    """Return the bytes of GRAPH_COMPUTE in pieces to send one after another. `has_uid`: in protocol 8.0's layout."""
    if not has_uid:
        return HEAD.pack(Command.GRAPH_COMPUTE, len(payload)), payload
    head = HEAD.pack(Command.GRAPH_COMPUTE, len(payload) + _UID.size)
    return head + payload[: _U32.size] + _UID.pack(uid), memoryview(payload)[_U32.size :]


class GraphLayout:
    """A graph, in protocol 8.0 with its uid. Reading checks the size."""

    size = None

    def __init__(self, *, has_uid: bool) -> None:
        self._has_uid = has_uid

    def pack(self, values: Any) -> bytes:
        head, rest = graph_pieces(values.payload, values.uid, has_uid=self._has_uid)
        return b"".join((head[HEAD.size :], rest))

    def unpack(self, payload: bytes) -> Sequence[Any]:
        uid = 0
        if self._has_uid:
            if len(payload) < _U32.size + _UID.size:
                raise WireError(f"GRAPH_COMPUTE of {len(payload)} bytes is too short")
            uid = _UID.unpack_from(payload, _U32.size)[0]
            payload = payload[: _U32.size] + payload[_U32.size + _UID.size :]
        graph = read_graph(payload, uid)
        return graph.device, graph.nodes, graph.tensors, graph.payload, graph.uid

    def fault(self, size: int) -> str | None:
        return None
