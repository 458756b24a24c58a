"""What the CPU device asks of an operation before it compiles it: graphs come from anywhere, and kernels trust shapes.

Everything here raises DeviceError or says no; nothing is computed.
"""

from __future__ import annotations

import struct

from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

MAX_NODES = 16_384
"""Operations of a graph; that of a model of 126 layers has 5,000."""
MAX_VIEWS = 64
"""Views of views; ggml refers each to the owner of the memory."""
MAX_WORK = 1 << 46
"""Multiplications of a graph: 1,000 tokens through a model of 70 billion weights. A graph that repeats itself over
strides of zero could ask for any number.
"""
MAX_ROTATED = 1 << 16
"""Elements that a rotation turns; its frequencies are computed when the graph is compiled. Heads have up to 1,024."""
MAX_HEADS = 1 << 16
"""Heads whose slopes (ALiBi) are computed when the graph is compiled."""
_ELEMENT = 64
"""Multiplications that take as long as anything else done to one number."""

BINARY = {Op.ADD: "add", Op.SUB: "sub", Op.MUL: "mul", Op.DIV: "div"}
COPIES = {Op.CPY, Op.DUP, Op.CONT}
_SOURCES = {
    **dict.fromkeys(BINARY, 2), Op.SET_ROWS: 2, Op.GET_ROWS: 2, Op.ROPE: 2, Op.MUL_MAT: 2, Op.CONCAT: 2,
    Op.FLASH_ATTN_EXT: 3,
}  # fmt: skip
"""Operations of more than one source."""


def check_graph(graph: Graph) -> None:
    """Raises DeviceError where a graph is out of all proportion."""
    if len(graph.nodes) > MAX_NODES:
        raise DeviceError(f"a graph of {len(graph.nodes)} operations; at most {MAX_NODES} are taken")
    for node in graph.nodes:
        for tensor in (node, *node.src):
            if tensor is not None and tensor.view_src is not None:
                _check_view(tensor)
    total = sum(_work(node) for node in graph.nodes if not node.is_noop)
    if total > MAX_WORK:
        raise DeviceError(f"a graph of {total:.1e} multiplications; at most {MAX_WORK:.1e} are taken")


def _check_view(tensor: Tensor) -> None:
    owner: Tensor | None = tensor
    for _ in range(MAX_VIEWS):
        if owner is None:
            return
        owner = owner.view_src
    raise DeviceError(f"tensor {tensor.name or '?'} is a view of a view, more than {MAX_VIEWS} deep or in a circle")


def _work(node: Tensor) -> int:
    a, b = node.source(0), node.source(1)
    if node.op is Op.MUL_MAT and a is not None:
        return node.nelements * a.ne[0]
    if node.op is Op.FLASH_ATTN_EXT and a is not None and b is not None:
        return (a.nelements + node.nelements) * b.ne[1]
    return _ELEMENT * max(node.nelements, *(s.nelements for s in node.src if s is not None), 0)


def extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last; DeviceError where that cannot be told."""
    ne, nb, type_ = tensor.ne, tensor.nb, tensor.type
    if 0 in ne:
        return 0
    block, size = type_.block_size, type_.block_bytes
    if min(ne) < 0 or min(nb) < 0 or ne[0] % block:
        raise DeviceError(f"tensor {tensor.name or '?'} has no possible shape: {type_.name}{list(ne)}, {list(nb)}")
    if tensor.has_contiguous_rows():
        row = ne[0] // block * size
    elif block == 1:
        row = (ne[0] - 1) * nb[0] + size
    else:
        raise DeviceError(f"tensor {tensor.name or '?'} has gaps between the {type_.name} blocks of a row")
    return row + (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]


def check_node(node: Tensor) -> None:
    """Raises DeviceError where an operation's result and sources cannot belong together."""
    size = node.type.row_bytes(node.ne[0]) * node.nrows if node.ne[0] % node.type.block_size == 0 else 0
    if size > extent(node):
        raise DeviceError(f"a result of {list(node.ne)} with strides {list(node.nb)} would overwrite itself")
    for source in node.src:
        if source is not None:
            extent(source)
    if not _fits(node):
        shapes = ", ".join(f"{s.type.name}{list(s.ne)}" for s in node.src if s is not None)
        raise DeviceError(f"sources {shapes or 'missing'} do not fit a result of {node.type.name}{list(node.ne)}")


def flat(tensor: Tensor) -> bool:
    """Whether a tensor's rows are f32 without gaps."""
    return tensor.type == TensorType.F32 and tensor.has_contiguous_rows()


def is_row_operation(node: Tensor) -> bool:
    """Whether kernels take a row operation's sources and result as they lie in memory."""
    a, b = node.source(0), node.source(1)
    if a is None or (node.op is not Op.SET_ROWS and not flat(node)):
        return False
    if node.op is Op.GET_ROWS:
        return a.has_contiguous_rows()
    if not flat(a):
        return False
    if node.op in BINARY:
        return b is not None and flat(b) and all(m in (1, n) for m, n in zip(b.ne, node.ne, strict=True))
    if node.op is Op.GLU:
        return b is not None and flat(b)
    if node.op is Op.SOFT_MAX:
        return b is None or (b.type in (TensorType.F32, TensorType.F16) and b.has_contiguous_rows())
    return node.op is not Op.SET_ROWS or node.has_contiguous_rows()


def _fits(node: Tensor) -> bool:
    """Whether the shapes of the sources are those the operation needs, and lists of numbers hold numbers."""
    op, ne = node.op, node.ne
    sources = [node.source(i) for i in range(4)]
    if any(s is None or 0 in s.ne for s in sources[: _SOURCES.get(op, 1)]):
        return False
    first, second = sources[0], sources[1]
    assert first is not None
    a, b, c, mask = (s.ne if s is not None else None for s in sources)
    assert a is not None
    match op:
        case _ if op in COPIES:
            return first.nelements == node.nelements
        case Op.REPEAT:
            return first.can_repeat_to(node)
        case Op.SUM_ROWS | Op.MEAN:
            return ne == (1, *a[1:]) and node.type == TensorType.F32
        case Op.SUM:
            return ne == (1, 1, 1, 1) and node.type == TensorType.F32
        case Op.ARGMAX:
            return ne == (a[1], 1, 1, 1) and a[2:] == (1, 1) and node.type == TensorType.I32
        case Op.ARGSORT | Op.TOP_K:
            return 0 < ne[0] <= a[0] and ne[1:] == a[1:] and node.type == TensorType.I32
        case Op.PAD:
            pads = struct.unpack_from("<8i", node.op_params)
            return min(pads) >= 0 and ne == tuple(n + sum(pads[2 * d : 2 * d + 2]) for d, n in enumerate(a))
        case Op.GLU:
            return a == b == ne if b is not None else a == (2 * ne[0], *ne[1:])
        case Op.SOFT_MAX:
            sinks = sources[2]
            covered = b is None or (
                0 not in b
                and b[0] == a[0]
                and b[1] >= a[1]
                and a[2] % b[2] == 0
                and a[3] % b[3] == 0
                and a[2] <= MAX_HEADS
            )
            return a == ne and covered and (sinks is None or (flat(sinks) and sinks.ne[0] >= a[2]))
    if b is None:
        return a == ne
    assert second is not None
    match op:
        case Op.GET_ROWS:
            return ne == (a[0], *b[:3]) and a[2:] == b[1:3] and b[3] == 1 and second.type == TensorType.I32
        case Op.SET_ROWS:
            rows = a[0] == ne[0] and a[2:] == ne[2:] and b[0] == a[1] and b[3] == 1
            listed = a[2] % b[1] == 0 and a[3] % b[2] == 0
            return rows and listed and second.type in (TensorType.I32, TensorType.I64)
        case Op.ROPE:
            n_dims = struct.unpack_from("<i", node.op_params, 4)[0]
            factors = sources[2]
            turned = a == ne and 0 < n_dims <= min(ne[0], MAX_ROTATED) and n_dims % 2 == 0
            divided = factors is None or (factors.ne[0] >= n_dims // 2 and flat(factors))
            return turned and divided and b[0] >= ne[2] and second.type == TensorType.I32 and second.is_contiguous()
        case Op.MUL_MAT:
            return a[0] == b[0] and ne == (a[1], *b[1:]) and b[2] % a[2] == 0 and b[3] % a[3] == 0
        case Op.FLASH_ATTN_EXT if c is not None:
            heads = a[0] == b[0] and b[1:] == c[1:] and a[2] % b[2] == 0 and a[3] == b[3]
            covered = mask is None or (mask[0] == b[1] and mask[1] >= a[1] and mask[3] in (1, a[3]))
            return heads and covered and ne == (c[0], a[2], a[1], a[3])
        case Op.CONCAT:
            d = struct.unpack_from("<i", node.op_params)[0]
            joined = 0 <= d < 4 and ne == tuple(n + b[d] if i == d else n for i, n in enumerate(a))
            return joined and all(m == n for i, (m, n) in enumerate(zip(a, b, strict=True)) if i != d)
        case _ if op in BINARY:
            return a == ne and second.can_repeat_to(node)
        case _:
            return a == ne
