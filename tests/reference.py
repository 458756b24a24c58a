"""A slow interpreter of graphs in numpy: what every operation means, as plainly as it can be said.

The oracle for kernels and models. Arithmetic is float64 (or float32 on request) on values de-quantized by the `gguf`
package; results are stored in each tensor's own type, so a graph of F32 tensors rounds once per operation. Arrays have
ggml's dimensions in numpy's order: a tensor of ne [a, b, c, d] is an array of shape (d, c, b, a).

Activations are not quantized, as real kernels do for quantized weights: compare with a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import erf, floor, log, log2, pi
from pathlib import Path
from struct import unpack_from
from typing import Any

import numpy as np
from block_types import decode
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from llamado.ggml import GluOp, Graph, Op, RopeMode, SortOrder, Tensor, UnaryOp
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import BatchShape, Model, load_adapters, load_model
from llamado.models.hadamard import hadamard
from llamado.models.memory import MemoryOptions

Array = NDArray[Any]

PLAIN: dict[TensorType, type[np.generic]] = {
    TensorType.F32: np.float32,
    TensorType.F16: np.float16,
    TensorType.F64: np.float64,
    TensorType.I8: np.int8,
    TensorType.I16: np.int16,
    TensorType.I32: np.int32,
    TensorType.I64: np.int64,
}
FLOATS = (TensorType.F32, TensorType.F16, TensorType.F64)


def decode_rows(rows: NDArray[np.uint8], type: TensorType) -> NDArray[np.float32]:
    """Weights from rows of bytes (..., row bytes)."""
    return decode(rows, type)


def encode_rows(values: Array, type: TensorType) -> NDArray[np.uint8]:
    """Rows of bytes from weights (..., ne0)."""
    if type == TensorType.IQ4_NL:
        return _encode_nl(np.ascontiguousarray(values, np.float32))
    encoded = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(int(type)))
    return np.ascontiguousarray(encoded).view(np.uint8)


NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def _encode_nl(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of IQ4_NL, which gguf-py only reads: the nearest values of the table, then the scale that fits them."""
    x = values.reshape(-1, 32)
    extreme = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = x * np.where(extreme, NL[0] / extreme, 0)
    numbers = np.searchsorted((NL[1:] + NL[:-1]) / 2, scaled, side="right").astype(np.uint8)
    numbers[np.abs(extreme[:, 0]) < 1e-15] = 0
    q, weight = NL[numbers], np.square(x)
    products, squares = (weight * q * x).sum(axis=1, keepdims=True), (weight * q * q).sum(axis=1, keepdims=True)
    scale = np.where(squares > 0, products / np.where(squares > 0, squares, 1), 0).astype(np.float16)
    packed = numbers[:, :16] | (numbers[:, 16:] << 4)
    return np.concatenate([scale.view(np.uint8), packed], axis=1).reshape(*values.shape[:-1], -1)


class ReferenceDevice:
    """Runs graphs one node at a time. Each tensor that owns memory has a byte array, zero until it is written.

    Results that are not computed yet are NaN, so that an order which reads too early shows.
    """

    def __init__(self, dtype: type[np.floating[Any]] = np.float64) -> None:
        self.dtype = dtype
        self.memory: dict[Tensor, NDArray[np.uint8]] = {}

    def bind(self, tensor: Tensor, data: NDArray[np.uint8]) -> None:
        """Lets a tensor lie in `data`, without a copy."""
        assert tensor.view_src is None
        assert data.nbytes >= tensor.nbytes, f"{tensor}: {data.nbytes} bytes for {tensor.nbytes}"
        self.memory[tensor] = data.reshape(-1)

    def _bytes(self, tensor: Tensor) -> tuple[NDArray[np.uint8], int]:
        root, offset = tensor.root()
        memory = self.memory.get(root)
        if memory is None:
            memory = np.full(root.nbytes, 0 if root.op == Op.NONE else 0xFF, np.uint8)
            self.memory[root] = memory
        return memory, offset

    def _strided(self, tensor: Tensor) -> Array:
        """The elements in place for plain types; rows of bytes for block types."""
        memory, offset = self._bytes(tensor)
        ne, nb = tensor.ne, tensor.nb
        dtype = PLAIN.get(tensor.type)
        if 0 in ne:
            return np.empty(ne[::-1], dtype or np.uint8)
        if dtype is not None:
            return np.ndarray(ne[::-1], dtype, memory.data, offset, nb[::-1])
        block, size = tensor.type.block_size, tensor.type.block_bytes
        assert nb[0] == size, f"{tensor}: blocks must be contiguous"
        shape = (ne[3], ne[2], ne[1], ne[0] // block * size)
        return as_strided(memory[offset:], shape, (*nb[:0:-1], 1), writeable=memory.flags.writeable)

    def get(self, tensor: Tensor) -> Array:
        """A copy of the values of a tensor: integers as they are, all else in the device's float type."""
        raw = self._strided(tensor)
        if tensor.type in PLAIN:
            return raw.astype(self.dtype) if tensor.type in FLOATS else raw.copy()
        return decode_rows(raw, tensor.type).reshape(tensor.ne[::-1]).astype(self.dtype)

    def get_rows(self, tensor: Tensor, rows: slice | Array) -> Array:
        """Some rows (dimension 1) of a tensor with nothing in dimensions 2 and 3."""
        raw = self._strided(tensor)[0, 0][rows]
        return (raw if tensor.type in PLAIN else decode_rows(raw, tensor.type)).astype(self.dtype)

    def set(self, tensor: Tensor, values: Any) -> None:
        """Writes values, converted to the tensor's type; any shape with as many elements will do."""
        values = np.asarray(values)
        target = self._strided(tensor)
        if tensor.type in PLAIN:
            target[...] = values.reshape(target.shape)
        else:
            target[...] = encode_rows(values.reshape(tensor.ne[::-1]), tensor.type).reshape(target.shape)

    def run(self, graph: Graph, values: Mapping[Tensor, Any] | None = None) -> dict[str, Array]:
        """Writes `values`, computes every node in order, and gives the outputs by name as (rows, ne0)."""
        for tensor, value in (values or {}).items():
            self.set(tensor, value)
        for node in graph.nodes:
            self.compute(node)
        return {name: self.get(t).reshape(-1, t.ne[0]) for name, t in graph.outputs.items()}

    def compute(self, node: Tensor) -> None:
        """Computes one node from its sources."""
        if node.is_noop:
            return
        rule = RULES.get(node.op)
        if rule is None:
            raise NotImplementedError(f"the reference has no {node.op.name}")
        values = rule(self, node)
        if values is not None:
            self.set(node, values)


Rule = Callable[[ReferenceDevice, Tensor], "Array | None"]
RULES: dict[Op, Rule] = {}


def rule(*ops: Op) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def source(node: Tensor, index: int) -> Tensor:
    tensor = node.source(index)
    assert tensor is not None, f"{node} lacks source {index}"
    return tensor


def f32(node: Tensor, index: int) -> float:
    """Parameter number `index` as a float."""
    return float(unpack_from("<f", node.op_params, 4 * index)[0])


def i32(node: Tensor, index: int) -> int:
    """Parameter number `index` as an integer."""
    return int(unpack_from("<i", node.op_params, 4 * index)[0])


def repeat_to(values: Array, shape: Sequence[int]) -> Array:
    """Whole copies of an array side by side until they fill a shape (numpy broadcasts only single elements)."""
    return np.tile(values, [n // m for n, m in zip(shape, values.shape, strict=True)])


# --- moving data ------------------------------------------------------------------------------------------------------


@rule(Op.DUP, Op.CONT, Op.CPY)
def copy(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0))


@rule(Op.GET_ROWS)
def get_rows(device: ReferenceDevice, node: Tensor) -> Array:
    a, ids = source(node, 0), device.get(source(node, 1))
    if ids.shape[:2] == (1, 1) and ids.shape[2] == 1:
        return device.get_rows(a, ids.reshape(-1))
    values = device.get(a)
    i, j = np.ogrid[: ids.shape[1], : ids.shape[2]]
    return values[i[..., None], j[..., None], ids[0]]


@rule(Op.SET_ROWS)
def set_rows(device: ReferenceDevice, node: Tensor) -> None:
    values, ids = device.get(source(node, 0)), device.get(source(node, 1))
    target = device._strided(node)
    rows = values if node.type in PLAIN else encode_rows(values, node.type).reshape(*values.shape[:3], -1)
    for i3, i2 in np.ndindex(values.shape[:2]):
        target[i3, i2, ids[0, i3 % ids.shape[1], i2 % ids.shape[2]]] = rows[i3, i2]


@rule(Op.CONCAT)
def concat(device: ReferenceDevice, node: Tensor) -> Array:
    return np.concatenate([device.get(source(node, 0)), device.get(source(node, 1))], axis=3 - i32(node, 0))


@rule(Op.PAD)
def pad(device: ReferenceDevice, node: Tensor) -> Array:
    return np.pad(device.get(source(node, 0)), [(i32(node, 2 * d), i32(node, 2 * d + 1)) for d in (3, 2, 1, 0)])


@rule(Op.REPEAT)
def repeat(device: ReferenceDevice, node: Tensor) -> Array:
    return repeat_to(device.get(source(node, 0)), node.ne[::-1])


# --- arithmetic -------------------------------------------------------------------------------------------------------


@rule(Op.ADD, Op.SUB, Op.MUL, Op.DIV)
def binary(device: ReferenceDevice, node: Tensor) -> Array:
    a = device.get(source(node, 0))
    b = repeat_to(device.get(source(node, 1)), a.shape)
    return {Op.ADD: np.add, Op.SUB: np.subtract, Op.MUL: np.multiply, Op.DIV: np.divide}[node.op](a, b)


@rule(Op.SCALE)
def scale(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)) * f32(node, 0) + f32(node, 1)


@rule(Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS)
def function(device: ReferenceDevice, node: Tensor) -> Array:
    functions = {Op.SQR: np.square, Op.SQRT: np.sqrt, Op.LOG: np.log, Op.SIN: np.sin, Op.COS: np.cos}
    return functions[node.op](device.get(source(node, 0)))


@rule(Op.CLAMP)
def clamp(device: ReferenceDevice, node: Tensor) -> Array:
    return np.clip(device.get(source(node, 0)), f32(node, 0), f32(node, 1))


@rule(Op.LEAKY_RELU)
def leaky_relu(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    return np.where(x > 0, x, x * f32(node, 0))


def sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def gelu(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / pi) * x * (1 + 0.044715 * x * x)))


def gelu_erf(x: Array) -> Array:
    return 0.5 * x * (1 + np.vectorize(erf, otypes=[x.dtype])(x / np.sqrt(2)))


def gelu_quick(x: Array) -> Array:
    return x * sigmoid(1.702 * x)


def silu(x: Array) -> Array:
    return x * sigmoid(x)


UNARY: dict[UnaryOp, Callable[[Array], Array]] = {
    UnaryOp.ABS: np.abs,
    UnaryOp.SGN: np.sign,
    UnaryOp.NEG: np.negative,
    UnaryOp.STEP: lambda x: (x > 0).astype(x.dtype),
    UnaryOp.FLOOR: np.floor,
    UnaryOp.CEIL: np.ceil,
    UnaryOp.ROUND: lambda x: np.trunc(x + np.copysign(0.5, x)),
    UnaryOp.TRUNC: np.trunc,
    UnaryOp.TANH: np.tanh,
    UnaryOp.ELU: lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    UnaryOp.RELU: lambda x: np.maximum(x, 0),
    UnaryOp.SIGMOID: sigmoid,
    UnaryOp.GELU: gelu,
    UnaryOp.GELU_QUICK: gelu_quick,
    UnaryOp.SILU: silu,
    UnaryOp.HARDSWISH: lambda x: x * np.clip((x + 3) / 6, 0, 1),
    UnaryOp.HARDSIGMOID: lambda x: np.clip((x + 3) / 6, 0, 1),
    UnaryOp.EXP: np.exp,
    UnaryOp.EXPM1: np.expm1,
    UnaryOp.SOFTPLUS: lambda x: np.logaddexp(x, 0),
    UnaryOp.GELU_ERF: gelu_erf,
    UnaryOp.FLOOR: np.floor,
    UnaryOp.CEIL: np.ceil,
    UnaryOp.ROUND: lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    UnaryOp.TRUNC: np.trunc,
}


@rule(Op.UNARY)
def unary(device: ReferenceDevice, node: Tensor) -> Array:
    if i32(node, 0) == UnaryOp.XIELU:
        x, (n, p, beta, eps) = device.get(source(node, 0)), (f32(node, i) for i in range(1, 5))
        return np.where(x > 0, p * x * x, n * (np.expm1(np.minimum(x, eps)) - x)) + beta * x
    return UNARY[UnaryOp(i32(node, 0))](device.get(source(node, 0)))


GATES: dict[GluOp, Callable[[Array], Array]] = {
    GluOp.REGLU: lambda x: np.maximum(x, 0),
    GluOp.GEGLU: gelu,
    GluOp.SWIGLU: silu,
    GluOp.GEGLU_ERF: gelu_erf,
    GluOp.GEGLU_QUICK: gelu_quick,
}


@rule(Op.GLU)
def glu(device: ReferenceDevice, node: Tensor) -> Array:
    op, values = GluOp(i32(node, 0)), node.source(1)
    if values is None:
        gate, up = np.split(device.get(source(node, 0)), 2, axis=3)
        if i32(node, 1):
            gate, up = up, gate
    else:
        gate, up = device.get(source(node, 0)), device.get(values)
    if op == GluOp.SWIGLU_OAI:
        alpha, limit = f32(node, 2), f32(node, 3)
        gate = np.minimum(gate, limit)
        return gate * sigmoid(alpha * gate) * (1 + np.clip(up, -limit, limit))
    if op == GluOp.SWIGLU_CLAMP:
        limit = f32(node, 3)
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)
    return GATES[op](gate) * up


# --- along rows -------------------------------------------------------------------------------------------------------


@rule(Op.NORM)
def norm(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    x = x - x.mean(axis=3, keepdims=True)
    return x / np.sqrt(np.square(x).mean(axis=3, keepdims=True) + f32(node, 0))


@rule(Op.RMS_NORM)
def rms_norm(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    return x / np.sqrt(np.square(x).mean(axis=3, keepdims=True) + f32(node, 0))


@rule(Op.L2_NORM)
def l2_norm(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    return x / np.maximum(np.sqrt(np.square(x).sum(axis=3, keepdims=True)), f32(node, 0))


@rule(Op.GROUP_NORM)
def group_norm(device: ReferenceDevice, node: Tensor) -> Array:
    x, n_groups, eps = device.get(source(node, 0)), i32(node, 0), f32(node, 1)
    width = -(-x.shape[1] // n_groups)
    out = np.empty_like(x)
    for i3 in range(x.shape[0]):
        for start in range(0, x.shape[1], width):
            group = x[i3, start : start + width]
            group = group - group.mean()
            out[i3, start : start + width] = group / np.sqrt(np.square(group).mean() + eps)
    return out


@rule(Op.SUM_ROWS)
def sum_rows(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)).sum(axis=3, keepdims=True)


@rule(Op.REPEAT_BACK)
def repeat_back(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    parts = [part for n, m in zip(x.shape, node.ne[::-1], strict=True) for part in (n // m, m)]
    return x.reshape(parts).sum(axis=(0, 2, 4, 6))


@rule(Op.SUM)
def sum_all(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)).sum()


@rule(Op.MEAN)
def mean(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)).mean(axis=3, keepdims=True)


@rule(Op.CUMSUM)
def cumsum(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)).cumsum(axis=3)


@rule(Op.ARGMAX)
def argmax(device: ReferenceDevice, node: Tensor) -> Array:
    return device.get(source(node, 0)).argmax(axis=3)


@rule(Op.POOL_2D)
def pool_2d(device: ReferenceDevice, node: Tensor) -> Array:
    kind, k0, k1, s0, s1, p0, p1 = (i32(node, i) for i in range(7))
    nothing = -np.finfo(np.float32).max if kind == 0 else 0.0
    x = np.pad(device.get(source(node, 0)), [(0, 0), (0, 0), (p1, p1), (p0, p0)], constant_values=nothing)
    windows = np.lib.stride_tricks.sliding_window_view(x, (k1, k0), axis=(2, 3))[:, :, ::s1, ::s0]
    return np.maximum(windows.max((4, 5)), nothing) if kind == 0 else windows.mean((4, 5))


@rule(Op.LIGHTNING_INDEXER)
def lightning_indexer(device: ReferenceDevice, node: Tensor) -> Array:
    q, k, weights, mask = (device.get(source(node, i)) for i in range(4))
    products = np.maximum(np.einsum("sthd,skxd->stkh", q, k), 0)
    return np.einsum("stkh,sxth->stk", products, weights)[:, None] + mask


@rule(Op.DSV4_HC_PRE)
def read_streams(device: ReferenceDevice, node: Tensor) -> Array:
    x, w = device.get(source(node, 0)), device.get(source(node, 1))
    factor, gated = unpack_from("<fi", node.op_params)
    parts = 1 / (1 + np.exp(-w)) if gated else w[0, 0][None, :, :, None]
    return factor * (x * parts).sum(2)[:, None]


@rule(Op.DSV4_HC_POST)
def add_to_streams(device: ReferenceDevice, node: Tensor) -> Array:
    x, streams, parts = (device.get(source(node, i)) for i in range(3))
    mixing = node.source(3)
    kept = streams if mixing is None else np.einsum("btsn,btsd->btdn", streams, device.get(mixing))
    return kept + x[0, 0][None, :, None] * parts[0, 0][None, :, :, None]


@rule(Op.DSV4_HC_COMB)
def mix_streams(device: ReferenceDevice, node: Tensor) -> Array:
    x, factors, shifts = (device.get(source(node, i)) for i in range(3))
    eps, n_rounds = unpack_from("<fi", node.op_params)
    y = (x[0, 0, :, 8:] * factors[0, 0, 0, 2] + shifts[0, 0, 0, 8:]).reshape(-1, 4, 4)
    y = np.exp(y - y.max(-1, keepdims=True))
    y = y / y.sum(-1, keepdims=True) + eps
    for i in range(n_rounds):
        if i:
            y = y / (y.sum(-1, keepdims=True) + eps)
        y = y / (y.sum(-2, keepdims=True) + eps)
    return y[None]


@rule(Op.ARANGE)
def arange(device: ReferenceDevice, node: Tensor) -> Array:
    return f32(node, 0) + f32(node, 2) * np.arange(node.ne[0], dtype=device.dtype).reshape(1, 1, 1, -1)


@rule(Op.FILL)
def fill(device: ReferenceDevice, node: Tensor) -> Array:
    return np.full(node.ne[::-1], f32(node, 0), device.dtype)


@rule(Op.ARGSORT)
def argsort(device: ReferenceDevice, node: Tensor) -> Array:
    x = device.get(source(node, 0))
    return np.argsort(-x if SortOrder(i32(node, 0)) == SortOrder.DESC else x, axis=3, kind="stable")


@rule(Op.TOP_K)
def top_k(device: ReferenceDevice, node: Tensor) -> Array:
    """In falling order, though the operation promises none."""
    return np.argsort(-device.get(source(node, 0)), axis=3, kind="stable")[..., : node.ne[0]]


def alibi_slopes(n_head: int, max_bias: float) -> Array:
    """The weight of the mask for each head: even powers down to 2^-max_bias, heads beyond a power of two in between."""
    if max_bias <= 0:
        return np.ones(n_head)
    n = 1 << floor(log2(n_head))
    whole, half = 2.0 ** (-max_bias / n), 2.0 ** (-max_bias / 2 / n)
    return np.array([whole ** (h + 1) if h < n else half ** (2 * (h - n) + 1) for h in range(n_head)])


def soft_max(scores: Array, mask: Array | None, max_bias: float, sinks: Array | None = None) -> Array:
    """Softmax over the last axis of (batch, head, row, key); a row that sees nothing gives zeros.

    `sinks`: the score of one more key for each head, which has no value.
    """
    if mask is not None:
        batch, n_head, n_rows, _ = scores.shape
        mask = mask[:, :, :n_rows]
        if max_bias > 0 or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, n_head):
            mask = repeat_to(mask, scores.shape)
            with np.errstate(invalid="ignore"):
                mask = alibi_slopes(n_head, max_bias)[:, None, None] * mask
        scores = scores + mask
    n_keys = scores.shape[3]
    if sinks is not None:
        more = np.broadcast_to(sinks[: scores.shape[1], None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, more], axis=3)
    top = scores.max(axis=3, keepdims=True)
    weights = scores - np.where(np.isneginf(top), 0, top)
    np.exp(weights, out=weights)
    total = weights.sum(axis=3, keepdims=True)
    weights /= np.where(total == 0, 1, total)
    return weights[..., :n_keys]


@rule(Op.SOFT_MAX)
def soft_max_ext(device: ReferenceDevice, node: Tensor) -> Array:
    mask, sinks = node.source(1), node.source(2)
    scores = device.get(source(node, 0)) * f32(node, 0)
    return soft_max(
        scores,
        None if mask is None else device.get(mask),
        f32(node, 1),
        None if sinks is None else device.get(sinks).reshape(-1),
    )


# --- matrices, positions, attention -----------------------------------------------------------------------------------


@rule(Op.MUL_MAT)
def mul_mat(device: ReferenceDevice, node: Tensor) -> Array:
    a, b = source(node, 0), device.get(source(node, 1))
    if a.ne[2] == a.ne[3] == 1:
        # A weight is de-quantized some rows at a time: a head of 262,144 rows does not fit otherwise.
        parts = [b @ device.get_rows(a, slice(r, r + 8192)).T for r in range(0, a.ne[1], 8192)]
        return np.concatenate(parts, axis=3)
    weights = device.get(a)
    # Row i of dimension 2 of b meets row i // (n_b / n_a) of a: heads that share keys are neighbors.
    weights = np.repeat(np.repeat(weights, b.shape[0] // a.ne[3], axis=0), b.shape[1] // a.ne[2], axis=1)
    return b @ weights.swapaxes(2, 3)


@rule(Op.MUL_MAT_ID)
def mul_mat_id(device: ReferenceDevice, node: Tensor) -> Array:
    experts, b = device.get(source(node, 0))[0], device.get(source(node, 1))[0]
    ids = device.get(source(node, 2))[0, 0]
    out = np.empty((ids.shape[0], ids.shape[1], experts.shape[1]), device.dtype)
    for expert in np.unique(ids):
        token, slot = np.nonzero(ids == expert)
        out[token, slot] = b[token, slot % b.shape[1]] @ experts[expert].T
    return out


@rule(Op.ADD_ID)
def add_id(device: ReferenceDevice, node: Tensor) -> Array:
    a, b = device.get(source(node, 0)), device.get(source(node, 1))[0, 0]
    return a + b[device.get(source(node, 2))[0, 0]]


def n_pairs(node: Tensor) -> int:
    """Number of pairs that a ROPE rotates: in VISION mode, all of a head."""
    return i32(node, 1) if RopeMode(i32(node, 2)) is RopeMode.VISION else i32(node, 1) // 2


def pair_positions(node: Tensor, positions: Array) -> Array:
    """Positions (token, pair or 1): pairs of M-RoPE's sections have positions of their own."""
    mode, (t, h, w, e) = RopeMode(i32(node, 2)), (i32(node, i) for i in range(11, 15))
    if mode in (RopeMode.NORMAL, RopeMode.NEOX):
        return positions[:, None]
    chosen = []
    for pair in range(n_pairs(node)):
        at = pair % (t + h + w + e)
        if mode is RopeMode.IMROPE:
            chosen.append(at % 3 if at < 3 * (t, h, w)[at % 3] else 3)
        else:
            chosen.append(0 if at < t else 1 if at < t + h else 2 if at < t + h + w else 3)
    return positions.reshape(4, -1)[chosen].T


def rope_angles(node: Tensor, positions: Array, freq_factors: Array | None) -> tuple[Array, float]:
    """Angles (token, pair) of a ROPE, and the factor on cosine and sine. YaRN mixes stretched and plain angles."""
    n_dims, n_ctx_orig = i32(node, 1), i32(node, 4)
    base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow = (f32(node, i) for i in range(5, 11))
    pair = np.arange(n_pairs(node))
    place = pair
    if RopeMode(i32(node, 2)) is RopeMode.VISION:  # each section begins the series anew
        lengths = [i32(node, i) for i in range(11, 15)]
        place = np.resize(np.concatenate([np.arange(n) for n in lengths]), pair.size)
    angles = positions * base ** (-2.0 * place / n_dims)
    if freq_factors is not None:
        angles = angles / freq_factors[: n_dims // 2]
    stretched = freq_scale * angles
    if not ext_factor:
        return stretched, attn_factor

    def pair_that_turns(times: float) -> float:
        return n_dims * log(n_ctx_orig / (times * 2 * pi)) / (2 * log(base))

    low = max(0.0, np.floor(pair_that_turns(beta_fast)))
    high = min(n_dims - 1.0, np.ceil(pair_that_turns(beta_slow)))
    mix = (1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)) * ext_factor
    return stretched * (1 - mix) + angles * mix, attn_factor * (1 + 0.1 * log(1 / freq_scale))


@rule(Op.ROPE)
def rope(device: ReferenceDevice, node: Tensor) -> Array:
    x, positions = device.get(source(node, 0)), device.get(source(node, 1)).reshape(-1)
    factors = node.source(2)
    angles, magnitude = rope_angles(
        node, pair_positions(node, positions), None if factors is None else device.get(factors).reshape(-1)
    )
    n_dims, mode, start = 2 * n_pairs(node), RopeMode(i32(node, 2)), i32(node, 15)
    cos, sin = (magnitude * f(angles)[None, :, None, :] for f in (np.cos, np.sin))
    first, second = {
        RopeMode.NORMAL: (slice(start, start + n_dims, 2), slice(start + 1, start + n_dims, 2)),
        RopeMode.NEOX: (slice(start, start + n_dims // 2), slice(start + n_dims // 2, start + n_dims)),
    }[RopeMode.NORMAL if mode is RopeMode.NORMAL else RopeMode.NEOX]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


@rule(Op.FLASH_ATTN_EXT)
def flash_attn_ext(device: ReferenceDevice, node: Tensor) -> Array:
    q, k, v = (device.get(source(node, i)) for i in range(3))
    mask, sinks, softcap = node.source(3), node.source(4), f32(node, 2)
    k, v = (np.repeat(np.repeat(x, q.shape[0] // x.shape[0], 0), q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * f32(node, 0)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = soft_max(
        scores,
        None if mask is None else device.get(mask),
        f32(node, 1),
        None if sinks is None else device.get(sinks).reshape(-1),
    )
    return (weights @ v).swapaxes(1, 2)


def _recurrence(
    device: ReferenceDevice, node: Tensor, step: Callable[[Array, dict[str, Array]], Array], names: str, states: Tensor
) -> Array:
    """`step` changes the state of a head [values, keys] and gives its output; tokens are of all sequences."""
    *_, n, n_heads, size = device.get(source(node, 0)).shape
    given = {name: device.get(source(node, i))[0] for i, name in enumerate(names.split())}
    now = device.get(states).reshape(-1, n_heads, size, size)
    out = np.zeros((n, n_heads, size), device.dtype)
    for t in range(n):
        for h in range(n_heads):
            state = now[t * len(now) // n, h]
            out[t, h] = step(state, {name: x[t, h] for name, x in given.items()})
    return np.concatenate([out.reshape(-1), now.reshape(-1)])


@rule(Op.GATED_LINEAR_ATTN)
def gated_linear_attn(device: ReferenceDevice, node: Tensor) -> Array:
    def step(state: Array, x: dict[str, Array]) -> Array:
        state[...] = state * x["g"][:, None] + x["k"][:, None] * x["v"]
        return x["q"] @ state * f32(node, 0)

    return _recurrence(device, node, step, "k v q g", source(node, 4))


@rule(Op.RWKV_WKV6)
def rwkv_wkv6(device: ReferenceDevice, node: Tensor) -> Array:
    k, v, r, bonus, decays, states = (source(node, i) for i in range(6))
    u = device.get(bonus).reshape(k.ne[1], k.ne[0])
    x = [device.get(t)[0] for t in (k, v, r, decays)]
    now = device.get(states).reshape(-1, k.ne[1], k.ne[0], k.ne[0])
    out = np.zeros_like(x[0])
    for t in range(k.ne[2]):
        state = now[t * len(now) // k.ne[2]]
        k_, v_, r_, w_ = (a[t] for a in x)
        new = k_[:, :, None] * v_[:, None, :]
        out[t] = np.einsum("hi,hij->hj", r_, state + u[:, :, None] * new)
        state[...] = state * w_[:, :, None] + new
    return np.concatenate([out.reshape(-1), now.reshape(-1)])


@rule(Op.RWKV_WKV7)
def rwkv_wkv7(device: ReferenceDevice, node: Tensor) -> Array:
    def step(state: Array, x: dict[str, Array]) -> Array:
        state[...] = state * x["w"] + x["v"][:, None] * x["k"] + (state @ x["a"])[:, None] * x["b"]
        return state @ x["r"]

    return _recurrence(device, node, step, "r w k v a b", source(node, 6))


@rule(Op.GATED_DELTA_NET)
def gated_delta_net(device: ReferenceDevice, node: Tensor) -> Array:
    q, k, v, g, beta, states = (device.get(source(node, i)) for i in range(6))
    n_seqs, n_tokens, n_heads, size = v.shape
    q, k = (np.tile(x, (1, 1, n_heads // x.shape[2], 1)) for x in (q, k))
    kept = np.full((i32(node, 0), *states.shape), np.nan, device.dtype)
    out = np.zeros_like(v)
    for s in range(n_seqs):
        for h in range(n_heads):
            state = states[s, h]  # [values, keys]
            for t in range(n_tokens):
                state = state * np.exp(g[s, t, h])
                change = (v[s, t, h] - state @ k[s, t, h]) * beta[s, t, h]
                state = state + change[:, None] * k[s, t, h]
                out[s, t, h] = state @ q[s, t, h] * size**-0.5
                if n_tokens - 1 - t < len(kept):
                    kept[n_tokens - 1 - t, s, h] = state
    return np.concatenate([out.reshape(-1), kept.reshape(-1)])


# --- models -----------------------------------------------------------------------------------------------------------


@rule(Op.SSM_CONV)
def ssm_conv(device: ReferenceDevice, node: Tensor) -> Array:
    x, kernel = device.get(source(node, 0))[0], device.get(source(node, 1))[0, 0]
    n, size = node.ne[1], kernel.shape[1]
    found: Array = sum(x[:, :, i : i + n] * kernel[:, i, None] for i in range(size))
    return found.transpose(0, 2, 1)[None]


@rule(Op.SSM_SCAN)
def ssm_scan(device: ReferenceDevice, node: Tensor) -> Array:
    s, x, dt, a, b, c, ids = (device.get(source(node, i)) for i in range(7))
    _, n_tokens, n_head, _ = x.shape
    step, share = np.logaddexp(dt[0], 0), n_head // b.shape[2]
    y, states = np.empty_like(x), []
    state = s[ids.reshape(-1).astype(int)]
    for t in range(n_tokens):
        decay = np.exp(step[:, t, :, None] * a[0, 0])[:, :, None]
        taken = (step[:, t, :, None] * x[:, t])[..., None] * np.repeat(b[:, t], share, axis=1)[:, :, None]
        state = state * decay + taken
        y[:, t] = (state * np.repeat(c[:, t], share, axis=1)[:, :, None]).sum(-1)
        states.insert(0, state)
    states = states[: i32(node, 0)]
    return np.concatenate([y.reshape(-1), *(state.reshape(-1) for state in states)])[None, None, None]


def attention_masks(model: Model, positions: Sequence[int], starts: Sequence[int], n_kv: int) -> dict[str, Array]:
    """The masks (token, cell) for tokens at `positions` of sequences whose cells begin at `starts`."""
    cell = np.arange(n_kv)
    position, start = np.array(positions)[:, None], np.array(starts)[:, None]
    there = cell - start
    sees = (there >= 0) & (there <= position)
    in_window = sees & (position - there < (model.hparams.n_swa or n_kv + 1))
    return {name: np.where(m, 0.0, -np.inf) for name, m in (("mask", sees), ("mask_swa", in_window))}


class ReferenceModel:
    """A model file run by the reference, with a cache of its own."""

    def __init__(
        self,
        path: Path,
        *,
        n_cells: int = 256,
        type_k: TensorType = TensorType.F16,
        type_v: TensorType = TensorType.F16,
        dtype: type[np.floating[Any]] = np.float64,
        adapters: Sequence[Path] = (),
    ) -> None:
        self.file = GGUFFile.open(path)
        self.model = load_model(self.file)
        load_adapters(self.model, adapters)
        self.kv = self.model.memory(MemoryOptions(n_cells=n_cells, type_k=type_k, type_v=type_v, whole=True))
        self.device = ReferenceDevice(dtype)
        for name, tensor in self.model.weights.items():
            self.device.bind(tensor, self.file.data(name))
        for adapter in self.model.adapters:
            for tensor in adapter.tensors:
                self.device.bind(tensor, adapter.data(tensor.name))

    def logits(
        self,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
        n_kv: int | None = None,
        scales: tuple[float, ...] = (),
    ) -> Array:
        """Logits (output, vocabulary) of a batch: token i sits at `positions[i]` of the run of cells from `starts[i]`.

        By default one sequence from position 0, and the logits of its last token.
        """
        n = len(tokens)
        positions = range(n) if positions is None else positions
        starts = [0] * n if starts is None else starts
        outputs = [n - 1] if outputs is None else outputs
        n_kv = self.kv.n_cells if n_kv is None else n_kv
        graph = self.model.build(BatchShape(n, len(outputs), n_kv, scales=scales), self.kv)
        values: dict[str, Any] = {
            "tokens": tokens,
            "positions": positions,
            "cells": np.add(positions, starts),
            "out_rows": outputs,
            **attention_masks(self.model, positions, starts, n_kv),
            **{f"hadamard_{n}": hadamard(n).view(np.float32) for n in (64, 128, 256)},
        }
        result = self.device.run(graph, {tensor: values[name] for name, tensor in graph.inputs.items()})
        return result.get("logits", np.empty((0, self.model.hparams.n_vocab)))
