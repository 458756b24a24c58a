"""Operations that only llama.cpp's graphs use: attention in single steps, other types and strides, sampling."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from running import PLAIN, Array, Case, check, each_type, new, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError
from llamado.ggml import GluOp, Op, RopeMode, SortOrder, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.ggml.tensor import contiguous_strides
from llamado.gguf.types import TensorType as T

CACHES = (T.F32, T.F16, T.BF16, T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.IQ4_NL)
BLOCKS = CACHES[3:]
HALVES = (T.F16, T.BF16)
ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def name(type: T) -> str:
    return type.name


def causal(n_tokens: int, n_kv: int, first: int = 0) -> Array:
    sees = np.arange(n_kv) <= first + np.arange(n_tokens)[:, None]
    return np.where(sees, 0.0, -np.inf).astype(np.float32)


# --- soft_max ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", [T.F32, T.F16], ids=name)
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
def test_soft_max_with_masks(device: CpuDevice, type: T, max_bias: float) -> None:
    for ne, mask_ne in (
        ((64, 3, 4, 1), (64, 3, 1, 1)),
        ((77, 5, 6, 2), (77, 9, 1, 2)),
        ((8, 1, 3, 2), (8, 1, 3, 1)),
        ((5, 2, 1, 1), (5, 2, 1, 1)),
    ):
        x, mask = new(*ne), new(*mask_ne, type=type)
        m = np.where(values(*mask_ne, seed=1) > 0.3, values(*mask_ne, seed=2), -np.inf)
        m[..., 0] = 0.5
        check(device, g.soft_max_ext(x, mask, 0.7, max_bias), {x: values(*ne, scale=4), mask: m}, rtol=1e-4)


def test_soft_max_without_a_mask_with_sinks_and_of_nothing(device: CpuDevice) -> None:
    for ne in ((1,), (40,), (13, 3, 2, 2), (2048, 2)):
        x = new(*ne)
        check(device, g.soft_max_ext(x, None, 1.0), {x: values(*ne, scale=5)}, rtol=1e-4)
    x, mask, sinks = new(24, 3, 4), new(24, 3), new(4)
    node = g.soft_max_ext(x, mask, 0.3)
    node.src = (x, mask, sinks)
    data = {x: values(24, 3, 4, scale=5), mask: causal(3, 24, 9), sinks: [0.5, -3.0, 8.0, 0.0]}
    check(device, node, data, rtol=1e-4)
    blind = np.full((3, 24), -np.inf)
    found = check(device, g.soft_max_ext(x, mask, 0.3), {x: values(24, 3, 4), mask: blind})
    assert not found.any()


def test_soft_max_of_a_row_does_not_depend_on_other_rows_or_masked_length(teams: list[CpuDevice]) -> None:
    """Bits: hidden keys behind the last one add zeros."""
    scores = values(512, 12, scale=4)
    mask = causal(12, 512, 100)

    def run(device: CpuDevice, rows: list[int], n_kv: int) -> list[bytes]:
        x, m = new(n_kv, len(rows)), new(n_kv, len(rows))
        result = g.soft_max_ext(x, m, 0.5)
        found = Case({"r": result}, {x: scores[rows, :n_kv], m: mask[rows, :n_kv]}).run(device)["r"][0, 0]
        return [row[:120].tobytes() for row in found]

    whole = run(teams[0], list(range(12)), 512)
    for device in teams:
        for rows in ([3], [0, 5, 11], list(range(12))[::-1]):
            for n_kv in (120, 256, 512):
                assert run(device, rows, n_kv) == [whole[i] for i in rows]


# --- attention in single steps ----------------------------------------------------------------------------------------


def attention_steps(type_k: T, type_v: T, n: int, n_kv: int, streams: int = 1) -> Case:
    """Return attention without the fused operation: values are stored transposed, one element to a row."""
    head, heads, heads_kv, cells = 32, 6, 2, 64
    q, mask = new(head, heads, n, streams), new(n_kv, n, 1, streams)
    k = new(head * heads_kv, cells, streams, type=type_k)
    v = new(cells, head * heads_kv, streams, type=type_v)
    data: dict[Tensor, Any] = {
        q: values(*q.ne),
        mask: np.broadcast_to(causal(n, n_kv, n_kv - n - 3), (streams, 1, n, n_kv)),
        k: weight_bytes(type_k, k.ne[0], cells * streams),
        v: weight_bytes(type_v, cells, k.ne[0] * streams),
    }
    keys = g.view_4d(k, head, n_kv, heads_kv, streams, k.nb[1], k.type.row_bytes(head), k.nb[2])
    vals = g.view_4d(v, n_kv, head, heads_kv, streams, v.nb[1], v.nb[1] * head, v.nb[2])
    scores = g.soft_max_ext(g.mul_mat(keys, g.permute(q, 0, 2, 1, 3)), mask, head**-0.5)
    mixed = g.permute(g.mul_mat(vals, scores), 0, 2, 1, 3)
    return Case({"out": g.cont(mixed, head * heads, n * streams)}, data)


@pytest.mark.slow
@pytest.mark.parametrize("type", CACHES, ids=name)
def test_attention_in_single_steps(device: CpuDevice, type: T) -> None:
    # Keys in blocks are multiplied with queries of 8 bits.
    atol = 2e-3 if type in BLOCKS else 1e-4
    for n, n_kv, streams in ((1, 32, 1), (5, 64, 1), (3, 32, 2)):
        attention_steps(type, T.F16, n, n_kv, streams).check(device, rtol=1e-3, atol=atol)
    attention_steps(type, T.F32, 2, 64).check(device, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16], ids=name)
def test_values_are_stored_element_by_element(device: CpuDevice, type: T) -> None:
    """SET_ROWS to a transposed cache: a row of the target is one number."""
    n, width, cells = 7, 24, 32
    x, cache, ids = new(width, n), new(1, width * cells, type=type), new(width * n, type=T.I64)
    places = (np.arange(width)[None, :] * cells + np.array([3, 9, 0, 31, 30, 1, 2])[:, None]).reshape(-1)
    stored = g.set_rows(cache, g.reshape(x, 1, width * n), ids)
    check(device, stored, {x: values(width, n), ids: places}, rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize("type", BLOCKS, ids=name)
def test_flash_attention_over_blocks(device: CpuDevice, type: T) -> None:
    head, heads, heads_kv, n_kv = 64, 4, 2, 96
    for n in (1, 11):
        q, mask = new(head, heads, n), new(n_kv, n, type=T.F16)
        k, v = (new(head * heads_kv, n_kv, type=type) for _ in range(2))
        data: dict[Tensor, Any] = {q: values(head, heads, n), mask: causal(n, n_kv, 70)}
        data |= {k: weight_bytes(type, k.ne[0], n_kv, 1), v: weight_bytes(type, k.ne[0], n_kv, 2)}
        view = [g.view_4d(t, head, n_kv, heads_kv, 1, t.nb[1], type.row_bytes(head), t.nb[2]) for t in (k, v)]
        check(device, g.flash_attn_ext(g.permute(q, 0, 2, 1, 3), *view, mask, 0.2), data, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("type", BLOCKS, ids=name)
def test_rows_become_blocks_of_every_kind(device: CpuDevice, type: T) -> None:
    """Copies and SET_ROWS, bit for bit but where a number lies between two."""
    x, ids = new(96, 5), new(5, type=T.I64)
    rows = values(96, 5)
    rows[1, :32], rows[2, 32:64], rows[3, :32] = 0.0, 1.5, np.linspace(-1, 1, 32)
    rows[4, 64:] = -(2.0 ** np.arange(-16.0, 16.0))
    cache = new(96, 8, type=type)
    case = Case({"set": g.set_rows(cache, x, ids), "copy": g.cast(x, type)}, {x: rows, ids: [7, 0, 2, 5, 3]})
    found, expected = case.run(device), case.expected()
    for key, right in expected.items():
        step = np.abs(right).reshape(-1, 32).max(axis=1).repeat(32).reshape(right.shape) / (
            100 if type == T.Q8_0 else 7
        )
        assert (np.abs(found[key] - right) <= 1.01 * step).all()
        assert (found[key] == right).mean() > 0.98, key


# --- other types and strides ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", HALVES, ids=name)
def test_row_operations_on_halves(device: CpuDevice, type: T) -> None:
    ne = (24, 5, 3)
    a, b, row = new(*ne, type=type), new(*ne, type=type), new(24)
    data = {a: values(*ne), b: values(*ne, seed=1), row: values(24, seed=2)}
    for node in (g.add(a, b), g.mul(a, row), g.silu(a), g.scale(b, 0.5, 1.0), g.rms_norm(a, 1e-5), g.sub(b, a)):
        check(device, node, data, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("type", [T.F32, *HALVES, T.Q8_0, T.Q4_0], ids=name)
@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.NEOX])
def test_a_context_shift_rotates_keys_in_place(device: CpuDevice, type: T, mode: RopeMode) -> None:
    """The graph of a context shift: ROPE in place on a view of the cache, or on a copy of it and back."""
    head, heads, cells = 32, 3, 40
    cache, shift = new(head * heads, cells, type=type), new(cells, type=T.I32)
    keys = g.view_3d(cache, head, heads, cells, type.row_bytes(head), cache.nb[1])
    data: dict[Tensor, Any] = {cache: weight_bytes(type, head * heads, cells), shift: -np.arange(cells) % 17}
    if type in (T.F32, *HALVES):
        turned = g.rope_ext(keys, shift, None, head, mode, *ROPE)
        turned.view_src, turned.nb = keys.view_src, keys.nb
        turned.view_offs = keys.view_offs
    else:
        turned = g.cpy(g.rope_ext(g.cast(keys, T.F32), shift, None, head, mode, *ROPE), keys)
    case = Case({"turned": turned}, data)
    found, expected = case.run(device)["turned"], case.expected()["turned"]
    assert np.abs(found - expected).max() < {T.Q4_0: 0.2, T.Q8_0: 0.02}.get(type, 0.01) * np.abs(expected).max()
    assert np.abs(found - expected).mean() < 1e-3


def test_operands_repeated_with_gaps_or_turned(device: CpuDevice) -> None:
    a, b, wide, turned = new(12, 6, 2), new(4, 3), new(24, 6, 2), new(6, 12, 2)
    data = {a: values(12, 6, 2), b: values(4, 3, seed=1), wide: values(24, 6, 2), turned: values(6, 12, 2, seed=4)}
    check(device, g.mul(a, b), data)
    check(device, g.add(a, g.transpose(turned)), data)
    every_other = g.view_3d(wide, 12, 6, 2, wide.nb[1], wide.nb[2])
    every_other.nb = (8, *every_other.nb[1:])
    check(device, g.add(every_other, a), data)
    gaps = g.silu(a)  # our builder would not, ggml's graphs may
    gaps.src = (every_other,)
    check(device, gaps, data)
    check(device, g.scale(g.view_3d(wide, 12, 6, 2, wide.nb[1], wide.nb[2], 16), 2.0), data)


@pytest.mark.parametrize("op", [GluOp.SWIGLU, GluOp.GEGLU, GluOp.REGLU])
@pytest.mark.parametrize("swapped", [False, True])
def test_gate_and_values_in_one_tensor(device: CpuDevice, op: GluOp, swapped: bool) -> None:
    x = new(26, 5, 2)
    check(device, g.glu(x, op, swapped), {x: values(26, 5, 2, scale=2)}, rtol=3e-6)


def test_functions_of_one_number(device: CpuDevice) -> None:
    x = np.abs(values(37, 3, scale=4)) + 1e-3
    x[0, :6] = [1.0, 2.0, 1e-30, 1e30, 0.5, 3e-39]
    for make in (g.sqr, g.sqrt, g.log, g.sin, g.cos, lambda a: g.clamp(a, 0.5, 2.0), lambda a: g.leaky_relu(a, 0.1)):
        a = new(37, 3)
        y = np.minimum(x, 1e5) if make in (g.sin, g.cos) else x
        check(device, make(a), {a: y}, rtol=1e-6, atol=1e-7)
    a = new(4)
    found = Case({"r": g.log(a)}, {a: [0.0, -1.0, np.inf, np.nan]}).run(device)["r"].reshape(-1)
    assert found[0] == -np.inf and np.isnan(found[1]) and found[2] == np.inf and np.isnan(found[3])


def test_xielu_bends_both_ways(device: CpuDevice) -> None:
    x = new(37, 3)
    check(device, g.xielu(x, 0.4, 0.7, 0.5, -1e-6), {x: values(37, 3, scale=4)}, rtol=3e-6, atol=1e-6)


def test_rows_of_more_dimensions(device: CpuDevice) -> None:
    table, ids = new(16, 9, 3, 2), new(4, 3, 2, type=T.I32)
    numbers = np.random.default_rng(1).integers(0, 9, (2, 3, 4))
    check(device, g.get_rows(table, ids), {table: values(16, 9, 3, 2), ids: numbers}, rtol=0)
    some = g.view_3d(ids, 2, 3, 2, ids.nb[1], ids.nb[2], 4)
    check(device, g.get_rows(table, some), {table: values(16, 9, 3, 2), ids: numbers}, rtol=0)
    whole = new(5, 11, type=T.I32)
    two = new(2, type=T.I32)
    check(device, g.get_rows(whole, two), {whole: np.arange(55), two: [10, 3]}, rtol=0)
    for type in (T.F32, T.F16, T.Q8_0):
        cache, rows, at = new(32, 7, 4, 2, type=type), new(32, 3, 4, 2), new(3, 2, 1, type=T.I64)
        where = np.array([[6, 0, 3], [1, 2, 5]])
        rtol = 0.02 if type == T.Q8_0 else 1e-3
        check(device, g.set_rows(cache, rows, at), {rows: values(32, 3, 4, 2), at: where}, rtol=rtol, atol=1e-2)
    halves, cache, at = new(32, 3, type=T.F16), new(32, 7), new(3, type=T.I32)
    check(device, g.set_rows(cache, halves, at), {halves: values(32, 3), at: [4, 0, 6]}, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type([T.Q8_0, T.Q4_1, T.Q1_0, T.NVFP4, T.Q3_K, T.Q6_K, T.TQ1_0, *PLAIN]))
def test_products_of_few_rows_and_of_many_matrices(device: CpuDevice, type: T) -> None:
    n = 40 if type in PLAIN else 2 * type.block_size
    for rows, dims, columns in ((3, (1, 1), 4), (7, (1, 1), 9), (12, (2, 1), 3), (5, (2, 2), 1)):
        w, x = new(n, rows, *dims, type=type), new(n, columns, 2 * dims[0], dims[1])
        data = {w: weight_bytes(type, n, rows * dims[0] * dims[1]), x: values(*x.ne, seed=1)}
        # of few rows the weights become f32, of more the activations 8 bits
        exact = type in PLAIN or rows < 8
        check(device, g.mul_mat(w, x), data, rtol=1e-4 if exact else 0.05, atol=1e-5 if exact else 0.02)


@pytest.mark.slow
def test_products_with_gaps_everywhere(device: CpuDevice) -> None:
    w, x = new(64, 20, type=T.Q4_0), new(64, 6, 5)
    data: dict[Tensor, Any] = {w: weight_bytes(T.Q4_0, 64, 20), x: values(64, 6, 5)}
    check(device, g.mul_mat(w, g.permute(x, 0, 2, 1, 3)), data, rtol=0.05, atol=0.02)
    a, b = new(12, 30), new(9, 30)
    data = {a: values(12, 30), b: values(9, 30, seed=1)}
    # our builder, as ggml's, refuses transposed weights; a graph from elsewhere may have them
    node = g.mul_mat(g.cont(g.transpose(a)), g.transpose(b))
    check(device, node, data, rtol=1e-4, atol=1e-5)
    halves = new(30, 9, type=T.F16)
    data = {a: values(12, 30), halves: values(30, 9)}
    check(device, g.mul_mat(g.cont(g.transpose(a)), halves), data, rtol=1e-4, atol=1e-5)


# --- moving and counting ----------------------------------------------------------------------------------------------


def test_repeat_concat_and_pad(device: CpuDevice) -> None:
    x, y = new(6, 4, 3), new(6, 4, 3)
    data: dict[Tensor, Any] = {x: values(6, 4, 3), y: values(6, 4, 3, seed=1)}
    for ne in ((6, 4, 3, 1), (12, 4, 3, 2), (6, 8, 9, 1)):
        check(device, g.repeat(x, *ne), data, rtol=0)
    z = new(16, 1, 3, 2)
    check(device, g.repeat(z, 16, 4, 3, 2), {z: values(16, 1, 3, 2)}, rtol=0)  # whole rows, each several times
    for d in range(4):
        check(device, g.concat(x, y, d), data, rtol=0)
    for type in (T.F16, T.I32, T.Q8_0):
        a, b = new(32, 3, type=type), new(64, 3, type=type)
        raw = {t: weight_bytes(type, t.ne[0], 3) if type != T.I32 else np.arange(t.nelements) for t in (a, b)}
        check(device, g.concat(a, b, 0), raw, rtol=1e-3 if type == T.Q8_0 else 0)
    node = Tensor(T.F32, (9, 5, 3, 2), contiguous_strides(T.F32, (9, 5, 3, 2)), Op.PAD, (x,))
    node.op_params = struct.pack("<9i28x", 1, 2, 0, 1, 0, 0, 1, 0, 0)
    check(device, node, data, rtol=0)


@pytest.mark.parametrize("ne", [(1,), (7, 3), (64, 2, 3, 2), (1001, 2)])
def test_sums_orders_and_greatest(device: CpuDevice, ne: tuple[int, ...]) -> None:
    x = new(*ne)
    data = {x: values(*ne)}
    for make in (g.sum_rows, g.mean, g.cumsum, g.sum_all):
        check(device, make(x), data, rtol=1e-4, atol=1e-5)
    for order in SortOrder:
        check(device, g.argsort(x, order), data, rtol=0)
    for k in {1, min(5, ne[0]), ne[0]}:
        check(device, g.top_k(x, k), data, rtol=0)
    if len(ne) <= 2:
        check(device, g.argmax(x), data, rtol=0)


def not_built(op: Op, ne: tuple[int, ...], sources: tuple[Tensor, ...], params: bytes = bytes(64)) -> Tensor:
    """A node that only graphs from elsewhere have."""
    shape = (*ne, 1, 1, 1)[:4]
    return Tensor(T.F32, shape, contiguous_strides(T.F32, shape), op, sources, params)


@pytest.mark.parametrize("window", [(16, 1, 16, 1, 0, 0), (3, 2, 2, 1, 1, 1), (5, 5, 5, 5, 0, 2)])
@pytest.mark.parametrize("kind", [0, 1])
def test_windows(device: CpuDevice, window: tuple[int, ...], kind: int) -> None:
    k0, k1, s0, s1, p0, p1 = window
    x, data = new(48, 7, 3, 2), values(48, 7, 3, 2)
    data[..., :16] = -np.inf if kind == 0 else 1.0
    ne = ((48 + 2 * p0 - k0) // s0 + 1, (7 + 2 * p1 - k1) // s1 + 1, 3, 2)
    node = not_built(Op.POOL_2D, ne, (x,), struct.pack("<7i36x", kind, *window))
    check(device, node, {x: data}, rtol=1e-6)


def test_sequences_of_numbers(device: CpuDevice) -> None:
    x = new(16, 3)
    steps = not_built(Op.ARANGE, (16,), (), struct.pack("<3f52x", 2.0, 10.0, 0.5))
    check(device, g.add(x, steps), {x: values(16, 3)}, rtol=1e-6)
    long = not_built(Op.ARANGE, (1 << 21,), (), struct.pack("<3f52x", 0.0, 2.0**21, 1.0))
    with pytest.raises(DeviceError, match="not supported"):
        Case({"r": long}, {}).run(device)


@pytest.mark.parametrize("keys", [T.F32, T.F16, T.Q8_0])
def test_scores_of_keys(device: CpuDevice, keys: T) -> None:
    n_kv, n_tokens, n_streams = 70, 5, 2
    q, w = new(64, 3, n_tokens, n_streams), new(3, n_tokens, 1, n_streams)
    k, mask = new(64, 1, n_kv, n_streams, type=keys), new(n_kv, n_tokens, type=T.F16)
    hidden = np.where(values(n_kv, n_tokens) > 0.5, -np.inf, 0.0).astype(np.float16)
    raw = weight_bytes(keys, 64, n_kv * n_streams) if keys == T.Q8_0 else values(64, 1, n_kv, n_streams)
    data = {q: values(64, 3, n_tokens, n_streams), w: values(3, n_tokens, 1, n_streams), mask: hidden}
    data[k] = raw if keys == T.Q8_0 else raw.astype(np.float16 if keys == T.F16 else np.float32)
    node = not_built(Op.LIGHTNING_INDEXER, (n_kv, n_tokens, 1, n_streams), (q, k, w, mask))
    check(device, node, data, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [64, 100])
def test_streams(device: CpuDevice, n: int) -> None:
    """Hyper-connections: reading from several residual streams, adding to them, and mixing four of them."""
    x, made, parts = new(n, 3, 7), new(n, 7), new(3, 7)
    data = {x: values(n, 3, 7), made: values(n, 7), parts: values(3, 7)}
    pre = not_built(Op.DSV4_HC_PRE, (n, 7), (x, parts), struct.pack("<fi56x", 1.5, 0))
    check(device, pre, data, rtol=1e-4, atol=1e-4)
    gates, mixing = new(n, 3, 7), new(3, 3, 7)
    pre = not_built(Op.DSV4_HC_PRE, (n, 7), (x, gates), struct.pack("<fi56x", 0.5, 1))
    check(device, pre, {**data, gates: values(n, 3, 7)}, rtol=1e-4, atol=1e-4)
    post = not_built(Op.DSV4_HC_POST, (n, 3, 7), (made, x, parts))
    check(device, post, data, rtol=1e-4, atol=1e-4)
    post = not_built(Op.DSV4_HC_POST, (n, 3, 7), (made, x, parts, mixing))
    check(device, post, {**data, mixing: values(3, 3, 7)}, rtol=1e-4, atol=1e-4)
    mixes, factors, shifts = new(24, 7), new(3), new(24)
    comb = not_built(Op.DSV4_HC_COMB, (4, 4, 7), (mixes, factors, shifts), struct.pack("<fi56x", 1e-6, 5))
    check(device, comb, {mixes: values(24, 7), factors: values(3), shifts: values(24)}, rtol=1e-4, atol=1e-4)


def test_halves_are_rounded_away_from_zero(device: CpuDevice) -> None:
    x = new(8)
    data = np.array([0.5, -0.5, 1.5, -2.5, 0.49999997, -0.49999997, 3.0, -7.75], np.float32)
    check(device, g.unary(x, UnaryOp.ROUND), {x: data}, rtol=0)


@pytest.mark.parametrize("ne", [(576, 40), (64, 7, 3, 2), (100, 9), (13, 4, 2), (70, 6)])
def test_copies_are_added_up(device: CpuDevice, ne: tuple[int, ...]) -> None:
    """All of them in one order, so that a sum over rows does not depend on how they came."""
    x = new(*ne)
    data = {x: values(*ne)}
    check(device, g.repeat_back(x, ne[0]), data, rtol=1e-5, atol=1e-5)
    check(device, g.repeat_back(x, ne[0], 1, *ne[2:]), data, rtol=1e-5, atol=1e-5)
    if ne == (70, 6):
        check(device, g.repeat_back(x, 35, 2), data, rtol=1e-5, atol=1e-5)
        turned = g.permute(x, 1, 0, 2, 3)
        check(device, g.repeat_back(turned, 3, 7), data, rtol=1e-5, atol=1e-5)


def test_rows_are_added_up_in_order(device: CpuDevice) -> None:
    """To the bit what numpy's single additions come to, one row after the other."""
    x, given = new(100, 33), values(100, 33)
    right = np.zeros(100, np.float32)
    for row in given.reshape(33, 100):
        right += row * row
    found = Case({"sum": g.repeat_back(g.sqr(x), 100)}, {x: given}).run(device)
    assert found["sum"].tobytes() == right.tobytes()


def test_sort_order_of_ties_and_nan(device: CpuDevice) -> None:
    x = new(50, 2)
    rows = np.repeat(np.arange(10.0), 5).reshape(1, 50).repeat(2, axis=0)
    check(device, g.argsort(x, SortOrder.DESC), {x: rows}, rtol=0)
    rows[1] = np.nan
    found = Case({"r": g.argsort(x)}, {x: rows}).run(device)["r"][0, 0, 1]
    assert sorted(found) == list(range(50))


def test_sampling_on_the_device(device: CpuDevice) -> None:
    """The greatest 40 of a vocabulary, their weights, a cut at a sum of 0.95: what `-bs` sends."""
    logits = new(1000, 1)
    top = g.top_k(logits, 40)
    row = g.view_2d(top, 40, 1, top.nb[1])
    column = g.reshape(logits, 1, 1000)
    chosen = g.reshape(g.get_rows(column, g.reshape(row, 40)), 40, 1)
    weights = g.soft_max_ext(chosen, None, 1.25)
    kept = g.unary(g.scale(g.cumsum(weights), -1.0, 0.95), UnaryOp.STEP)
    best = g.argmax(g.add(g.log(weights), g.log(g.clamp(kept, 1e-9, 1.0))))
    case = Case({"kept": g.sum_all(kept), "best": best, "weights": weights}, {logits: values(1000, 1, scale=3)})
    case.check(device, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("source", CACHES, ids=name)
@pytest.mark.parametrize("target", CACHES, ids=name)
def test_copies_between_all_types_of_a_cache(best: CpuDevice, source: T, target: T) -> None:
    x = new(64, 3, 4, type=source)
    data = {x: weight_bytes(source, 64, 12)}
    for make in (g.cast(x, target), g.cpy(g.permute(x, 0, 2, 1, 3), new(64, 4, 3, type=target))):
        case = Case({"r": make}, data)
        found, right = case.run(best)["r"], case.expected()["r"]
        coarse = {T.F32: 1e-7, T.F16: 1e-3, T.BF16: 1e-2, T.Q8_0: 0.02}.get(target, 0.3)
        assert np.abs(found - right).max() <= coarse * np.abs(right).max()
        assert np.abs(found - right).mean() <= 0.02 * np.abs(right).mean()
