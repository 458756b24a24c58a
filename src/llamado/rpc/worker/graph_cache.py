"""Cache of one client's graphs: the latest ones ready to run, and all graphs that it may run again by name.

In 8.0 a client names up to 1,024 graphs of a device, and the protocol cannot report a dropped one. So graphs that are
not ready any more are kept as compressed bytes and decoded again on demand.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llamado.rpc import wire
from llamado.rpc.worker.connection import ClientConnection
from llamado.rpc.worker.decode import DecodedGraph, decode
from llamado.rpc.worker.memory import Region

_READY = 64
_READY_BYTES = 32 << 20
_PACKED_BYTES = 256 << 20
"""Most bytes of one client's compressed graphs."""


@dataclass
class _NamedGraph:
    """A graph that may be run again: `ready`, or its compressed bytes. `regions`: ptrs of the buffers it uses."""

    regions: frozenset[int]
    ready: DecodedGraph | None
    packed: bytes = b""


class GraphCache:
    """Graphs of one client. `dropped` is called with each graph that is not ready any more."""

    def __init__(
        self, connection: ClientConnection, regions: Mapping[int, Region], dropped: Callable[[DecodedGraph], None]
    ) -> None:
        self._connection, self._regions, self._dropped = connection, regions, dropped
        self._ready: OrderedDict[bytes, DecodedGraph] = OrderedDict()
        self._ready_bytes = 0
        self._named: dict[int, dict[int, _NamedGraph]] = {}

    def add(self, request: wire.GraphCompute) -> DecodedGraph:
        """Return a received graph, decoding equal bytes once. Raises WireError."""
        graph = self._ready.get(request.payload)
        if graph is None:
            graph = decode(request, self._regions)
        self._keep(graph)
        protocol = self._connection.protocol
        if request.uid or not protocol.names_graphs:
            named = self._named.setdefault(request.device, {})
            if len(named) >= protocol.graphs:
                named.clear()
            named[request.uid] = _NamedGraph(graph.regions, graph)
        return graph

    def get(self, request: wire.GraphRecompute) -> DecodedGraph:
        """Return a graph by name. Raises WireError."""
        named = self._named.get(request.device, {}).get(request.uid)
        if named is None:
            which = f" {request.uid}" if self._connection.protocol.names_graphs else ""
            raise wire.WireError(
                f"GRAPH_RECOMPUTE without a graph{which}: none was sent, or a buffer it used was freed"
            )
        if named.ready is None:
            sent = wire.read_graph(zlib.decompress(named.packed))
            named.ready = self._ready.get(sent.payload) or decode(sent, self._regions)
            named.packed = b""
        self._keep(named.ready)
        return named.ready

    def free(self, ptr: int) -> None:
        """Drop the graphs that use a freed buffer."""
        for named in self._named.values():
            for uid in [uid for uid, one in named.items() if ptr in one.regions]:
                del named[uid]
        for graph in [graph for graph in self._ready.values() if ptr in graph.regions]:
            self._drop(graph)

    def clear(self) -> None:
        """Drop all graphs."""
        self._named.clear()
        while self._ready:
            self._drop(next(iter(self._ready.values())))

    def _keep(self, graph: DecodedGraph) -> None:
        """Keep a graph ready, as the last one to be dropped."""
        before = self._ready.pop(graph.payload, None)
        if before is None:
            self._ready_bytes += len(graph.payload)
        self._ready[graph.payload] = graph
        if before is not None and before is not graph:
            self._pack(before)
        while len(self._ready) > 1 and (len(self._ready) > _READY or self._ready_bytes > _READY_BYTES):
            self._drop(next(iter(self._ready.values())))

    def _drop(self, graph: DecodedGraph) -> None:
        del self._ready[graph.payload]
        self._ready_bytes -= len(graph.payload)
        self._pack(graph)

    def _pack(self, graph: DecodedGraph) -> None:
        names = [one for named in self._named.values() for one in named.values() if one.ready is graph]
        packed = zlib.compress(graph.payload, 1) if names else b""
        for one in names:
            one.ready, one.packed = None, packed
        if names:
            kept = sum(len(one.packed) for named in self._named.values() for one in named.values())
            if kept > _PACKED_BYTES:
                raise wire.WireError(f"the graphs that may be run again take more than {_PACKED_BYTES >> 20} MiB")
        self._dropped(graph)
