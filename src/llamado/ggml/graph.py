"""Graph construction: one function per operation, and `Graph`, which puts operations in order.

Each function checks its sources as ggml does; `shapes.py` holds the shape rules. It gives the result ggml's shape,
strides and parameter bytes (ggml.c), so that ggml back ends can run the graph. Nothing is computed. Every function
raises ShapeError.
"""

from __future__ import annotations

import math
from struct import Struct

from llamado.ggml import shapes
from llamado.ggml.errors import ShapeError
from llamado.ggml.ops import GluOp, MatrixHint, Op, PrecType, RopeMode, SortOrder, TensorFlag, UnaryOp
from llamado.ggml.tensor import BLOCK, NO_PARAMS, Shape, Tensor, contiguous_layout, contiguous_strides
from llamado.gguf.types import TensorType

# Bound once: members of an Enum class are slow to reach, and a graph has a thousand nodes.
_COMPUTE = int(TensorFlag.COMPUTE)
_NONE = Op.NONE
_ADD, _SUB, _MUL, _DIV = Op.ADD, Op.SUB, Op.MUL, Op.DIV
_VIEW, _RESHAPE, _PERMUTE = Op.VIEW, Op.RESHAPE, Op.PERMUTE
_MUL_MAT, _RMS_NORM, _ROPE, _GLU, _SET_ROWS = Op.MUL_MAT, Op.RMS_NORM, Op.ROPE, Op.GLU, Op.SET_ROWS

_pack_f = Struct("<f60x").pack
_pack_ff = Struct("<2f56x").pack
_pack_fi = Struct("<fi56x").pack
_pack_i = Struct("<i60x").pack
_pack_xielu = Struct("<i4f44x").pack
_pack_ii = Struct("<ii56x").pack
_pack_if = Struct("<if56x").pack
_pack_iiff = Struct("<2i2f48x").pack
_pack_offset = Struct("<Q56x").pack
_pack_axes = Struct("<4i48x").pack
_pack_pad = Struct("<9i28x").pack
_pack_rope = Struct("<5i6f5i").pack
_pack_flash = Struct("<3f2i44x").pack


def _make(
    type: TensorType, ne: Shape, op: Op, src: tuple[Tensor | None, ...], params: bytes = NO_PARAMS, name: str = ""
) -> Tensor:
    """Return a contiguous result with its own memory."""
    ne, nb = contiguous_layout(type, ne)
    return Tensor(type, ne, nb, op, src, params, None, 0, name)


def _alias(
    a: Tensor, ne: Shape, nb: Shape, op: Op, src: tuple[Tensor | None, ...], params: bytes, offset: int, name: str
) -> Tensor:
    """Return a result that shares the memory of `a`; a view of a view refers to the owner of the memory."""
    owner = a.view_src
    if owner is None:
        return Tensor(a.type, ne, nb, op, src, params, a, offset, name)
    return Tensor(a.type, ne, nb, op, src, params, owner, a.view_offs + offset, name)


def _shape(op: str, ne: tuple[int, ...]) -> Shape:
    if not 1 <= len(ne) <= 4 or min(ne) < 0:
        raise ShapeError(op, f"a shape has 1 to 4 dimensions, none negative; got {list(ne)}")
    return (*ne, 1, 1, 1)[:4]  # type: ignore[return-value]  # four by construction


def new_tensor(type: TensorType, *ne: int, name: str = "") -> Tensor:
    """Return a contiguous tensor that no operation computes: a weight, an input or a cache."""
    shape = _shape("new_tensor", ne)
    if shape[0] % BLOCK[type][0]:
        raise ShapeError("new_tensor", f"a row of {shape[0]} elements is not a whole number of {type.name} blocks")
    return Tensor(type, shape, contiguous_strides(type, shape), name=name)


# --- views: other shapes of the same memory ---------------------------------------------------------------------------


def _view(op: str, a: Tensor, ne: Shape, nb: Shape, offset: int, name: str) -> Tensor:
    block, size = BLOCK[a.type]
    if ne[0] % block:
        raise ShapeError(op, f"a row of {ne[0]} elements is not a whole number of blocks", a)
    end = offset + size * (ne[0] // block)
    if 0 not in ne:
        end += (ne[1] - 1) * nb[1] + (ne[2] - 1) * nb[2] + (ne[3] - 1) * nb[3]
        owner, start = (a, 0) if a.view_src is None else (a.view_src, a.view_offs)
        if offset < 0 or start + end > owner.nbytes:
            raise ShapeError(op, f"bytes {offset} to {end} lie outside the tensor", a)
    return _alias(a, ne, nb, _VIEW, (a,), _pack_offset(offset), offset, name)


def view_1d(a: Tensor, ne0: int, offset: int = 0, name: str = "") -> Tensor:
    """`ne0` elements of `a` from byte `offset`."""
    ne = _shape("view_1d", (ne0,))
    return _view("view_1d", a, ne, contiguous_strides(a.type, ne), offset, name)


def view_2d(a: Tensor, ne0: int, ne1: int, nb1: int, offset: int = 0, name: str = "") -> Tensor:
    """`ne1` rows of `ne0` elements of `a` with a stride of `nb1` bytes, from byte `offset`."""
    nb2 = nb1 * ne1
    return _view("view_2d", a, (ne0, ne1, 1, 1), (BLOCK[a.type][1], nb1, nb2, nb2), offset, name)


def view_3d(a: Tensor, ne0: int, ne1: int, ne2: int, nb1: int, nb2: int, offset: int = 0, name: str = "") -> Tensor:
    """A three-dimensional window of `a` with strides `nb1` and `nb2` in bytes, from byte `offset`."""
    return _view("view_3d", a, (ne0, ne1, ne2, 1), (BLOCK[a.type][1], nb1, nb2, nb2 * ne2), offset, name)


def view_4d(
    a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, nb1: int, nb2: int, nb3: int, offset: int = 0, name: str = ""
) -> Tensor:
    """A four-dimensional window of `a` with strides in bytes, from byte `offset`."""
    return _view("view_4d", a, (ne0, ne1, ne2, ne3), (BLOCK[a.type][1], nb1, nb2, nb3), offset, name)


def reshape(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """The same elements in another shape; `a` must be contiguous."""
    shape = _shape("reshape", ne)
    if shape[0] * shape[1] * shape[2] * shape[3] != a.nelements:
        raise ShapeError("reshape", f"{a.nelements} elements do not fill {list(ne)}", a)
    if not a.is_contiguous():
        raise ShapeError("reshape", "the tensor must be contiguous", a)
    if shape[0] % BLOCK[a.type][0]:
        raise ShapeError("reshape", f"a row of {shape[0]} elements is not a whole number of blocks", a)
    return _alias(a, shape, contiguous_strides(a.type, shape), _RESHAPE, (a,), NO_PARAMS, 0, name)


def permute(a: Tensor, axis0: int, axis1: int, axis2: int, axis3: int, name: str = "") -> Tensor:
    """The same memory with dimension i of `a` moved to dimension `axis_i`."""
    axes = (axis0, axis1, axis2, axis3)
    if axes == (0, 2, 1, 3):  # the permutation of attention heads
        (n0, n1, n2, n3), (b0, b1, b2, b3) = a.ne, a.nb
        return _alias(a, (n0, n2, n1, n3), (b0, b2, b1, b3), _PERMUTE, (a,), _SWAP_12, 0, name)
    if sorted(axes) != [0, 1, 2, 3]:
        raise ShapeError("permute", f"axes must be 0, 1, 2, 3 in some order; got {list(axes)}", a)
    source = [axes.index(i) for i in range(4)]
    ne = (a.ne[source[0]], a.ne[source[1]], a.ne[source[2]], a.ne[source[3]])
    nb = (a.nb[source[0]], a.nb[source[1]], a.nb[source[2]], a.nb[source[3]])
    return _alias(a, ne, nb, _PERMUTE, (a,), _pack_axes(*axes), 0, name)


_SWAP_12 = _pack_axes(0, 2, 1, 3)


def transpose(a: Tensor, name: str = "") -> Tensor:
    """The same memory with dimensions 0 and 1 exchanged."""
    (n0, n1, n2, n3), (b0, b1, b2, b3) = a.ne, a.nb
    return _alias(a, (n1, n0, n2, n3), (b1, b0, b2, b3), Op.TRANSPOSE, (a,), NO_PARAMS, 0, name)


# --- moving data ------------------------------------------------------------------------------------------------------


def dup(a: Tensor, name: str = "") -> Tensor:
    """A copy of `a`, contiguous, of the same type."""
    return _make(*shapes.elementwise(a), Op.DUP, (a,), name=name)


def cont(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """A contiguous copy of `a` in shape `ne` (default: its own)."""
    shape = _shape("cont", ne) if ne else a.ne
    return _make(*shapes.copy("cont", a, a.type, shape), Op.CONT, (a,), name=name)


def cpy(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """Write `a` into the memory of `b`, converting the type. Both have the same number of elements; the result is a
    view of `b`.
    """
    shapes.copy("cpy", a, b.type, b.ne)
    return _alias(b, b.ne, b.nb, Op.CPY, (a, b), NO_PARAMS, 0, name)


def cast(a: Tensor, type: TensorType, name: str = "") -> Tensor:
    """`a` converted to another type, contiguous."""
    result = _make(*shapes.copy("cast", a, type, a.ne), Op.CPY, (), name=name)
    result.src = (a, result)  # ggml names the destination twice
    return result


def get_rows(a: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Rows `ids` (I32) of `a` as F32 (I32 stays I32): [a.ne0, ids.ne0, ids.ne1, ids.ne2]."""
    return _make(*shapes.get_rows(a, ids), Op.GET_ROWS, (a, ids), name=name)


def set_rows(dst: Tensor, src: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Write row i of `src` (F32 or F16) into row `ids[i]` (I64 or I32) of `dst`, converting the type.

    `ids` is [src.ne1] and may repeat over dimensions 2 and 3. The result is a view of `dst`.
    """
    shapes.set_rows(dst, src, ids)
    if not (dst.has_contiguous_rows() and src.has_contiguous_rows()):
        raise ShapeError("set_rows", "rows must be contiguous", dst, src, ids)
    # The destination comes last: ggml's order of sources.
    return _alias(dst, dst.ne, dst.nb, _SET_ROWS, (src, ids, dst), NO_PARAMS, 0, name)


def concat(a: Tensor, b: Tensor, dim: int, name: str = "") -> Tensor:
    """`a` followed by `b` along dimension `dim`; the other dimensions and the type must be equal."""
    return _make(*shapes.concat(a, b, dim), Op.CONCAT, (a, b), _pack_i(dim), name)


def pad(a: Tensor, *sides: tuple[int, int], name: str = "") -> Tensor:
    """`a` between zeros: `sides` are their numbers before and behind it in the first dimensions."""
    pads = [n for d in range(4) for n in (sides[d] if d < len(sides) else (0, 0))]
    return _make(*shapes.pad(a, tuple(pads)), Op.PAD, (a,), _pack_pad(*pads, 0), name)


def repeat(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """Copies of `a` side by side until they fill shape `ne`."""
    return _make(*shapes.repeat(a, _shape("repeat", ne)), Op.REPEAT, (a,), name=name)


# --- arithmetic -------------------------------------------------------------------------------------------------------


def _binary(op: Op, a: Tensor, b: Tensor, name: str) -> Tensor:
    return _make(*shapes.binary(op.name.lower(), a, b), op, (a, b), NO_PARAMS, name)


def add(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a + b, with `b` repeated to the shape of `a`."""
    return _binary(_ADD, a, b, name)


def sub(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a - b, with `b` repeated to the shape of `a`."""
    return _binary(_SUB, a, b, name)


def mul(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a × b element by element, with `b` repeated to the shape of `a`."""
    return _binary(_MUL, a, b, name)


def div(a: Tensor, b: Tensor, name: str = "") -> Tensor:
    """a / b element by element, with `b` repeated to the shape of `a`."""
    return _binary(_DIV, a, b, name)


def scale(a: Tensor, s: float, b: float = 0.0, name: str = "") -> Tensor:
    """a × s + b with numbers s and b."""
    ne, nb = a.ne, a.nb
    if nb[0] != BLOCK[a.type][1] or nb[2] != nb[1] * ne[1] or nb[3] != nb[2] * ne[2]:
        raise ShapeError("scale", "only rows may have gaps between them", a)
    return _map(Op.SCALE, a, name, _pack_ff(s, b))


def _map(op: Op, a: Tensor, name: str, params: bytes = NO_PARAMS) -> Tensor:
    return _make(*shapes.elementwise(a), op, (a,), params, name)


def sqr(a: Tensor, name: str = "") -> Tensor:
    """a² element by element."""
    return _map(Op.SQR, a, name)


def sqrt(a: Tensor, name: str = "") -> Tensor:
    """The square root of each element."""
    return _map(Op.SQRT, a, name)


def log(a: Tensor, name: str = "") -> Tensor:
    """The natural logarithm of each element."""
    return _map(Op.LOG, a, name)


def sin(a: Tensor, name: str = "") -> Tensor:
    """The sine of each element."""
    return _map(Op.SIN, a, name)


def cos(a: Tensor, name: str = "") -> Tensor:
    """The cosine of each element."""
    return _map(Op.COS, a, name)


def clamp(a: Tensor, low: float, high: float, name: str = "") -> Tensor:
    """Each element limited to `low`..`high`."""
    return _map(Op.CLAMP, a, name, _pack_ff(low, high))


def fill(a: Tensor, number: float, name: str = "") -> Tensor:
    """A tensor with the shape of `a` and `number` in every element."""
    if not a.is_contiguous():
        raise ShapeError("fill", "the tensor must be contiguous", a)
    return _map(Op.FILL, a, name, _pack_f(number))


def unary(a: Tensor, op: UnaryOp, name: str = "") -> Tensor:
    """The function `op` of each element; rows must be contiguous."""
    if not a.has_contiguous_rows():
        raise ShapeError(f"unary {op.name}", "rows must be contiguous", a)
    return _map(Op.UNARY, a, name, _pack_i(op))


def xielu(a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float, name: str = "") -> Tensor:
    """xIELU (arXiv 2411.13010) of each element.

    p·x² + beta·x if x > 0, else n·(exp(min(x, eps)) − 1 − x) + beta·x, with n = beta + softplus(alpha_n) and p =
    softplus(alpha_p).
    """
    n, p = beta + _softplus(alpha_n), _softplus(alpha_p)
    return _map(Op.UNARY, a, name, _pack_xielu(UnaryOp.XIELU, n, p, beta, eps))


def _softplus(x: float) -> float:
    return x if x > 20 else math.log1p(math.exp(x))


def relu(a: Tensor, name: str = "") -> Tensor:
    """max(a, 0)."""
    return unary(a, UnaryOp.RELU, name)


def silu(a: Tensor, name: str = "") -> Tensor:
    """a × sigmoid(a)."""
    return unary(a, UnaryOp.SILU, name)


def gelu(a: Tensor, name: str = "") -> Tensor:
    """GELU, the tanh approximation."""
    return unary(a, UnaryOp.GELU, name)


def tanh(a: Tensor, name: str = "") -> Tensor:
    """The hyperbolic tangent of each element."""
    return unary(a, UnaryOp.TANH, name)


def softplus(a: Tensor, name: str = "") -> Tensor:
    """ln(1 + exp(a)), or `a` itself above 20."""
    return unary(a, UnaryOp.SOFTPLUS, name)


def exp(a: Tensor, name: str = "") -> Tensor:
    """e to the power of each element."""
    return unary(a, UnaryOp.EXP, name)


def sigmoid(a: Tensor, name: str = "") -> Tensor:
    """1 / (1 + exp(-a))."""
    return unary(a, UnaryOp.SIGMOID, name)


def leaky_relu(a: Tensor, slope: float, name: str = "") -> Tensor:
    """a if positive, else a × slope."""
    return _map(Op.LEAKY_RELU, a, name, _pack_f(slope))


def glu_split(a: Tensor, b: Tensor, op: GluOp, name: str = "") -> Tensor:
    """activation(a) × b: the gated activation with the gate in one tensor and the values in another."""
    if not (a.is_contiguous(1) and b.is_contiguous(1)):
        raise ShapeError(f"glu {op.name}", "elements of a row must be contiguous", a, b)
    return _make(*shapes.glu(a, b), _GLU, (a, b), _pack_iiff(op, 0, 0.0, 0.0), name)


def glu(a: Tensor, op: GluOp, swapped: bool = False, name: str = "") -> Tensor:
    """activation(first half of each row) × second half; `swapped` exchanges the halves."""
    if not a.is_contiguous(1):
        raise ShapeError(f"glu {op.name}", "elements of a row must be contiguous", a)
    return _make(*shapes.glu(a, None), _GLU, (a, None), _pack_iiff(op, swapped, 0.0, 0.0), name)


_SWIGLU, _GEGLU = GluOp.SWIGLU, GluOp.GEGLU


def swiglu_split(gate: Tensor, up: Tensor, name: str = "") -> Tensor:
    """silu(gate) × up."""
    return glu_split(gate, up, _SWIGLU, name)


def geglu_split(gate: Tensor, up: Tensor, name: str = "") -> Tensor:
    """gelu(gate) × up, with the tanh approximation."""
    return glu_split(gate, up, _GEGLU, name)


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float, name: str = "") -> Tensor:
    """min(gate, limit) × sigmoid(alpha × gate) × (1 + clamp(up, ±limit))."""
    result = glu_split(gate, up, GluOp.SWIGLU_OAI, name)
    result.op_params = _pack_iiff(GluOp.SWIGLU_OAI, 0, alpha, limit)
    return result


# --- along rows -------------------------------------------------------------------------------------------------------


def norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """(a - mean) / sqrt(variance + eps) of each row."""
    return _map(Op.NORM, a, name, _pack_f(eps))


def rms_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / sqrt(mean(a²) + eps) of each row."""
    return _map(_RMS_NORM, a, name, _pack_f(eps))


def group_norm(a: Tensor, n_groups: int, eps: float, name: str = "") -> Tensor:
    """`norm` over groups of channels (dimension 2)."""
    return _map(Op.GROUP_NORM, a, name, _pack_if(n_groups, eps))


def l2_norm(a: Tensor, eps: float, name: str = "") -> Tensor:
    """a / max(sqrt(sum(a²)), eps) of each row."""
    return _map(Op.L2_NORM, a, name, _pack_f(eps))


def sum_rows(a: Tensor, name: str = "") -> Tensor:
    """The sum of each row: [1, ne1, ne2, ne3]."""
    return _make(*shapes.sum_rows(a), Op.SUM_ROWS, (a,), name=name)


def repeat_back(a: Tensor, *ne: int, name: str = "") -> Tensor:
    """Sum of the copies of shape `ne` that make up an F32 tensor: for `[n]`, the sum of all rows."""
    return _make(*shapes.repeat_back(a, _shape("repeat_back", ne)), Op.REPEAT_BACK, (a,), name=name)


def sum_all(a: Tensor, name: str = "") -> Tensor:
    """The sum of all elements: [1]."""
    return _make(*shapes.sum_all(a), Op.SUM, (a,), name=name)


def mean(a: Tensor, name: str = "") -> Tensor:
    """The mean of each row, F32: [1, ne1, ne2, ne3]."""
    return _make(*shapes.mean(a), Op.MEAN, (a,), name=name)


def cumsum(a: Tensor, name: str = "") -> Tensor:
    """Running sums along each row of an F32 tensor."""
    return _make(*shapes.cumsum(a), Op.CUMSUM, (a,), name=name)


def argmax(a: Tensor, name: str = "") -> Tensor:
    """The index of the largest element of each row of a matrix: I32 [ne1]."""
    return _make(*shapes.argmax(a), Op.ARGMAX, (a,), name=name)


def argsort(a: Tensor, order: SortOrder = SortOrder.ASC, name: str = "") -> Tensor:
    """The indices that sort each row: I32, the shape of `a`."""
    return _make(*shapes.argsort(a), Op.ARGSORT, (a,), _pack_i(order), name)


def argsort_top_k(a: Tensor, k: int, name: str = "") -> Tensor:
    """The indices of the `k` largest elements of each row in descending order: a view of a full sort."""
    shapes.top_k(a, k)
    order = argsort(a, SortOrder.DESC)
    return view_4d(order, k, *order.ne[1:], *order.nb[1:], name=name)


def top_k(a: Tensor, k: int, name: str = "") -> Tensor:
    """The indices of the `k` largest elements of each row, in no particular order: I32 [k, ne1, ne2, ne3]."""
    return _make(*shapes.top_k(a, k), Op.TOP_K, (a,), name=name)


def soft_max_ext(
    a: Tensor,
    mask: Tensor | None,
    scale: float,
    max_bias: float = 0.0,
    name: str = "",
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(a × scale + mask) of each row.

    `mask` is F16 or F32 [ne0, at least ne1, …], repeated over dimensions 2 and 3. If `max_bias` > 0, the mask is scaled
    per head (ALiBi). `sinks`, F32 [ne2], are attention sinks: the score of one extra element per head.
    """
    result = shapes.soft_max(a, mask, sinks, max_bias)
    if not a.is_contiguous() or (mask is not None and not mask.is_contiguous()):
        raise ShapeError("soft_max", "scores and mask must be contiguous", a, mask)
    return _make(*result, Op.SOFT_MAX, (a, mask, sinks), _pack_ff(scale, max_bias), name)


# --- matrices, positions, attention -----------------------------------------------------------------------------------


def mul_mat(
    a: Tensor,
    b: Tensor,
    precision: PrecType = PrecType.DEFAULT,
    name: str = "",
    *,
    hint: MatrixHint = MatrixHint.NONE,
) -> Tensor:
    """Dot products of every row of `a` with every row of `b`: F32 [a.ne1, b.ne1, b.ne2, b.ne3].

    Rows are equally long; `a` is repeated over dimensions 2 and 3 of `b`. `hint` is a known property of `a`.
    """
    if a.is_transposed():
        raise ShapeError("mul_mat", "the first tensor must not be transposed", a, b)
    params = _pack_ii(precision, hint) if precision or hint else NO_PARAMS
    return _make(*shapes.mul_mat(a, b), _MUL_MAT, (a, b), params, name)


def mul_mat_id(experts: Tensor, b: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """`mul_mat` with a matrix selected for each row: F32 [experts.ne1, ids.ne0, b.ne2].

    `experts` stacks one matrix per expert along dimension 2; `ids` is I32 [experts per token, tokens]; `b` is [row, 1
    or experts per token, tokens].
    """
    if experts.is_transposed():
        raise ShapeError("mul_mat_id", "experts must not be transposed", experts, b, ids)
    return _make(*shapes.mul_mat_id(experts, b, ids), Op.MUL_MAT_ID, (experts, b, ids), name=name)


def add_id(a: Tensor, b: Tensor, ids: Tensor, name: str = "") -> Tensor:
    """Add row `ids[i, j]` of `b` to row [i, j] of `a`."""
    return _make(*shapes.add_id(a, b, ids), Op.ADD_ID, (a, b, ids), name=name)


def rope_ext(
    a: Tensor,
    pos: Tensor,
    freq_factors: Tensor | None,
    n_dims: int,
    mode: RopeMode | int,
    n_ctx_orig: int,
    freq_base: float,
    freq_scale: float,
    ext_factor: float,
    attn_factor: float,
    beta_fast: float,
    beta_slow: float,
    name: str = "",
    offset: int = 0,
    sections: tuple[int, int, int, int] | None = None,
) -> Tensor:
    """Rotary position embedding of `n_dims` elements, from `offset` on, of each head of `a` [head_dim, n_head,
    n_tokens].

    `pos` is I32 [n_tokens]; `freq_factors`, F32 [n_dims / 2], divides the frequencies; `ext_factor`, `attn_factor`,
    `beta_fast` and `beta_slow` are YaRN's. The multi-section modes (ggml_rope_multi) take the length of each of the
    `sections` in pairs, and four positions per token: `pos` is then [4 × n_tokens].
    """
    if mode & 1 or bool(mode & RopeMode.MROPE) != (sections is not None):
        raise ShapeError("rope", f"mode {int(mode)} with sections {sections}", a)
    result = shapes.rope(a, pos, freq_factors, n_dims, mode, offset)
    params = _pack_rope(
        *(0, n_dims, mode, 0, n_ctx_orig),
        *(freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow),
        *(sections or (0, 0, 0, 0)),
        offset,
    )
    return _make(*result, _ROPE, (a, pos, freq_factors), params, name)


def flash_attn_ext(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    max_bias: float = 0.0,
    logit_softcap: float = 0.0,
    precision: PrecType = PrecType.DEFAULT,
    name: str = "",
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q·k × scale + mask) · v for each head: F32 [v.ne0, n_head, n_tokens, q.ne3].

    q [head_dim, n_tokens, n_head], k and v [head_dim, n_kv, n_head_kv] with n_head a multiple of n_head_kv; `mask` F16
    [n_kv, at least n_tokens]. If `max_bias` > 0, the mask is scaled per head (ALiBi). A `logit_softcap` c > 0 turns
    scores s into c × tanh(s / c). `sinks`, F32 [n_head], are attention sinks: the score of one extra key per head,
    without a value.
    """
    result = shapes.flash_attn_ext(q, k, v, mask, sinks, max_bias)
    if mask is not None and not mask.is_contiguous():
        raise ShapeError("flash_attn_ext", "the mask must be contiguous", q, k, v, mask)
    params = _pack_flash(scale, max_bias, logit_softcap, precision, 0)
    return _make(*result, Op.FLASH_ATTN_EXT, (q, k, v, mask, sinks), params, name)


# --- hyper-connections: several streams of hidden states --------------------------------------------------------------


def read_streams(x: Tensor, weights: Tensor, name: str = "") -> Tensor:
    """Weighted sum of streams [n, n_streams, n_tokens] with weights [n_streams, n_tokens]: F32 [n, n_tokens]."""
    return _make(*shapes.read_streams(x, weights, False), Op.DSV4_HC_PRE, (x, weights), _pack_fi(1.0, 0), name)


def add_to_streams(x: Tensor, streams: Tensor, parts: Tensor, mixing: Tensor, name: str = "") -> Tensor:
    """Mix the streams and add a new output to each: F32 [n, n_streams, n_tokens].

    `streams` [n, n_streams, n_tokens] are mixed by `mixing` [to, from, n_tokens]. Each stream then gets x [n, n_tokens]
    times its weight in `parts` [n_streams, n_tokens].
    """
    result = shapes.add_to_streams(x, streams, parts, mixing)
    return _make(*result, Op.DSV4_HC_POST, (x, streams, parts, mixing), name=name)


def mix_streams(x: Tensor, factors: Tensor, shifts: Tensor, eps: float, n_rounds: int, name: str = "") -> Tensor:
    """Mixing matrix of four streams: F32 [to, from, n_tokens], almost doubly stochastic.

    Its logits are elements 8 to 23 of each token of x [24, n_tokens], multiplied by the third of `factors` and shifted
    by `shifts` [24]. Softmax of each row, then `n_rounds` Sinkhorn-Knopp rounds, which add `eps` to the sums.
    """
    result = shapes.mix_streams(x, factors, shifts, n_rounds)
    return _make(*result, Op.DSV4_HC_COMB, (x, factors, shifts), _pack_fi(eps, n_rounds), name)


# --- linear attention with a state ------------------------------------------------------------------------------------


def gated_delta_net(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, n_snapshots: int = 1, name: str = ""
) -> Tensor:
    """Gated delta rule: F32 [size × heads, tokens × sequences + snapshots × size × sequences].

    q, k [size, heads (or fewer, repeated), tokens, sequences] and v [size, heads, tokens, sequences]. `g` [1 or size,
    heads, tokens, sequences] holds logarithms of decays, `beta` [1, heads, tokens, sequences] the update strengths, and
    `states` [size, size, heads, sequences] the states before the first token. The outputs of all tokens come first,
    then the states after the last token, then the states after each of the `n_snapshots` - 1 tokens before it
    (unwritten if there are fewer tokens).
    """
    for x in (q, k, v):
        if not x.has_contiguous_rows():
            raise ShapeError("gated_delta_net", "rows must be contiguous", q, k, v)
    if not (g.is_contiguous() and beta.is_contiguous() and states.is_contiguous()):
        raise ShapeError("gated_delta_net", "decays, strengths and states must be contiguous", g, beta, states)
    result = shapes.gated_delta_net(q, k, v, g, beta, states, n_snapshots)
    return _make(*result, Op.GATED_DELTA_NET, (q, k, v, g, beta, states), _pack_i(n_snapshots), name)


def gated_linear_attn(
    k: Tensor, v: Tensor, q: Tensor, g: Tensor, states: Tensor, scale: float, name: str = ""
) -> Tensor:
    """Gated linear attention: F32 [size × heads, tokens + size × sequences], outputs then states.

    k, v, q and decays `g` are [size, heads, tokens of all sequences], `states` [size² × heads, sequences].
    """
    result = shapes.linear_attention("gated_linear_attn", (k, v, q, g), states)
    return _make(*result, Op.GATED_LINEAR_ATTN, (k, v, q, g, states), _pack_f(scale), name)


def rwkv_wkv6(k: Tensor, v: Tensor, r: Tensor, bonus: Tensor, decays: Tensor, states: Tensor, name: str = "") -> Tensor:
    """RWKV-6 time mixing; shapes as in `gated_linear_attn`, `bonus` [size, heads]."""
    result = shapes.linear_attention("rwkv_wkv6", (k, v, r, decays), states, bonus)
    return _make(*result, Op.RWKV_WKV6, (k, v, r, bonus, decays, states), NO_PARAMS, name)


def rwkv_wkv7(
    r: Tensor, decays: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, states: Tensor, name: str = ""
) -> Tensor:
    """RWKV-7 time mixing; shapes as in `gated_linear_attn`."""
    result = shapes.linear_attention("rwkv_wkv7", (r, decays, k, v, a, b), states)
    return _make(*result, Op.RWKV_WKV7, (r, decays, k, v, a, b, states), NO_PARAMS, name)


# --- recurrence -------------------------------------------------------------------------------------------------------


def ssm_conv(x: Tensor, kernel: Tensor, name: str = "") -> Tensor:
    """Causal convolution of each channel: F32 [channels, n_tokens, n_seqs].

    `x`, F32 [n - 1 + n_tokens, channels, n_seqs], starts with the n - 1 inputs before the tokens; `kernel` is F32 [n,
    channels].
    """
    return _make(*shapes.ssm_conv(x, kernel), Op.SSM_CONV, (x, kernel), name=name)


def ssm_scan(
    s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, ids: Tensor, n_states: int = 1, name: str = ""
) -> Tensor:
    """Selective scan (Mamba, arXiv 2312.00752): s ← s · e^(d·a) + d·x·b and y = s·c per token, with d = softplus(dt).

    `s`, F32 [d_state, head_dim, n_head, rows], holds states; `ids`, I32 [n_seqs], gives the row of each sequence's
    state. `x` [head_dim, n_head, n_tokens, n_seqs], `dt` [n_head, n_tokens, n_seqs], `a` [1 or d_state, n_head], `b`
    and `c` [d_state, n_group, n_tokens, n_seqs]. The result is one row: y, with the shape of `x`, then the last
    `n_states` states of each sequence, [d_state, head_dim, n_head, n_seqs, n_states], the latest first.
    """
    if not (s.is_contiguous() and dt.is_contiguous() and a.is_contiguous()):
        raise ShapeError("ssm_scan", "states, steps and decays must be contiguous", s, dt, a)
    if any(t.nb[0] != 4 or t.nb[1] != 4 * t.ne[0] for t in (x, b, c)):
        raise ShapeError("ssm_scan", "heads and groups must lie one behind the other", x, b, c)
    result = shapes.ssm_scan(s, x, dt, a, b, c, ids, n_states)
    return _make(*result, Op.SSM_SCAN, (s, x, dt, a, b, c, ids), _pack_i(n_states), name)


# --- the graph --------------------------------------------------------------------------------------------------------


class Graph:
    """Operations in an executable order.

    `nodes` are the operations, each after its sources; `leafs` are the data tensors they read. `inputs` and `outputs`
    name the tensors that a caller writes before a run and reads after it. `has_program` is True while a device keeps a
    program that it made of the graph.
    """

    __slots__ = ("_seen", "has_program", "inputs", "leafs", "nodes", "outputs")

    def __init__(self) -> None:
        self.has_program = False
        self.nodes: list[Tensor] = []
        self.leafs: list[Tensor] = []
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self._seen: set[Tensor] | None = None

    def __repr__(self) -> str:
        return f"<Graph {len(self.nodes)} nodes, {len(self.leafs)} leafs, in {[*self.inputs]}, out {[*self.outputs]}>"

    def input(self, name: str, type: TensorType, *ne: int) -> Tensor:
        """Return a new tensor that the caller writes before each run."""
        tensor = new_tensor(type, *ne, name=name)
        tensor.flags = int(TensorFlag.INPUT)
        self.inputs[name] = tensor
        return tensor

    def output(self, name: str, tensor: Tensor) -> Tensor:
        """Add `tensor` and its missing sources; the caller may read it after a run."""
        tensor.flags |= int(TensorFlag.OUTPUT)
        self.outputs[name] = tensor
        return self.expand(tensor)

    def expand(self, tensor: Tensor) -> Tensor:
        """Add `tensor` and its missing sources: depth first, sources left to right, each node after its sources.

        This is the order of ggml_build_forward_expand, so nodes are sent over RPC in the order in which a ggml program
        sends them.
        """
        nodes, leafs = self.nodes, self.leafs
        seen = self._seen
        if seen is None:
            seen = self._seen = {*nodes, *leafs}
        if tensor in seen:
            return tensor
        seen.add(tensor)
        # An explicit stack instead of recursion: a graph may be deeper than Python's call stack.
        path = [(tensor, iter(tensor.src))]
        while path:
            node, sources = path[-1]
            for source in sources:
                if source is not None and source not in seen:
                    seen.add(source)
                    if source.src:
                        path.append((source, iter(source.src)))
                        break
                    leafs.append(source) if source.op is _NONE else self._add(source)
            else:
                path.pop()
                if node.op is _NONE:
                    leafs.append(node)
                else:
                    node.flags |= _COMPUTE
                    nodes.append(node)
        return tensor

    def compact(self) -> None:
        """Free the set that only `expand` uses; a later `expand` rebuilds it."""
        self._seen = None

    @property
    def is_runnable(self) -> bool:
        """True if the operations are there, or a device's program of them."""
        return bool(self.nodes) or self.has_program

    def discard_nodes(self) -> None:
        """Drop the operations, because a device has a program of them; inputs and outputs stay.

        A graph of a thousand operations takes 400 KB, and every full run of the cycle collector visits them.
        """
        self.nodes, self.leafs, self._seen = [], [], None
        for output in self.outputs.values():
            output.src = output.root()[0].src = ()

    def _add(self, node: Tensor) -> None:
        node.flags |= _COMPUTE
        self.nodes.append(node)

    def use_counts(self) -> dict[Tensor, int]:
        """Return how often each tensor is a source of a node."""
        counts: dict[Tensor, int] = {}
        for node in self.nodes:
            for source in node.src:
                if source is not None:
                    counts[source] = counts.get(source, 0) + 1
        return counts
