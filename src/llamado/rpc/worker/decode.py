"""Decoding of graphs: TENSOR records to a ggml Graph whose tensors are bound to a client's regions.

The records are untrusted. Whole columns are checked at once, since a graph has a thousand tensors and delays the first
token; then one object is made for each tensor. A decoded Graph has known types and operations, every node after
its sources, and every bound tensor inside a region of the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.errors import ShapeError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import MAX_SRC, VIEW_OPS, Op, TensorFlag
from llamado.ggml.shapes import check_result
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.rpc import wire
from llamado.rpc.worker.activity import tokens_of
from llamado.rpc.worker.memory import Region

MAX_NODES = 16384
"""llama.cpp's largest graphs have some 6,000."""
MAX_VIEWS = 64
"""Deepest chain of views; ggml refers every view to the owner of the memory."""
_MOST_ELEMENTS = 1 << 40
_OVERLAP = 64
"""Most reads of the same byte by one source; windows of a convolution overlap."""

_TYPES: list[TensorType | None] = [None] * 256
for _type in TensorType:
    _TYPES[_type] = _type
_BLOCK = np.array([t.block_size if t is not None else 0 for t in _TYPES], np.int64)
_BYTES = np.array([t.block_bytes if t is not None else 0 for t in _TYPES], np.int64)
_OPS = [Op(i) for i in range(max(Op) + 1)]
_IS_VIEW = np.array([op in VIEW_OPS for op in _OPS])
_COMPUTE, _OUTPUT = int(TensorFlag.COMPUTE), int(TensorFlag.OUTPUT)
assert wire.TENSOR.fields is not None
_PARAMS_AT = wire.TENSOR.fields["op_params"][1]


@dataclass(eq=False)
class DecodedGraph:
    """A graph ready to run. `regions`: ptrs of the memory it uses."""

    graph: Graph
    request: wire.GraphCompute
    regions: frozenset[int] = frozenset()

    @property
    def payload(self) -> bytes:
        """The graph's bytes, without its uid."""
        return self.request.payload

    @cached_property
    def empty(self) -> bool:
        """True if the graph has nothing to compute."""
        return all(node.is_noop for node in self.graph.nodes)

    @cached_property
    def n_tokens(self) -> int:
        """Tokens that the graph computes, for the log."""
        return tokens_of(self.graph)


def tensor_bytes(tensor: wire.WireTensor) -> int:
    """Return the bytes of a tensor, gaps included. Raises WireError for an impossible one."""
    kind = _TYPES[tensor.type] if tensor.type < len(_TYPES) else None
    if kind is None:
        raise wire.WireError(f"tensor {_text(tensor.name)}: type {tensor.type} is not known")
    if tensor.ne[0] % kind.block_size:
        raise wire.WireError(
            f"tensor {_text(tensor.name)}: a row of {tensor.ne[0]} is no whole number of {kind.name} blocks"
        )
    return Tensor(kind, tensor.ne, tensor.nb).nbytes


def decode(request: wire.GraphCompute, regions: Mapping[int, Region]) -> DecodedGraph:
    """Decode a request. `regions`: the client's, by ptr. Raises WireError with the tensor and the reason."""
    return _Decoder(request, regions).decode()


class _Decoder:
    def __init__(self, request: wire.GraphCompute, regions: Mapping[int, Region]) -> None:
        self.request, self.regions, self.records = request, regions, request.tensors
        self.n = len(request.tensors)

    def decode(self) -> DecodedGraph:
        request, records, n = self.request, self.records, self.n
        if not 0 < len(request.nodes) <= MAX_NODES:
            raise wire.WireError(f"a graph of {len(request.nodes)} nodes; 1 to {MAX_NODES} are accepted")
        sizes = self._check_layouts()
        index = _Index(records["id"])
        nodes = index.find(request.nodes)
        if (nodes < 0).any():
            raise wire.WireError(f"node {request.nodes[nodes < 0][0]:#x} is not among the graph's tensors")
        position = np.full(n, -1, np.int64)
        position[nodes] = np.arange(len(nodes))
        if len(np.unique(nodes)) != len(nodes):
            raise wire.WireError("a tensor is a node twice")
        sources = index.find(records["src"].reshape(-1)).reshape(n, MAX_SRC)
        self._check_found(sources, records["src"], "source")
        owners = index.find(records["view_src"])
        self._check_found(owners[:, None], records["view_src"][:, None], "view_src")
        self._check_order(nodes, sources, position)
        offsets = self._bind(sizes)
        roots, inside = self._resolve_views(owners, offsets, sizes)
        return self._build(nodes, sources, position, roots, inside, offsets, sizes)

    # --- whole columns ----------------------------------------------------------------------------------------------
    def _fail(self, bad: NDArray[np.bool_], why: str | Callable[[Any], str]) -> None:
        """Raise WireError for the first tensor that is `bad`."""
        if bad.any():
            record = self.records[int(np.argmax(bad))]
            text = why if isinstance(why, str) else why(record)
            raise wire.WireError(f"tensor {_text(record['name'])}: {text}")

    def _check_layouts(self) -> NDArray[np.int64]:
        """Check types, operations, shapes and strides. Returns the sizes of the tensors in bytes, i64[n]."""
        records = self.records
        types = records["type"]
        known = np.minimum(types, len(_TYPES) - 1)
        block, size = _BLOCK[known], _BYTES[known]
        self._fail((types >= len(_TYPES)) | (block == 0), lambda r: f"type {r['type']} is not known")
        self._fail(records["op"] >= len(_OPS), lambda r: f"operation number {r['op']} is not one of ggml's")
        ne, nb = records["ne"].astype(np.int64), records["nb"].astype(np.int64)
        self._fail(ne[:, 0] % block != 0, lambda r: f"a row of {r['ne'][0]} is no whole number of blocks")
        self._fail((ne[:, 0] > block) & (nb[:, 0] < size), lambda r: f"elements {r['nb'][0]} bytes apart overlap")
        # Floats: products of four 32-bit numbers overflow 64 bits.
        elements = ne.astype(np.float64).prod(axis=1)
        steps = nb.astype(np.float64)
        first = np.where(block > 1, ne[:, 0] // block * steps[:, 0], size + (ne[:, 0] - 1) * steps[:, 0])
        span = first + ((ne[:, 1:] - 1) * steps[:, 1:]).sum(axis=1)
        empty = (ne == 0).any(axis=1)
        self._fail(
            ~empty & ((span >= _MOST_ELEMENTS) | (elements >= _MOST_ELEMENTS)),
            lambda r: f"shape {r['ne'].tolist()} with strides {r['nb'].tolist()} is larger than any memory",
        )
        sizes = np.where(empty, 0, span).astype(np.int64)
        dense = elements / block * size
        self._fail(
            ~empty & (dense > _OVERLAP * sizes.astype(np.float64)),
            lambda r: f"shape {r['ne'].tolist()} with strides {r['nb'].tolist()} reads the same bytes over and over",
        )
        computed = ~_IS_VIEW[records["op"]] & (records["op"] != Op.NONE) & ((records["flags"] & _COMPUTE) != 0)
        self._fail(
            computed & ~empty & (dense > sizes),
            lambda r: f"the rows of a result with shape {r['ne'].tolist()} and strides {r['nb'].tolist()} overlap",
        )
        return sizes

    def _check_found(self, found: NDArray[np.int64], ids: NDArray[np.uint64], what: str) -> None:
        missing = (found < 0) & (ids != 0)
        self._fail(missing.any(axis=1), f"its {what} is not among the graph's tensors")

    def _check_order(self, nodes: NDArray[np.int64], sources: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Check that every node comes after the nodes it reads. Only CPY may name itself, as its destination."""
        read = sources[nodes]
        when = np.where(read >= 0, position[read], -1)
        own = np.arange(len(nodes))[:, None]
        late = when >= own
        itself = read == nodes[:, None]
        itself[:, [0, *range(2, MAX_SRC)]] = False
        late &= ~(itself & (self.records["op"][nodes] == Op.CPY)[:, None])
        if late.any():
            node, source = np.argwhere(late)[0]
            reader, source = nodes[node], read[node, source]
            raise wire.WireError(
                f"tensor {_text(self.records['name'][reader])} reads {_text(self.records['name'][source])}, which is "
                "not computed before it"
            )

    def _bind(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the offsets of the tensors in their regions, −1 without a place, i64[n]."""
        ptrs, data = self.records["buffer"], self.records["data"]
        self._fail((ptrs == 0) & (data != 0), "it has an address but no buffer")
        offsets = np.full(self.n, -1, np.int64)
        for ptr in np.unique(ptrs).tolist():
            if not ptr:
                continue
            mine = ptrs == ptr
            region = self.regions.get(ptr)
            if region is None:
                self._fail(mine, f"buffer {ptr:#x} is not one of this connection's")
                continue
            start = data[mine] - np.uint64(region.base)  # wraps around below the base, far beyond the end
            outside = np.zeros(self.n, np.bool_)
            limit = np.uint64(region.size)
            size = np.minimum(sizes[mine].astype(np.uint64), limit + np.uint64(1))
            outside[mine] = (start > limit) | (size > limit) | (start > limit - np.minimum(size, limit))
            self._fail(outside, f"it does not lie inside its buffer of {region.size} bytes")
            offsets[mine] = start.astype(np.int64)
        return offsets

    def _resolve_views(
        self, owners: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the owner of each tensor's memory (the tensor itself if it is no view) and the offset in it, i64[n].

        A view whose place differs from its owner's counts as an owner itself.
        """
        records, n = self.records, self.n
        steps = records["view_offs"]
        self._fail((owners >= 0) & (steps > _MOST_ELEMENTS), lambda r: f"a view {r['view_offs']} bytes in")
        roots = np.arange(n)
        inside = np.zeros(n, np.int64)
        at = steps.astype(np.int64)
        for _ in range(MAX_VIEWS):
            next_ = owners[roots]
            more = next_ >= 0
            if not more.any():
                break
            inside[more] += at[roots[more]]
            roots[more] = next_[more]
        else:
            self._fail(owners[roots] >= 0, f"a view of a view, more than {MAX_VIEWS} deep or in a circle")
        view = roots != np.arange(n)
        placed, owned = offsets >= 0, offsets[roots] >= 0
        same = self.records["buffer"] == self.records["buffer"][roots]
        agrees = same & (offsets[roots] + inside == offsets)
        alone = view & placed & ~(owned & agrees)
        roots[alone], inside[alone] = np.flatnonzero(alone), 0
        view &= ~alone
        # A view without a place of its own lies inside its owner.
        self._fail(
            view & ~placed & (inside + sizes > sizes[roots]),
            lambda r: f"a view outside the tensor of {r['view_src']:#x}",
        )
        return roots, inside

    def _unplaced(
        self, runs: NDArray[np.bool_], nodes: NDArray[np.int64], sources: NDArray[np.int64],
        roots: NDArray[np.int64], offsets: NDArray[np.int64],
    ) -> NDArray[np.bool_]:  # fmt: skip
        """Return a mask of placed results that are not needed after the graph, bool[n].

        A ggml program places every activation. One that is no output, and that this graph reads as often as the
        program's whole graph (`use_count`), need not be in memory at all; ggml's back ends fuse operations by the same
        rule. The device may then place it itself, or keep it in registers only.
        """
        records = self.records
        read = sources[nodes]
        uses = np.bincount(read[read >= 0], minlength=self.n)
        listed = np.zeros(self.n, np.bool_)
        listed[nodes] = True
        used = uses.copy()
        used[nodes] -= (read == nodes[:, None]).sum(axis=1)  # a cast has itself as a source
        private = listed & (records["use_count"] == uses) & (used > 0) & ((records["flags"] & _OUTPUT) == 0)
        is_view = _IS_VIEW[records["op"]]
        unplaced: NDArray[np.bool_] = private & runs & ~is_view & (roots == np.arange(self.n)) & (offsets >= 0)
        unplaced[roots[~private]] = False
        # A view with another owner than its source would read the old place.
        views = nodes[is_view[nodes]]
        seen = sources[views]
        apart = (seen >= 0) & (roots[seen] != roots[views][:, None])
        unplaced[roots[seen[apart]]] = False
        # A program that stops after a node to inspect it (llama-imatrix) inspects the node's sources, too.
        final = sources[nodes[-1]]
        unplaced[roots[final[final >= 0]]] = False
        return unplaced

    def _peak(
        self, which: NDArray[np.bool_], nodes: NDArray[np.int64], sources: NDArray[np.int64],
        position: NDArray[np.int64], roots: NDArray[np.int64], sizes: NDArray[np.int64],
    ) -> int:  # fmt: skip
        """Return the most bytes of the tensors in `which` that are needed at the same time."""
        if not which.any():
            return 0
        last = position.copy()
        read = sources[nodes]
        reader = np.broadcast_to(np.arange(len(nodes))[:, None], read.shape)
        np.maximum.at(last, roots[read[read >= 0]], reader[read >= 0])
        change = np.zeros(len(nodes) + 1)
        np.add.at(change, position[which], sizes[which])
        np.subtract.at(change, last[which] + 1, sizes[which])
        return int(change.cumsum().max())

    # --- one by one -------------------------------------------------------------------------------------------------
    def _build(
        self, nodes: NDArray[np.int64], sources: NDArray[np.int64], position: NDArray[np.int64],
        roots: NDArray[np.int64], inside: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64],
    ) -> DecodedGraph:  # fmt: skip
        records, n = self.records, self.n
        runs = (position >= 0) & ((records["flags"] & _COMPUTE) != 0)
        # Views of memory on other devices may be nodes if no node here reads them (-nkvo).
        read = sources[nodes[runs[nodes] & ~_IS_VIEW[records["op"][nodes]]]]
        read = read[read >= 0]
        missing = np.zeros(n, np.bool_)
        computed = runs & ~_IS_VIEW[records["op"]]
        missing[read] = (offsets[roots[read]] < 0) & ~computed[roots[read]] & (sizes[read] > 0)
        self._fail(missing, "it has no memory, and nothing computes it")
        unplaced = self._unplaced(runs, nodes, sources, roots, offsets)
        ptrs = np.unique(records["buffer"][unplaced])
        if self._peak(unplaced, nodes, sources, position, roots, sizes) > sum(
            self.regions[p].size for p in ptrs.tolist()
        ):
            unplaced[:] = False  # their places overlap, so this is no plan of ggml's
        offsets = np.where(unplaced, -1, offsets)
        tensors = self._tensors(runs, offsets)
        for i in np.flatnonzero(roots != np.arange(n)).tolist():
            tensor = tensors[i]
            tensor.view_src, tensor.view_offs, tensor.buffer, tensor.offset = tensors[roots[i]], int(inside[i]), None, 0
        lengths = ((sources >= 0) * np.arange(1, MAX_SRC + 1)).max(axis=1).tolist()
        rows, run = sources.tolist(), runs.tolist()
        graph = Graph()
        add = graph.nodes.append
        for i in nodes.tolist():
            if run[i]:
                node = tensors[i]
                node.src = tuple([tensors[s] if s >= 0 else None for s in rows[i][: lengths[i]]])
                self._check_node(node)
                add(node)
        _check_views(graph)
        used = frozenset(p for p in np.unique(records["buffer"]).tolist() if p)
        return DecodedGraph(graph, self.request, used)

    def _tensors(self, runs: NDArray[np.bool_], offsets: NDArray[np.int64]) -> list[Tensor]:
        """Return one tensor per record, without views and sources. Tensors that are not computed are data."""
        records, payload = self.records, self.request.payload
        at = len(payload) - self.n * wire.TENSOR.itemsize + _PARAMS_AT
        regions = self.regions
        columns = (records["type"], records["ne"], records["nb"], np.where(runs, records["op"], int(Op.NONE)),
                   records["flags"], records["name"], records["buffer"], offsets)  # fmt: skip
        made = []
        for type_, ne, nb, op, flags, name, ptr, offset in zip(*[c.tolist() for c in columns], strict=True):
            kind = _TYPES[type_]
            assert kind is not None
            tensor = Tensor(kind, tuple(ne), tuple(nb), _OPS[op], (), payload[at : at + 64], None, 0, _text(name))
            tensor.flags = flags
            if offset >= 0:
                tensor.buffer, tensor.offset = regions[ptr].buffer, offset
            made.append(tensor)
            at += wire.TENSOR.itemsize
        return made

    def _check_node(self, node: Tensor) -> None:
        unplaced = node.view_src is None and node.buffer is None
        if unplaced and node.op is not Op.NONE and node.op not in VIEW_OPS and not node.is_contiguous():
            # the device reuses memory of other graphs here, so a result must cover its whole place
            raise wire.WireError(f"tensor {node.name or '?'}: a result without a place has gaps")
        if 0 not in node.ne:
            try:
                check_result(node)
            except ShapeError as error:
                raise wire.WireError(f"tensor {node.name or '?'}: {error}") from None


class _Index:
    """Positions of tensors by id."""

    def __init__(self, ids: NDArray[np.uint64]) -> None:
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]
        if len(ids) and not self._sorted[0]:
            raise wire.WireError("a tensor with the id 0, which means none")
        twice: NDArray[np.bool_] = self._sorted[1:] == self._sorted[:-1]
        if twice.any():
            raise wire.WireError(f"two tensors with the id {self._sorted[1:][twice][0]:#x}")

    def find(self, ids: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the positions of ids, −1 for unknown ones."""
        if not len(self._sorted):
            return np.full(len(ids), -1, np.int64)
        at = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        return np.where(self._sorted[at] == ids, self._order[at], -1)


def _check_views(graph: Graph) -> None:
    """Raise WireError for chains of views that are too deep for the compiler."""
    depth: dict[Tensor, int] = {}
    for node in graph.nodes:
        if node.op in VIEW_OPS:
            depth[node] = deep = 1 + max([depth.get(s, 0) for s in node.src if s is not None], default=0)
            if deep > MAX_VIEWS:
                raise wire.WireError(f"tensor {node.name}: a view of a view, more than {MAX_VIEWS} deep")


def _text(name: bytes) -> str:
    return name.split(b"\0", 1)[0].decode("utf-8", "replace") or "?"
