"""Matrix products against what their formats say, and one numerics, as bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from block_types import CODES, SCALES
from reference import decode_rows
from running import BEST, CODEBOOKS, PLAIN, WEIGHTS, Array, Case, check, each_type, jit_for, new, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.lowerings import LOWERINGS
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


def ids(type: T) -> str:
    return type.name


def rounded(x: Array, block: int) -> Array:
    """Activations as the int8 columns of `block` values hold them."""
    blocks = x.reshape(-1, block).astype(np.float32)
    peak = np.abs(blocks).max(axis=1, keepdims=True)
    quants = np.rint(blocks * np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), 0).astype(np.float32))
    scale = peak / np.float32(127)
    if block == 32:
        scale = scale.astype(np.float16).astype(np.float32)
    return (quants * scale.astype(np.float64)).reshape(x.shape)


def product(type: T, raw: Array, n: int, x: Array) -> Array:
    """x · Wᵀ in float64, with activations rounded as the device rounds them."""
    weights = decode_rows(raw.reshape(-1, type.row_bytes(n)), type).astype(np.float64)
    return rounded(x, 256 if type.block_size == 256 else 32) @ weights.T


def multiply(device: CpuDevice, type: T, raw: Array, n: int, x: Array) -> Array:
    w, b = new(n, raw.size // type.row_bytes(n), type=type), new(n, len(x))
    return Case({"y": g.mul_mat(w, b)}, {w: raw, b: x}).run(device)["y"][0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type(WEIGHTS))
def test_products_of_every_weight_type(device: CpuDevice, type: T) -> None:
    for blocks, rows, columns in ((1, 8, 1), (3, 23, 3), (2, 40, 3), (9, 17, 9), (2, 11, 21), (1, 9, 10), (3, 21, 29)):
        n = blocks * type.block_size
        raw, x = weight_bytes(type, n, rows), values(n, columns, seed=1)
        # a minimum's sum of activations is rounded through f16, as ggml's Q8_1 is
        top = np.abs(x).max() * (2e-3 if type in (T.Q4_1, T.Q5_1) else 1e-5)
        np.testing.assert_allclose(multiply(device, type, raw, n, x), product(type, raw, n, x), atol=top, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "type"),
    [
        *((BEST, type) for type in CODEBOOKS),
        *(pytest.param(name, T.IQ2_S, marks=pytest.mark.full) for name in sorted(LOWERINGS) if name != BEST),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_products_with_codebooks(name: str, type: T) -> None:
    """Products are right, and a column has the same bits alone and among many."""
    device, n, rows, columns = CpuDevice(2, jit=jit_for(name)), 512, 19, 29
    raw, x = weight_bytes(type, n, rows), values(n, columns, seed=1)
    found = multiply(device, type, raw, n, x)
    np.testing.assert_allclose(found, product(type, raw, n, x), atol=np.abs(x).max() * 1e-5, rtol=1e-4)
    for j in (0, 17, 28):
        assert multiply(device, type, raw, n, x[j : j + 1]).tobytes() == found[j].tobytes()
    device.close()


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type(WEIGHTS))
def test_extreme_weights_and_activations(device: CpuDevice, type: T) -> None:
    """All bits set, the greatest activations: no integer sum overflows."""
    n, rows, columns = 2048, 8, 3
    raw = np.full(rows * type.row_bytes(n), 0xFF, np.uint8).reshape(-1, type.block_bytes)
    for byte in (0xFF, 0x80, 0x7F, 0x00):
        raw[:] = byte
        raw[:, : CODES.get(type, 0)] = 120
        for at in SCALES.get(type, ()):
            raw[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        x = np.stack([np.ones(n), -np.ones(n), np.where(np.arange(n) % 2, 1, -1)]).astype(np.float32) * 5
        expected = product(type, raw.reshape(-1), n, x[:columns])
        found = multiply(device, type, raw.reshape(-1), n, x[:columns])
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=np.abs(expected).max() * 2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type(WEIGHTS))
def test_activations_of_zero_and_of_any_size(device: CpuDevice, type: T) -> None:
    n = type.block_size
    raw = weight_bytes(type, n, 8)
    x = np.zeros((10, n), np.float32)
    x[1, 3], x[2], x[3], x[4] = 1e-30, 1e4, 1e-42, -0.0
    found = multiply(device, type, raw, n, x)
    assert np.isfinite(found).all() and not found[[0, 4, 5, 9]].any()


@pytest.mark.parametrize("type", PLAIN, ids=ids)
def test_products_of_floats(device: CpuDevice, type: T) -> None:
    for n, rows, columns in ((1, 1, 1), (8, 3, 2), (13, 5, 9), (64, 8, 21), (257, 7, 3)):
        w, b = new(n, rows, type=type), new(n, columns)
        check(device, g.mul_mat(w, b), {w: weight_bytes(type, n, rows), b: values(n, columns, seed=1)}, atol=2e-6)


@pytest.mark.parametrize("type", PLAIN, ids=ids)
def test_heads_share_keys_and_may_be_permuted(device: CpuDevice, type: T) -> None:
    k, q = new(24, 2, 7, type=type), new(24, 6, 5)
    scores = g.mul_mat(g.permute(k, 0, 2, 1, 3), g.permute(q, 0, 2, 1, 3))
    assert scores.ne == (7, 5, 6, 1)
    check(device, scores, {k: weight_bytes(type, 24, 14), q: values(24, 6, 5, seed=1)}, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("type", [T.Q4_0, T.Q8_0, T.Q4_K], ids=ids)
def test_a_matrix_for_each_head(device: CpuDevice, type: T) -> None:
    """The bits are those of each matrix alone, in any order of dimensions, and if heads share a matrix."""
    n, rows, n_matrices = 256, 21, 5
    data = weight_bytes(type, n, rows * n_matrices)
    for columns, per_matrix in ((1, 1), (2, 1), (3, 2), (12, 1), (80, 1)):
        heads = n_matrices * per_matrix
        x = values(n, heads, columns)
        w, b = new(n, rows, n_matrices, type=type), new(n, heads, columns)
        found = Case({"y": g.mul_mat(w, g.permute(b, 0, 2, 1, 3))}, {w: data, b: x}).run(device)["y"][0]
        for i in range(heads):
            alone, column = new(n, rows, type=type), new(n, columns)
            own = data.reshape(n_matrices, -1)[i // per_matrix]
            right = Case({"y": g.mul_mat(alone, column)}, {alone: own, column: x[:, i]}).run(device)["y"][0, 0]
            assert found[i].tobytes() == right.tobytes(), (columns, i)


def test_columns_may_have_further_dimensions(device: CpuDevice) -> None:
    w, x = new(64, 12, type=T.Q5_1), new(64, 3, 5)
    check(device, g.mul_mat(w, x), {w: weight_bytes(T.Q5_1, 64, 12), x: values(64, 3, 5)}, rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_weights_may_be_a_part_of_a_larger_matrix(device: CpuDevice) -> None:
    whole, x = new(64, 40, type=T.Q4_0), new(64, 11)
    raw, columns = weight_bytes(T.Q4_0, 64, 40), values(64, 11)
    part = g.view_2d(whole, 64, 13, whole.nb[1], 9 * whole.nb[1])
    y = Case({"y": g.mul_mat(part, x)}, {whole: raw, x: columns}).run(device)["y"][0, 0]
    assert np.array_equal(y, multiply(device, T.Q4_0, raw, 64, columns)[:, 9:22])


@pytest.mark.slow
@pytest.mark.parametrize("type", [T.Q4_0, T.Q4_K], ids=ids)
def test_two_threads_at_rows_that_overlap(teams: list[CpuDevice], type: T) -> None:
    """Twelve rows are two panels of eight that share four: neither thread may see the other's half-done sums."""
    n, columns = 6144, 96
    raw, x = weight_bytes(type, n, 12), values(n, columns)
    w, b = new(n, 12, type=type), new(n, columns)
    case = Case({"y": g.mul_mat(w, b)}, {w: raw, b: x})
    first = case.run(teams[0])["y"].tobytes()
    found = np.frombuffer(first, np.float32).reshape(columns, 12)
    assert np.allclose(found, product(type, raw, n, x), atol=1e-2)
    for device in teams[1:]:
        for _ in range(30):
            device.submit(case.graph)
            assert device.read(case.outputs["y"], 0, len(first)).result().tobytes() == first


# --- one numerics -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((1, 2, 3, 5, 8, 9, 13, 17, 21), id="some"),
        pytest.param(range(1, 22), id="all", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("type", each_type([*WEIGHTS, *PLAIN]))
def test_a_column_has_the_same_bits_in_any_batch(teams: list[CpuDevice], type: T, counts: Sequence[int]) -> None:
    """Bits: any number of columns, any neighbors, any place among them, any number of threads."""
    n = 2304 if type.block_size == 256 else 2176  # more than one stretch of the product of many columns
    raw, x = weight_bytes(type, n, 27), values(n, 21, seed=1)
    alone = np.concatenate([multiply(teams[0], type, raw, n, x[i : i + 1]) for i in range(21)])
    for count in counts:
        order = np.random.default_rng(count).permutation(21)[:count]
        found = multiply(teams[count % 3], type, raw, n, x[order])
        assert found.tobytes() == alone[order].tobytes(), count
    for device in teams:
        for count in (3, 8, 21):
            assert multiply(device, type, raw, n, x[:count]).tobytes() == alone[:count].tobytes()


@pytest.mark.full
@pytest.mark.parametrize("type", [*WEIGHTS, *PLAIN], ids=ids)
def test_lowerings_agree_to_the_bit(lowerings: dict[str, CpuDevice], type: T) -> None:
    """Integer sums are exact and float operations are written in one order: machines may differ, answers do not."""
    n = 3 * type.block_size if type in WEIGHTS else 203
    raw, x = weight_bytes(type, n, 19), values(n, 13)
    found: dict[str, Any] = {
        name: [multiply(device, type, raw, n, x[:count]).tobytes() for count in (1, 3, 13)]
        for name, device in lowerings.items()
    }
    assert len(found) > 0 and all(answers == found["portable"] for answers in found.values())


@pytest.mark.slow
def test_nan_of_other_sequences_does_not_reach_a_column(best: CpuDevice) -> None:
    """Infinities and NaN stay in their own column."""
    raw, x = weight_bytes(T.Q4_K, 256, 16), values(256, 12)
    clean = multiply(best, T.Q4_K, raw, 256, x)
    x[3, 7], x[9, 0], x[10] = np.inf, np.nan, 3e38
    found = multiply(best, T.Q4_K, raw, 256, x)
    others = [0, 1, 2, 4, 5, 6, 7, 8, 11]
    assert found[others].tobytes() == clean[others].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("type", [T.Q4_1, T.Q5_1], ids=lambda t: t.name)
@pytest.mark.parametrize("columns", [1, 5, 40])
def test_sums_of_activations_are_rounded_as_in_q8_1(device: CpuDevice, type: T, columns: int) -> None:
    """Weights that are nothing but their minimum, 1, leave d · Σq, which ggml keeps as f16 (no f16: ours as f32)."""
    blocks = np.zeros((16, type.block_bytes), np.uint8)
    blocks[:, 2:4] = np.ones(1, np.float16).view(np.uint8)  # d = 0, m = 1
    x = values(32, columns, seed=3) * np.float32(10) ** np.arange(columns, dtype=np.float32)[:, None].clip(max=4)
    if columns > 1:
        x[-1] = np.linspace(1e4, 2e4, 32)
    w, a = new(32, 16, type=type), new(32, columns)
    found = Case({"y": g.mul_mat(w, a)}, {w: blocks.reshape(-1), a: x}).run(device)["y"].reshape(columns, 16)
    most = np.abs(x).max(axis=1)
    q = np.rint(x * (np.float32(127) / most)[:, None]).sum(axis=1, dtype=np.float32)
    total = (most / np.float32(127)) * q
    with np.errstate(over="ignore"):
        rounded = total.astype(np.float16).astype(np.float32)
    expected = np.where(np.abs(total) > 65504, total, rounded)
    assert (rounded != total).any() and np.isinf(rounded[-1]) == (columns > 1)
    assert np.array_equal(found, np.repeat(expected[:, None], 16, axis=1))
