"""Products of experts: what each chosen matrix alone would give, as bits; and how tokens choose them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from running import PLAIN, WEIGHTS, Array, Case, check, new, values, weight_bytes
from tiers import chosen

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError
from llamado.ggml import graph as g
from llamado.ggml.ops import GluOp, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T

N_EXPERTS = 5


def ids(type: T) -> str:
    return type.name


def choices(n_tokens: int, n_used: int, n_experts: int = N_EXPERTS, seed: int = 0) -> Array:
    """Different experts for each token, some of them more often chosen than others."""
    rng = np.random.default_rng(seed)
    often = np.arange(1, n_experts + 1) ** 2
    picked = [rng.choice(n_experts, n_used, replace=False, p=often / often.sum()) for _ in range(n_tokens)]
    return np.array(picked, np.int32)


def alone(device: CpuDevice, type: T, raw: Array, n: int, x: Array, chosen: Array) -> Array:
    """Each token's products with its experts, each with a product of that matrix and that column alone."""
    size = len(raw) // N_EXPERTS
    rows = size // type.row_bytes(n)
    found = np.empty((*chosen.shape, rows), np.float32)
    for token, slot in np.ndindex(chosen.shape):
        w, b = new(n, rows, type=type), new(n, 1)
        expert, column = chosen[token, slot], x[token, slot % x.shape[1]]
        case = Case({"y": g.mul_mat(w, b)}, {w: raw[expert * size : (expert + 1) * size], b: column[None]})
        found[token, slot] = case.run(device)["y"][0, 0, 0]
    return found


def together(device: CpuDevice, type: T, raw: Array, n: int, x: Array, chosen: Array) -> Array:
    """The same by one product of experts; `chosen` are the first elements of longer rows, as a sort gives them."""
    n_tokens, n_used = chosen.shape
    rows = len(raw) // N_EXPERTS // type.row_bytes(n)
    w, b = new(n, rows, N_EXPERTS, type=type), new(n, x.shape[1], n_tokens)
    sorted_ = new(n_used + 3, n_tokens, type=T.I32)
    order = np.full((n_tokens, n_used + 3), 99, np.int32)
    order[:, :n_used] = chosen
    y = g.mul_mat_id(w, b, g.view_2d(sorted_, n_used, n_tokens, sorted_.nb[1]))
    return Case({"y": y}, {w: raw, b: x, sorted_: order}).run(device)["y"][0]


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen([*WEIGHTS, *PLAIN], (T.Q4_0, T.Q6_K, T.F16), ids))
def test_an_expert_has_the_same_bits_alone(teams: list[CpuDevice], type: T) -> None:
    """Bits: few and many tokens, one column for a token or one for each choice, any number of threads."""
    n = 2304 if type.block_size == 256 else 1152  # more than one stretch of the product of many columns
    raw = weight_bytes(type, n, 27 * N_EXPERTS)
    for device, (n_tokens, n_used, each) in zip(
        [*teams, *teams],
        ((1, 2, False), (1, 2, True), (3, 2, True), (7, 3, False),
         (18, 2, True), (24, 3, False), (60, 3, True), (60, 3, False)),
        strict=True,
    ):  # fmt: skip
        x = values(n, n_used if each else 1, n_tokens, seed=n_tokens)
        chosen = choices(n_tokens, n_used, seed=n_tokens)
        expected = alone(teams[1], type, raw, n, x, chosen)
        assert together(device, type, raw, n, x, chosen).tobytes() == expected.tobytes(), (n_tokens, each)


@pytest.mark.parametrize("type", [T.Q4_0, T.Q8_0, T.F16], ids=ids)
@pytest.mark.parametrize("n_tokens", [1, 2, 40])
def test_every_lowering(device: CpuDevice, type: T, n_tokens: int) -> None:
    n = 2 * max(type.block_size, 24)
    raw = weight_bytes(type, n, 19 * N_EXPERTS)
    x, chosen = values(n, 1, n_tokens), choices(n_tokens, 2)
    expected = alone(device, type, raw, n, x, chosen)
    assert together(device, type, raw, n, x, chosen).tobytes() == expected.tobytes()


@pytest.mark.full
@pytest.mark.parametrize("n_tokens", [1, 3])
def test_experts_with_codebooks(best: CpuDevice, n_tokens: int) -> None:
    raw = weight_bytes(T.IQ1_S, 512, 19 * N_EXPERTS)
    x, chosen = values(512, 1, n_tokens), choices(n_tokens, 2)
    expected = alone(best, T.IQ1_S, raw, 512, x, chosen)
    assert together(best, T.IQ1_S, raw, 512, x, chosen).tobytes() == expected.tobytes()


@pytest.mark.slow
def test_columns_that_choose_several_experts(device: CpuDevice) -> None:
    raw, x, chosen = weight_bytes(T.Q5_1, 64, 16 * N_EXPERTS), values(64, 2, 3), choices(3, 4)
    expected = alone(device, T.Q5_1, raw, 64, x, chosen)
    assert together(device, T.Q5_1, raw, 64, x, chosen).tobytes() == expected.tobytes()


def test_experts_of_few_rows(device: CpuDevice) -> None:
    w, b, chosen = new(64, 3, 4, type=T.Q8_0), new(64, 1, 5), new(2, 5, type=T.I32)
    data = {w: weight_bytes(T.Q8_0, 64, 12), b: values(64, 1, 5), chosen: choices(5, 2, 4)}
    check(device, g.mul_mat_id(w, b, chosen), data)


def test_invalid_expert_numbers_read_expert_zero(device: CpuDevice) -> None:
    raw = weight_bytes(T.Q4_0, 64, 16 * N_EXPERTS)
    for n_tokens in (1, 4):
        x = values(64, 1, n_tokens)
        wild = np.array([[-1, N_EXPERTS], [2**31 - 1, 3], [-(2**31), 1], [0, 7]], np.int32)[:n_tokens]
        tame = np.where((wild < 0) | (wild >= N_EXPERTS), 0, wild)
        found = together(device, T.Q4_0, raw, 64, x, wild)
        assert found.tobytes() == alone(device, T.Q4_0, raw, 64, x, tame).tobytes()


def test_too_many_experts_are_refused(device: CpuDevice) -> None:
    w = g.view_3d(new(32, 8, 1, type=T.Q4_0), 32, 8, 1, 18, 0)
    w.ne = (32, 8, 1 << 20, 1)
    y = g.mul_mat_id(w, new(32, 1, 2), new(1, 2, type=T.I32))
    with pytest.raises(DeviceError, match="MUL_MAT_ID"):
        Case({"y": y}, {}).run(device)


def test_rows_of_biases_are_chosen(device: CpuDevice) -> None:
    a, b, chosen = new(32, 2, 5), new(32, 4), new(2, 5, type=T.I32)
    data = {a: values(32, 2, 5), b: values(32, 4, seed=1), chosen: choices(5, 2, 4)}
    check(device, g.silu(g.add_id(g.sqr(a), b, chosen)), data)
    packed = new(*b.ne[:2], type=T.Q8_0)
    check(device, g.add_id(a, packed, chosen), {**data, packed: weight_bytes(T.Q8_0, *b.ne[:2])})


@pytest.mark.parametrize("halves", [False, True])
def test_gated_activation_with_limits(device: CpuDevice, halves: bool) -> None:
    whole = new(80, 3, 4)
    gate = g.view_3d(whole, 40, 3, 4, whole.nb[1], whole.nb[2])
    up = g.view_3d(whole, 40, 3, 4, whole.nb[1], whole.nb[2], 160)
    x = values(80, 3, 4, scale=6.0)
    result = g.swiglu_oai(gate, up, 1.702, 7.0)
    if halves:
        params = result.op_params
        result = g.glu(whole, GluOp.SWIGLU_OAI)
        result.op_params = params
    check(device, result, {whole: x}, rtol=1e-5)


@pytest.mark.parametrize("halves", [False, True])
def test_an_activation_whose_gate_and_factor_are_bounded(device: CpuDevice, halves: bool) -> None:
    gate, up, whole = new(40, 3, 4), new(40, 3, 4), new(80, 3, 4)
    data = {whole: values(80, 3, 4, scale=6.0)} if halves else {t: values(40, 3, 4, scale=6.0) for t in (gate, up)}
    result = g.glu(whole, GluOp.SWIGLU_CLAMP) if halves else g.glu_split(gate, up, GluOp.SWIGLU_CLAMP)
    result.op_params = struct.pack("<2i2f48x", GluOp.SWIGLU_CLAMP, 0, 0.0, 2.5)
    check(device, result, data, rtol=1e-5)


@pytest.mark.parametrize("type", [T.F32, T.F16])
def test_filling(device: CpuDevice, type: T) -> None:
    check(device, g.fill(new(7, 3, 2, type=type), -np.inf), {})


def feed_forward(x: Tensor, router: Tensor, up: Tensor, gate: Tensor, down: Tensor, n_used: int) -> Tensor:
    """A mixture of experts as llama.cpp builds it: softmax, the best, their weights normed, the weighted sum."""
    n_embd, n_tokens, n_experts = x.ne[0], x.ne[1], router.ne[1]
    probs = g.soft_max_ext(g.mul_mat(router, x), None, 1.0)
    chosen = g.argsort_top_k(probs, n_used)
    weights = g.reshape(g.get_rows(g.reshape(probs, 1, n_experts, n_tokens), chosen), n_used, n_tokens)
    weights = g.div(weights, g.clamp(g.sum_rows(weights), 6.103515625e-5, np.inf))
    h = g.reshape(x, n_embd, 1, n_tokens)
    h = g.swiglu_split(g.mul_mat_id(gate, h, chosen), g.mul_mat_id(up, h, chosen))
    y = g.mul(g.mul_mat_id(down, h, chosen), g.reshape(weights, 1, n_used, n_tokens))
    parts = [g.view_2d(y, n_embd, n_tokens, y.nb[2], i * y.nb[1]) for i in range(n_used)]
    total = parts[0]
    for part in parts[1:]:
        total = g.add(total, part)
    return total


@pytest.mark.slow
def test_a_token_has_the_same_bits_in_any_batch(teams: list[CpuDevice]) -> None:
    """Bits of the whole of it: norm, router, choice, experts, sum."""
    n, n_ff, n_experts, n_used = 256, 64, 12, 4
    router, norm = new(n, n_experts), new(n)
    up, gate = new(n, n_ff, n_experts, type=T.Q4_K), new(n, n_ff, n_experts, type=T.Q4_1)
    down = new(n_ff, n, n_experts, type=T.Q8_0)
    data = {
        router: values(n, n_experts, scale=0.05), norm: values(n, seed=3),
        up: weight_bytes(T.Q4_K, n, n_ff * n_experts), gate: weight_bytes(T.Q4_1, n, n_ff * n_experts),
        down: weight_bytes(T.Q8_0, n_ff, n * n_experts),
    }  # fmt: skip
    x = values(n, 70, seed=5)

    def run(device: CpuDevice, rows: Array) -> Array:
        b = new(n, len(rows))
        h = g.mul(g.rms_norm(b, 1e-6), norm)
        y = g.add(feed_forward(h, router, up, gate, down, n_used), b)
        for leaf in data:
            leaf.buffer = None
        return Case({"y": y}, {**data, b: x[rows]}).run(device)["y"][0, 0]

    one = np.stack([run(teams[0], np.array([i]))[0] for i in range(70)])
    for count, device in ((2, teams[1]), (9, teams[2]), (33, teams[1]), (70, teams[2])):
        rows = np.random.default_rng(count).permutation(70)[:count]
        assert run(device, rows).tobytes() == one[rows].tobytes(), count


def test_a_mixture_against_the_reference(device: CpuDevice) -> None:
    n, n_ff, n_experts, n_used = 64, 32, 6, 2
    x, router = new(n, 5), new(n, n_experts)
    up, gate, down = new(n, n_ff, n_experts), new(n, n_ff, n_experts), new(n_ff, n, n_experts)
    data = {x: values(n, 5), router: values(n, n_experts, seed=1)}
    data |= {w: values(*w.ne[:3], seed=7, scale=0.1) for w in (up, gate, down)}
    check(device, feed_forward(x, router, up, gate, down, n_used), data, rtol=1e-4, atol=1e-5)


def test_experts_are_chosen_of_the_best_groups(device: CpuDevice) -> None:
    """Groups by the sum of their two best; the experts of all others count as minus infinity."""
    n_experts, n_groups, n_tokens = 12, 4, 5
    per_group = n_experts // n_groups
    scores = new(n_experts, n_tokens)
    groups = g.reshape(g.unary(scores, UnaryOp.SIGMOID), per_group, n_groups, n_tokens)
    best = g.argsort_top_k(groups, 2)
    sums = g.get_rows(g.reshape(groups, 1, per_group, n_groups, n_tokens), best)
    sums = g.sum_rows(g.reshape(sums, *sums.ne[1:]))
    kept = g.argsort_top_k(g.reshape(sums, n_groups, n_tokens), 2)
    masked = g.set_rows(g.fill(groups, -np.inf), g.get_rows(groups, kept), kept)
    chosen = g.argsort_top_k(g.reshape(masked, n_experts, n_tokens), 4)
    data = {scores: values(n_experts, n_tokens)}
    found = Case({"chosen": g.cont(chosen)}, data).run(device)["chosen"][0, 0]
    probs = 1 / (1 + np.exp(-data[scores].astype(np.float64)))
    for token in range(n_tokens):
        per = probs[token].reshape(n_groups, per_group)
        ranked = np.argsort(-np.sort(per, axis=1)[:, -2:].sum(axis=1))[:2]
        allowed = np.concatenate([np.arange(per_group) + per_group * r for r in ranked])
        assert set(found[token]) == set(allowed[np.argsort(-probs[token][allowed])][:4])
