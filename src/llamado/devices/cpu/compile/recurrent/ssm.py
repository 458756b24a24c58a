"""State spaces (`kernels/ssm.py`): SSM_CONV and SSM_SCAN."""

from __future__ import annotations

import struct

from llamado.devices.cpu.compile import copies
from llamado.devices.cpu.compile.copies import made, straight
from llamado.devices.cpu.compile.emitter import Emitter, Fields
from llamado.devices.cpu.compile.recurrent.keeping import Keeping, Made
from llamado.devices.cpu.kernels import ssm
from llamado.devices.device import DeviceError
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

MAX_LANES = 1024
"""Elements of a row of states; models have up to 256."""


def convolve(out: Emitter, node: Tensor) -> None:
    """SSM_CONV."""
    x, kernel = node.src[0], node.src[1]
    assert x is not None and kernel is not None
    places = kernel.ne[0]
    if not 0 < places <= ssm.MAX_PLACES:
        raise DeviceError(f"a convolution over {places} tokens is not supported here")
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    x, kernel = straight(out, x), straight(out, kernel)
    fields: Fields = {
        "x": out.place(x), "x1": x.nb[1], "x2": x.nb[2], "k": out.place(kernel), "k1": kernel.nb[1],
        "y": out.place(node), "y1": node.nb[1], "y2": node.nb[2],
        "n_channels": node.ne[0], "n_tokens": node.ne[1], "n_seqs": node.ne[2],
    }  # fmt: skip
    parameters = {"places": places, "wide": node.ne[0] >= 8}
    out.emit(ssm.ssm_conv, parameters, fields, [out.span(x), out.span(kernel)], [out.span(node)], "ssm_conv")


def made_by_scan(node: Tensor) -> Made | None:
    """The states in the result of an SSM_SCAN; None where there are several of each sequence."""
    s, x = _needed(node, 0), _needed(node, 1)
    (n_states,) = struct.unpack_from("<i", node.op_params)
    return Made(4 * x.nelements, 4 * s.ne[0] * s.ne[1] * s.ne[2]) if n_states == 1 else None


def scan(out: Emitter, node: Tensor, keeping: Keeping) -> None:
    """SSM_SCAN, whose states are kept by `keeping`."""
    s, x, dt, a, b, c, ids = (_needed(node, i) for i in range(7))
    lanes, head_dim, n_head, n_rows = s.ne
    (n_states,) = struct.unpack_from("<i", node.op_params)
    one_rate = a.ne[0] == 1
    if lanes % 8 or lanes > MAX_LANES or (not one_rate and head_dim != 1) or ids.nb[0] % 4 or not node.is_contiguous():
        raise DeviceError(f"states of {lanes} × {head_dim} with {a.ne[0]} rates are not supported here")
    s, x, dt, a, b, c = (_plain(out, t, 3 if t is s else 2 if t in (dt, a) else 1) for t in (s, x, dt, a, b, c))
    fields: Fields = {
        "s": out.place(s), "s3": s.nb[3], "n_rows": n_rows, "ids": out.place(ids), "id0": ids.nb[0],
        "x": out.place(x), "x1": x.nb[1], "x2": x.nb[2], "x3": x.nb[3],
        "dt": out.place(dt), "dt1": dt.nb[1], "dt2": dt.nb[2], "a": out.place(a),
        "b": out.place(b), "b1": b.nb[1], "b2": b.nb[2], "b3": b.nb[3],
        "c": out.place(c), "c1": c.nb[1], "c2": c.nb[2], "c3": c.nb[3],
        "y": out.place(node), "states": out.place(node, 4 * x.nelements), "n_states": n_states,
        "n_head": n_head, "head_dim": head_dim, "n_group": b.ne[1], "n_tokens": x.ne[2], "n_seqs": x.ne[3],
        **keeping.fields, **out.share_scratch(ssm.SCRATCH),
    }  # fmt: skip
    kernel = ssm.scan_heads if one_rate else ssm.scan_channels
    grouped = head_dim if one_rate else n_head // b.ne[1]
    parameters = {"lanes": lanes, "rows": ssm.ROWS if grouped % ssm.ROWS == 0 else 1, "keeps": keeping.ids}
    reads = [out.span(t) for t in (s, x, dt, a, b, c, ids)] + keeping.reads
    out.emit(kernel, parameters, fields, reads, [out.span(node), *keeping.writes], "ssm_scan")


def _needed(node: Tensor, i: int) -> Tensor:
    source = node.source(i)
    assert source is not None  # checks.check_node has looked
    return source


def _plain(out: Emitter, tensor: Tensor, dims: int) -> Tensor:
    """The tensor itself where its first dimensions have no gaps, else a copy."""
    step = 4
    for n, nb in zip(tensor.ne[:dims], tensor.nb[:dims], strict=True):
        if nb != step:
            plain = made(TensorType.F32, tensor.ne, tensor.name)
            copies.copy(out, tensor, plain)
            return plain
        step *= n
    return tensor
