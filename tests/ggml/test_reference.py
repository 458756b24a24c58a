"""The reference held against other ways of saying the same: the oracle must not be wrong itself."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from reference import GATES, RULES, UNARY, ReferenceDevice

from llamado.ggml import GluOp, Graph, Op, RopeMode, SortOrder, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.ggml.ops import VIEW_OPS
from llamado.gguf.types import TensorType as T

Array = np.ndarray[Any, Any]


def values(*ne: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(ne[::-1]).astype(np.float32)


def new(*ne: int, type: T = T.F32) -> Tensor:
    return g.new_tensor(type, *ne)


def compute(result: Tensor, inputs: dict[Tensor, Any], device: ReferenceDevice | None = None) -> Array:
    """The result as an array with dimensions of 1 at the slow end left out."""
    device = device or ReferenceDevice()
    graph = Graph()
    graph.output("result", result)
    device.run(graph, inputs)
    out = device.get(result)
    return out.reshape(out.shape[4 - result.n_dims :])


def test_every_operation_of_the_graph_functions_has_a_rule() -> None:
    built = {Op[name] for name in re.findall(r"\bOp\.([A-Z0-9_]+)", inspect.getsource(g))} - VIEW_OPS - {Op.NONE}
    assert len(built) > 30
    assert built <= set(RULES), built - set(RULES)
    assert set(UNARY) == set(UnaryOp) - {UnaryOp.XIELU}
    assert set(GATES) == set(GluOp) - {GluOp.SWIGLU_OAI, GluOp.SWIGLU_CLAMP}


def test_binary_operations_repeat_the_second_operand() -> None:
    a, b = new(6, 4, 2), new(3, 2)
    x, y = values(6, 4, 2), values(3, 2, seed=1)
    for function, expected in ((g.add, np.add), (g.sub, np.subtract), (g.mul, np.multiply), (g.div, np.divide)):
        np.testing.assert_allclose(compute(function(a, b), {a: x, b: y}), expected(x, np.tile(y, (2, 2, 2))), rtol=1e-6)


def test_mul_mat_shares_the_first_operand_over_neighbouring_heads() -> None:
    a, b = new(8, 5, 2), new(8, 3, 6)
    x, y = values(8, 5, 2), values(8, 3, 6, seed=1)
    out = compute(g.mul_mat(a, b), {a: x, b: y})
    expected = np.stack([y[h] @ x[h // 3].T for h in range(6)])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("type", [T.F16, T.BF16, T.Q8_0, T.Q5_0, T.Q4_1])
def test_quantised_weights_are_close_to_what_they_stand_for(type: T) -> None:
    w, x = new(64, 9, type=type), new(64, 2)
    a, b = values(64, 9), values(64, 2, seed=1)
    error = compute(g.mul_mat(w, x), {w: a, x: b}) - b @ a.T
    assert np.abs(error).max() < (0.1 if type in (T.F16, T.BF16, T.Q8_0) else 1.5)


def test_get_rows_of_weights_and_of_batches() -> None:
    table, ids = new(32, 10, type=T.Q8_0), new(3, type=T.I32)
    x = values(32, 10)
    np.testing.assert_allclose(compute(g.get_rows(table, ids), {table: x, ids: [7, 0, 7]}), x[[7, 0, 7]], atol=0.03)
    table, ids = new(4, 5, 2), new(3, 2, type=T.I32)
    x = values(4, 5, 2)
    out = compute(g.get_rows(table, ids), {table: x, ids: [[4, 0, 1], [2, 2, 3]]})
    np.testing.assert_array_equal(out, np.stack([x[0, [4, 0, 1]], x[1, [2, 2, 3]]]))


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, T.Q8_0])
def test_set_rows_changes_only_the_rows_it_names(type: T) -> None:
    cache, rows, ids = new(64, 8, type=type), new(64, 2), new(2, type=T.I64)
    device = ReferenceDevice()
    old, written = values(64, 8), values(64, 2, seed=1)
    device.set(cache, old)
    before = device.get(cache)
    compute(g.set_rows(cache, rows, ids), {rows: written, ids: [5, 2]}, device)
    after = device.get(cache)[0, 0]
    np.testing.assert_allclose(after[[5, 2]], written, atol=0.03, rtol=0.01)
    untouched = [0, 1, 3, 4, 6, 7]
    np.testing.assert_array_equal(after[untouched], before[0, 0, untouched])


def test_writes_through_views_reach_the_owner() -> None:
    cache, x = new(4, 6, type=T.F16), new(8)
    device = ReferenceDevice()
    compute(g.cpy(x, g.view_1d(cache, 8, offset=16)), {x: np.arange(8)}, device)
    np.testing.assert_array_equal(device.get(cache)[0, 0].reshape(-1), [*[0] * 8, *range(8), *[0] * 8])


def test_copies_follow_strides() -> None:
    a = new(3, 2, 4)
    x = values(3, 2, 4)
    np.testing.assert_array_equal(compute(g.cont(g.permute(a, 0, 2, 1, 3)), {a: x}), x.swapaxes(0, 1))
    np.testing.assert_array_equal(compute(g.cont(g.transpose(a)), {a: x}), x.swapaxes(1, 2))
    np.testing.assert_array_equal(
        compute(g.dup(g.view_2d(a, 2, 2, 12, 16)), {a: x}), x.reshape(-1)[4:10].reshape(2, 3)[:, :2]
    )


def test_concat_and_repeat() -> None:
    a, b = new(2, 3), new(2, 1)
    x, y = values(2, 3), values(2, 1, seed=1)
    np.testing.assert_array_equal(compute(g.concat(a, b, 1), {a: x, b: y}), np.vstack([x, y]))
    np.testing.assert_array_equal(compute(g.repeat(a, 4, 3), {a: x}), np.tile(x, (1, 2)))


@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.NEOX])
def test_rope_is_a_complex_rotation(mode: RopeMode) -> None:
    """(a + ib) × exp(i p base^(-2j/n)), and what lies behind n_dims stays."""
    x, pos, n_dims = values(10, 2, 3), [0, 5, 70], 8
    a, p = new(10, 2, 3), new(3, type=T.I32)
    out = compute(g.rope_ext(a, p, None, n_dims, mode, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0), {a: x, p: pos})
    j = np.arange(4)
    first, second = (2 * j, 2 * j + 1) if mode == RopeMode.NORMAL else (j, j + 4)
    z = x[..., first] + 1j * x[..., second]
    turned = z * np.exp(1j * np.array(pos)[:, None, None] * 1e4 ** (-2 * j / n_dims))
    np.testing.assert_allclose(out[..., first], turned.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out[..., second], turned.imag, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(out[..., 8:], x[..., 8:])


def test_rope_scaling() -> None:
    x = values(8, 1, 1)
    a, p, f = new(8, 1, 1), new(1, type=T.I32), new(4)

    def rope(pos: int, scale: float, ext: float, factors: float) -> Array:
        tensor = g.rope_ext(a, p, f, 8, RopeMode.NEOX, 64, 1e4, scale, ext, 1.0, 32.0, 1.0)
        return compute(tensor, {a: x, p: [pos], f: [factors] * 4})

    np.testing.assert_allclose(rope(8, 0.25, 0.0, 1.0), rope(2, 1.0, 0.0, 1.0), rtol=1e-6)
    np.testing.assert_allclose(rope(8, 1.0, 0.0, 4.0), rope(2, 1.0, 0.0, 1.0), rtol=1e-6)
    # YaRN keeps a vector's direction in the fastest pair, and stretches lengths by 1 + 0.1 ln(factor).
    yarn = rope(8, 0.25, 1.0, 1.0)
    np.testing.assert_allclose(np.linalg.norm(yarn), np.linalg.norm(x) * (1 + 0.1 * np.log(4)), rtol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_flash_attention_is_attention(softcap: float) -> None:
    """Against one query, one head at a time."""
    q, k, v, m = new(8, 3, 4), new(8, 7, 2), new(6, 7, 2), new(7, 3, type=T.F16)
    x, y, z = values(8, 3, 4), values(8, 7, 2, seed=1), values(6, 7, 2, seed=2)
    mask = np.where(np.arange(7)[None] <= np.array([[6], [3], [0]]), 0, -np.inf)
    out = compute(g.flash_attn_ext(q, k, v, m, 0.5, 0.0, softcap), {q: x, k: y, v: z, m: mask})
    for head in range(4):
        for row, n_seen in enumerate((7, 4, 1)):
            s = 0.5 * y[head // 2, :n_seen] @ x[head, row]
            s = softcap * np.tanh(s / softcap) if softcap else s
            w = np.exp(s) / np.exp(s).sum()
            np.testing.assert_allclose(out[row, head], w @ z[head // 2, :n_seen], rtol=1e-5, atol=1e-6)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v, m = new(8, 1, 1), new(8, 4, 1), new(8, 4, 1), new(4, 1, type=T.F16)
    inputs = {q: values(8, 1), k: values(8, 4), v: values(8, 4), m: np.full(4, -np.inf)}
    np.testing.assert_array_equal(compute(g.flash_attn_ext(q, k, v, m, 1.0), inputs), np.zeros(8))


def test_soft_max_with_alibi() -> None:
    a, m = new(5, 1, 3), new(5, 1, type=T.F16)
    x, bias = values(5, 1, 3), -np.arange(5.0)
    out = compute(g.soft_max_ext(a, m, 2.0, 8.0), {a: x, m: bias})
    # Three heads: two powers of two (2^-4, 2^-8), then one between (2^-2).
    s = 2 * x[:, 0] + np.array([[2**-4], [2**-8], [2**-2]]) * bias
    np.testing.assert_allclose(out[:, 0], np.exp(s) / np.exp(s).sum(1, keepdims=True), rtol=1e-5)


def test_norms() -> None:
    a, x = new(16, 3), values(16, 3) * 5 + 2
    rms, mean, unit = (compute(f(a, 1e-6), {a: x}) for f in (g.rms_norm, g.norm, g.l2_norm))
    np.testing.assert_allclose(np.square(rms).mean(1), 1, rtol=1e-5)
    np.testing.assert_allclose([mean.mean(1), mean.std(1)], [[0] * 3, [1] * 3], atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
    grouped = compute(g.group_norm(new_a := new(2, 3, 4), 2, 1e-6), {new_a: values(2, 3, 4)})
    np.testing.assert_allclose(grouped.reshape(2, -1).std(1), 1, rtol=1e-4)


def test_rows() -> None:
    a, x = new(5, 3), values(5, 3)
    np.testing.assert_allclose(compute(g.sum_rows(a), {a: x}).reshape(3), x.sum(1), rtol=1e-5)
    np.testing.assert_allclose(compute(g.mean(a), {a: x}).reshape(3), x.mean(1), rtol=1e-5)
    np.testing.assert_allclose(compute(g.cumsum(a), {a: x}), x.cumsum(1), rtol=1e-5)
    np.testing.assert_allclose(compute(g.repeat_back(a, 5), {a: x}).reshape(5), x.sum(0), rtol=1e-5)
    np.testing.assert_allclose(compute(g.sum_all(a), {a: x}), x.sum(), rtol=1e-5)
    np.testing.assert_array_equal(compute(g.argmax(a), {a: x}), x.argmax(1))
    np.testing.assert_array_equal(compute(g.argsort(a), {a: x}), x.argsort(1))
    np.testing.assert_array_equal(compute(g.argsort(a, SortOrder.DESC), {a: x}), x.argsort(1)[:, ::-1])
    np.testing.assert_array_equal(np.sort(compute(g.top_k(a, 2), {a: x})), np.sort(x.argsort(1)[:, -2:]))


def test_experts() -> None:
    w, b, ids, bias = new(8, 5, 4), new(8, 1, 3), new(2, 3, type=T.I32), new(5, 4)
    x, y, choice, z = values(8, 5, 4), values(8, 1, 3, seed=1), [[0, 3], [1, 1], [2, 0]], values(5, 4, seed=2)
    chosen = g.add_id(g.mul_mat_id(w, b, ids), bias, ids)
    out = compute(chosen, {w: x, b: y, ids: choice, bias: z})
    expected = [[x[e] @ y[t, 0] + z[e] for e in row] for t, row in enumerate(choice)]
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "at", "expected"),
    [
        (g.silu, [-1.0, 0.0, 2.0], [-0.26894142, 0.0, 1.7615942]),
        (g.gelu, [-1.0, 0.0, 2.0], [-0.15880801, 0.0, 1.9545977]),
        (g.relu, [-1.0, 0.0, 2.0], [0.0, 0.0, 2.0]),
        (g.sigmoid, [-1.0, 0.0, 2.0], [0.26894142, 0.5, 0.8807971]),
        (g.tanh, [-1.0, 0.0, 2.0], [-0.7615942, 0.0, 0.9640276]),
        (lambda a: g.unary(a, UnaryOp.GELU_ERF), [-1.0, 0.0, 2.0], [-0.15865525, 0.0, 1.9544997]),
        (lambda a: g.unary(a, UnaryOp.ROUND), [-1.5, 0.5, 2.4], [-2.0, 1.0, 2.0]),
        (lambda a: g.clamp(a, -0.5, 1.0), [-1.0, 0.0, 2.0], [-0.5, 0.0, 1.0]),
        (lambda a: g.leaky_relu(a, 0.1), [-1.0, 0.0, 2.0], [-0.1, 0.0, 2.0]),
        (lambda a: g.scale(a, 2.0, 1.0), [-1.0, 0.0, 2.0], [-1.0, 1.0, 5.0]),
        (g.sqr, [-1.0, 0.0, 2.0], [1.0, 0.0, 4.0]),
    ],
)
def test_functions(function: Callable[[Tensor], Tensor], at: list[float], expected: list[float]) -> None:
    a = new(3)
    np.testing.assert_allclose(compute(function(a), {a: at}), expected, rtol=1e-6)


def test_gates() -> None:
    a, b, both = new(4), new(4), new(8)
    x, y = values(4), values(4, seed=1)
    silu_x = x / (1 + np.exp(-x))
    np.testing.assert_allclose(compute(g.swiglu_split(a, b), {a: x, b: y}), silu_x * y, rtol=1e-5)
    np.testing.assert_allclose(compute(g.glu(both, GluOp.SWIGLU), {both: [*x, *y]}), silu_x * y, rtol=1e-5)
    swapped = compute(g.glu(both, GluOp.SWIGLU, swapped=True), {both: [*y, *x]})
    np.testing.assert_allclose(swapped, silu_x * y, rtol=1e-5)
    oai = compute(g.swiglu_oai(a, b, 1.7, 0.5), {a: x, b: y})
    gate = np.minimum(x, 0.5)
    np.testing.assert_allclose(oai, gate / (1 + np.exp(-1.7 * gate)) * (1 + np.clip(y, -0.5, 0.5)), rtol=1e-5)


def test_reading_too_early_shows() -> None:
    x = new(4)
    late = g.sqr(x)
    early = g.sqr(late)
    device = ReferenceDevice()
    device.compute(early)
    assert np.isnan(device.get(early)).all()
