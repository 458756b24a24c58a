"""Stages of chains: the parameters of each row operation, and its reads besides the row."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from llamado.devices.compile.chains import Chain
from llamado.devices.compile.checks import BINARY
from llamado.devices.compile.copies import WRITABLE
from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.compile.rope import alibi_slopes, places_in_sections, rope_frequencies, sections_of_pairs
from llamado.devices.device import DeviceError
from llamado.devices.kernels import rows
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.kernels.maths import GATE, UNARY, UNARY_OPS
from llamado.ggml.ops import GluOp, Op, RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

StageOf = Callable[[Chain, Tensor], None]


def _binary(chain: Chain, node: Tensor) -> None:
    other = node.src[1] if node.src[0] is chain.value else node.src[0]
    assert other is not None
    kind = BINARY[node.op]
    chain.operand((kind,) if other.ne[0] == node.ne[0] else ("element", kind), other, node, kind)


def _norm(chain: Chain, node: Tensor) -> None:
    chain.add((node.op.name.lower(),), node.op.name, eps=struct.unpack_from("<f", node.op_params)[0])


def _scale(chain: Chain, node: Tensor) -> None:
    factor, bias = struct.unpack_from("<2f", node.op_params)
    chain.add(("scale",), "scale", factor=factor, bias=bias)


def _clamp(chain: Chain, node: Tensor) -> None:
    low, high = struct.unpack_from("<2f", node.op_params)
    chain.add(("clamp",), "clamp", low=low, high=high)


def _leaky_relu(chain: Chain, node: Tensor) -> None:
    chain.add(("leaky_relu",), "LEAKY_RELU", slope=struct.unpack_from("<f", node.op_params)[0])


def _add_unary(chain: Chain, node: Tensor) -> None:
    chain.add(("unary", node.op.name), node.op.name)


def _unary(chain: Chain, node: Tensor) -> None:
    function = UnaryOp(struct.unpack_from("<i", node.op_params)[0])
    if function is UnaryOp.XIELU:
        names = ("negative", "positive", "beta", "eps")
        chain.add(("xielu",), "XIELU", **dict(zip(names, struct.unpack_from("<4f", node.op_params, 4), strict=True)))
        return
    if function not in UNARY:
        raise DeviceError(f"the {chain.out.device} device has no function {function.name}")
    chain.add(("unary", function.name), function.name)


def _glu(chain: Chain, node: Tensor) -> None:
    kind, swapped, alpha, limit = struct.unpack_from("<2i2f", node.op_params)
    gate = GluOp(kind)
    up = node.source(1)
    if gate is GluOp.SWIGLU_OAI and up is not None and not swapped:
        chain.operand(("swiglu_oai",), up, node, gate.name, alpha=alpha, limit=limit)
        return
    if gate is GluOp.SWIGLU_CLAMP and up is not None and not swapped:
        chain.operand(("swiglu_clamp",), up, node, gate.name, limit=limit)
        return
    if gate not in GATE or up is None or swapped:
        raise DeviceError(f"gated activation {gate.name} of this form is not supported here")
    chain.operand(("glu", gate.name), up, node, gate.name)


def _add_id(chain: Chain, node: Tensor) -> None:
    matrix, ids = node.src[1], node.src[2]
    assert matrix is not None and ids is not None
    out = chain.out
    chain.add(
        ("add_id",),
        "ADD_ID",
        x=out.place(matrix),
        nb1=matrix.nb[1],
        ids=out.place(ids),
        id1=ids.nb[0],
        id2=ids.nb[1],
        rows=matrix.ne[1],
    )
    chain.reads += [out.span(matrix), out.span(ids)]


def _get_rows(chain: Chain, node: Tensor) -> None:
    table, ids = node.src[0], node.src[1]
    assert table is not None and ids is not None
    if table.type not in FORMATS:
        raise DeviceError(f"GET_ROWS from {table.type.name} is not supported here")
    chain.add(
        ("get_rows", table.type.name),
        "get_rows",
        x=chain.out.place(table),
        **{f"nb{d}": table.nb[d] for d in (1, 2, 3)},
        ids=chain.out.place(ids),
        **{f"id{d}": ids.nb[d - 1] for d in (1, 2, 3)},
        rows=table.ne[1],
    )
    chain.reads += [chain.out.span(table), chain.out.span(ids)]


def _soft_max(chain: Chain, node: Tensor) -> None:
    out, mask, sinks = chain.out, node.source(1), node.source(2)
    scale, max_bias = struct.unpack_from("<2f", node.op_params)
    fields: Fields = {"s1": 0, "s2": 0, "s3": 0, "m2": 1, "m3": 1}
    fields |= {"scale": scale, "mask": no_operand(), "slopes": no_operand(), "sinks": no_operand()}
    if mask is not None:
        slopes = out.constant(alibi_slopes(node.ne[2], max_bias))
        fields |= {"mask": out.place(mask), "slopes": slopes, "m2": mask.ne[2], "m3": mask.ne[3]}
        fields |= {f"s{d}": mask.nb[d] for d in (1, 2, 3)}
        chain.reads.append(out.span(mask))
    if sinks is not None:
        fields["sinks"] = out.place(sinks)
        chain.reads.append(out.span(sinks))
    stage = ("soft_max", None if mask is None else mask.type.name, sinks is not None)
    chain.add(stage, "SOFT_MAX", **fields)


def _set_rows(chain: Chain, node: Tensor) -> None:
    out, source, ids = chain.out, node.src[0], node.src[1]
    assert source is not None and ids is not None
    if node.type not in WRITABLE:
        raise DeviceError(f"SET_ROWS to {node.type.name} is not supported here")
    # the row may be one head of a row of the cache
    how = "flat" if source.ne[2] * source.ne[3] == 1 else "deep"
    if chain.value.ne[0] != source.ne[0]:
        how = "heads"
    chain.add(
        ("set_rows", node.type.name, ids.type == TensorType.I64, how),
        "set_rows",
        x=out.place(node),
        **{f"nb{d}": node.nb[d] for d in (1, 2, 3)},
        ids=out.place(ids),
        **{f"id{d}": ids.nb[d - 1] for d in (1, 2, 3)},
        m2=ids.ne[1],
        m3=ids.ne[2],
        part=node.type.row_bytes(chain.value.ne[0]) if how == "heads" else 0,
        rows=node.ne[1],
    )
    chain.reads.append(out.span(ids))
    chain.writes.append(out.span(node))


def _rope(chain: Chain, node: Tensor) -> None:
    _, n_dims, number, *_ = struct.unpack_from("<5i", node.op_params)
    mode = RopeMode(number)
    (offset,) = struct.unpack_from("<i", node.op_params, 60)
    if mode is RopeMode.VISION:  # n_dims is the number of pairs, and all elements are rotated
        if 2 * n_dims != node.ne[0] or offset or node.source(2) is not None:
            raise DeviceError("rotation mode VISION must rotate whole heads and has no frequency factors")
        n_dims *= 2
    halves = RopeMode.NORMAL if mode is RopeMode.NORMAL else RopeMode.NEOX
    table = _angles(chain.out, node, n_dims // 2)
    chain.add(
        ("rope", halves.name), "rope", table=Place(table, 0), step=8 * (n_dims // 2), n_dims=n_dims, offset=offset
    )
    chain.reads.append(ByteSpan(Place(table, 0), table.size))


def _angles(out: Emitter, node: Tensor, n_pairs: int) -> Temporary:
    """Return the cos and sin of every token and pair of a rotation, computed once for all layers."""
    positions, factors = node.src[1], node.source(2)
    assert positions is not None
    _, n_dims, number, _, n_ctx_orig, *scaling = struct.unpack_from("<5i6f", node.op_params)
    mode = RopeMode(number)
    lengths = struct.unpack_from("<4i", node.op_params, 44)
    key = (
        "angles", out.contents_key(positions), node.op_params[:60],
        None if factors is None else out.contents_key(factors), node.ne[2],
    )  # fmt: skip
    if key not in out.shared:
        with np.errstate(all="ignore"):  # parameters may be anything
            places = places_in_sections(n_pairs, lengths) if mode is RopeMode.VISION else None
            frequencies, magnitude = rope_frequencies(n_dims, n_ctx_orig, tuple(scaling), places)
            sections = sections_of_pairs(n_pairs, mode, lengths)
        table = Temporary(8 * node.ne[2] * n_pairs)
        fields: Fields = {
            "positions": out.place(positions),
            "frequencies": out.constant(frequencies),
            "sections": no_operand() if sections is None else out.constant(sections),
            "factors": no_operand() if factors is None else out.place(factors),
            "table": Place(table, 0),
            "n_tokens": node.ne[2],
            "n_pairs": n_pairs,
            "magnitude": magnitude,
        }
        read = [out.span(t) for t in (positions, factors) if t is not None]
        parameters = {"factored": factors is not None, "sectioned": sections is not None}
        out.emit(rows.rope_table, parameters, fields, read, [ByteSpan(Place(table, 0), table.size)])
        out.shared[key] = table
    return out.shared[key]


STAGES: dict[Op, StageOf] = {
    **dict.fromkeys(BINARY, _binary),
    **dict.fromkeys(UNARY_OPS, _add_unary),
    Op.ADD_ID: _add_id,
    Op.RMS_NORM: _norm,
    Op.NORM: _norm,
    Op.L2_NORM: _norm,
    Op.SCALE: _scale,
    Op.CLAMP: _clamp,
    Op.LEAKY_RELU: _leaky_relu,
    Op.UNARY: _unary,
    Op.GLU: _glu,
    Op.ROPE: _rope,
    Op.SOFT_MAX: _soft_max,
    Op.GET_ROWS: _get_rows,
    Op.SET_ROWS: _set_rows,
}
"""Row operations, and the function that adds each to a chain. GET_ROWS can only begin one."""
