"""Kernels in teams besides chains of row operations: the CPU's bits; and the shapes that launches get."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from running import Case, new, values
from tiers import first_of

from cuda.cards import fake_device
from cuda.emulation import in_teams, on_cpu
from llamado.devices.compile.compiler import Compiler
from llamado.devices.compile.emitter import Target
from llamado.devices.cpu.jit import Jit
from llamado.devices.cuda.compile.teams import in_teams as shaped
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.kernel import ShapedOperation
from llamado.devices.cuda.lanes import GROUPS
from llamado.devices.cuda.memory import CudaBuffer
from llamado.devices.cuda.teams import Team
from llamado.devices.kernel import Kernel
from llamado.devices.kernels import experts, floats, rows, sorting
from llamado.devices.lowering import PORTABLE
from llamado.devices.simd import F32, Code, F32x8, Work
from llamado.ggml import Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

Array = NDArray[Any]

TEAMS = [Team(1), Team(4), Team(16)]
EACH_TEAM = first_of([Team(4), Team(1), Team(16)], ids=("4", "1", "16"))


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit(PORTABLE)


def _same(
    jit: Jit, kernel: Kernel, arrays: dict[str, Array], numbers: dict[str, Any], team: Team, scratch: str = "",
    by_team: dict[str, bool] | None = None, **parameters: Any,
) -> dict[str, Array]:  # fmt: skip
    """Run a kernel on the CPU and in teams; all arrays but the scratch must be the same. Return them."""
    expected, found = ({name: array.copy() for name, array in arrays.items()} for _ in range(2))
    on_cpu(jit, kernel, expected, numbers, **parameters)
    teams = 2 if team.groups <= 4 else 1
    in_teams(kernel, found, numbers, team, teams=teams, **parameters, **(by_team or {}))
    for name in arrays.keys() - {scratch}:
        assert found[name].tobytes() == expected[name].tobytes(), name
    return found


def _maxima(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Two maxima and two numbers of the first group one after the other, and loops with steps."""
    zeros = c.const(F32x8, 0.0)
    with c.shares(work, c.i64(5), c.i64(1)) as item:
        at = a.x + item * 256
        with c.each(0, 64, 8) as i:
            c.store(a.y + item * 256 + i * 4, c.load(F32x8, at + i * 4) * 2.0)
        maxima = []
        for half in range(2):
            peaks = c.var(zeros)
            with c.several(32 * half, 32 * half + 32, 8) as turns:
                for turn in turns:
                    with turn.guard:
                        peaks.value = c.max(c.load(F32x8, at + turn.at * 4), peaks.value)
            maxima.append(c.greatest(peaks.value, c.f32(-1.0)))
        for half, greatest in enumerate(maxima):
            number = c.once(lambda at=at, half=half: c.load(F32, at + 4 * half))
            c.store(a.z + item * 8 + 4 * half, greatest + number)


@pytest.mark.parametrize("team", [Team(1, 2), Team(4, 1), Team(4, 3), Team(16, 2)], ids=str)
def test_numbers_of_the_whole_team(jit: Jit, team: Team) -> None:
    x = np.random.default_rng(4).standard_normal((5, 64)).astype(np.float32)
    arrays = {"x": x, "y": np.zeros((5, 64), np.float32), "z": np.zeros((5, 2), np.float32)}
    found = _same(jit, Kernel("maxima", ("x", "y", "z"), _maxima), arrays, {}, team)
    assert (found["y"] == 2 * x).all()
    assert (found["z"] == np.maximum(x.reshape(5, 2, 32).max(axis=2), 0) + x[:, :2]).all()


def _rows_of(n: int, k: int) -> dict[str, int]:
    numbers = {"n": n, "n1": 3, "n2": 1, "n3": 1, "k": k}
    return numbers | {f"{side}{d}": 4 * size for side, size in (("x", n), ("y", k)) for d in (1, 2, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("team", EACH_TEAM)
@pytest.mark.parametrize("falling", [True, False])
def test_a_short_row_is_sorted_by_counting(jit: Jit, team: Team, falling: bool) -> None:
    rng = np.random.default_rng(5)
    for n, k in ((1, 1), (7, 3), (20, 20), (129, 8)):
        x = np.round(rng.standard_normal((3, n)) * 4).astype(np.float32)  # many are equal
        x[x == 0.0] *= rng.choice([-1.0, 1.0], (x == 0.0).sum()).astype(np.float32)
        arrays = {"x": x, "y": np.full((3, k), -7, np.int32)}
        found = _same(jit, sorting.sort, arrays, _rows_of(n, k), team, by_team={"by_team": True}, falling=falling)
        assert (found["y"] == np.argsort(-x if falling else x, axis=1, kind="stable")[:, :k]).all()
        if n > 20:
            continue
        arrays["x"][1, n // 2] = np.nan
        _same(jit, sorting.sort, arrays, _rows_of(n, k), team, by_team={"by_team": True}, falling=falling)


@pytest.mark.slow
@pytest.mark.parametrize("team", EACH_TEAM)
def test_experts_are_listed_as_by_one_thread(jit: Jit, team: Team) -> None:
    rng = np.random.default_rng(6)
    for n_tokens, n_used, n_experts in ((1, 1, 1), (9, 2, 5), (40, 3, 33), (7, 8, 64)):
        ids = rng.integers(0, n_experts, (n_tokens, n_used + 2)).astype(np.int32)
        ids[rng.random(ids.shape) < 0.1] = -1
        ids[rng.random(ids.shape) < 0.1] = n_experts + 3
        n_slots = n_tokens * n_used
        arrays = {
            "ids": ids, "counts": np.zeros(experts.counts_bytes(n_experts, n_slots), np.uint8),
            "routes": np.zeros(experts.routes_bytes(n_experts, n_slots), np.uint8),
        }  # fmt: skip
        numbers = {"id0": 4, "id1": 4 * ids.shape[1], "n_used": n_used, "n_experts": n_experts, "n_tokens": n_tokens}
        found = _same(jit, experts.group_by_expert, arrays, numbers, team, "counts", {"by_team": True})
        assert found["routes"].any()


@pytest.mark.parametrize("sectioned", [False, True])
@pytest.mark.parametrize("team", TEAMS, ids=lambda t: str(t.groups))
def test_angles(jit: Jit, team: Team, sectioned: bool) -> None:
    n_tokens, n_pairs = 3, 21
    arrays = {
        "positions": (np.arange(3 * n_tokens) * 977).astype(np.int32),
        "sections": (np.arange(n_pairs) % 3).astype(np.int64),
        "frequencies": 10000.0 ** (-np.arange(n_pairs) / n_pairs), "factors": np.linspace(1, 8, n_pairs).astype("f"),
        "table": np.zeros((n_tokens, n_pairs, 2), np.float32),
    }  # fmt: skip
    numbers = {"n_tokens": n_tokens, "n_pairs": n_pairs, "magnitude": 1.25}
    _same(jit, rows.rope_table, arrays, numbers, team, factored=True, sectioned=sectioned)


@pytest.mark.parametrize("team", TEAMS, ids=lambda t: str(t.groups))
@pytest.mark.parametrize("types", [("F32", "F16"), ("I32", "I32"), ("BF16", "F32"), ("F32", "BF16")])
def test_elements_are_copied(jit: Jit, team: Team, types: tuple[str, str]) -> None:
    source, target = types
    x = np.random.default_rng(7).integers(0x3000, 0x4000, (3, 50)).astype(np.int32)
    size = T[target].block_bytes
    arrays = {"x": x, "y": np.zeros((4, 37, size), np.uint8)}
    numbers = {"x0": 4, "x1": 200, "y0": size, "y1": 37 * size, "n0": 37, "n1": 4, "m0": 20, "m1": 3}
    numbers |= {f"{name}{d}": int(name in "nm") for name in "xynm" for d in (2, 3)}
    _same(jit, floats.copy, arrays, numbers, team, source=source, target=target, repeated=True)


# --- launches ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def card() -> CudaDevice:
    return fake_device()


def _launches(card: CudaDevice, result: Tensor, data: dict[Tensor, Any]) -> list[ShapedOperation]:
    case = Case({"result": result}, data)
    case.bind(card)
    compiler = Compiler(case.graph, Target("CUDA0", GROUPS, card.n_groups, CudaBuffer, aligned=True))
    made = [shaped(one, card.card.properties, card.n_groups) for one in compiler.compile()]
    assert all(isinstance(one, ShapedOperation) for one in made)
    return [one for one in made if isinstance(one, ShapedOperation)]


@pytest.mark.parametrize(
    ("ne", "threads", "blocks"),
    [
        ((4096, 1), 512, 1),
        ((4096, 8), 512, 8),
        ((4096, 16), 256, 16),
        ((4096, 40), 128, 40),
        ((300, 7), 64, 7),
        ((128, 40), 128, 10),
        ((20, 33), 128, 3),
    ],
)
def test_a_norm_gets_threads_by_the_length_of_its_rows(
    card: CudaDevice, ne: tuple[int, ...], threads: int, blocks: int
) -> None:
    x = new(*ne)
    (launch,) = _launches(card, g.rms_norm(x, 1e-5), {x: values(*ne)})
    assert (launch.shape.threads, launch.shape.grid) == (threads, (blocks, 1))
    assert launch.parameters["team"].row_bytes >= 4 * ne[0]


def test_a_row_without_sums_is_divided(card: CudaDevice) -> None:
    x = new(14336, 2)
    (launch,) = _launches(card, g.unary(x, UnaryOp.SILU), {x: values(14336, 2)})
    assert launch.shape.grid == (28, 1) and launch.parameters["part"] == 1024


def test_a_row_that_does_not_fit_shared_memory_has_only_teams_with_scratch(card: CudaDevice) -> None:
    x = new(60_000, 130)
    (launch,) = _launches(card, g.soft_max_ext(x, None, 1.0), {x: np.zeros((130, 60_000), np.float32)})
    assert launch.parameters["team"].row_bytes == 0
    assert launch.shape.grid == (card.n_groups, 1)
