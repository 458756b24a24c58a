"""The graph compiler: ggml graph → operations of this device.

What it fuses: chains of row operations (norm, scale, add, gate, rotation, cache write) into one kernel each
(`rows.py`); the quantisation of activations into the chain that makes them, once for all products that use them;
rotation angles once per graph; the visible range of each mask row once per graph. Views cost nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.compile import checks, copies
from llamado.devices.cpu.compile.checks import BINARY, COPIES
from llamado.devices.cpu.compile.copies import alias, made, straight
from llamado.devices.cpu.compile.program import Operation, Place, Span, Temporary
from llamado.devices.cpu.compile.rope import alibi_slopes, rope_frequencies
from llamado.devices.cpu.jit import Kernel
from llamado.devices.cpu.kernels import attention, floats, matmul, rows, sorting
from llamado.devices.cpu.kernels.activations import quantized_bytes
from llamado.devices.cpu.kernels.formats import FORMATS, in_blocks
from llamado.devices.cpu.kernels.formats.format import Blocks, Plain
from llamado.devices.cpu.kernels.maths import ALONE, GATE, UNARY
from llamado.devices.cpu.lowering import Lowering
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import VIEW_OPS, GluOp, Op, RopeMode, SortOrder, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_CHAIN_OPS = {
    *BINARY, *ALONE, Op.RMS_NORM, Op.NORM, Op.SCALE, Op.CLAMP, Op.UNARY, Op.LEAKY_RELU, Op.GLU, Op.ROPE, Op.SOFT_MAX,
    Op.GET_ROWS, Op.SET_ROWS,
}  # fmt: skip
SUPPORTED = frozenset(
    {
        *_CHAIN_OPS, *COPIES, *VIEW_OPS, Op.MUL_MAT, Op.FLASH_ATTN_EXT, Op.REPEAT, Op.CONCAT, Op.PAD, Op.SUM,
        Op.SUM_ROWS, Op.MEAN, Op.ARGMAX, Op.CUMSUM, Op.ARGSORT, Op.TOP_K,
    }
)  # fmt: skip
_MAX_STAGES = 24
"""Stages of a chain: every chain is a kernel of its own, which takes time to compile."""
_FAR = 256
"""Operations ahead at which a chain looks for the next of its own."""
_MAX_HEAD = 1024
_MANY = 32
"""Columns from which a product of plain floats expands its weights first."""
_TILE = 32
"""Queries that share one expanded key block in prompt processing."""


@dataclass(frozen=True)
class _Access:
    """Memory an operation touches: bytes `start` to `stop` of a tensor without a place yet (`base`), or absolute ones.

    `layout` says where each row lies, None where that is not known: the same for two accesses means that row i of one
    is row i of the other.
    """

    base: Tensor | None
    start: int
    stop: int
    write: bool
    layout: tuple[int, ...] | None = None

    def meets(self, other: _Access) -> bool:
        """Whether one of the two writes what the other touches."""
        return (
            (self.write or other.write)
            and self.base is other.base
            and self.start < other.stop
            and other.start < self.stop
        )


@dataclass
class _Chain:
    """A chain of row operations being built: dimensions of the rows, stages, fields of each."""

    value: Tensor  # what the row is now
    stages: list[rows.Stage] = field(default_factory=list)
    fields: dict[str, int | float | Place] = field(default_factory=dict)
    reads: list[Span] = field(default_factory=list)
    writes: list[Span] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    touched: list[_Access] = field(default_factory=list)

    def add(self, stage: rows.Stage, name: str, **fields: int | float | Place) -> None:
        prefix = f"s{len(self.stages)}_"
        self.stages.append(stage)
        self.fields.update({prefix + key: value for key, value in fields.items()})
        self.names.append(name)


class Compiler:
    """Compiles one graph. `operations` come in order; temporaries are placed later (program.py)."""

    def __init__(self, graph: Graph, lowering: Lowering, n_threads: int) -> None:
        self.graph, self.lowering, self.n_threads = graph, lowering, n_threads
        self.operations: list[Operation] = []
        self.constants: list[NDArray[Any]] = []  # kept alive as long as the program
        self.places: dict[Tensor, Temporary] = {}
        self._readers: dict[Tensor, list[Tensor]] = {}
        self._done: set[Tensor] = set()
        self._numbers = {node: i for i, node in enumerate(graph.nodes)}
        self._at = 0  # number of the node being compiled
        self._subject: Tensor | None = None  # what an error is about
        self._changes: dict[Tensor, int] = {}  # how often memory was written in place
        self._quantized: dict[tuple[Any, ...], Temporary] = {}
        self._tables: dict[tuple[Any, ...], tuple[Temporary, int]] = {}
        self._ranges: dict[tuple[Any, ...], Temporary] = {}
        self._outputs = {t.root()[0] for t in graph.outputs.values()}
        self._last_few: dict[str, int | float | Place] | None = None
        self.scratch = Temporary(0)
        self.scratch_step = 0

    # --- places ----------------------------------------------------------------------------------------------------
    def place(self, tensor: Tensor, offset: int = 0) -> Place:
        """Where a tensor's first byte is."""
        root, inside = (tensor, 0) if tensor.view_src is None else tensor.root()
        buffer = root.buffer
        if buffer is not None:
            if not isinstance(buffer, CpuBuffer):
                raise DeviceError(f"tensor {root.name or '?'} lies on another device")
            start, size = root.offset + inside, checks.extent(tensor)
            if start < 0 or start + size > buffer.size:
                raise DeviceError(
                    f"tensor {tensor.name or root.name or '?'} ends at byte {start + size} of a buffer of {buffer.size}"
                )
            return Place(None, buffer.address + start + offset)
        if root.op is Op.NONE:
            raise DeviceError(f"tensor {root.name or '?'} has no memory: bind it before the graph runs")
        whole = checks.extent(root)
        if inside < 0 or inside + checks.extent(tensor) > whole:
            raise DeviceError(f"tensor {tensor.name or '?'} lies outside tensor {root.name or '?'}")
        temporary = self.places.get(root)
        if temporary is None:
            temporary = self.places[root] = Temporary(whole, keep=root in self._outputs)
        return Place(temporary, inside + offset)

    def span(self, tensor: Tensor) -> Span:
        """The bytes of a tensor."""
        return Span(self.place(tensor), checks.extent(tensor))

    def temporary(self, size: int) -> Place:
        return Place(Temporary(size), 0)

    def _constant(self, values: NDArray[Any]) -> Place:
        self.constants.append(values)
        return Place(None, values.ctypes.data)

    # --- the walk --------------------------------------------------------------------------------------------------
    def compile(self) -> list[Operation]:
        """All operations of the graph; DeviceError names what this device cannot do."""
        checks.check_graph(self.graph)
        nodes = self.graph.nodes
        listed, waiting = set(nodes), list(reversed(nodes))
        while waiting:
            node = waiting.pop()
            for source in node.src:
                if source is not None:
                    self._readers.setdefault(source, []).append(node)
                    if source not in listed and source.op in VIEW_OPS:  # a view that is not listed is one all the same
                        listed.add(source)
                        waiting.append(source)
        for self._at, node in enumerate(nodes):
            if node not in self._done and not node.is_noop:
                self._subject = node
                try:
                    self._node(node)
                except (DeviceError, ValueError, ArithmeticError) as error:  # an operation's numbers may be anything
                    node = self._subject
                    raise DeviceError(f"{node.op.name} (tensor {node.name or '?'}): {error}") from error
        if self.scratch_step:
            # one step for all: a thread that is ahead must not meet another's scratch of the operation before
            for operation in self.operations:
                if "scratch_step" in operation.fields:
                    operation.fields["scratch_step"] = self.scratch_step
            self.scratch.size = self.scratch_step * self.n_threads
        return self.operations

    def _node(self, node: Tensor) -> None:
        checks.check_node(node)
        match node.op:
            case op if op in _CHAIN_OPS:
                if checks.is_row_operation(node):
                    self._chain(node)
                    return
                self._straightened(node)
            case Op.MUL_MAT:
                self._mul_mat(node)
            case Op.FLASH_ATTN_EXT:
                self._attention(node)
            case op if op in COPIES:
                assert node.src[0] is not None
                copies.copy(self, node.src[0], node)
            case Op.REPEAT:
                assert node.src[0] is not None
                copies.repeat(self, node.src[0], node)
            case Op.CONCAT:
                copies.concat(self, node)
            case Op.PAD:
                copies.pad(self, node)
            case Op.SUM | Op.SUM_ROWS | Op.MEAN | Op.ARGMAX | Op.CUMSUM | Op.ARGSORT | Op.TOP_K:
                self._whole_rows(node)
            case _:
                raise DeviceError("the CPU device does not have this operation")
        self._did(node)

    def _straightened(self, node: Tensor) -> None:
        """A row operation on what is not rows of f32: on copies that are, its result copied to where it belongs."""
        a, b = node.src[0], node.source(1)
        assert a is not None
        type_ = TensorType.F32
        if node.op is Op.GET_ROWS and node.type == a.type == TensorType.I32:  # moved as they are
            a = alias(a, type_, a.ne, a.nb)
            type_ = TensorType.I32
        elif node.type not in copies.WRITABLE:
            raise DeviceError(f"a result of type {node.type.name} is not supported here")
        if node.op is Op.SET_ROWS:
            if not node.has_contiguous_rows():
                raise DeviceError("rows of the target have gaps")
            result = alias(node, node.type, node.ne, node.nb)
        elif node.has_contiguous_rows() and node.type == type_:
            result = alias(node, TensorType.F32, node.ne, node.nb)
        else:
            result = made(TensorType.F32, node.ne, node.name)
        sources: tuple[Tensor | None, ...] = (*node.src[1:],)
        if node.op is Op.GLU and b is None:
            swapped = struct.unpack_from("<i", node.op_params, 4)[0]
            a = straight(self, a)
            halves = [alias(a, a.type, node.ne, a.nb, at) for at in (0, 4 * node.ne[0])]
            a, b = halves[::-1] if swapped else halves
            sources = (b,)
        elif b is not None and (node.op in BINARY or node.op is Op.GLU):
            b = straight(self, b)
            if any(m not in (1, n) for m, n in zip(b.ne, node.ne, strict=True)):
                whole = made(TensorType.F32, node.ne)
                copies.repeat(self, b, whole)
                b = whole
            sources = (b,)
        elif b is not None and node.op is Op.SOFT_MAX:
            sources = (straight(self, b), *node.src[2:])
        a = straight(self, a)
        result.op, result.src, result.op_params = node.op, (a, *sources), node.op_params
        if node.op is Op.GLU:
            result.op_params = node.op_params[:4] + bytes(4) + node.op_params[8:]
        self._chain(result)
        if result.view_src is None:
            copies.copy(self, result if type_ == TensorType.F32 else alias(result, type_, result.ne, result.nb), node)

    def _whole_rows(self, node: Tensor) -> None:
        """Sums, places of the greatest, orders."""
        a = node.src[0]
        assert a is not None
        if node.op is Op.SUM:
            whole = made(TensorType.F32, a.ne)
            copies.copy(self, a, whole)
            a = copies.in_shape(whole, (a.nelements, 1, 1, 1))
        else:
            a = straight(self, a)
        if node.op is Op.CUMSUM and node.type != TensorType.F32:
            raise DeviceError(f"a result of type {node.type.name} is not supported here")
        if not node.has_contiguous_rows():
            raise DeviceError("rows of the result have gaps")
        steps = (4, 0, 0) if node.op is Op.ARGMAX else node.nb[1:]  # its row number is dimension 0
        fields: dict[str, int | float | Place] = {"x": self.place(a), "y": self.place(node), "n": a.ne[0]}
        fields |= {f"{name}{d}": nb[d - 1] for name, nb in (("x", a.nb[1:]), ("y", steps)) for d in (1, 2, 3)}
        fields |= {f"n{d}": a.ne[d] for d in (1, 2, 3)}
        parameters: dict[str, Any] = {}
        kernel = sorting.cumulate
        if node.op in (Op.ARGSORT, Op.TOP_K):
            order = struct.unpack_from("<i", node.op_params)[0]
            parameters["falling"] = node.op is Op.TOP_K or SortOrder(order) is SortOrder.DESC
            kernel, fields["k"] = sorting.sort, node.ne[0]
        elif node.op is not Op.CUMSUM:
            kernel = sorting.reduce_rows
            parameters["kind"] = {Op.ARGMAX: "argmax", Op.MEAN: "mean"}.get(node.op, "sum")
        self.emit(kernel, parameters, fields, [self.span(a)], [self.span(node)], node.op.name)

    def _did(self, node: Tensor) -> None:
        self._done.add(node)
        if node.view_src is not None:
            root = node.root()[0]
            self._changes[root] = self._changes.get(root, 0) + 1

    def _contents(self, tensor: Tensor) -> tuple[Any, ...]:
        """A key for what a tensor's bytes are now: where, in which shape, after how many writes in place."""
        root, inside = tensor.root()
        return root, inside, tensor.ne, tensor.nb, self._changes.get(root, 0)

    def emit(
        self, kernel: Kernel, parameters: dict[str, Any], fields: dict[str, int | float | Place],
        reads: list[Span], writes: list[Span], label: str = "",
    ) -> None:  # fmt: skip
        """Appends an operation."""
        self.operations.append(Operation(kernel, parameters, fields, reads, writes, label=label))

    def _scratch(self, size: int) -> dict[str, int | float | Place]:
        """Fields of per-thread scratch. Its threads never meet, so it counts as nobody's read or write."""
        size = -(-size // 64) * 64
        self.scratch_step = max(self.scratch_step, size)
        return {"scratch": Place(self.scratch, 0), "scratch_step": size}

    def _consumers(self, tensor: Tensor) -> list[Tensor]:
        """Operations that read a tensor, also through views."""
        found: list[Tensor] = []  # once for each time it reads
        seen, waiting = {tensor}, [tensor]
        while waiting:
            for reader in self._readers.get(waiting.pop(), ()):
                if not reader.is_noop:
                    found.append(reader)
                elif reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return found

    # --- chains of row operations ------------------------------------------------------------------------------------
    def _chain(self, first: Tensor) -> None:
        chain = _Chain(first)
        node: Tensor | None = first
        source = first.src[0]
        assert source is not None
        if first.op is Op.GET_ROWS:
            self._start_get_rows(chain, first)
        else:
            self._operand(chain, ("row",), source, first if first.op is not Op.SET_ROWS else source, "row")
            chain.value = source
            self._stage(chain, first)
        chain.touched += self._accesses(first)
        self._did(first)
        chain.value = first
        while node is not None and node.op is not Op.SET_ROWS:
            consumers = self._consumers(node)
            after = self._next(chain, node, consumers)
            products = [c for c in consumers if c is not after and self._quantized_input(c, node)]
            stored = node.root()[0] in self._outputs or node.view_src is not None or node.buffer is not None
            if stored or len(consumers) - (after is not None) > len(products) or not consumers:
                self._operand(chain, ("store",), node, node, "store", write=True)
            for block in sorted({self._block(c) for c in products}):
                self._quantize_stage(chain, node, block)
            if after is not None:
                self._subject = after
                self._stage(chain, after)
                chain.touched += self._accesses(after)
                self._did(after)
                chain.value = after
            node = after
        self._finish(chain, first if first.op is not Op.SET_ROWS else source)

    def _next(self, chain: _Chain, node: Tensor, consumers: list[Tensor]) -> Tensor | None:
        """The row operation that takes over from `node`, if everything else it needs is there already."""
        if len(chain.stages) >= _MAX_STAGES:
            return None
        for reader in consumers:
            if reader in self._done or reader.op not in _CHAIN_OPS or reader.op is Op.GET_ROWS:
                continue
            if self._numbers[reader] > self._at + _FAR or not checks.is_row_operation(reader):
                continue
            if reader.op is Op.SET_ROWS:
                rows_in = reader.src[0]
                assert rows_in is not None
                whole = rows_in.root()[0] is node and rows_in.nelements == node.nelements
                if not (
                    whole and rows_in.is_contiguous() and node.is_contiguous() and rows_in.ne[2] == rows_in.ne[3] == 1
                ):
                    continue
                if rows_in is not node and (node.ne[0] * node.ne[1] != rows_in.ne[0] or node.ne[3] != 1):
                    continue
                if node.ne[0] % reader.type.block_size:
                    continue
            elif reader.ne != node.ne or node not in reader.src:
                continue
            elif reader.op in BINARY and reader.src[0] is not node:
                # only a sum or a product may take the row as its second operand
                if reader.op not in (Op.ADD, Op.MUL) or reader.src[0] is None or reader.src[0].ne != node.ne:
                    continue
            elif reader.src[0] is not node:
                continue
            if (
                all(s is None or s is node or self._is_ready(s, node) for s in reader.src)
                and self._keeps_to_rows(chain, reader)
                and self._may_come_early(reader)
            ):
                self._subject = reader
                checks.check_node(reader)
                return reader
        return None

    def _is_ready(self, tensor: Tensor, node: Tensor) -> bool:
        """Whether a tensor's bytes are there (or it is `node` itself in another shape)."""
        for _ in range(checks.MAX_VIEWS):
            if tensor.view_src is None or not (tensor.op in VIEW_OPS or tensor.op is Op.NONE):
                return tensor is node or tensor.op is Op.NONE or tensor in self._done
            tensor = next((s for s in tensor.src if s is not None), tensor.view_src)
        return False

    def _access(self, tensor: Tensor, *, write: bool = False, like: Tensor | None = None) -> _Access:
        root, start = tensor.root()
        base: Tensor | None = root
        if isinstance(root.buffer, CpuBuffer):
            base, start = None, root.buffer.address + root.offset + start
        layout = None
        if like is not None:
            steps = self._strides(tensor, like).values()
            layout = (start, tensor.ne[0], *(s if n > 1 else 0 for s, n in zip(steps, like.ne[1:], strict=True)))
        return _Access(base, start, start + checks.extent(tensor), write, layout)

    def _accesses(self, node: Tensor) -> list[_Access]:
        """What a row operation touches, row by row where the chain's rows are meant."""
        chosen = (Op.SET_ROWS, Op.GET_ROWS)
        found = [self._access(node, write=True, like=None if node.op is Op.SET_ROWS else node)]
        for i, source in enumerate(node.src):
            if source is None or (node.op is Op.SET_ROWS and i == 0):
                continue  # the rows a cache takes come in registers
            aside = node.op in chosen or (node.op in (Op.ROPE, Op.SOFT_MAX) and i > 0)
            found.append(self._access(source, like=None if aside else node))
        return found

    def _keeps_to_rows(self, chain: _Chain, reader: Tensor) -> bool:
        """Whether a chain with `reader` in it touches nothing of other rows: their threads may be anywhere."""
        return not any(
            mine.meets(theirs) and (mine.layout is None or mine.layout != theirs.layout)
            for mine in self._accesses(reader)
            for theirs in chain.touched
        )

    def _may_come_early(self, reader: Tensor) -> bool:
        """Whether `reader` may run now: nothing that stands between writes what it touches, or reads what it writes."""
        between = self.graph.nodes[self._at + 1 : self._numbers[reader]]
        others = [node for node in between if node not in self._done and not node.is_noop]
        if not others:
            return True
        mine = [self._access(reader, write=True), *(self._access(s) for s in reader.src if s is not None)]
        return not any(
            access.meets(theirs)
            for node in others
            for theirs in (self._access(node, write=True), *(self._access(s) for s in node.src if s is not None))
            for access in mine
        )

    def _strides(self, operand: Tensor, like: Tensor) -> dict[str, int]:
        """Strides of an operand over the row numbers of `like`; a dimension of one is repeated."""
        nb = [0 if operand.ne[d] == 1 and like.ne[d] != 1 else operand.nb[d] for d in (1, 2, 3)]
        for d in (1, 2, 3):
            if operand.ne[d] not in (1, like.ne[d]):
                raise DeviceError(f"{like.op.name} repeats {list(operand.ne)} over {list(like.ne)}: not supported here")
        return {"s1": nb[0], "s2": nb[1], "s3": nb[2]}

    def _operand(
        self, chain: _Chain, stage: rows.Stage, operand: Tensor, like: Tensor, name: str, *, write: bool = False
    ) -> None:
        chain.add(stage, name, x=self.place(operand), **self._strides(operand, like))
        (chain.writes if write else chain.reads).append(self.span(operand))

    def _stage(self, chain: _Chain, node: Tensor) -> None:
        """Appends the stage of one operation."""
        params = node.op_params
        match node.op:
            case Op.ADD | Op.SUB | Op.MUL | Op.DIV:
                current = chain.value
                other = node.src[1] if node.src[0] is current else node.src[0]
                assert other is not None
                kind = BINARY[node.op]
                if other.ne[0] == node.ne[0]:
                    self._operand(chain, (kind,), other, node, kind)
                else:
                    self._operand(chain, ("element", kind), other, node, kind)
            case Op.RMS_NORM | Op.NORM:
                chain.add((node.op.name.lower(),), node.op.name, eps=struct.unpack_from("<f", params)[0])
            case Op.SCALE:
                factor, bias = struct.unpack_from("<2f", params)
                chain.add(("scale",), "scale", factor=factor, bias=bias)
            case Op.CLAMP:
                low, high = struct.unpack_from("<2f", params)
                chain.add(("clamp",), "clamp", low=low, high=high)
            case Op.LEAKY_RELU:
                chain.add(("leaky_relu",), "LEAKY_RELU", slope=struct.unpack_from("<f", params)[0])
            case op if op in ALONE:
                chain.add(("unary", op.name), op.name)
            case Op.UNARY:
                function = UnaryOp(struct.unpack_from("<i", params)[0])
                if function not in UNARY:
                    raise DeviceError(f"the CPU device has no function {function.name}")
                chain.add(("unary", function.name), function.name)
            case Op.GLU:
                kind_, swapped = struct.unpack_from("<2i", params)
                gate = GluOp(kind_)
                up = node.source(1)
                if gate not in GATE or up is None or swapped:
                    raise DeviceError(f"gated activation {gate.name} of this form is not supported here")
                self._operand(chain, ("glu", gate.name), up, node, gate.name)
            case Op.ROPE:
                self._rope(chain, node)
            case Op.SOFT_MAX:
                self._soft_max(chain, node)
            case Op.SET_ROWS:
                self._set_rows(chain, node)

    def _start_get_rows(self, chain: _Chain, node: Tensor) -> None:
        table, ids = node.src[0], node.src[1]
        assert table is not None and ids is not None
        if table.type not in FORMATS:
            raise DeviceError(f"GET_ROWS from {table.type.name} is not supported here")
        chain.add(
            ("get_rows", table.type.name),
            "get_rows",
            x=self.place(table),
            **{f"nb{d}": table.nb[d] for d in (1, 2, 3)},
            ids=self.place(ids),
            **{f"id{d}": ids.nb[d - 1] for d in (1, 2, 3)},
            rows=table.ne[1],
        )
        chain.reads += [self.span(table), self.span(ids)]

    def _soft_max(self, chain: _Chain, node: Tensor) -> None:
        mask, sinks = node.source(1), node.source(2)
        scale, max_bias = struct.unpack_from("<2f", node.op_params)
        fields: dict[str, int | float | Place] = {"s1": 0, "s2": 0, "s3": 0, "m2": 1, "m3": 1}
        fields |= {"scale": scale, "mask": Place(None, 0), "slopes": Place(None, 0), "sinks": Place(None, 0)}
        if mask is not None:
            slopes = self._constant(alibi_slopes(node.ne[2], max_bias))
            fields |= {"mask": self.place(mask), "slopes": slopes, "m2": mask.ne[2], "m3": mask.ne[3]}
            fields |= {f"s{d}": mask.nb[d] for d in (1, 2, 3)}
            chain.reads.append(self.span(mask))
        if sinks is not None:
            fields["sinks"] = self.place(sinks)
            chain.reads.append(self.span(sinks))
        stage = ("soft_max", None if mask is None else mask.type.name, sinks is not None)
        chain.add(stage, "SOFT_MAX", **fields)

    def _set_rows(self, chain: _Chain, node: Tensor) -> None:
        source, ids = node.src[0], node.src[1]
        assert source is not None and ids is not None
        if node.type not in copies.WRITABLE:
            raise DeviceError(f"SET_ROWS to {node.type.name} is not supported here")
        # the row may be one head of what the cache keeps as one row
        how = "flat" if source.ne[2] * source.ne[3] == 1 else "deep"
        if chain.value.ne[0] != source.ne[0]:
            how = "heads"
        chain.add(
            ("set_rows", node.type.name, ids.type == TensorType.I64, how),
            "set_rows",
            x=self.place(node),
            **{f"nb{d}": node.nb[d] for d in (1, 2, 3)},
            ids=self.place(ids),
            **{f"id{d}": ids.nb[d - 1] for d in (1, 2, 3)},
            m2=ids.ne[1],
            m3=ids.ne[2],
            part=node.type.row_bytes(chain.value.ne[0]) if how == "heads" else 0,
            rows=node.ne[1],
        )
        chain.reads.append(self.span(ids))
        chain.writes.append(self.span(node))

    def _rope(self, chain: _Chain, node: Tensor) -> None:
        positions, factors = node.src[1], node.source(2)
        assert positions is not None
        values = struct.unpack_from("<5i6f", node.op_params)
        n_dims, mode_number, n_ctx_orig = values[1], values[2], values[4]
        mode = RopeMode(mode_number)
        if mode not in (RopeMode.NORMAL, RopeMode.NEOX):
            raise DeviceError(f"rotation mode {mode.name} is not supported here")
        key = (
            self._contents(positions), node.op_params, None if factors is None else self._contents(factors), node.ne[2]
        )  # fmt: skip
        if key not in self._tables:
            with np.errstate(all="ignore"):  # parameters may be anything
                frequencies, magnitude = rope_frequencies(n_dims, n_ctx_orig, values[5:])
            table = self.temporary(8 * node.ne[2] * (n_dims // 2))
            assert table.base is not None
            fields: dict[str, int | float | Place] = {
                "positions": self.place(positions),
                "frequencies": self._constant(frequencies),
                "factors": Place(None, 0) if factors is None else self.place(factors),
                "table": table,
                "n_tokens": node.ne[2],
                "n_pairs": n_dims // 2,
                "magnitude": magnitude,
            }
            read = [self.span(t) for t in (positions, factors) if t is not None]
            parameters = {"factored": factors is not None}
            self.emit(rows.rope_table, parameters, fields, read, [Span(table, table.base.size)])
            self._tables[key] = (table.base, 8 * (n_dims // 2))
        made, step = self._tables[key]
        chain.add(("rope", mode.name), "rope", table=Place(made, 0), step=step, n_dims=n_dims)
        chain.reads.append(Span(Place(made, 0), made.size))

    def rows(self, label: str, x: Tensor, load: rows.Stage, y: Tensor, put: rows.Stage) -> None:
        """An operation of its own that takes each row of x and puts it into y."""
        chain = _Chain(x)
        self._operand(chain, load, x, y, label)
        self._operand(chain, put, y, y, "", write=True)
        self._finish(chain, y)

    def _finish(self, chain: _Chain, shape: Tensor) -> None:
        n1, n2, n3 = shape.ne[1:]
        count = n1 * n2 * n3
        fields = chain.fields | {"n": shape.ne[0], "n1": n1, "n2": n2, "n3": n3}
        fields |= {"share": max(1, min(16, count // (4 * self.n_threads)))}
        fields |= self._scratch(4 * shape.ne[0])
        stages = tuple(chain.stages)
        self.emit(
            rows.rows_kernel(stages),
            {"stages": stages},
            fields,
            chain.reads,
            chain.writes,
            " ".join(filter(None, chain.names)),
        )

    # --- quantised activations ---------------------------------------------------------------------------------------
    def _block(self, product: Tensor) -> int:
        weights = product.src[0]
        assert weights is not None
        return weights.type.block_size

    def _quantized_input(self, product: Tensor, node: Tensor) -> bool:
        """Whether `product` multiplies quantised weights with `node` itself, row for column."""
        return product.op is Op.MUL_MAT and product.source(1) is node and node.is_contiguous() and _in_blocks(product)

    def _quantize_stage(self, chain: _Chain, node: Tensor, block: int) -> None:
        columns = node.nrows
        size = quantized_bytes(block, node.ne[0], columns, self.lowering.columns)
        target = self.temporary(size)
        assert target.base is not None
        self._quantized[self._columns(node, block)] = target.base
        chain.add(("quantize", block), "quantize", x=target, columns=columns)
        chain.writes.append(Span(target, size))

    def _columns(self, x: Tensor, block: int) -> tuple[Any, ...]:
        """A key for the quantised columns of contiguous x: its further dimensions may be cut as they like."""
        root, inside = x.root()
        return root, inside, x.ne[0], x.nrows, block, self._changes.get(root, 0)

    def _activations(self, x: Tensor, block: int) -> Temporary:
        """Quantised columns of x, made here unless the chain that computed x has."""
        key = self._columns(x, block)
        if key not in self._quantized:
            chain = _Chain(x)
            self._operand(chain, ("row",), x, x, "row")
            self._quantize_stage(chain, x, block)
            self._finish(chain, x)
        return self._quantized[key]

    # --- products ----------------------------------------------------------------------------------------------------
    def _mul_mat(self, node: Tensor) -> None:
        w, x = node.src[0], node.src[1]
        assert w is not None and x is not None
        if node.type != TensorType.F32 or not node.has_contiguous_rows():
            result = made(TensorType.F32, node.ne, node.name)
            result.op, result.src = node.op, (w, x)
            self._mul_mat(result)
            copies.copy(self, result, node)
            return
        x = straight(self, x)
        if not _in_blocks(node):
            # few rows of weights, or many matrices of them (a cache): as f32 where they are in blocks
            plain = w if _is_plain(w) and w.has_contiguous_rows() else straight(self, w)
            self._mul_mat_float(node, plain, x)
            return
        if not x.is_contiguous():
            columns_in = made(TensorType.F32, x.ne, x.name)
            copies.copy(self, x, columns_in)
            x = columns_in
        form, columns = in_blocks(w.type), x.nrows
        acts = self._activations(x, form.block)
        panels = -(-w.ne[1] // 8)
        few = columns <= matmul.SEVERAL * self.lowering.columns  # the rows pass through registers, not through scratch
        kernel = matmul.matmul_many
        parameters: dict[str, Any] = {"weights": w.type.name}
        if few:
            parameters |= {"near": 8 * w.nb[1] <= matmul.NEAR}
            kernel = matmul.matmul_several
            if columns <= self.lowering.columns:
                kernel = matmul.matmul_few
                parameters |= {"columns": columns}
        else:
            parameters |= {"panel_rows": self.lowering.panel_rows if w.ne[1] >= self.lowering.panel_rows else 8}
        fields: dict[str, int | float | Place] = {
            "w": self.place(w),
            "row_bytes": w.nb[1],
            "n_blocks": w.ne[0] // form.block,
            "n_rows": w.ne[1],
            "x": Place(acts, 0),
            "n_columns": columns,
            "y": self.place(node),
            "y_stride": node.nb[1],
            "share": max(1, min(8, panels // (16 * self.n_threads))),
        }
        if few:
            fields |= {"next": 0, "next_panels": panels, "next_row_bytes": w.nb[1]}
            if self._last_few is not None:  # the product before this one is told of it
                self._last_few |= {"next": fields["w"], "next_panels": panels, "next_row_bytes": w.nb[1]}
            self._last_few = fields
        reads = [self.span(w), Span(Place(acts, 0), acts.size)]
        self.emit(kernel, parameters, fields, reads, [self.span(node)], f"{w.type.name} {w.name}")

    def _mul_mat_float(self, node: Tensor, w: Tensor, x: Tensor) -> None:
        fields: dict[str, int | float | Place] = {
            "n": w.ne[0], "n_rows": w.ne[1], "n_columns": x.ne[1], "n2": x.ne[2], "n3": x.ne[3],
            "r2": x.ne[2] // w.ne[2], "r3": x.ne[3] // w.ne[3],
            "w": self.place(w), "w1": w.nb[1], "w2": w.nb[2], "w3": w.nb[3],
            "x": self.place(x), "x1": x.nb[1], "x2": x.nb[2], "x3": x.nb[3],
            "y": self.place(node), "y1": node.nb[1], "y2": node.nb[2], "y3": node.nb[3],
        }  # fmt: skip
        kernel = floats.matmul_float
        if x.ne[1] >= _MANY and w.ne[0] and w.ne[0] % 8 == 0 == w.ne[1] % 4:
            kernel = floats.matmul_float_many
            width = max(12, floats.STRETCH // (4 * w.ne[0]) // 3 * 3)
            fields |= {"width": width, **self._scratch(floats.many_scratch(w.ne[0], width))}
        self.emit(
            kernel, {"weights": w.type.name}, fields, [self.span(w), self.span(x)], [self.span(node)],
            f"{w.type.name} {w.name}",
        )  # fmt: skip

    # --- attention ---------------------------------------------------------------------------------------------------
    def _attention(self, node: Tensor) -> None:
        q, k, v, mask = node.src[0], node.src[1], node.src[2], node.source(3)
        assert q is not None and k is not None and v is not None
        scale, max_bias, softcap = struct.unpack_from("<3f", node.op_params)
        head_k, head_v = k.ne[0], v.ne[0]
        if max_bias or node.source(4) is not None:
            raise DeviceError("attention with ALiBi or sinks is not supported here")
        if head_k % 8 or head_v % 8 or max(head_k, head_v) > _MAX_HEAD:
            raise DeviceError(f"attention with heads of {head_k} and {head_v} is not supported here")
        if node.type != TensorType.F32 or not node.has_contiguous_rows():
            raise DeviceError(f"a result of {node.type.name} with strides {list(node.nb)} is not supported here")
        q, k, v = straight(self, q), self._cache(k), self._cache(v)
        if mask is not None:
            mask = self._attention_mask(mask)
        n_tokens, n_heads, n_streams = q.ne[1], q.ne[2], q.ne[3]
        n_kv, n_heads_kv = k.ne[1], k.ne[2]
        ranges = self._mask_ranges(mask) if mask is not None else None
        # a pair of heads shares what it reads of the cache; more queries share an expanded block
        tile = _TILE if n_tokens > 8 else 2 if (n_heads // n_heads_kv) % 2 == 0 else 1
        scratch = self._scratch(attention.scratch_bytes(head_k, head_v, tile))
        nothing = Place(None, 0)
        fields: dict[str, int | float | Place] = {
            "q": self.place(q), "q_token": q.nb[1], "q_head": q.nb[2], "q_stream": q.nb[3],
            "k": self.place(k), "k_cell": k.nb[1], "k_head": k.nb[2], "k_stream": k.nb[3],
            "v": self.place(v), "v_cell": v.nb[1], "v_head": v.nb[2], "v_stream": v.nb[3],
            "mask": nothing if mask is None else self.place(mask),
            "mask_token": 0 if mask is None else mask.nb[1],
            "mask_stream": 0 if mask is None or mask.ne[3] == 1 else mask.nb[3],
            "ranges": nothing if ranges is None else Place(ranges, 0),
            "ranges_stream": 0 if mask is None or mask.ne[3] == 1 else 8 * mask.ne[1],
            "out": self.place(node), "out_head": node.nb[1], "out_token": node.nb[2], "out_stream": node.nb[3],
            "n_tokens": n_tokens, "n_heads_kv": n_heads_kv, "n_streams": n_streams, "group": n_heads // n_heads_kv,
            "n_kv": n_kv, "scale": scale / softcap if softcap else scale, "softcap": softcap, **scratch,
        }  # fmt: skip
        parameters = {
            "head_k": head_k, "head_v": head_v, "keys": k.type.name, "values": v.type.name,
            "tile": tile, "masked": mask is not None, "capped": bool(softcap),
        }  # fmt: skip
        reads = [self.span(t) for t in (q, k, v, mask) if t is not None]
        if ranges is not None:
            reads.append(Span(Place(ranges, 0), ranges.size))
        self.emit(attention.flash_attention, parameters, fields, reads, [self.span(node)], "attention")

    def _cache(self, cache: Tensor) -> Tensor:
        """Keys or values in a type that attention reads."""
        form = FORMATS.get(cache.type)
        if form is not None and form.cached and cache.has_contiguous_rows():
            return cache
        return straight(self, cache)

    def _attention_mask(self, mask: Tensor) -> Tensor:
        """A mask in f16, its streams one behind the other."""
        if mask.ne[2] != 1:
            raise DeviceError("attention with a mask per head is not supported here")
        if mask.type == TensorType.F16 and mask.has_contiguous_rows() and mask.ne[3] == 1:
            return mask
        if mask.type == TensorType.F16 and mask.is_contiguous():
            return mask
        plain = made(TensorType.F16, mask.ne)
        copies.copy(self, mask, plain)
        return plain

    def _mask_ranges(self, mask: Tensor) -> Temporary:
        key = self._contents(mask)
        if key not in self._ranges:
            n_rows = mask.ne[1] * mask.ne[3]
            made = self.temporary(8 * n_rows)
            assert made.base is not None
            fields: dict[str, int | float | Place] = {
                "mask": self.place(mask), "nb1": mask.nb[1], "n_kv": mask.ne[0], "n_rows": n_rows, "ranges": made
            }  # fmt: skip
            self.emit(attention.mask_ranges, {}, fields, [self.span(mask)], [Span(made, made.base.size)])
            self._ranges[key] = made.base
        return self._ranges[key]


def _in_blocks(product: Tensor) -> bool:
    """Whether a product takes its weights as the file has them: one matrix in blocks, of eight rows or more."""
    w, x = product.source(0), product.source(1)
    if (
        w is None
        or x is None
        or not isinstance(FORMATS.get(w.type), Blocks)
        or w.ne[0] != x.ne[0]
        or w.ne[0] % w.type.block_size
    ):
        return False
    return w.ne[1] >= 8 and w.ne[2] == 1 == w.ne[3] and product.type == TensorType.F32 and product.is_contiguous()


def _is_plain(tensor: Tensor) -> bool:
    return isinstance(FORMATS.get(tensor.type), Plain)
