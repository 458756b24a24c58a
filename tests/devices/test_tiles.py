"""Products in tile registers, as bits: what the other lowerings give, and when they are used."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import numpy as np
import pytest
from running import CODEBOOKS, FEATURES, WEIGHTS, Array, Case, jit_for, new, values, weight_bytes

from llamado.devices.compile.columns import FILL_TILES
from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu import lowerings
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.devices.cpu.lowerings import LOWERINGS, permission
from llamado.devices.kernels.activations import TILE
from llamado.devices.kernels.tiles.experts import MANY
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


@pytest.fixture(scope="module")
def tiled() -> Iterator[list[CpuDevice]]:
    """The device with tiles, of one to four threads."""
    devices = [CpuDevice(n, jit=jit_for("amx")) for n in (1, 2, 3, 4)]
    yield devices
    for device in devices:
        device.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[CpuDevice]:
    """The device without."""
    device = CpuDevice(2, jit=jit_for("vnni"))
    yield device
    device.close()


@pytest.fixture(scope="module")
def portable() -> Iterator[CpuDevice]:
    """The device in plain arithmetic."""
    device = CpuDevice(2, jit=jit_for("portable"))
    yield device
    device.close()


def product(type: T, raw: Array, n: int, x: Array) -> Case:
    w, b = new(n, raw.size // type.row_bytes(n), type=type, name="w"), new(n, len(x))
    return Case({"y": g.mul_mat(w, b)}, {w: raw, b: x})


def bits(device: CpuDevice, type: T, raw: Array, n: int, x: Array) -> bytes:
    return product(type, raw, n, x).run(device)["y"].tobytes()


def uses(device: CpuDevice, case: Case, kernel: str) -> bool:
    """Return True if a graph is compiled to the named kernel."""
    case.bind(device)
    operations = Compiler(case.graph, cpu_target(device.jit.lowering, 2)).compile()
    return kernel in [operation.kernel.name for operation in operations]


def shapes(type: T) -> tuple[tuple[int, int, int], ...]:
    """Numbers along K, rows and columns: less than a stretch, several and a part of one, rows and columns that fill
    tiles and panels or do not.
    """
    block = type.block_size
    return (
        (block, 16, FILL_TILES),
        (3 * block, 17, FILL_TILES + 1),
        (-(-544 // block) * block, 31, 64),
        (-(-1312 // block) * block, 203, FILL_TILES + 3),
    )


@pytest.mark.parametrize("type", [T.Q4_1, T.Q4_K], ids=lambda t: t.name)
def test_tiles_give_the_bits_of_the_other_kernels(tiled: list[CpuDevice], plain: CpuDevice, type: T) -> None:
    _compare(tiled, plain, type)


@pytest.mark.full
@pytest.mark.parametrize("type", sorted({*WEIGHTS, *CODEBOOKS} - {T.Q4_1, T.Q4_K}), ids=lambda t: t.name)
def test_tiles_of_every_weight_type(tiled: list[CpuDevice], plain: CpuDevice, type: T) -> None:
    _compare(tiled, plain, type)


def _compare(tiled: list[CpuDevice], plain: CpuDevice, type: T) -> None:
    for number, (n, rows, columns) in enumerate(shapes(type)):
        raw, x = weight_bytes(type, n, rows, seed=number), values(n, columns, seed=1)
        device = tiled[number]
        assert uses(device, product(type, raw, n, x), "matmul_tiles")
        assert bits(device, type, raw, n, x) == bits(plain, type, raw, n, x), (n, rows, columns)


@pytest.mark.slow
@pytest.mark.parametrize("type", [T.Q5_0, T.Q8_0, T.NVFP4, T.Q2_K, T.Q6_K], ids=lambda t: t.name)
def test_tiles_give_the_bits_of_plain_arithmetic(tiled: list[CpuDevice], portable: CpuDevice, type: T) -> None:
    n, rows, columns = 1024, 37, FILL_TILES + 9
    raw, x = weight_bytes(type, n, rows), values(n, columns, seed=2)
    assert bits(tiled[1], type, raw, n, x) == bits(portable, type, raw, n, x)


@pytest.mark.slow
def test_many_columns_and_any_number_of_threads(tiled: list[CpuDevice], plain: CpuDevice) -> None:
    for type in (T.Q4_0, T.Q4_K):
        n, rows, columns = 2048, 296, 511
        raw, x = weight_bytes(type, n, rows), values(n, columns, seed=1)
        right = bits(plain, type, raw, n, x)
        assert all(bits(device, type, raw, n, x) == right for device in tiled)


@pytest.mark.slow
@pytest.mark.parametrize("type", [T.Q4_0, T.Q8_0, T.Q4_K, T.Q6_K, T.IQ4_XS], ids=lambda t: t.name)
def test_greatest_weights_and_activations(tiled: list[CpuDevice], plain: CpuDevice, type: T) -> None:
    """All bits set, or only the highest: products with scales fill both of their bytes."""
    n, rows = 1024, 32
    x = np.stack([np.where(np.arange(n) % (j + 1), 1, -1) for j in range(FILL_TILES)]).astype(np.float32)
    for byte in (0xFF, 0x80, 0x7F):
        raw = np.full(rows * type.row_bytes(n), byte, np.uint8).reshape(-1, type.block_bytes)
        at = {T.Q6_K: 208}.get(type, 0)
        raw[:, at : at + 2] = np.array([0.01], np.float16).view(np.uint8)
        assert bits(tiled[1], type, raw.reshape(-1), n, x) == bits(plain, type, raw.reshape(-1), n, x), byte


def test_nan_stays_in_its_own_column(tiled: list[CpuDevice]) -> None:
    raw, x = weight_bytes(T.Q4_1, 64, 16), values(64, 56)
    clean = np.frombuffer(bits(tiled[1], T.Q4_1, raw, 64, x), np.uint32).reshape(56, 16)
    x[3, 7], x[19, 0], x[55] = np.inf, np.nan, 3e38
    found = np.frombuffer(bits(tiled[1], T.Q4_1, raw, 64, x), np.uint32).reshape(56, 16)
    others = [j for j in range(56) if j not in (3, 19, 55)]
    assert np.array_equal(found[others], clean[others])


def test_products_that_share_columns_may_differ_in_their_kernels(tiled: list[CpuDevice], plain: CpuDevice) -> None:
    """Eight rows are too few for a tile: their columns lie otherwise."""
    n, columns = 96, FILL_TILES + 2
    data = {rows: weight_bytes(T.Q5_1, n, rows) for rows in (8, 48)}
    x = values(n, columns)

    def run(device: CpuDevice) -> list[bytes]:
        b = new(n, columns)
        ws = {rows: new(n, rows, type=T.Q5_1) for rows in data}
        outputs = {str(rows): g.mul_mat(w, g.scale(b, 2.0)) for rows, w in ws.items()}
        case = Case(outputs, {b: x} | {ws[rows]: raw for rows, raw in data.items()})
        return [y.tobytes() for y in case.run(device).values()]

    assert run(tiled[1]) == run(plain)


def experts(type: T, n: int, rows: int, each: bool) -> Case:
    """120 tokens that choose two of five experts: the first is the favorite, the last one's are few. `each`: a column
    for each choice, as behind a gate; else one for all of a token.
    """
    rng = np.random.default_rng(7)
    picked = [rng.choice(5, 2, replace=False, p=(0.47, 0.21, 0.2, 0.1, 0.02)) for _ in range(120)]
    w, ids = new(n, rows, 5, type=type), new(2, 120, type=T.I32)
    b = new(n, 2 if each else 1, 120)
    data = {w: weight_bytes(type, n, 5 * rows), b: values(*b.ne, seed=1), ids: np.array(picked, np.int32)}
    other = g.mul_mat_id(w, g.scale(b, 0.5), ids)
    return Case({"y": g.mul_mat_id(w, b, ids), "again": g.mul_mat_id(w, b, ids), "other": other}, data)


@pytest.mark.parametrize("type", [T.Q4_K, T.Q6_K, T.TQ2_0], ids=lambda t: t.name)
def test_experts_that_many_columns_fall_on(tiled: list[CpuDevice], plain: CpuDevice, type: T) -> None:
    for number, (n, rows, each) in enumerate(((256, 16, False), (1024, 83, True), (768, 100, False))):
        device = tiled[number + 1]
        assert uses(device, experts(type, n, rows, each), "experts_tiles")
        found, right = (experts(type, n, rows, each).run(d) for d in (device, plain))
        assert all(found[name].tobytes() == right[name].tobytes() for name in right), (n, rows, each)


def test_expert_columns_are_tiled_once_for_all_products(tiled: list[CpuDevice]) -> None:
    case = experts(T.Q3_K, 256, 32, False)
    case.bind(tiled[1])
    names = [op.kernel.name for op in Compiler(case.graph, cpu_target(tiled[1].jit.lowering, 2)).compile()]
    assert names.count("gather_tiles") == 2 and names.count("experts_tiles") == 3


@pytest.mark.parametrize("columns", [MANY - 1, MANY, 77])
def test_a_matrix_for_each_head_in_tiles(tiled: list[CpuDevice], plain: CpuDevice, columns: int) -> None:
    n, rows, heads = 256, 40, 3
    data, x = weight_bytes(T.Q5_K, n, rows * heads), values(n, columns, heads)

    def run(device: CpuDevice) -> bytes:
        w, b = new(n, rows, heads, type=T.Q5_K), new(n, columns, heads)
        case = Case({"y": g.mul_mat(w, b)}, {w: data, b: x})
        assert uses(device, case, "experts_tiles") == (device is not plain)
        return case.run(device)["y"].tobytes()

    assert run(tiled[2]) == run(plain)


def test_few_columns_or_rows_take_no_tiles(tiled: list[CpuDevice], plain: CpuDevice) -> None:
    for rows, columns in ((TILE, FILL_TILES - 1), (TILE - 1, FILL_TILES), (TILE, FILL_TILES)):
        case = product(T.Q8_0, weight_bytes(T.Q8_0, 32, rows), 32, values(32, columns))
        assert uses(tiled[0], case, "matmul_tiles") == (rows == TILE and columns == FILL_TILES)
        assert not uses(plain, case, "matmul_tiles")


def test_tiles_are_not_used_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys((*FEATURES, *LOWERINGS["amx"].needs), True)
    for allowed, name in ((False, "vnni"), (True, "amx")):
        monkeypatch.setattr(lowerings, "tiles_permitted", lambda allowed=allowed: allowed)
        assert lowerings.choose(features).name == name
    monkeypatch.setattr(lowerings, "tiles_permitted", lambda: False)
    monkeypatch.setenv("LLAMADO_SIMD", "amx")
    with pytest.raises(ValueError, match="amx"):
        lowerings.choose(features)


def test_amx_permission_is_requested_once_on_linux_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    permission.tiles_permitted.cache_clear()
    assert permission.tiles_permitted() is False
    monkeypatch.undo()
    permission.tiles_permitted.cache_clear()
    assert permission.tiles_permitted() is permission.tiles_permitted()
    assert permission.tiles_permitted.cache_info().misses == 1
