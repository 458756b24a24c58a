"""Data movement: copies between any strides and types, and the operations that consist only of copies.

Operations use it for sources their kernels cannot read: a source of another type, or with gaps in its rows, is first
copied to plain rows of f32 (`plain_rows`).
"""

from __future__ import annotations

import struct

import numpy as np

from llamado.devices.compile.chains import move_rows
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.device import DeviceError
from llamado.devices.kernels import floats
from llamado.devices.kernels.elements import SCALAR
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.formats.format import Plain
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Shape, Tensor, contiguous_strides
from llamado.gguf.types import TensorType

WRITABLE = frozenset(type_ for type_, form in FORMATS.items() if form.writable)
"""Types that rows of f32 can be converted to."""
_MOST_NUMBERS = 1 << 20
"""Most numbers of an ARANGE; graphs use it for the sizes of a sequence's blocks."""
_CONVERTIBLE = frozenset({TensorType.I32, *(type_ for type_, form in FORMATS.items() if isinstance(form, Plain))})


def alias(tensor: Tensor, type: TensorType, ne: Shape, nb: Shape, offset: int = 0) -> Tensor:
    """View other elements in the memory of a tensor."""
    return Tensor(type, ne, nb, Op.VIEW, (tensor,), view_src=tensor, view_offs=offset, name=tensor.name)


def in_shape(tensor: Tensor, ne: Shape) -> Tensor:
    """View the elements of a contiguous tensor in another shape."""
    return alias(tensor, tensor.type, ne, contiguous_strides(tensor.type, ne))


def intermediate(type: TensorType, ne: Shape, name: str = "") -> Tensor:
    """Make a tensor for an intermediate result, which the plan places."""
    return Tensor(type, ne, contiguous_strides(type, ne), Op.CONT, name=name)


def plain_rows(out: Emitter, tensor: Tensor, type: TensorType = TensorType.F32) -> Tensor:
    """Return the tensor, or a copy of it, in contiguous rows of `type`."""
    if tensor.type == type and tensor.has_contiguous_rows():
        return tensor
    if tensor.type not in FORMATS:
        raise DeviceError(f"values of type {tensor.type.name} are not supported here (tensor {tensor.name or '?'})")
    plain = intermediate(type, tensor.ne, tensor.name)
    copy(out, tensor, plain)
    return plain


def copy(out: Emitter, x: Tensor, y: Tensor) -> None:
    """y = x: the same number of elements, any strides and shapes, with conversion of the type."""
    if x.ne != y.ne:
        if y.is_contiguous() and x.ne[0] % y.type.block_size == 0:
            y = in_shape(y, x.ne)
        else:
            if not x.is_contiguous() or y.ne[0] % x.type.block_size:
                between = intermediate(x.type if x.type.block_size == 1 else TensorType.F32, x.ne)
                copy(out, x, between)
                x = between
            x = in_shape(x, y.ne)
    rows = x.has_contiguous_rows() and y.has_contiguous_rows()
    row_bytes = x.type.row_bytes(x.ne[0])
    if x.type == y.type and rows:  # any type: copies the bits
        steps = [row_bytes, *(step for t in (x, y) for step in (t.root()[1], *_steps(t)))]
        units = (TensorType.F32, TensorType.I16, TensorType.I8)
        unit = next(unit for unit in units if not any(step % unit.block_bytes for step in steps))
        size = unit.block_bytes
        x, y = (alias(t, unit, (row_bytes // size, *t.ne[1:]), (size, *t.nb[1:])) for t in (x, y))
        if unit == TensorType.F32:
            move_rows(out, "copy", x, ("row",), y, ("store",))
        else:
            elements(out, x, y)
    elif rows and x.type in FORMATS and y.type in WRITABLE:
        move_rows(out, "copy", x, ("load", x.type.name), y, ("keep", y.type.name))
    elif (x.type == y.type and x.type in SCALAR) or {x.type, y.type} <= _CONVERTIBLE:
        elements(out, x, y)
    elif x.type in FORMATS and y.type in WRITABLE:  # one in blocks, the other with gaps
        between = intermediate(TensorType.F32, x.ne)
        copy(out, x, between)
        copy(out, between, y)
    else:
        raise DeviceError(f"copying {x.type.name} to {y.type.name} is not supported here")


def _steps(tensor: Tensor) -> list[int]:
    """Bytes from one row to the next, in each dimension that has several."""
    return [step for n, step in zip(tensor.ne[1:], tensor.nb[1:], strict=True) if n > 1]


def copy_node(out: Emitter, node: Tensor) -> None:
    """CPY, DUP and CONT."""
    assert node.src[0] is not None
    copy(out, node.src[0], node)


def elements(out: Emitter, x: Tensor, y: Tensor) -> None:
    """y = x element by element, with x repeated until it fills y."""
    if x.type not in SCALAR or y.type not in SCALAR:
        raise DeviceError(f"repeating {x.type.name} in {y.type.name} is not supported here")
    fields: Fields = {"x": out.place(x), "y": out.place(y)}
    for d in range(4):
        fields |= {f"x{d}": x.nb[d], f"y{d}": y.nb[d], f"n{d}": y.ne[d], f"m{d}": x.ne[d]}
    parameters = {"source": x.type.name, "target": y.type.name, "repeated": x.ne != y.ne}
    out.emit(floats.copy, parameters, fields, [out.span(x)], [out.span(y)], "copy")


def repeat(out: Emitter, x: Tensor, y: Tensor) -> None:
    """y = adjacent copies of x."""
    rows = x.type == y.type == TensorType.F32 and x.has_contiguous_rows() and y.has_contiguous_rows()
    if x.ne == y.ne:
        copy(out, x, y)
    elif rows and x.ne[0] == y.ne[0] and all(n in (1, m) for n, m in zip(x.ne, y.ne, strict=True)):
        move_rows(out, "repeat", x, ("row",), y, ("store",))
    else:
        elements(out, x if x.type == y.type else plain_rows(out, x, y.type), y)


def repeat_node(out: Emitter, node: Tensor) -> None:
    """REPEAT."""
    assert node.src[0] is not None
    repeat(out, node.src[0], node)


def concat(out: Emitter, node: Tensor) -> None:
    """Copy the second source behind the first along a dimension."""
    a, b = node.src[0], node.src[1]
    assert a is not None and b is not None
    d = struct.unpack_from("<i", node.op_params)[0]
    if a.ne[d] % (node.type.block_size if d == 0 else 1):
        raise DeviceError(f"a part of {a.ne[d]} elements is not a whole number of blocks")
    skipped = node.type.row_bytes(a.ne[0]) if d == 0 and node.has_contiguous_rows() else a.ne[d] * node.nb[d]
    for part, offset in ((a, 0), (b, skipped)):
        copy(out, part, alias(node, node.type, part.ne, node.nb, offset))


def fill(out: Emitter, node: Tensor) -> None:
    """FILL."""
    if not node.is_contiguous():
        raise DeviceError("filling of this form is not supported here")
    if node.type != TensorType.F32:
        whole = intermediate(TensorType.F32, node.ne)
        whole.op_params = node.op_params
        fill(out, whole)
        copy(out, whole, node)
        return
    span, number = out.span(node), struct.unpack_from("<f", node.op_params)[0]
    out.emit(floats.fill, {}, {"x": span.place, "size": span.size, "number": number}, [], [span], "fill")


def arange(out: Emitter, node: Tensor) -> None:
    """ARANGE: numbers that are known when the graph is compiled."""
    start, _, step = struct.unpack_from("<3f", node.op_params)
    if node.type != TensorType.F32 or not node.is_contiguous() or node.nrows != 1 or node.ne[0] > _MOST_NUMBERS:
        raise DeviceError("a sequence of this form is not supported here")
    numbers = np.float32(start) + np.float32(step) * np.arange(node.ne[0], dtype=np.float32)
    fields: Fields = {"x": out.constant(numbers), "y": out.place(node)}
    for d in range(4):
        fields |= {f"x{d}": node.nb[d], f"y{d}": node.nb[d], f"n{d}": node.ne[d], f"m{d}": node.ne[d]}
    out.emit(floats.copy, {"source": "F32", "target": "F32", "repeated": False}, fields, [], [out.span(node)], "arange")


def pad(out: Emitter, node: Tensor) -> None:
    """Copy the source into zeros."""
    a = node.src[0]
    assert a is not None
    *pads, circular = struct.unpack_from("<9i", node.op_params)
    if circular or node.type != TensorType.F32 or not node.is_contiguous():
        raise DeviceError("padding of this form is not supported here")
    span = out.span(node)
    out.emit(floats.fill, {}, {"x": span.place, "size": span.size, "number": 0.0}, [], [span], "pad")
    offset = sum(pads[2 * d] * node.nb[d] for d in range(4))
    copy(out, a, alias(node, node.type, a.ne, node.nb, offset))
