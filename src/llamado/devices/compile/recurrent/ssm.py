"""Compilation of state-space models (`kernels/ssm.py`): SSM_CONV and SSM_SCAN."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from llamado.devices.compile import checks, copies
from llamado.devices.compile.checks import COPIES
from llamado.devices.compile.copies import intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.compile.recurrent.state_target import StateLocation, StateTarget
from llamado.devices.device import DeviceError
from llamado.devices.kernels import ssm
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

Between = Callable[[Tensor], Sequence[Tensor] | None]
"""Return the operations of a graph after one operation and before another; None if their order is unknown."""

MAX_LANES = 1024
"""Most elements of a row of states; models have up to 256."""


def convolve(out: Emitter, node: Tensor) -> None:
    """SSM_CONV."""
    x, kernel = node.src[0], node.src[1]
    assert x is not None and kernel is not None
    places = kernel.ne[0]
    if not 0 < places <= ssm.MAX_PLACES:
        raise DeviceError(f"a convolution over {places} tokens is not supported here")
    if not node.has_contiguous_rows():
        raise DeviceError("rows of the result have gaps")
    x, kernel = plain_rows(out, x), plain_rows(out, kernel)
    fields: Fields = {
        "x": out.place(x), "x1": x.nb[1], "x2": x.nb[2], "k": out.place(kernel), "k1": kernel.nb[1],
        "y": out.place(node), "y1": node.nb[1], "y2": node.nb[2],
        "n_channels": node.ne[0], "n_tokens": node.ne[1], "n_seqs": node.ne[2],
    }  # fmt: skip
    parameters = {"places": places, "wide": node.ne[0] >= 8}
    out.emit(ssm.ssm_conv, parameters, fields, [out.span(x), out.span(kernel)], [out.span(node)], "ssm_conv")


def stream(out: Emitter, node: Tensor, readers: Sequence[Tensor], between: Between) -> bool:
    """Fuse a CONCAT of earlier and new tokens with its only readers, a convolution and a copy of the last tokens,
    without copies. Return True if that is possible.

    `readers`: the operations that read the node, also through views; `between`: returns the operations after it and
    before another one.
    """
    before, x = node.src[0], node.src[1]
    assert before is not None and x is not None
    conv = next((reader for reader in readers if reader.op is Op.SSM_CONV and reader.source(0) is node), None)
    last = next((reader for reader in readers if reader.op in COPIES), None)
    if len(readers) != 2 or conv is None or last is None or node.root()[0] in out.outputs or node.view_src is not None:
        return False
    kernel, source = conv.src[1], last.src[0]
    assert kernel is not None and source is not None
    (n_before, n_channels, n_seqs), (places, n_tokens) = before.ne[:3], (kernel.ne[0], x.ne[0])
    if not (
        struct.unpack_from("<i", node.op_params)[0] == 0
        and {t.type for t in (before, x, kernel, conv, last)} == {TensorType.F32}
        and 1 < places <= ssm.MAX_PLACES
        and (n_before, before.nb[0], x.nb[1]) == (places - 1, 4, 4)
        and source.root() == (node, 4 * n_tokens)
        and (source.ne, source.nb) == ((n_before, n_channels, n_seqs, 1), node.nb)
        and last.is_contiguous()
        and conv.view_src is None
        and conv.has_contiguous_rows()
        and kernel.has_contiguous_rows()
    ):
        return False
    until_last, until_conv = between(last), between(conv)
    if until_last is None or until_conv is None:
        return False
    others = [other for other in until_conv if other is not last]
    if out.is_written((kernel,), others) or any(other is not conv for other in until_last):
        return False
    if not out.can_write_early(last, (before, x, kernel), ()):
        return False
    if not out.can_write_early(conv, (before, x, kernel, last), others):
        return False
    for one in (conv, last):
        out.subject = one
        checks.check_node(one, out.extent)
    vectors = 2 if n_channels >= 16 else 1 if n_channels >= 8 else 0
    fields: Fields = {
        "before": out.place(before), "before1": before.nb[1], "before2": before.nb[2],
        "x": out.place(x), "x1": x.nb[0], "x2": x.nb[2], "k": out.place(kernel), "k1": kernel.nb[1],
        "y": out.place(conv), "y1": conv.nb[1], "y2": conv.nb[2], "last": out.place(last),
        "n_channels": n_channels, "n_tokens": n_tokens, "n_seqs": n_seqs,
    }  # fmt: skip
    reads, writes = [out.span(t) for t in (before, x, kernel)], [out.span(t) for t in (conv, last)]
    out.emit(ssm.ssm_stream, {"places": places, "vectors": vectors}, fields, reads, writes, "ssm_conv")
    for one in (node, conv, last):
        out.mark_done(one)
    return True


def scan_state_location(node: Tensor) -> StateLocation | None:
    """Return the location of the states in the result of an SSM_SCAN; None if there are several per sequence."""
    s, x = _needed(node, 0), _needed(node, 1)
    (n_states,) = struct.unpack_from("<i", node.op_params)
    return StateLocation(4 * x.nelements, 4 * s.ne[0] * s.ne[1] * s.ne[2]) if n_states == 1 else None


def scan(out: Emitter, node: Tensor, target: StateTarget) -> None:
    """SSM_SCAN, with new states written to `target`."""
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
        **target.fields, **out.share_scratch(ssm.SCRATCH),
    }  # fmt: skip
    kernel = ssm.scan_heads if one_rate else ssm.scan_channels
    grouped = head_dim if one_rate else n_head // b.ne[1]
    parameters = {"lanes": lanes, "rows": ssm.ROWS if grouped % ssm.ROWS == 0 else 1, "keeps": target.ids}
    reads = [out.span(t) for t in (s, x, dt, a, b, c, ids)] + target.reads
    out.emit(kernel, parameters, fields, reads, [out.span(node), *target.writes], "ssm_scan")


def _needed(node: Tensor, i: int) -> Tensor:
    source = node.source(i)
    assert source is not None  # check_node has checked this
    return source


def _plain(out: Emitter, tensor: Tensor, dims: int) -> Tensor:
    """Return the tensor if its first dimensions have no gaps, otherwise a copy."""
    step = 4
    for n, nb in zip(tensor.ne[:dims], tensor.nb[:dims], strict=True):
        if nb != step:
            plain = intermediate(TensorType.F32, tensor.ne, tensor.name)
            copies.copy(out, tensor, plain)
            return plain
        step *= n
    return tensor
