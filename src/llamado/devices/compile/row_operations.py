"""Compilation of row operations: chains as one kernel each, and operations on data that is not rows of f32."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from llamado.devices.compile import columns, copies
from llamado.devices.compile.chains import Chain
from llamado.devices.compile.checks import BINARY
from llamado.devices.compile.copies import alias, intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter
from llamado.devices.compile.fusion import Fusion
from llamado.devices.compile.stages import STAGES
from llamado.devices.device import DeviceError
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_MAX_STAGES = 24
"""Most stages of a chain: every chain is a kernel of its own, which takes time to compile."""


class RowOperations:
    """Compiles the row operations of a graph."""

    def __init__(self, out: Emitter, nodes: Sequence[Tensor]) -> None:
        self._out, self._nodes = out, nodes
        self.numbers = {node: i for i, node in enumerate(nodes)}
        self._readers: dict[Tensor, list[Tensor]] = {}

    def reads(self, source: Tensor, reader: Tensor) -> None:
        """Record that an operation of the graph, or a view, reads a tensor."""
        self._readers.setdefault(source, []).append(reader)

    def consumers(self, tensor: Tensor) -> list[Tensor]:
        """Return the operations that read a tensor, also through views."""
        found: list[Tensor] = []  # one entry for each time an operation reads it
        seen, waiting = {tensor}, [tensor]
        while waiting:
            for reader in self._readers.get(waiting.pop(), ()):
                if not reader.is_noop:
                    found.append(reader)
                elif reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        return found

    def chain(self, first: Tensor, at: Tensor) -> None:
        """Emit the longest chain that begins with `first`. `at`: the node of the graph that it is for."""
        out, source = self._out, first.src[0]
        assert source is not None
        chain, fusion = Chain(out, source), Fusion(out, self._nodes, self.numbers, at)
        shape = source if first.op is Op.SET_ROWS else first
        if first.op is not Op.GET_ROWS:
            chain.operand(("row",), source, shape, "row")
        node: Tensor | None = first
        while node is not None:
            STAGES[node.op](chain, node)
            fusion.joined(node)
            out.mark_done(node)
            chain.value = node
            if node.op is Op.SET_ROWS:
                break
            consumers = self.consumers(node)
            after = fusion.next(node, consumers) if len(chain.stages) < _MAX_STAGES else None
            self._keep(chain, node, after, consumers)
            node = after
        chain.finish(shape)

    def _keep(self, chain: Chain, node: Tensor, after: Tensor | None, consumers: Sequence[Tensor]) -> None:
        """Store the outputs of a node that operations other than `after` need: the row in memory, or its quantized
        columns.
        """
        products = [c for c in consumers if c is not after and columns.takes_columns(c, node)]
        stored = node.root()[0] in self._out.outputs or node.view_src is not None or node.buffer is not None
        if stored or len(consumers) - (after is not None) > len(products) or not consumers:
            chain.operand(("store",), node, node, "store", write=True)
        for layout in sorted({columns.layout_of(c, self._out.lowering) for c in products}):
            columns.quantize(chain, node, layout)

    def emit_on_copies(self, node: Tensor) -> None:
        """Emit a row operation on data that is not rows of f32: on copies that are, with its result copied to its
        place.
        """
        out, a, b = self._out, node.src[0], node.source(1)
        assert a is not None
        type_ = TensorType.F32
        if node.op is Op.GET_ROWS and node.type == a.type == TensorType.I32:  # moved without conversion
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
            result = intermediate(TensorType.F32, node.ne, node.name)
        sources: tuple[Tensor | None, ...] = (*node.src[1:],)
        if node.op is Op.GLU and b is None:
            swapped = struct.unpack_from("<i", node.op_params, 4)[0]
            a = plain_rows(out, a)
            halves = [alias(a, a.type, node.ne, a.nb, at) for at in (0, 4 * node.ne[0])]
            a, b = halves[::-1] if swapped else halves
            sources = (b,)
        elif b is not None and (node.op in BINARY or node.op is Op.GLU):
            sources = (self._repeated(plain_rows(out, b), node),)
        elif b is not None and node.op in (Op.SOFT_MAX, Op.ADD_ID):
            sources = (plain_rows(out, b), *node.src[2:])
        a = plain_rows(out, a)
        result.op, result.src, result.op_params = node.op, (a, *sources), node.op_params
        if node.op is Op.GLU:
            result.op_params = node.op_params[:4] + bytes(4) + node.op_params[8:]
        self.chain(result, node)
        if result.view_src is None:
            copies.copy(out, result if type_ == TensorType.F32 else alias(result, type_, result.ne, result.nb), node)

    def _repeated(self, operand: Tensor, node: Tensor) -> Tensor:
        """Return an operand whose dimensions are those of the result, or one."""
        if all(m in (1, n) for m, n in zip(operand.ne, node.ne, strict=True)):
            return operand
        whole = intermediate(TensorType.F32, node.ne)
        copies.repeat(self._out, operand, whole)
        return whole
