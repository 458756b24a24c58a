"""Checks of an operation before it is compiled: graphs come from untrusted clients, and kernels trust shapes.

Shapes must be those of ggml (`ggml/shapes.py`); the further checks here are limits of the kernels. Failed checks
raise `DeviceError` or return False; nothing is computed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from llamado.devices.device import DeviceError
from llamado.ggml.errors import ShapeError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.shapes import check_result
from llamado.ggml.tensor import BLOCK, Tensor
from llamado.gguf.types import TensorType

MAX_NODES = 16_384
"""Most operations of a graph; that of a model of 126 layers has 5,000."""
MAX_VIEWS = 64
"""Most nested views; ggml refers each to the owner of the memory."""
MAX_WORK = 1 << 46
"""Most multiplications of a graph: 1,000 tokens through a model of 70 billion weights. A graph that repeats itself over
strides of zero could request any number.
"""
MAX_ROTATED = 1 << 16
"""Most elements that RoPE rotates; its frequencies are computed when the graph is compiled. Heads have up to 1,024."""
MAX_HEADS = 1 << 16
"""Most heads whose slopes (ALiBi) are computed when the graph is compiled."""
MAX_EXPERTS = 1 << 16
"""Most experts that tokens are sorted by; models have up to 1,024."""
_CARRIED = 16
"""Cost of a token's update of an element of a state, in multiplications."""
MAX_SNAPSHOTS = 1024
"""Most states of earlier tokens that an operation stores for each sequence; drafts have tens of tokens."""
_ELEMENT = 64
"""Cost of any other operation on one number, in multiplications."""

BINARY = {Op.ADD: "add", Op.SUB: "sub", Op.MUL: "mul", Op.DIV: "div"}
RECURRENCES = {Op.GATED_DELTA_NET, Op.GATED_LINEAR_ATTN, Op.RWKV_WKV6, Op.RWKV_WKV7}
COPIES = {Op.CPY, Op.DUP, Op.CONT}


def check_graph(graph: Graph) -> None:
    """Raise `DeviceError` if a graph is empty or too large."""
    if not graph.nodes:
        raise DeviceError("a graph without operations")
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
    if node.op in (Op.MUL_MAT, Op.MUL_MAT_ID) and a is not None:
        return node.nelements * a.ne[0]
    if node.op is Op.FLASH_ATTN_EXT and a is not None and b is not None:
        return (a.nelements + node.nelements) * b.ne[1]
    if node.op is Op.LIGHTNING_INDEXER and a is not None:
        return node.nelements * a.ne[0] * a.ne[1]
    if node.op is Op.POOL_2D:
        k0, k1 = (int(n) for n in struct.unpack_from("<2i", node.op_params, 4))
        return _ELEMENT * node.nelements * max(k0, 1) * max(k1, 1)
    if node.op in RECURRENCES and a is not None:
        return 4 * node.nelements * a.ne[0]
    if node.op in (Op.SSM_CONV, Op.SSM_SCAN) and a is not None and b is not None:
        return _ELEMENT * node.nelements + a.ne[0] * b.nelements * _CARRIED
    return _ELEMENT * max(node.nelements, *(s.nelements for s in node.src if s is not None), 0)


def is_aligned(tensor: Tensor, offset: int) -> bool:
    """Return True if all elements (of blocks: all halves) of a tensor at byte `offset` of a buffer are aligned."""
    size = tensor.type.block_bytes if tensor.type.block_size == 1 else 2 - tensor.type.block_bytes % 2
    steps = [step for n, step in zip(tensor.ne, tensor.nb, strict=True) if n > 1]
    return not any(step % size for step in (offset, *steps))


def extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last. Raise `DeviceError` if the shape is
    impossible.
    """
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


def check_node(node: Tensor, extent: Callable[[Tensor], int] = extent) -> None:
    """Raise `DeviceError` if an operation's result and sources do not fit together, or are not supported here.

    `extent` may cache its results.
    """
    ne, (block, size) = node.ne, BLOCK[node.type]
    if ne[0] % block == 0 and ne[0] // block * size * node.nrows > extent(node):
        raise DeviceError(f"a result of {list(ne)} with strides {list(node.nb)} would overwrite itself")
    for source in node.src:
        if source is not None:
            extent(source)
    try:
        check_result(node)
    except ShapeError as error:
        raise DeviceError(f"{_misfit(node)}: {error.reason}") from None
    if node.op is Op.ARANGE and not any(node.src):
        return
    if node.source(0) is None or any(s is not None and 0 in s.ne for s in node.src):
        raise DeviceError(_misfit(node))
    if not _is_possible(node):
        raise DeviceError(f"{_misfit(node)} on this device")


def _misfit(node: Tensor) -> str:
    given = ", ".join(f"{s.type.name}{list(s.ne)}" for s in node.src if s is not None)
    return f"sources {given or 'missing'} do not fit a result of {node.type.name}{list(node.ne)}"


def flat(tensor: Tensor) -> bool:
    """Return True if a tensor's rows are f32 without gaps."""
    return tensor.type == TensorType.F32 and tensor.has_contiguous_rows()


def is_row_operation(node: Tensor) -> bool:
    """Return True if kernels can read a row operation's sources and write its result in place."""
    a, b = node.source(0), node.source(1)
    if a is None or (node.op is not Op.SET_ROWS and not flat(node)):
        return False
    if node.op is Op.GET_ROWS:
        return a.has_contiguous_rows()
    if not flat(a):
        return False
    if node.op in BINARY:
        return b is not None and flat(b) and all(m in (1, n) for m, n in zip(b.ne, node.ne, strict=True))
    if node.op in (Op.GLU, Op.ADD_ID):
        return b is not None and flat(b)
    if node.op is Op.SOFT_MAX:
        return b is None or (b.type in (TensorType.F32, TensorType.F16) and b.has_contiguous_rows())
    return node.op is not Op.SET_ROWS or node.has_contiguous_rows()


def _is_possible(node: Tensor) -> bool:
    """Return True if the kernels support this form, which ggml allows."""
    a, b, c, mask = (node.source(i) for i in range(4))
    assert a is not None  # check_node has checked this
    match node.op:
        case Op.SUM | Op.SUM_ROWS | Op.REPEAT_BACK:
            return node.type == TensorType.F32
        case Op.PAD:
            return all(n >= 0 for n in struct.unpack_from("<8i", node.op_params))
        case Op.GLU:
            return b is not None or a.ne[0] % 2 == 0
        case Op.SOFT_MAX:
            return (b is None or a.ne[2] <= MAX_HEADS) and (c is None or flat(c))
        case Op.LIGHTNING_INDEXER:
            return mask is not None and mask.ne[3] in (1, a.ne[3])
        case Op.MUL_MAT_ID:
            return a.ne[2] <= MAX_EXPERTS
        case Op.GATED_DELTA_NET:
            n_snapshots: int = struct.unpack_from("<i", node.op_params)[0]
            return n_snapshots <= MAX_SNAPSHOTS
        case Op.ROPE:
            n_dims: int = struct.unpack_from("<i", node.op_params, 4)[0]
            return n_dims <= MAX_ROTATED and (c is None or flat(c))
        case Op.FLASH_ATTN_EXT:
            sinks = node.source(4)
            return (
                a.ne[2] <= MAX_HEADS and (mask is None or mask.ne[3] in (1, a.ne[3])) and (sinks is None or flat(sinks))
            )
        case _:
            return True
