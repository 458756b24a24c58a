"""Compilation of operations that need a whole row for each result: sums, argmax, sorting, pooling, scores."""

from __future__ import annotations

import struct
from typing import Any

from llamado.devices.compile import copies
from llamado.devices.compile.copies import intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.device import DeviceError
from llamado.devices.kernels import sorting, streams
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Plain
from llamado.ggml.ops import Op, SortOrder
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_GREATEST, _MEAN = 0, 1
"""Kinds of windows (ggml_op_pool)."""


def reduce(out: Emitter, node: Tensor) -> None:
    """SUM, SUM_ROWS, MEAN and ARGMAX."""
    a = node.src[0]
    assert a is not None
    if node.op is Op.SUM:
        whole = intermediate(TensorType.F32, a.ne)
        copies.copy(out, a, whole)
        a = copies.in_shape(whole, (a.nelements, 1, 1, 1))
    kind = {Op.ARGMAX: "argmax", Op.MEAN: "mean"}.get(node.op, "sum")
    steps = (4, 0, 0) if node.op is Op.ARGMAX else node.nb[1:]  # its row number is dimension 0
    _emit(out, node, a, sorting.reduce_rows, {"kind": kind}, steps)


def cumulative_sum(out: Emitter, node: Tensor) -> None:
    """CUMSUM."""
    a = node.src[0]
    assert a is not None
    if node.type != TensorType.F32:
        raise DeviceError(f"a result of type {node.type.name} is not supported here")
    _emit(out, node, a, sorting.cumulative_sum, {}, node.nb[1:])


def add_copies(out: Emitter, node: Tensor) -> None:
    """REPEAT_BACK."""
    a = node.src[0]
    assert a is not None
    a = plain_rows(out, a)
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    fields: Fields = {"x": out.place(a), "y": out.place(node), "n": node.ne[0]}
    fields |= {f"{name}{d}": nb[d] for name, nb in (("x", a.nb), ("y", node.nb)) for d in (1, 2, 3)}
    fields |= {f"n{d}": node.ne[d] for d in (1, 2, 3)}
    fields |= {f"k{d}": a.ne[d] // node.ne[d] for d in range(4)}
    out.emit(sorting.add_copies, {}, fields, [out.span(a)], [out.span(node)], node.op.name)


def sort(out: Emitter, node: Tensor) -> None:
    """ARGSORT and TOP_K."""
    a = node.src[0]
    assert a is not None
    order = struct.unpack_from("<i", node.op_params)[0]
    falling = node.op is Op.TOP_K or SortOrder(order) is SortOrder.DESC
    _emit(out, node, a, sorting.sort, {"falling": falling}, node.nb[1:], k=node.ne[0])


def pool(out: Emitter, node: Tensor) -> None:
    """POOL_2D."""
    a = node.src[0]
    assert a is not None
    a = plain_rows(out, a)
    kind, *sizes = struct.unpack_from("<7i", node.op_params)
    if kind not in (_GREATEST, _MEAN) or not node.has_contiguous_rows():
        raise DeviceError("a window of this form is not supported here")
    fields: Fields = {"x": out.place(a), "y": out.place(node), "n": a.ne[0], "m": a.ne[1], "width": node.ne[0]}
    fields |= {f"{name}{d}": t.nb[d] for name, t in (("x", a), ("y", node)) for d in (1, 2, 3)}
    fields |= {f"n{d}": node.ne[d] for d in (1, 2, 3)}
    fields |= dict(zip(("k0", "k1", "s0", "s1", "p0", "p1"), sizes, strict=True))
    out.emit(sorting.pool, {"greatest": kind == _GREATEST}, fields, [out.span(a)], [out.span(node)], "pool")


def score(out: Emitter, node: Tensor) -> None:
    """LIGHTNING_INDEXER."""
    q, k, w, mask = (node.src[i] for i in range(4))
    assert q is not None and k is not None and w is not None and mask is not None
    q, w, mask = plain_rows(out, q), plain_rows(out, w), plain_rows(out, mask, TensorType.F16)
    if not isinstance(FORMATS.get(k.type), Plain) or not k.has_contiguous_rows():
        k = plain_rows(out, k)
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    fields: Fields = {
        "q": out.place(q), "q1": q.nb[1], "q2": q.nb[2], "q3": q.nb[3],
        "k": out.place(k), "k2": k.nb[2], "k3": k.nb[3],
        "w": out.place(w), "w1": w.nb[1], "w3": w.nb[3],
        "mask": out.place(mask), "mask1": mask.nb[1], "mask3": 0 if mask.ne[3] == 1 else mask.nb[3],
        "y": out.place(node), "y1": node.nb[1], "y3": node.nb[3],
        "n": q.ne[0], "n_head": q.ne[1], "n_tokens": q.ne[2], "n_kv": k.ne[2], "n3": q.ne[3],
    }  # fmt: skip
    reads = [out.span(t) for t in (q, k, w, mask)]
    out.emit(sorting.score_keys, {"keys": k.type.name}, fields, reads, [out.span(node)], node.op.name)


def read_streams(out: Emitter, node: Tensor) -> None:
    """DSV4_HC_PRE."""
    x, w = node.src[0], node.src[1]
    assert x is not None and w is not None
    x, w = plain_rows(out, x), plain_rows(out, w)
    factor, gated = struct.unpack_from("<fi", node.op_params)
    fields: Fields = {
        "x": out.place(x), "x1": x.nb[1], "x2": x.nb[2], "w": out.place(w), "w1": w.nb[1], "w2": w.nb[2],
        "y": out.place(node), "y1": node.nb[1], "n": x.ne[0], "n_streams": x.ne[1], "n_tokens": x.ne[2],
        "factor": float(factor),
    }  # fmt: skip
    parameters = {"gated": bool(gated)}
    out.emit(streams.read_streams, parameters, fields, [out.span(x), out.span(w)], [out.span(node)], node.op.name)


def add_to_streams(out: Emitter, node: Tensor) -> None:
    """DSV4_HC_POST."""
    x, r, p, m = (node.source(i) for i in range(4))
    assert x is not None and r is not None and p is not None
    given = [plain_rows(out, t) for t in (x, r, p, *(() if m is None else (m,)))]
    x, r, p, m = given[0], given[1], given[2], given[-1]
    fields: Fields = {
        "x": out.place(x), "x1": x.nb[1], "r": out.place(r), "r1": r.nb[1], "r2": r.nb[2],
        "p": out.place(p), "p1": p.nb[1], "m": out.place(m), "m1": m.nb[1], "m2": m.nb[2],
        "y": out.place(node), "y1": node.nb[1], "y2": node.nb[2],
        "n": x.ne[0], "n_streams": r.ne[1], "n_tokens": x.ne[1],
    }  # fmt: skip
    reads = [out.span(t) for t in given]
    out.emit(streams.add_to_streams, {"mixed": len(given) > 3}, fields, reads, [out.span(node)], node.op.name)


def mix_streams(out: Emitter, node: Tensor) -> None:
    """DSV4_HC_COMB."""
    x, factors, shifts = (node.src[i] for i in range(3))
    assert x is not None and factors is not None and shifts is not None
    x, factors, shifts = (plain_rows(out, t) for t in (x, factors, shifts))
    eps, n_rounds = struct.unpack_from("<fi", node.op_params)
    fields: Fields = {
        "x": out.place(x), "x1": x.nb[1], "factors": out.place(factors), "shifts": out.place(shifts),
        "y": out.place(node), "y2": node.nb[2], "n_tokens": x.ne[1],
        "eps": float(eps), "n_rounds": n_rounds,
    }  # fmt: skip
    reads = [out.span(t) for t in (x, factors, shifts)]
    out.emit(streams.mix_streams, {}, fields, reads, [out.span(node)], node.op.name)


def _emit(
    out: Emitter, node: Tensor, a: Tensor, kernel: Any, parameters: dict[str, Any], steps: tuple[int, ...], **more: int
) -> None:
    """Emit a kernel over the rows of `a`; `steps`: strides of the result over their numbers."""
    a = plain_rows(out, a)
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    fields: Fields = {"x": out.place(a), "y": out.place(node), "n": a.ne[0]}
    fields |= {f"{name}{d}": nb[d - 1] for name, nb in (("x", a.nb[1:]), ("y", steps)) for d in (1, 2, 3)}
    fields |= {f"n{d}": a.ne[d] for d in (1, 2, 3)}
    fields |= more
    out.emit(kernel, parameters, fields, [out.span(a)], [out.span(node)], node.op.name)
