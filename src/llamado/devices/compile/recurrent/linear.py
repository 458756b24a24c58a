"""Compilation of linear attention (`kernels/recurrence.py`): GATED_DELTA_NET, GATED_LINEAR_ATTN, RWKV_WKV6,
RWKV_WKV7.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from llamado.devices.compile import copies
from llamado.devices.compile.chains import Chain
from llamado.devices.compile.copies import in_shape, intermediate, plain_rows
from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.recurrent.state_source import state_source
from llamado.devices.compile.recurrent.state_target import StateLocation, StateTarget
from llamado.devices.device import DeviceError
from llamado.devices.kernel import Kernel
from llamado.devices.kernels import recurrence
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_MAX_HEAD = 1024


class _Shape(NamedTuple):
    """The shape of all vectors: elements of a head, heads, tokens of a sequence, sequences."""

    size: int
    n_heads: int
    n_tokens: int
    n_seqs: int


def delta_net(out: Emitter, node: Tensor, target: StateTarget) -> None:
    """GATED_DELTA_NET: q, k, v, logarithms of decays, strengths, states."""
    *vectors, states = _sources(node)
    q, k, v, g, beta = (plain_rows(out, x) for x in vectors)
    (n_snapshots,) = struct.unpack_from("<i", node.op_params)
    shape = _Shape(*v.ne)
    fields = {"n_snapshots": n_snapshots, "snapshot": 4 * shape.size**2 * shape.n_heads * shape.n_seqs}
    named = {"q": q, "k": k, "v": v, "w": _exponentials(out, g), "beta": beta}
    parameters = {"rule": "delta", "vector": g.ne[0] > 1, "snapshots": n_snapshots > 1}
    _emit(out, node, target, shape, recurrence.by_rows, parameters, named, states, shape.size**-0.5, fields)


def rwkv7(out: Emitter, node: Tensor, target: StateTarget) -> None:
    """RWKV_WKV7: r, decays, k, v, a, b, states."""
    r, w, k, v, a, b, states = _sources(node)
    named = {"q": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    parameters = {"rule": "rwkv7", "vector": True, "snapshots": False}
    fields: Fields = {"n_snapshots": 1, "snapshot": 0}
    _emit(out, node, target, _batch(k, states), recurrence.by_rows, parameters, named, states, 1.0, fields)


def rwkv6(out: Emitter, node: Tensor, target: StateTarget) -> None:
    """RWKV_WKV6: k, v, r, the bonus of a token for itself, decays, states."""
    k, v, r, u, w, states = _sources(node)
    u = _whole(out, u)
    fields: Fields = {"bonus": out.place(u), "bonus_head": 4 * k.ne[0]}
    named = {"q": r, "k": k, "v": v, "w": w}
    _emit(out, node, target, _batch(k, states), recurrence.by_columns, {"bonus": True}, named, states, 1.0, fields, [u])


def gated_linear(out: Emitter, node: Tensor, target: StateTarget) -> None:
    """GATED_LINEAR_ATTN: k, v, q, decays, states."""
    k, v, q, w, states = _sources(node)
    (scale,) = struct.unpack_from("<f", node.op_params)
    fields: Fields = {"bonus": no_operand(), "bonus_head": 0}
    named = {"q": q, "k": k, "v": v, "w": w}
    _emit(out, node, target, _batch(k, states), recurrence.by_columns, {"bonus": False}, named, states, scale, fields)


def state_location(node: Tensor) -> StateLocation | None:
    """Return the location of the states in an operation's result; None if there are several per sequence."""
    states = node.src[-1]
    assert states is not None
    if node.op is Op.GATED_DELTA_NET and struct.unpack_from("<i", node.op_params)[0] > 1:
        return None
    return StateLocation(4 * (node.nelements - states.nelements), 4 * states.nelements // n_seqs(node))


def n_seqs(node: Tensor) -> int:
    """Number of sequences whose states an operation updates."""
    states = node.src[-1]
    assert states is not None
    return states.ne[3] if node.op is Op.GATED_DELTA_NET else states.ne[1]


CARRY: dict[Op, tuple[Callable[[Tensor], StateLocation | None], Callable[[Emitter, Tensor, StateTarget], None]]] = {
    Op.GATED_DELTA_NET: (state_location, delta_net),
    Op.RWKV_WKV7: (state_location, rwkv7),
    Op.RWKV_WKV6: (state_location, rwkv6),
    Op.GATED_LINEAR_ATTN: (state_location, gated_linear),
}
"""Operations with states as their last source and behind their other results."""


def _sources(node: Tensor) -> list[Tensor]:
    return [s for s in node.src if s is not None]


def _batch(x: Tensor, states: Tensor) -> _Shape:
    """Shape of vectors [size, heads, tokens of all sequences], with equally many tokens per sequence, and states […,
    sequences].
    """
    size, n_heads, n, _ = x.ne
    return _Shape(size, n_heads, n // states.ne[1], states.ne[1])


def _whole(out: Emitter, x: Tensor) -> Tensor:
    """Return the tensor, or a copy of it, in f32 without gaps."""
    if x.type == TensorType.F32 and x.is_contiguous():
        return x
    plain = intermediate(TensorType.F32, x.ne, x.name)
    copies.copy(out, x, plain)
    return plain


def _exponentials(out: Emitter, g: Tensor) -> Tensor:
    """Compute e to the power of all elements, with the rows of all heads as one row."""
    g = _whole(out, g)
    powers = intermediate(TensorType.F32, g.ne, g.name)
    n0, n1, n2, n3 = g.ne
    x, y = (in_shape(t, (n0 * n1, n2, n3, 1)) for t in (g, powers))
    chain = Chain(out, x)
    chain.operand(("row",), x, y, "row")
    chain.add(("unary", "EXP"), "EXP")
    chain.operand(("store",), y, y, "store", write=True)
    chain.finish(y)
    return powers


def _emit(
    out: Emitter,
    node: Tensor,
    target: StateTarget,
    shape: _Shape,
    kernel: Any,
    parameters: dict[str, Any],
    named: dict[str, Tensor],
    states: Tensor,
    scale: float,
    fields: Fields,
    others: list[Tensor] | None = None,
) -> None:
    """Emit the operation: outputs of all tokens, and behind them the states after the last ones."""
    size, n_heads, n_tokens, n_seqs = shape
    if size % recurrence.PARTS or size > _MAX_HEAD:
        raise DeviceError(f"heads of {size} elements: not a multiple of {recurrence.PARTS}, or more than {_MAX_HEAD}")
    if node.type != TensorType.F32 or not node.is_contiguous():
        raise DeviceError("a result with gaps is not supported here")
    if states.root()[0] not in out.deferred:
        states = _whole(out, states)
    named = {name: plain_rows(out, x) for name, x in named.items()}
    row = 4 * size * size * n_heads
    source = state_source(out, states, row)
    fields |= source.fields | target.fields
    fields |= {"states": out.place(node, 4 * size * n_heads * n_tokens * n_seqs), "states_row": row}
    fields |= {"out": out.place(node), "n_tokens": n_tokens, "n_heads": n_heads, "n_seqs": n_seqs, "scale": scale}
    for name in _vector_names(kernel):
        x = named.get(name)
        if x is None:
            fields |= {f"{name}{suffix}": 0 for suffix in ("", "_head", "_token", "_seq")} | {f"{name}_heads": 1}
            continue
        seq = x.nb[3] if x.ne[2] == n_tokens and x.ne[3] == n_seqs else x.nb[2] * n_tokens
        steps: Fields = {"": out.place(x), "_head": x.nb[1], "_token": x.nb[2], "_seq": seq, "_heads": x.ne[1]}
        fields |= {name + suffix: value for suffix, value in steps.items()}
    parameters = parameters | {"size": size, "lanes": out.lowering.panel_rows, "chosen": source.chosen}
    parameters |= {"keeps": target.ids}
    reads = [out.span(t) for t in (*named.values(), *(others or ()))] + source.reads + target.reads
    out.emit(kernel, parameters, fields, reads, [out.span(node), *target.writes], node.op.name)


def _vector_names(kernel: Kernel) -> list[str]:
    return [field.removesuffix("_heads") for field in kernel.fields if field.endswith("_heads") and field != "n_heads"]
