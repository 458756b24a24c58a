"""Row operations and their chains against the reference, on odd sizes."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from running import PLAIN, WEIGHTS, Array, Case, check, new, turned_by_sections, values, weight_bytes

from llamado.devices.compile.compiler import Compiler
from llamado.devices.compile.emitter import Target
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.devices.device import DeviceError
from llamado.devices.kernels.maths import GATE, UNARY
from llamado.devices.lowering import PORTABLE
from llamado.ggml import GluOp, RopeMode, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

SHAPES = [(1,), (7, 3), (8, 1, 5), (13, 2, 3, 2), (64, 33), (576, 5), (2049, 2)]
BINARY = [g.add, g.sub, g.mul, g.div]


def n_operations(case: Case, device: CpuDevice) -> int:
    leaf = next(iter(case.bind(device)))
    return len(Compiler(case.graph, Target(device.name, PORTABLE, 2, type(leaf.buffer))).compile())


@pytest.mark.parametrize("function", BINARY)
def test_arithmetic_with_whole_tensors_rows_and_single_numbers(device: CpuDevice, function: Any) -> None:
    for ne in SHAPES:
        a = new(*ne)
        others = [a.ne, (*a.ne[:2], 1, 1), (a.ne[0], 1, 1, 1), (1, *a.ne[1:]), (1, 1, 1, 1), (a.ne[0], 1, a.ne[2], 1)]
        for other in others:
            b = new(*other)
            x, y = values(*a.ne), values(*other, seed=1)
            y = np.sign(y) * (np.abs(y) + 0.2)
            check(device, function(a, b), {a: x, b: y})


@pytest.mark.parametrize("ne", SHAPES)
def test_norms_and_scale(device: CpuDevice, ne: tuple[int, ...]) -> None:
    x = values(*ne, scale=3.0)
    for function in (lambda a: g.rms_norm(a, 1e-5), lambda a: g.norm(a, 1e-5), lambda a: g.scale(a, -0.37, 1.25)):
        a = new(*ne)
        check(device, function(a), {a: x}, atol=1e-5)


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name)
def test_unary_functions(device: CpuDevice, op: UnaryOp) -> None:
    x = np.concatenate([values(37, 3, scale=4.0).reshape(-1), [0.0, -0.0, 1e-30, -1e-30, 20.0, -20.0, 80.0, -80.0]])
    for n in (x.size, 3):
        a = new(n)
        check(device, g.unary(a, op), {a: x[-n:]}, rtol=2e-6, atol=1e-7 if op != UnaryOp.EXP else 1e-9)


@pytest.mark.parametrize("op", GATE, ids=lambda op: op.name)
def test_gated_activations(device: CpuDevice, op: GluOp) -> None:
    for ne in SHAPES:
        gate, up = new(*ne), new(*ne)
        check(device, g.glu_split(gate, up, op), {gate: values(*ne, scale=3), up: values(*ne, seed=1)}, rtol=3e-6)


YARN = (4096, 10000.0, 0.25, 1.0, 1.1, 32.0, 1.0)
PLAIN_ROPE = (0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
LINEAR = (0, 500000.0, 0.125, 0.0, 1.0, 32.0, 1.0)


@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.NEOX])
@pytest.mark.parametrize("parameters", [PLAIN_ROPE, LINEAR, YARN], ids=["plain", "linear", "yarn"])
@pytest.mark.parametrize("factors", [False, True])
def test_rotation(device: CpuDevice, mode: RopeMode, parameters: Any, factors: bool) -> None:
    for head, n_dims, heads, tokens, offset in (
        (64, 64, 3, 5, 0),
        (16, 16, 1, 1, 0),
        (80, 48, 2, 9, 0),
        (80, 48, 2, 9, 32),
        (80, 24, 2, 3, 50),
        (6, 4, 2, 3, 0),
        (128, 128, 1, 17, 0),
    ):
        x, positions = new(head, heads, tokens), new(tokens, type=T.I32)
        data: dict[Tensor, Any] = {x: values(head, heads, tokens), positions: np.arange(tokens) * 977 % 131000}
        freq = None
        if factors:
            freq = new(n_dims // 2)
            data[freq] = np.linspace(1, 8, n_dims // 2)
        result = g.rope_ext(x, positions, freq, n_dims, mode, *parameters, offset=offset)
        check(device, result, data, rtol=1e-4, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize("type", [*PLAIN, *WEIGHTS], ids=lambda t: t.name)
def test_get_rows_from_every_type(device: CpuDevice, type: T) -> None:
    sizes = (1, 13, 64) if type in PLAIN else (type.block_size, 3 * type.block_size)
    for ne0 in sizes:
        table, ids = new(ne0, 19, type=type), new(7, type=T.I32)
        data = weight_bytes(type, ne0, 19)
        case = Case({"rows": g.get_rows(table, ids)}, {table: data, ids: [18, 0, 0, 5, 17, 1, 18]})
        found = case.check(device, rtol=1e-6)
        if type in PLAIN:
            assert np.array_equal(found["rows"], case.expected()["rows"])


@pytest.mark.parametrize("type", [*PLAIN, T.Q8_0], ids=lambda t: t.name)
@pytest.mark.parametrize("wide", [False, True])
def test_set_rows_to_every_cache_type(device: CpuDevice, type: T, wide: bool) -> None:
    for ne0 in (96,) if type == T.Q8_0 else (96, 5):
        for n in (1, 6):
            cache, rows, ids = new(ne0, 11, type=type), new(ne0, n), new(n, type=T.I64 if wide else T.I32)
            data = {rows: values(ne0, n), ids: np.array([10, 0, 3, 7, 1, 5])[:n]}
            found = check(device, g.set_rows(cache, rows, ids), data, rtol=1e-6, atol=1e-6)
            untouched = [i for i in range(11) if i not in data[ids]]
            assert not found[0, 0, untouched].any()


def test_row_numbers_that_do_not_exist_touch_no_other_memory(device: CpuDevice) -> None:
    """They come over the wire like all data."""
    wild = np.array([1, -1, 4, 1 << 30, -(1 << 31)])
    table, ids, rows = new(16, 4), new(5, type=T.I32), new(16, 5)
    data = {table: values(16, 4), ids: wild, rows: values(16, 5, seed=1)}
    found = Case({"rows": g.get_rows(table, ids)}, data).run(device)["rows"][0, 0]
    assert np.array_equal(found, data[table][[1, 0, 0, 0, 0]])
    for type in (T.I32, T.I64):
        ids = new(5, type=type)
        cache = new(16, 4, type=T.F16)
        kept = Case({"c": g.set_rows(cache, rows, ids)}, {ids: wild, rows: data[rows]}).run(device)["c"][0, 0]
        assert np.array_equal(kept[1], data[rows][0].astype(np.float16)) and not kept[[0, 2, 3]].any()


def test_conversions_round_to_nearest_even_and_keep_infinities_and_nan(device: CpuDevice) -> None:
    x = np.array([0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519.0, 65520.0, 1e-8, 6e-8, -3e-8,
                  np.inf, -np.inf, 3.4e38, 1e-40], np.float32)  # fmt: skip
    for type in (T.F16, T.BF16):
        for n in (len(x), 8):
            cache, rows, ids = new(n, 1, type=type), new(n, 1), new(1, type=T.I32)
            found = Case({"r": g.set_rows(cache, rows, ids)}, {rows: x[:n], ids: [0]})
            with np.errstate(over="ignore"):
                assert np.array_equal(found.run(device)["r"], found.expected()["r"]), type
    for type in (T.F16, T.BF16):
        cache, rows, ids = new(9, 1, type=type), new(9, 1), new(1, type=T.I32)
        stored = Case({"r": g.set_rows(cache, rows, ids)}, {rows: np.full(9, np.nan), ids: [0]}).run(device)["r"]
        assert np.isnan(stored).all()


# --- chains -----------------------------------------------------------------------------------------------------------


def test_a_residual_block_is_one_kernel_whose_middle_is_an_output_too(device: CpuDevice) -> None:
    for n, rows in ((13, 3), (576, 9), (2048, 1)):
        x, w1, r, w2 = new(n, rows), new(n), new(n, rows), new(n)
        data = {x: values(n, rows), w1: values(n, seed=1), r: values(n, rows, seed=2), w2: values(n, seed=3)}
        middle = g.add(g.mul(g.rms_norm(x, 1e-6), w1), r)
        case = Case({"middle": middle, "end": g.mul(g.rms_norm(middle, 1e-6), w2)}, data)
        case.check(device)
        assert n_operations(case, device) == 1


def test_values_read_later_are_kept(device: CpuDevice) -> None:
    x, w = new(24, 5), new(24)
    a = g.mul(x, w)
    b = g.silu(a)
    c = g.rms_norm(b, 1e-5)
    end = g.add(g.add(c, a), b)  # a and b are read by stages far behind them
    check(device, end, {x: values(24, 5), w: values(24, seed=1)})


def test_a_chain_that_reads_its_own_value_twice(device: CpuDevice) -> None:
    x = new(19, 4)
    a = g.silu(x)
    check(device, g.mul(a, a), {x: values(19, 4)})
    b = g.scale(x, 2.0)
    check(device, g.add(g.norm(b, 1e-5), b), {x: values(19, 4)})


def test_a_value_repeated_over_its_own_rows(device: CpuDevice) -> None:
    """One row of what a chain makes, as operand of the next stage for all rows: no thread may read it too early."""
    for _ in range(8):
        x = new(512, 64)
        a = g.silu(x)
        row = g.view_2d(a, 512, 1, a.nb[1], 37 * a.nb[1])
        check(device, g.mul(a, row), {x: values(512, 64)})
        column = g.view_2d(a, 1, 64, a.nb[1], 4 * 500)
        check(device, g.add(a, column), {x: values(512, 64)})
        turned = g.silu(new_x := new(64, 24, 24))
        check(device, g.add(turned, g.permute(turned, 0, 2, 1, 3)), {new_x: values(64, 24, 24)})


@pytest.mark.slow
@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.NEOX])
@pytest.mark.parametrize("type", [T.F16, T.Q8_0, T.F32], ids=lambda t: t.name)
def test_keys_normed_turned_and_stored_are_one_kernel(device: CpuDevice, mode: RopeMode, type: T) -> None:
    for head, heads, tokens in ((64, 2, 5), (32, 1, 9), (32, 5, 1)):
        x, w, positions = new(head, heads, tokens), new(head), new(tokens, type=T.I32)
        cache, cells = new(head * heads, 32, type=type), new(tokens, type=T.I64)
        k = g.rope_ext(g.mul(g.rms_norm(x, 1e-6), w), positions, None, head, mode, *PLAIN_ROPE)
        stored = g.set_rows(cache, g.view_2d(k, head * heads, tokens, k.nb[2]), cells)
        data = {x: values(head, heads, tokens), w: values(head, seed=1), positions: np.arange(tokens) + 3}
        data[cells] = np.arange(tokens)[::-1] * 3
        case = Case({"stored": stored}, data)
        case.check(device, rtol=0.02 if type == T.Q8_0 else 2e-3, atol=1e-2 if type == T.Q8_0 else 1e-4)
        assert n_operations(case, device) == 2  # the table of angles, the chain


@pytest.mark.slow
def test_get_rows_starts_a_chain(device: CpuDevice) -> None:
    for type in (T.F32, T.F16, T.Q4_K, T.Q6_K):
        table, ids, w = new(256, 12, type=type), new(5, type=T.I32), new(256)
        x = g.scale(g.get_rows(table, ids), 16.0)
        end = g.mul(g.rms_norm(x, 1e-6), w)
        data = {table: weight_bytes(type, 256, 12), ids: [3, 11, 0, 3, 7], w: values(256)}
        Case({"x": x, "end": end}, data).check(device)


@pytest.mark.slow
def test_one_embedding_for_every_product_and_a_residual(device: CpuDevice) -> None:
    """Products of both block sizes take their activations from the chain, the residual takes the numbers."""
    x, w = new(256, 11), new(256)
    small, big = new(256, 16, type=T.Q4_0), new(256, 24, type=T.Q4_K)
    h = g.mul(g.rms_norm(x, 1e-6), w)
    data = {x: values(256, 11), w: values(256, seed=1)}
    data |= {small: weight_bytes(T.Q4_0, 256, 16), big: weight_bytes(T.Q4_K, 256, 24)}
    case = Case({"a": g.mul_mat(small, h), "b": g.mul_mat(big, h), "r": g.add(h, x)}, data)
    case.check(device, rtol=0.05, atol=0.02)
    # the numbers are exact where they are not quantized
    assert np.allclose(case.run(device)["r"], case.expected()["r"], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_products_of_parts_and_other_shapes_of_one_tensor(device: CpuDevice) -> None:
    """A view that begins where its tensor does is not the tensor."""
    x, w, half = new(64, 10), new(64, 8, type=T.Q8_0), new(32, 8, type=T.Q8_0)
    y = g.scale(x, 1.5)
    data = {x: values(64, 10), w: weight_bytes(T.Q8_0, 64, 8), half: weight_bytes(T.Q8_0, 32, 8)}
    case = Case(
        {
            "whole": g.mul_mat(w, y),
            "part": g.mul_mat(w, g.view_2d(y, 64, 5, y.nb[1])),
            "other": g.mul_mat(half, g.reshape(y, 32, 20)),
            "tail": g.mul_mat(w, g.view_2d(y, 64, 3, y.nb[1], 7 * y.nb[1])),
        },
        data,
    )
    case.check(device, rtol=0.05, atol=0.02)


def test_scratch_of_neighbours_does_not_meet(best: CpuDevice) -> None:
    """Chains with short and long rows may run at once, one thread ahead of the other: thread i has the same scratch in
    all operations.
    """
    pairs, data = {}, {}
    for i in range(6):
        x = new(*((64, 9), (2048, 6))[i % 2])
        data[x] = values(*x.ne, seed=i)
        pairs[f"r{i}"] = g.silu(g.norm(g.silu(g.rms_norm(g.scale(x, 1.1), 1e-5)), 1e-5))
    case = Case(pairs, data)
    case.check(best, rtol=1e-4, atol=1e-4)
    operations = Compiler(case.graph, cpu_target(best.jit.lowering, 2)).compile()
    assert {o.fields["scratch_step"] for o in operations} == {4 * 2048}


def test_nothing_to_do_is_done(device: CpuDevice) -> None:
    """Tensors with a dimension of zero."""
    x, ids, w = new(16, 4), new(0, type=T.I32), new(16, 8, type=T.F16)
    rows = g.get_rows(x, ids)
    data = {x: values(16, 4), w: weight_bytes(T.F16, 16, 8)}
    found = Case({"none": g.mul_mat(w, rows), "some": g.scale(x, 2.0)}, data).check(device)
    assert found["some"].shape == (1, 1, 4, 16) and found["none"].size == 0


def test_parameters_reach_the_kernel_as_they_are(best: CpuDevice) -> None:
    x = new(5)
    node = g.scale(x, 0.0, 7.0)
    assert struct.unpack_from("<2f", node.op_params) == (0.0, 7.0)
    assert (check(best, node, {x: [1, 2, 3, 4, 5]}) == 7.0).all()


def rows_of(array: Array) -> list[bytes]:
    return [row.tobytes() for row in array.reshape(-1, array.shape[-1])]


def test_a_row_has_the_same_bits_in_any_batch(teams: list[CpuDevice]) -> None:
    x, w = values(100, 21), values(100, seed=1)

    def run(device: CpuDevice, count: int) -> list[bytes]:
        a, b = new(100, count), new(100)
        result = g.silu(g.mul(g.rms_norm(a, 1e-5), b))
        return rows_of(Case({"r": result}, {a: x[:count], b: w}).run(device)["r"])

    whole = run(teams[0], 21)
    for device in teams:
        for count in (1, 2, 7, 20, 21):
            assert run(device, count) == whole[:count]


@pytest.mark.parametrize("mode", [RopeMode.MROPE, RopeMode.IMROPE, RopeMode.VISION])
def test_sections_of_pairs_are_turned_by_positions_of_their_own(best: CpuDevice, mode: RopeMode) -> None:
    check(best, *turned_by_sections(mode), atol=1e-5)


def test_positions_of_pictures_begin_the_frequencies_of_each_section_anew(best: CpuDevice) -> None:
    """Row and column rotate the same element of their halves by the same angle (ggml's VISION mode)."""
    x, positions = new(16, 1, 5), new(4 * 5, type=T.I32)
    turned = g.rope_ext(x, positions, None, 8, RopeMode.VISION, 0, 100.0, 1.0, 0.0, 1.0, 32.0, 1.0, sections=(4,) * 4)
    at = np.array([[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [9] * 5, [9] * 5])
    found = Case({"r": turned}, {x: values(16, 1, 5), positions: at}).run(best)["r"].reshape(5, 2, 2, 4)
    given = values(16, 1, 5).reshape(5, 2, 2, 4)  # pairs, then row or column, then frequency
    z = (given[:, 0] + 1j * given[:, 1]) * np.exp(1j * at[:2].T[:, :, None] * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(found[:, 0] + 1j * found[:, 1], z, atol=1e-6)


@pytest.mark.parametrize("n_dims, offset, factors", [(6, 0, False), (4, 2, False), (8, 0, True)])
def test_rotations_of_parts_of_heads_in_pictures_are_refused(
    best: CpuDevice, n_dims: int, offset: int, factors: bool
) -> None:
    x, positions = new(16, 1, 5), new(4 * 5, type=T.I32)
    divisors = new(n_dims // 2) if factors else None
    turned = g.rope_ext(
        x, positions, divisors, n_dims, RopeMode.VISION, 0, 100.0, 1.0, 0.0, 1.0, 32.0, 1.0, offset=offset,
        sections=(4,) * 4,
    )  # fmt: skip
    data = {x: values(16, 1, 5), positions: np.zeros(20)} | ({divisors: np.ones(n_dims // 2)} if factors else {})
    with pytest.raises(DeviceError, match="must rotate whole heads"):
        Case({"r": turned}, data).run(best)
