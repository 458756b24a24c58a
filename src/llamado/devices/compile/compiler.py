"""The graph compiler: translates a ggml graph to operations of a device.

It fuses chains of row operations (norm, scale, add, gate, rotation, cache write) into one kernel each (`rows.py`), and
the quantization of activations into the chain that computes them, once for all products that use them. Rotation angles
and the visible range of each mask row are computed once per graph. Views cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from llamado.devices.compile import attend, checks, copies, experts, whole_rows
from llamado.devices.compile.checks import COPIES
from llamado.devices.compile.emitter import Emitter, Target
from llamado.devices.compile.products import Products
from llamado.devices.compile.program import Constant, Operation, Temporary
from llamado.devices.compile.recurrent import linear, ssm, state_source, state_target
from llamado.devices.compile.recurrent.state_target import StateLocation, StateTarget
from llamado.devices.compile.row_operations import RowOperations
from llamado.devices.compile.stages import STAGES
from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import VIEW_OPS, Op
from llamado.ggml.tensor import Tensor

_EMIT: dict[Op, Callable[[Emitter, Tensor], None]] = {
    **dict.fromkeys(COPIES, copies.copy_node),
    Op.REPEAT: copies.repeat_node,
    Op.CONCAT: copies.concat,
    Op.PAD: copies.pad,
    Op.ARANGE: copies.arange,
    **dict.fromkeys((Op.SUM, Op.SUM_ROWS, Op.MEAN, Op.ARGMAX), whole_rows.reduce),
    Op.CUMSUM: whole_rows.cumulative_sum,
    Op.REPEAT_BACK: whole_rows.add_copies,
    **dict.fromkeys((Op.ARGSORT, Op.TOP_K), whole_rows.sort),
    Op.POOL_2D: whole_rows.pool,
    Op.LIGHTNING_INDEXER: whole_rows.score,
    Op.DSV4_HC_PRE: whole_rows.read_streams,
    Op.DSV4_HC_POST: whole_rows.add_to_streams,
    Op.DSV4_HC_COMB: whole_rows.mix_streams,
    Op.FILL: copies.fill,
    Op.SSM_CONV: ssm.convolve,
}
"""Operations that are emitted one by one."""

_CARRY: dict[Op, tuple[Callable[[Tensor], StateLocation | None], Callable[[Emitter, Tensor, StateTarget], None]]] = {
    Op.SSM_SCAN: (ssm.scan_state_location, ssm.scan),
    **linear.CARRY,
}
"""Operations that produce states, which may be stored in memory rows directly: the location of the states, and the
emitter.
"""


OperationEmitters = Mapping[Op, Callable[[Tensor], None]]
"""Functions that emit the nodes of one graph, by operation."""


def products_and_attention(out: Emitter) -> OperationEmitters:
    """Return the emitters of products and attention, for which a device may have kernels of its own."""
    return {
        Op.MUL_MAT: Products(out).emit,
        Op.MUL_MAT_ID: partial(experts.multiply, out),
        Op.FLASH_ATTN_EXT: partial(attend.attend, out),
    }


SUPPORTED = frozenset({*_EMIT, *_CARRY, *STAGES, Op.MUL_MAT, Op.MUL_MAT_ID, Op.FLASH_ATTN_EXT, *VIEW_OPS})


class Compiler:
    """Compiles one graph. Operations are in execution order; temporaries are placed later (program.py)."""

    def __init__(
        self,
        graph: Graph,
        target: Target,
        emitters: Callable[[Emitter], OperationEmitters] = products_and_attention,
    ) -> None:
        """`emitters`: makes the emitters of the graph's products and attention."""
        self.graph = graph
        self._out = Emitter(graph, target)
        self._rows = RowOperations(self._out, graph.nodes)
        self._emitters = emitters(self._out)

    @property
    def constants(self) -> list[Constant]:
        """Data the operations read besides tensors: keep it as long as they run."""
        return self._out.constants

    @property
    def places(self) -> dict[Tensor, Temporary]:
        """Memory of tensors without a buffer."""
        return self._out.places

    @property
    def scratch(self) -> Temporary:
        """Scratch memory of all threads, shared by the operations that need some."""
        return self._out.scratch

    def compile(self) -> list[Operation]:
        """Return all operations of the graph. Raise `DeviceError` with the operation that the device does not
        support.
        """
        checks.check_graph(self.graph)
        nodes, out = self.graph.nodes, self._out
        listed, waiting = set(nodes), list(reversed(nodes))
        while waiting:
            node = waiting.pop()
            for source in node.src:
                if source is not None:
                    self._rows.reads(source, node)
                    if source not in listed and source.op in VIEW_OPS:  # a view that is not listed is still a view
                        listed.add(source)
                        waiting.append(source)
        for node in nodes:
            if node not in out.done and not node.is_noop:
                out.subject = node
                try:
                    self._node(node)
                except (DeviceError, ValueError, ArithmeticError) as error:  # an operation's parameters may be anything
                    node = out.subject
                    raise DeviceError(f"{node.op.name} (tensor {node.name or '?'}): {error}") from error
        return out.finish()

    def _node(self, node: Tensor) -> None:
        checks.check_node(node, self._out.extent)
        if node.op is Op.GET_ROWS and self._defers_rows(node):
            assert node.src[0] is not None and node.src[1] is not None
            self._out.deferred[node] = node.src[0], node.src[1]
        elif node.op in STAGES:
            if checks.is_row_operation(node):
                self._rows.chain(node, node)
                return
            self._rows.emit_on_copies(node)
        elif node.op in self._emitters:
            self._emitters[node.op](node)
        elif node.op is Op.CONCAT and ssm.stream(self._out, node, self._rows.consumers(node), self._between(node)):
            return
        elif node.op in _EMIT:
            _EMIT[node.op](self._out, node)
        elif node.op in _CARRY:
            locate, emit = _CARRY[node.op]
            emit(self._out, node, self._state_target(node, locate(node)))
        else:
            raise DeviceError(f"the {self._out.device} device does not have this operation")
        self._out.mark_done(node)

    def _defers_rows(self, node: Tensor) -> bool:
        """Return True if the choice of rows is left to the operation that continues from these states."""
        readers, numbers = self._rows.consumers(node), self._rows.numbers
        if len(readers) != 1 or readers[0].op not in linear.CARRY or not {node, readers[0]} <= numbers.keys():
            return False
        (reader,) = readers
        between = self.graph.nodes[numbers[node] + 1 : numbers[reader]]
        checks.check_node(reader, self._out.extent)
        return node.ne[1] == linear.n_seqs(reader) and state_source.can_defer_rows(self._out, node, reader, between)

    def _between(self, node: Tensor) -> Callable[[Tensor], list[Tensor] | None]:
        """Return a function for the operations between a node and another one, or None if the graph does not list them
        in this order.
        """
        numbers = self._rows.numbers

        def between(other: Tensor) -> list[Tensor] | None:
            first, last = numbers.get(node, -1), numbers.get(other, -1)
            if not 0 <= first < last:
                return None
            return [one for one in self.graph.nodes[first + 1 : last] if not one.is_noop]

        return between

    def _state_target(self, node: Tensor, states: StateLocation | None) -> StateTarget:
        """Return the target of the states that a node produces."""
        if states is None:
            return state_target.NO_TARGET
        readers = self._rows.consumers(node)
        return state_target.fuse_state_store(self._out, node, states, self.graph.nodes, self._rows.numbers, readers)
