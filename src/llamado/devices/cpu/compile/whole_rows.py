"""Operations that need a whole row for each number of theirs: sums, places of the greatest, orders."""

from __future__ import annotations

import struct
from typing import Any

from llamado.devices.cpu.compile import copies
from llamado.devices.cpu.compile.copies import made, straight
from llamado.devices.cpu.compile.emitter import Emitter, Fields
from llamado.devices.cpu.kernels import sorting
from llamado.devices.device import DeviceError
from llamado.ggml.ops import Op, SortOrder
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


def reduce(out: Emitter, node: Tensor) -> None:
    """SUM, SUM_ROWS, MEAN and ARGMAX."""
    a = node.src[0]
    assert a is not None
    if node.op is Op.SUM:
        whole = made(TensorType.F32, a.ne)
        copies.copy(out, a, whole)
        a = copies.in_shape(whole, (a.nelements, 1, 1, 1))
    kind = {Op.ARGMAX: "argmax", Op.MEAN: "mean"}.get(node.op, "sum")
    steps = (4, 0, 0) if node.op is Op.ARGMAX else node.nb[1:]  # its row number is dimension 0
    _emit(out, node, a, sorting.reduce_rows, {"kind": kind}, steps)


def cumulate(out: Emitter, node: Tensor) -> None:
    """CUMSUM."""
    a = node.src[0]
    assert a is not None
    if node.type != TensorType.F32:
        raise DeviceError(f"a result of type {node.type.name} is not supported here")
    _emit(out, node, a, sorting.cumulate, {}, node.nb[1:])


def sort(out: Emitter, node: Tensor) -> None:
    """ARGSORT and TOP_K."""
    a = node.src[0]
    assert a is not None
    order = struct.unpack_from("<i", node.op_params)[0]
    falling = node.op is Op.TOP_K or SortOrder(order) is SortOrder.DESC
    _emit(out, node, a, sorting.sort, {"falling": falling}, node.nb[1:], k=node.ne[0])


def _emit(
    out: Emitter, node: Tensor, a: Tensor, kernel: Any, parameters: dict[str, Any], steps: tuple[int, ...], **more: int
) -> None:
    """A kernel over the rows of `a`; `steps`: strides of the result over their numbers."""
    a = straight(out, a)
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    fields: Fields = {"x": out.place(a), "y": out.place(node), "n": a.ne[0]}
    fields |= {f"{name}{d}": nb[d - 1] for name, nb in (("x", a.nb[1:]), ("y", steps)) for d in (1, 2, 3)}
    fields |= {f"n{d}": a.ne[d] for d in (1, 2, 3)}
    fields |= more
    out.emit(kernel, parameters, fields, [out.span(a)], [out.span(node)], node.op.name)
