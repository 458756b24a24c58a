"""What ggml itself demands of an operation's tensors (its asserts in ggml.c), for graphs that ggml did not build.

A device checks what its kernels need; this is the gate before it, and knows nothing of kernels. Operations without a
rule here pass: a device that has them knows them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from llamado.ggml.errors import ShapeError, describe
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

MAX_HEAD = 1024
"""Elements of an attention head; the largest in use has 576."""

_F32, _F16, _I32, _I64 = TensorType.F32, TensorType.F16, TensorType.I32, TensorType.I64

Rule = Callable[[Tensor], bool]


def check_result(node: Tensor) -> None:
    """Raises ShapeError unless the sources of a node are such that ggml would give it this type and shape."""
    found = _RULES.get(node.op)
    if found is None:
        return
    needed, rule = found
    sources = node.src
    if len(sources) < needed or None in sources[:needed]:
        raise ShapeError(node.op.name, f"needs {needed} sources", *sources)
    if not rule(node):
        raise ShapeError(node.op.name, f"cannot make {describe(node)}", *(s for s in sources if s is not None))


def _same(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return a.ne == node.ne


def _binary(node: Tensor) -> bool:
    a, b = node.src[:2]
    assert a is not None and b is not None
    return a.ne == node.ne and (b.ne == a.ne or b.can_repeat_to(a))


def _copy(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return a.ne == node.ne or a.nelements == node.nelements


def _glu(node: Tensor) -> bool:
    a, b = node.src[0], node.source(1)
    assert a is not None
    if a.type is not node.type:
        return False
    if b is None:
        return a.ne[1:] == node.ne[1:] and a.ne[0] == 2 * node.ne[0]
    return a.ne == node.ne == b.ne and a.type is b.type


def _mul_mat(node: Tensor) -> bool:
    a, b = node.src[:2]
    assert a is not None and b is not None
    an, bn = a.ne, b.ne
    if node.type is not _F32 or an[0] != bn[0] or node.ne != (an[1], bn[1], bn[2], bn[3]):
        return False
    return (an[2] == bn[2] and an[3] == bn[3]) or (
        an[2] != 0 and an[3] != 0 and bn[2] % an[2] == 0 and bn[3] % an[3] == 0
    )


def _mul_mat_id(node: Tensor) -> bool:
    experts, b, ids = node.src[:3]
    assert experts is not None and b is not None and ids is not None
    if node.type is not _F32 or ids.type is not _I32 or experts.ne[3] != 1 or b.ne[3] != 1 or ids.ne[2:] != (1, 1):
        return False
    if experts.ne[0] != b.ne[0] or ids.ne[1] != b.ne[2] or not b.ne[1] or ids.ne[0] % b.ne[1]:
        return False
    return node.ne == (experts.ne[1], ids.ne[0], b.ne[2], 1)


def _add_id(node: Tensor) -> bool:
    a, b, ids = node.src[:3]
    assert a is not None and b is not None and ids is not None
    return a.ne == node.ne and a.ne[0] == b.ne[0] and a.ne[1:3] == ids.ne[:2] and ids.type is _I32


def _get_rows(node: Tensor) -> bool:
    a, ids = node.src[:2]
    assert a is not None and ids is not None
    an, n = a.ne, ids.ne
    fits = an[2] == n[1] and an[3] == n[2] and n[3] == 1 and node.ne == (an[0], n[0], n[1], n[2])
    return fits and ids.type is _I32 and node.type is (_I32 if a.type is _I32 else _F32)


def _set_rows(node: Tensor) -> bool:
    source, ids = node.src[:2]
    assert source is not None and ids is not None
    if node.view_src is None or source.type not in (_F32, _F16) or ids.type not in (_I64, _I32):
        return False
    sn, cn, dn = source.ne, ids.ne, node.ne
    if dn[0] != sn[0] or dn[2:] != sn[2:] or sn[1] != cn[0] or cn[3] != 1 or not cn[1] or not cn[2]:
        return False
    return sn[2] % cn[1] == 0 and sn[3] % cn[2] == 0


def _rope(node: Tensor) -> bool:
    a, positions = node.src[:2]
    assert a is not None and positions is not None
    if a.ne != node.ne or a.type is not node.type or positions.type is not _I32 or not positions.is_contiguous():
        return False
    n_dims = struct.unpack_from("<i", node.op_params, 4)[0]
    factors = node.source(2)
    if not (0 < n_dims <= a.ne[0] and n_dims % 2 == 0) and 0 not in a.ne:
        return False
    if factors is not None and (factors.type is not _F32 or factors.ne[0] < n_dims // 2):
        return False
    return positions.ne[0] in (a.ne[2], 4 * a.ne[2])


def _soft_max(node: Tensor) -> bool:
    a, mask, sinks = node.src[0], node.source(1), node.source(2)
    assert a is not None
    if a.ne != node.ne:
        return False
    if mask is not None:
        m = mask.ne
        if mask.type not in (_F16, _F32) or m[0] != a.ne[0] or m[1] < a.ne[1] or not m[2] or not m[3]:
            return False
        if a.ne[2] % m[2] or a.ne[3] % m[3]:
            return False
    return sinks is None or (sinks.type is _F32 and sinks.ne[0] == a.ne[2])


def _attention(node: Tensor) -> bool:
    q, k, v = node.src[:3]
    mask, sinks = node.source(3), node.source(4)
    assert q is not None and k is not None and v is not None
    qn, kn, vn = q.ne, k.ne, v.ne
    if node.type is not _F32 or qn[0] != kn[0] or kn[1:] != vn[1:] or node.ne != (vn[0], qn[2], qn[1], qn[3]):
        return False
    if max(kn[0], vn[0]) > MAX_HEAD or not kn[2] or not kn[3] or qn[2] % kn[2] or qn[3] % kn[3]:
        return False
    if mask is not None:
        m = mask.ne
        if mask.type is not _F16 or m[0] != kn[1] or m[1] < qn[1] or not m[2] or not m[3]:
            return False
        if qn[2] % m[2] or qn[3] % m[3]:
            return False
    return sinks is None or (sinks.type is _F32 and sinks.ne[0] == qn[2])


def _concat(node: Tensor) -> bool:
    a, b = node.src[:2]
    assert a is not None and b is not None
    axis = struct.unpack_from("<i", node.op_params)[0]
    if not 0 <= axis < 4 or not (a.type is b.type is node.type):
        return False
    return all(n == (x + y if i == axis else x) and (i == axis or x == y)
               for i, (n, x, y) in enumerate(zip(node.ne, a.ne, b.ne, strict=True)))  # fmt: skip


def _repeat(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return a.type is node.type and a.can_repeat_to(node)


def _rows_to_one(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return node.ne == (1, *a.ne[1:])


def _sum(node: Tensor) -> bool:
    return node.ne == (1, 1, 1, 1)


def _argmax(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return node.type is _I32 and node.ne == (a.ne[1], 1, 1, 1)


def _argsort(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return node.type is _I32 and node.ne == a.ne


def _top_k(node: Tensor) -> bool:
    a = node.src[0]
    assert a is not None
    return node.type is _I32 and node.ne[0] <= a.ne[0] and node.ne[1:] == a.ne[1:]


_SHAPE_KEPT = (
    Op.NORM, Op.RMS_NORM, Op.L2_NORM, Op.GROUP_NORM, Op.SCALE, Op.UNARY, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS,
    Op.CLAMP, Op.CUMSUM, Op.DIAG_MASK_INF, Op.DIAG_MASK_ZERO, Op.LEAKY_RELU,
)  # fmt: skip

# How many sources an operation needs at least, and its rule.
_RULES: dict[Op, tuple[int, Rule]] = {
    Op.ADD: (2, _binary),
    Op.SUB: (2, _binary),
    Op.MUL: (2, _binary),
    Op.DIV: (2, _binary),
    Op.ADD_ID: (3, _add_id),
    Op.DUP: (1, _copy),
    Op.CPY: (1, _copy),
    Op.CONT: (1, _copy),
    Op.GLU: (1, _glu),
    Op.MUL_MAT: (2, _mul_mat),
    Op.MUL_MAT_ID: (3, _mul_mat_id),
    Op.GET_ROWS: (2, _get_rows),
    Op.SET_ROWS: (2, _set_rows),
    Op.ROPE: (2, _rope),
    Op.SOFT_MAX: (1, _soft_max),
    Op.FLASH_ATTN_EXT: (3, _attention),
    Op.CONCAT: (2, _concat),
    Op.REPEAT: (1, _repeat),
    Op.SUM: (1, _sum),
    Op.SUM_ROWS: (1, _rows_to_one),
    Op.MEAN: (1, _rows_to_one),
    Op.ARGMAX: (1, _argmax),
    Op.ARGSORT: (1, _argsort),
    Op.TOP_K: (1, _top_k),
    **dict.fromkeys(_SHAPE_KEPT, (1, _same)),
}
