"""Shape rules: the sources each operation accepts, and the type and shape of its result (the asserts in ggml.c).

Each operation has one rule. `graph.py` applies it while building a graph, `check_result` to graphs received by RPC
servers and devices. A rule takes the sources and any parameters that the result depends on, and raises ShapeError.
Rules ignore strides and kernels, which differ between back ends: a device checks its own limits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from llamado.ggml.errors import ShapeError, describe
from llamado.ggml.ops import Op, RopeMode
from llamado.ggml.tensor import BLOCK, Shape, Tensor
from llamado.gguf.types import TensorType

# Bound once: members of an Enum class are slow to reach, and a graph has a thousand nodes.
_F32, _F16, _I32, _I64 = TensorType.F32, TensorType.F16, TensorType.I32, TensorType.I64
_MROPE = int(RopeMode.MROPE)

MAX_HEAD = 1024
"""Largest head dimension accepted; the largest in use is 576."""

Result = tuple[TensorType, Shape]
"""Type and shape of an operation's result."""


# --- moving data ------------------------------------------------------------------------------------------------------


def copy(op: str, a: Tensor, type: TensorType, ne: Shape) -> Result:
    """CPY, CONT and DUP: the elements of `a` in another type or shape."""
    if a.nelements != ne[0] * ne[1] * ne[2] * ne[3]:
        raise ShapeError(op, f"{a.nelements} elements do not fill {list(ne)}", a)
    if ne[0] % BLOCK[type][0]:
        raise ShapeError(op, f"a row of {ne[0]} elements is not a whole number of {type.name} blocks", a)
    return type, ne


def get_rows(a: Tensor, ids: Tensor) -> Result:
    """GET_ROWS: rows of `a` as F32; I32 rows stay I32."""
    an, bn = a.ne, ids.ne
    if ids.type is not _I32 or an[2] != bn[1] or an[3] != bn[2] or bn[3] != 1:
        raise ShapeError("get_rows", "row numbers must be I32 [n, a.ne2, a.ne3]", a, ids)
    return _I32 if a.type is _I32 else _F32, (an[0], bn[0], bn[1], bn[2])


def set_rows(dst: Tensor, src: Tensor, ids: Tensor) -> Result:
    """SET_ROWS: the result is the destination."""
    dn, sn, cn = dst.ne, src.ne, ids.ne
    if dn[0] != sn[0] or dn[2] != sn[2] or dn[3] != sn[3]:
        raise ShapeError("set_rows", "source and destination differ in dimension 0, 2 or 3", dst, src, ids)
    if sn[1] != cn[0] or cn[3] != 1 or not cn[1] or not cn[2] or sn[2] % cn[1] or sn[3] % cn[2]:
        raise ShapeError("set_rows", "there must be one row number for each source row", dst, src, ids)
    if src.type is not _F32 and src.type is not _F16:
        raise ShapeError("set_rows", "the source must be F32 or F16", dst, src, ids)
    if ids.type is not _I64 and ids.type is not _I32:
        raise ShapeError("set_rows", "row numbers must be I64 or I32", dst, src, ids)
    return dst.type, dn


def concat(a: Tensor, b: Tensor, dim: int) -> Result:
    """CONCAT: the lengths along `dim` add up."""
    if not 0 <= dim < 4 or a.type is not b.type:
        raise ShapeError("concat", f"dimension {dim} must be 0 to 3 and the types equal", a, b)
    ne = list(a.ne)
    ne[dim] = b.ne[dim]
    if tuple(ne) != b.ne:
        raise ShapeError("concat", f"shapes differ outside dimension {dim}", a, b)
    ne[dim] += a.ne[dim]
    return a.type, (ne[0], ne[1], ne[2], ne[3])


def repeat(a: Tensor, ne: Shape) -> Result:
    """REPEAT: whole copies of `a` fill `ne`."""
    if 0 not in ne if 0 in a.ne else any(n % m for n, m in zip(ne, a.ne, strict=True)):
        raise ShapeError("repeat", f"whole copies do not fill {list(ne)}", a)
    return a.type, ne


def repeat_back(a: Tensor, ne: Shape) -> Result:
    """REPEAT_BACK: `a` consists of whole copies of shape `ne`, which are summed."""
    if 0 in ne or any(n % m for n, m in zip(a.ne, ne, strict=True)):
        raise ShapeError("repeat_back", f"whole copies of {list(ne)} do not fill it", a)
    return a.type, ne


def pad(a: Tensor, pads: tuple[int, ...]) -> Result:
    """PAD: `pads` are the elements before and after each dimension."""
    n0, n1, n2, n3 = (n + before + behind for n, before, behind in zip(a.ne, pads[::2], pads[1::2], strict=True))
    return a.type, (n0, n1, n2, n3)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def elementwise(a: Tensor) -> Result:
    """An operation on each element or each row: the result has the type and shape of `a`."""
    return a.type, a.ne


def binary(op: str, a: Tensor, b: Tensor) -> Result:
    """ADD, SUB, MUL and DIV: `b` is repeated to the shape of `a`."""
    if a.ne != b.ne and not b.can_repeat_to(a):
        raise ShapeError(op, "whole copies of the second tensor do not fill the first", a, b)
    return a.type, a.ne


def glu(a: Tensor, b: Tensor | None) -> Result:
    """GLU: gate and values are two tensors, or the two halves of each row of `a`."""
    if b is not None and (a.ne != b.ne or a.type is not b.type):
        raise ShapeError("glu", "gate and values differ in shape or type", a, b)
    if b is not None:
        return a.type, a.ne
    n0, n1, n2, n3 = a.ne
    return a.type, (n0 // 2, n1, n2, n3)


# --- along rows -------------------------------------------------------------------------------------------------------


def cumsum(a: Tensor) -> Result:
    """CUMSUM: running sums, F32 only."""
    if a.type is not _F32:
        raise ShapeError("cumsum", "the tensor must be F32", a)
    return _F32, a.ne


def sum_rows(a: Tensor) -> Result:
    """SUM_ROWS: one number per row."""
    return a.type, (1, *a.ne[1:])


def sum_all(a: Tensor) -> Result:
    """SUM: one number."""
    return a.type, (1, 1, 1, 1)


def mean(a: Tensor) -> Result:
    """MEAN: one F32 per row."""
    return _F32, (1, *a.ne[1:])


def argmax(a: Tensor) -> Result:
    """ARGMAX: one index per row of a matrix."""
    if a.ne[2] != 1 or a.ne[3] != 1:
        raise ShapeError("argmax", "the tensor must be a matrix", a)
    return _I32, (a.ne[1], 1, 1, 1)


def argsort(a: Tensor) -> Result:
    """ARGSORT: one index per element."""
    return _I32, a.ne


def top_k(a: Tensor, k: int) -> Result:
    """TOP_K: `k` indices per row."""
    if a.ne[0] < k:
        raise ShapeError("top_k", f"rows have fewer than {k} elements", a)
    return _I32, (k, *a.ne[1:])


def pool_2d(a: Tensor, params: tuple[int, ...]) -> Result:
    """POOL_2D: one number per window position over dimensions 0 and 1.

    `params` are the kind, window sizes, strides and padding.
    """
    _, k0, k1, s0, s1, p0, p1 = params
    if min(k0, k1, s0, s1) < 1 or min(p0, p1) < 0:
        raise ShapeError("pool_2d", "sizes and steps of a window are at least 1, and padding is not negative", a)
    ne = ((a.ne[0] + 2 * p0 - k0) // s0 + 1, (a.ne[1] + 2 * p1 - k1) // s1 + 1, *a.ne[2:])
    if min(ne[:2]) < 1:
        raise ShapeError("pool_2d", "the window is larger than the padded tensor", a)
    return _F32, ne


def soft_max(a: Tensor, mask: Tensor | None, sinks: Tensor | None, max_bias: float) -> Result:
    """SOFT_MAX: the mask covers the scores and is repeated over dimensions 2 and 3; one sink per head (dimension 2)."""
    if mask is not None:
        an, mn = a.ne, mask.ne
        if mask.type not in (_F16, _F32):
            raise ShapeError("soft_max", "the mask must be F16 or F32", a, mask)
        if mn[0] != an[0] or mn[1] < an[1] or not mn[2] or not mn[3] or an[2] % mn[2] or an[3] % mn[3]:
            raise ShapeError("soft_max", "the mask does not cover the scores", a, mask)
    elif max_bias > 0.0:
        raise ShapeError("soft_max", "ALiBi needs a mask", a)
    _check_sinks("soft_max", a, sinks)
    return a.type, a.ne


def _check_sinks(op: str, a: Tensor, sinks: Tensor | None) -> None:
    if sinks is not None and (sinks.type is not _F32 or sinks.ne[0] != a.ne[2]):
        raise ShapeError(op, "there must be one F32 sink for each head (dimension 2)", a, sinks)


# --- matrices, positions, attention -----------------------------------------------------------------------------------


def mul_mat(a: Tensor, b: Tensor) -> Result:
    """MUL_MAT: rows are equally long; `a` is repeated over dimensions 2 and 3 of `b`."""
    an, bn = a.ne, b.ne
    if an[0] != bn[0]:
        raise ShapeError("mul_mat", f"rows of {an[0]} and {bn[0]} elements", a, b)
    if (an[2] != 1 or an[3] != 1) and (not an[2] or not an[3] or bn[2] % an[2] or bn[3] % an[3]):
        raise ShapeError("mul_mat", "whole copies of the first tensor do not fill dimensions 2 and 3", a, b)
    return _F32, (an[1], bn[1], bn[2], bn[3])


def mul_mat_id(experts: Tensor, b: Tensor, ids: Tensor) -> Result:
    """MUL_MAT_ID: `ids` select a matrix (dimension 2 of `experts`) for each row of `b`."""
    en, bn, cn = experts.ne, b.ne, ids.ne
    if ids.type is not _I32 or en[3] != 1 or bn[3] != 1 or cn[2] != 1 or cn[3] != 1:
        raise ShapeError("mul_mat_id", "needs 3-d experts and rows, and I32 [experts, tokens]", experts, b, ids)
    if cn[1] != bn[2] or en[0] != bn[0] or not bn[1] or cn[0] % bn[1]:
        raise ShapeError("mul_mat_id", "experts, rows and choices do not fit", experts, b, ids)
    return _F32, (en[1], cn[0], bn[2], 1)


def add_id(a: Tensor, b: Tensor, ids: Tensor) -> Result:
    """ADD_ID: row [i, j] of `a` plus row `ids[i, j]` of `b`."""
    if ids.type is not _I32 or a.ne[0] != b.ne[0] or a.ne[1] != ids.ne[0] or a.ne[2] != ids.ne[1]:
        raise ShapeError("add_id", "rows and choices do not fit", a, b, ids)
    return a.type, a.ne


def rope(a: Tensor, pos: Tensor, factors: Tensor | None, n_dims: int, mode: int, offset: int) -> Result:
    """ROPE: one position per token (dimension 2), four in the modes with sections; one frequency factor per pair."""
    if mode & 1:
        raise ShapeError("rope", f"mode {mode} is no longer supported", a)
    n = 4 * a.ne[2] if mode & _MROPE else a.ne[2]
    if pos.type is not _I32 or pos.ne != (n, 1, 1, 1) or not pos.is_contiguous():
        count = "four I32 positions" if mode & _MROPE else "one I32 position"
        raise ShapeError("rope", f"there must be {count} for each token (dimension 2)", a, pos)
    if factors is not None and (factors.type is not _F32 or factors.ne[0] < n_dims // 2):
        raise ShapeError("rope", f"needs {n_dims // 2} F32 frequency factors", a, pos, factors)
    if n_dims <= 0 or n_dims % 2 or offset < 0 or offset % 2 or offset + n_dims > a.ne[0]:
        raise ShapeError("rope", f"cannot rotate {n_dims} elements of a head from element {offset}", a, pos)
    return a.type, a.ne


def flash_attn_ext(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None, max_bias: float
) -> Result:
    """FLASH_ATTN_EXT: the query heads are a multiple of the KV heads; the mask covers the scores."""
    qn, kn, vn = q.ne, k.ne, v.ne
    if qn[0] != kn[0] or not kn[2] or not kn[3] or qn[2] % kn[2] or qn[3] % kn[3] or qn[3] != kn[3] or qn[3] != vn[3]:
        raise ShapeError("flash_attn_ext", "queries and keys do not fit", q, k, v, mask)
    if vn[1] != kn[1] or vn[2] != kn[2]:
        raise ShapeError("flash_attn_ext", "keys and values do not fit", q, k, v, mask)
    if mask is not None:
        mn = mask.ne
        if mask.type is not _F16:
            raise ShapeError("flash_attn_ext", "the mask must be F16", q, k, v, mask)
        if mn[0] != kn[1] or mn[1] < qn[1] or not mn[2] or not mn[3] or qn[2] % mn[2] or qn[3] % mn[3]:
            raise ShapeError("flash_attn_ext", "the mask does not cover the scores", q, k, v, mask)
    elif max_bias > 0.0:
        raise ShapeError("flash_attn_ext", "ALiBi needs a mask", q, k, v)
    _check_sinks("flash_attn_ext", q, sinks)
    return _F32, (vn[0], qn[2], qn[1], qn[3])


def lightning_indexer(q: Tensor, k: Tensor, weights: Tensor, mask: Tensor) -> Result:
    """LIGHTNING_INDEXER: one score per key and token."""
    qn, kn, wn, mn, given = q.ne, k.ne, weights.ne, mask.ne, (q, k, weights, mask)
    if q.type is not _F32 or weights.type is not _F32 or mask.type is not _F16:
        raise ShapeError("lightning_indexer", "queries and weights must be F32, and the mask F16", *given)
    if qn[0] != kn[0] or kn[1] != 1 or kn[3] != qn[3] or wn != (qn[1], qn[2], 1, qn[3]):
        raise ShapeError("lightning_indexer", "queries, keys and weights do not fit", *given)
    if mn[:3] != (kn[2], qn[2], 1) or not mn[3] or qn[3] % mn[3]:
        raise ShapeError("lightning_indexer", "the mask does not cover the scores", *given)
    return _F32, (kn[2], qn[2], 1, qn[3])


# --- hyper-connections: several streams of hidden states -------------------------------------------------------------


def _all_f32(op: str, *given: Tensor | None) -> None:
    there = [t for t in given if t is not None]
    if any(t.type is not _F32 for t in there):
        raise ShapeError(op, "all must be F32", *there)


def read_streams(x: Tensor, weights: Tensor, gated: bool) -> Result:
    """DSV4_HC_PRE: one weight per stream, or one per element if `gated`."""
    n, n_streams, n_tokens, one = x.ne
    _all_f32("dsv4_hc_pre", x, weights)
    if one != 1 or weights.ne != ((n, n_streams, n_tokens, 1) if gated else (n_streams, n_tokens, 1, 1)):
        raise ShapeError("dsv4_hc_pre", "there must be a weight for each stream", x, weights)
    return _F32, (n, n_tokens, 1, 1)


def add_to_streams(x: Tensor, streams: Tensor, parts: Tensor, mixing: Tensor | None) -> Result:
    """DSV4_HC_POST: a weight per stream for the new output, and a square mixing matrix per token."""
    n, n_streams, n_tokens, one = streams.ne
    _all_f32("dsv4_hc_post", x, streams, parts, mixing)
    if one != 1 or x.ne != (n, n_tokens, 1, 1) or parts.ne != (n_streams, n_tokens, 1, 1):
        raise ShapeError("dsv4_hc_post", "streams, what is added and its parts do not fit", x, streams, parts)
    if mixing is not None and mixing.ne != (n_streams, n_streams, n_tokens, 1):
        raise ShapeError("dsv4_hc_post", "there must be a square for each token", streams, mixing)
    return _F32, streams.ne


def mix_streams(x: Tensor, factors: Tensor, shifts: Tensor, n_rounds: int) -> Result:
    """DSV4_HC_COMB: a mixing matrix over four streams."""
    n, given = 4, (x, factors, shifts)
    _all_f32("dsv4_hc_comb", *given)
    if x.ne[0] != (2 + n) * n or x.ne[2:] != (1, 1) or shifts.ne != (x.ne[0], 1, 1, 1) or factors.ne[1:] != (1, 1, 1):
        raise ShapeError("dsv4_hc_comb", "there must be 24 numbers for each token, and their shifts", *given)
    if factors.ne[0] < 3 or not 0 < n_rounds <= 1024:
        raise ShapeError("dsv4_hc_comb", "needs three factors, and 1 to 1024 rounds", *given)
    return _F32, (n, n, x.ne[1], 1)


# --- linear attention with a state ------------------------------------------------------------------------------------


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, n_snapshots: int
) -> Result:
    """GATED_DELTA_NET: outputs [size × heads] of all tokens of all sequences, then `n_snapshots` states per sequence.

    Query and key heads are repeated over the value heads.
    """
    op, given = "gated_delta_net", (q, k, v, g, beta, states)
    size, n_heads, n_tokens, n_seqs = v.ne
    if any(t.type is not _F32 for t in given) or n_snapshots < 1:
        raise ShapeError(op, "all must be F32, and at least one state kept", *given)
    for t in (q, k):
        if (t.ne[0], *t.ne[2:]) != (size, n_tokens, n_seqs) or not t.ne[1] or n_heads % t.ne[1]:
            raise ShapeError(op, "queries, keys and values do not fit", *given)
    if g.ne[0] not in (1, size) or g.ne[1:] != v.ne[1:] or beta.ne != (1, *v.ne[1:]):
        raise ShapeError(op, "there must be decays and a strength for each head of each token", *given)
    if states.ne != (size, size, n_heads, n_seqs):
        raise ShapeError(op, "there must be a square state for each head of each sequence", *given)
    return _F32, (size * n_heads, n_tokens * n_seqs + n_snapshots * size * n_seqs, 1, 1)


def linear_attention(op: str, vectors: tuple[Tensor, ...], states: Tensor, bonus: Tensor | None = None) -> Result:
    """Linear attention: outputs [size × heads] of all tokens, then the state of each sequence (dimension 1 of
    `states`).
    """
    given = (*vectors, states)
    ne = vectors[0].ne
    size, n_heads, n_tokens, one = ne
    if any(t.type is not _F32 or not t.is_contiguous() for t in given) or one != 1 or any(t.ne != ne for t in vectors):
        raise ShapeError(op, "all vectors must be F32 [size, heads, tokens] without gaps", *given)
    n_seqs = states.ne[1]
    if not n_seqs or n_tokens % n_seqs or states.nelements != size * size * n_heads * n_seqs:
        raise ShapeError(op, "there must be a square state for each head of each sequence", *given)
    if bonus is not None and (bonus.type is not _F32 or bonus.nelements != size * n_heads):
        raise ShapeError(op, "there must be a bonus for each element of each head", *given, bonus)
    return _F32, (size * n_heads, n_tokens + size * n_seqs, 1, 1)


# --- recurrence -------------------------------------------------------------------------------------------------------


def ssm_conv(x: Tensor, kernel: Tensor) -> Result:
    """SSM_CONV: one output per position of the kernel in each row of `x`, with rows and columns exchanged."""
    xn, kn = x.ne, kernel.ne
    if xn[3] != 1 or kn[2] != 1 or kn[3] != 1 or x.type is not _F32 or kernel.type is not _F32:
        raise ShapeError("ssm_conv", "needs F32 [n, channels, sequences] and a matrix", x, kernel)
    if xn[1] != kn[1] or xn[0] < kn[0] - 1:
        raise ShapeError("ssm_conv", "there must be a row of the kernel for each channel, and room for it", x, kernel)
    return _F32, (xn[1], xn[0] - kn[0] + 1, xn[2], 1)


def ssm_scan(s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, n_states: int) -> Result:
    """SSM_SCAN: the output of each token, then the last `n_states` states of each sequence, in one row."""
    sn, (head_dim, n_head, n_tokens, n_seqs), given = s.ne, x.ne, (s, x, dt, a, b, c, ids)
    if any(t.type is not _F32 for t in given[:-1]) or ids.type is not _I32:
        raise ShapeError("ssm_scan", "numbers must be F32, and row numbers I32", *given)
    if sn[1] != head_dim or sn[2] != n_head or dt.ne != (n_head, n_tokens, n_seqs, 1):
        raise ShapeError("ssm_scan", "states, inputs and steps do not fit", *given)
    if b.ne != c.ne or b.ne[0] != sn[0] or not b.ne[1] or n_head % b.ne[1] or b.ne[2:] != (n_tokens, n_seqs):
        raise ShapeError("ssm_scan", "inputs do not fit the B and C matrices", *given)
    if a.ne not in ((1, n_head, 1, 1), (sn[0], n_head, 1, 1)) or ids.ne != (n_seqs, 1, 1, 1):
        raise ShapeError("ssm_scan", "decays or row numbers do not fit", *given)
    if n_states < 1 or (n_states > 1 and a.ne[0] != 1):
        raise ShapeError("ssm_scan", f"cannot give {n_states} states", *given)
    return _F32, (x.nelements + n_states * sn[0] * head_dim * n_head * n_seqs, 1, 1, 1)


# --- graphs received from a client ------------------------------------------------------------------------------------


def check_result(node: Tensor) -> None:
    """Raise ShapeError unless ggml gives an operation with these sources and parameters this type and shape.

    Operations without a rule pass; a device that supports one checks it.
    """
    found = _RULES.get(node.op)
    if found is None:
        return
    needed, taken, rule = found
    sources = [node.source(i) for i in range(taken)]
    given = [s for s in sources if s is not None]
    if None in sources[:needed]:
        raise ShapeError(node.op.name, f"needs {needed} sources", *given)
    try:
        result = rule(node, *sources)
    except ShapeError as error:
        raise ShapeError(node.op.name, f"cannot make {describe(node)}: {error.reason}", *given) from None
    if result != (node.type, node.ne):
        expected = f"{result[0].name}{list(result[1])}"
        raise ShapeError(node.op.name, f"cannot make {describe(node)}: the result is {expected}", *given)


def _ints(node: Tensor, format: str, offset: int = 0) -> tuple[int, ...]:
    return struct.unpack_from(format, node.op_params, offset)


def _float(node: Tensor, index: int) -> float:
    number: float = struct.unpack_from("<f", node.op_params, 4 * index)[0]
    return number


def _sum_like(node: Tensor, a: Tensor, b: Tensor) -> Result:
    # ggml_add_cast gives a sum another type.
    return node.type if node.op is Op.ADD else a.type, binary(node.op.name, a, b)[1]


def _copy(node: Tensor, a: Tensor) -> Result:
    return copy(node.op.name, a, node.type if node.op is Op.CPY else a.type, node.ne)


def _set_rows(node: Tensor, src: Tensor, ids: Tensor) -> Result:
    if node.view_src is None:
        raise ShapeError("set_rows", "the result must lie in another tensor", src, ids)
    return set_rows(node, src, ids)


def _rope(node: Tensor, a: Tensor, pos: Tensor, factors: Tensor | None) -> Result:
    n_dims, mode = _ints(node, "<2i", 4)
    return rope(a, pos, factors, n_dims, mode, _ints(node, "<i", 60)[0])


def _attention(node: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Result:
    if max(k.ne[0], v.ne[0]) > MAX_HEAD:
        raise ShapeError("flash_attn_ext", f"a head has at most {MAX_HEAD} elements", q, k, v)
    return flash_attn_ext(q, k, v, mask, sinks, _float(node, 1))


def _delta(node: Tensor, *sources: Tensor) -> Result:
    q, k, v, g, beta, states = sources
    return gated_delta_net(q, k, v, g, beta, states, _ints(node, "<i")[0])


def _wkv6(node: Tensor, k: Tensor, v: Tensor, r: Tensor, bonus: Tensor, decays: Tensor, states: Tensor) -> Result:
    return linear_attention("rwkv_wkv6", (k, v, r, decays), states, bonus)


_EACH = (
    Op.NORM, Op.RMS_NORM, Op.L2_NORM, Op.GROUP_NORM, Op.SCALE, Op.UNARY, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS,
    Op.CLAMP, Op.FILL, Op.DIAG_MASK_INF, Op.DIAG_MASK_ZERO, Op.LEAKY_RELU,
)  # fmt: skip

# Required sources, sources that the rule takes (after the node), and the rule.
_RULES: dict[Op, tuple[int, int, Callable[..., Result]]] = {
    **dict.fromkeys(_EACH, (1, 1, lambda node, a: elementwise(a))),
    **dict.fromkeys((Op.ADD, Op.SUB, Op.MUL, Op.DIV), (2, 2, _sum_like)),
    **dict.fromkeys((Op.DUP, Op.CPY, Op.CONT), (1, 1, _copy)),
    Op.ADD_ID: (3, 3, lambda node, a, b, ids: add_id(a, b, ids)),
    Op.GLU: (1, 2, lambda node, a, b: glu(a, b)),
    Op.MUL_MAT: (2, 2, lambda node, a, b: mul_mat(a, b)),
    Op.MUL_MAT_ID: (3, 3, lambda node, experts, b, ids: mul_mat_id(experts, b, ids)),
    Op.GET_ROWS: (2, 2, lambda node, a, ids: get_rows(a, ids)),
    Op.SET_ROWS: (2, 2, _set_rows),
    Op.ROPE: (2, 3, _rope),
    Op.SOFT_MAX: (1, 3, lambda node, a, mask, sinks: soft_max(a, mask, sinks, _float(node, 1))),
    Op.FLASH_ATTN_EXT: (3, 5, _attention),
    Op.CONCAT: (2, 2, lambda node, a, b: concat(a, b, _ints(node, "<i")[0])),
    Op.REPEAT: (1, 1, lambda node, a: repeat(a, node.ne)),
    Op.REPEAT_BACK: (1, 1, lambda node, a: repeat_back(a, node.ne)),
    Op.PAD: (1, 1, lambda node, a: pad(a, _ints(node, "<8i"))),
    Op.POOL_2D: (1, 1, lambda node, a: pool_2d(a, _ints(node, "<7i"))),
    Op.LIGHTNING_INDEXER: (4, 4, lambda node, *sources: lightning_indexer(*sources)),
    Op.DSV4_HC_PRE: (2, 2, lambda node, x, w: read_streams(x, w, _ints(node, "<i", 4)[0] != 0)),
    Op.DSV4_HC_POST: (3, 4, lambda node, x, s, p, m=None: add_to_streams(x, s, p, m)),
    Op.DSV4_HC_COMB: (3, 3, lambda node, x, f, s: mix_streams(x, f, s, _ints(node, "<i", 4)[0])),
    Op.CUMSUM: (1, 1, lambda node, a: cumsum(a)),
    Op.SUM: (1, 1, lambda node, a: sum_all(a)),
    Op.SUM_ROWS: (1, 1, lambda node, a: sum_rows(a)),
    Op.MEAN: (1, 1, lambda node, a: mean(a)),
    Op.ARGMAX: (1, 1, lambda node, a: argmax(a)),
    Op.ARGSORT: (1, 1, lambda node, a: argsort(a)),
    Op.TOP_K: (1, 1, lambda node, a: top_k(a, node.ne[0])),
    Op.GATED_DELTA_NET: (6, 6, _delta),
    Op.RWKV_WKV6: (6, 6, _wkv6),
    Op.RWKV_WKV7: (7, 7, lambda node, *sources: linear_attention("rwkv_wkv7", sources[:6], sources[6])),
    Op.GATED_LINEAR_ATTN: (5, 5, lambda node, *s: linear_attention("gated_linear_attn", s[:4], s[4])),
    Op.SSM_CONV: (2, 2, lambda node, x, kernel: ssm_conv(x, kernel)),
    Op.SSM_SCAN: (7, 7, lambda node, s, x, dt, a, b, c, ids: ssm_scan(s, x, dt, a, b, c, ids, _ints(node, "<i")[0])),
}
