"""Chains of row operations in teams of groups: the CPU's bits, without races."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bits import normal
from block_types import encode
from numpy.typing import NDArray
from tiers import chosen

from cuda.emulation import in_teams, on_cpu
from llamado.devices.cpu.jit import Jit
from llamado.devices.cuda.teams import Team
from llamado.devices.kernels import rows
from llamado.devices.kernels.activations import BYTES_PER_COLUMN, TILE, UNIT_BYTES, quantized_bytes, units_bytes
from llamado.devices.lowering import PORTABLE
from llamado.ggml.ops import GluOp
from llamado.gguf.types import TensorType as T

Array = NDArray[Any]

N1, N2 = 3, 2
N_ROWS = N1 * N2
TABLE_ROWS = 11


class Chain:
    """A chain over N1 · N2 rows of `n` numbers, with random operands."""

    def __init__(self, n: int) -> None:
        self.n, self.rng = n, np.random.default_rng(n)
        self.stages: list[rows.Stage] = []
        self.arrays: dict[str, Array] = {"scratch": np.zeros(64 * n, np.float32)}
        self.numbers: dict[str, Any] = {"n": n, "n1": N1, "n2": N2, "n3": 1, "scratch_step": 4 * n, "share": 1}
        self.x = self.random(N2, N1, n)

    def random(self, *shape: int, scale: float = 1.0) -> Array:
        return (normal(self.rng, shape) * scale).astype(np.float32)

    def add(self, *stage: Any, **given: Any) -> Chain:
        """Append a stage. Arrays among its fields are memory; by default its operand has a row for each row."""
        prefix, fields = f"s{len(self.stages)}_", rows._FIELDS[stage[0]]
        if "x" in fields:
            given.setdefault("x", self.random(N2, N1, self.n))
        if "s1" in fields and "s1" not in given:
            given |= {"s1": given["x"].nbytes // N_ROWS, "s2": given["x"].nbytes // N2}
        for name in fields:
            value = given.get(name, 0)
            (self.arrays if isinstance(value, np.ndarray) else self.numbers)[prefix + name] = value
        self.stages.append(stage)
        return self

    def row(self) -> Chain:
        return self.add("row", x=self.x)

    def store(self) -> Chain:
        return self.add("store", x=np.zeros_like(self.x))

    def get_rows(self, type: T) -> Chain:
        table = np.ascontiguousarray(encode(self.rng, type, TABLE_ROWS, self.n, 1.0)).view(np.uint8)
        ids = np.array([3, 10, -1, 0, 7, 7], np.int32)
        return self.add("get_rows", type.name, x=table, nb1=type.row_bytes(self.n), ids=ids, id1=4, id2=12,
                        rows=TABLE_ROWS)  # fmt: skip

    def set_rows(self, type: T, how: str, *, wide: bool) -> Chain:
        """Rows of a cache, one of which does not exist. "heads": N1 of them are one row of the cache."""
        of_row = type.row_bytes(self.n)
        size = of_row * (N1 if how == "heads" else 1)
        cache, kind = np.zeros(TABLE_ROWS * size, np.uint8), np.int64 if wide else np.int32
        ids = np.array([4, 0, 99, 10, -1, 2], kind)
        fields = {"id1": ids.itemsize, "id2": 3 * ids.itemsize, "m2": N2, "m3": 1, "part": of_row}
        return self.add("set_rows", type.name, wide, how, x=cache, nb1=size, ids=ids, rows=TABLE_ROWS, **fields)

    def quantize(self, block: int, place: str) -> Chain:
        if place == "units":
            size = units_bytes(self.n) * N_ROWS
        else:
            size = quantized_bytes(block, self.n, N_ROWS, {"apart": 1, "tiles": TILE, "groups": 4}[place])
        return self.add("quantize", block, place, x=np.zeros(size, np.uint8), columns=N_ROWS)

    def rope(self, mode: str, n_dims: int, offset: int) -> Chain:
        table = self.random(N2, n_dims // 2, 2)
        return self.add("rope", mode, table=table, step=4 * n_dims, n_dims=n_dims, offset=offset)

    def soft_max(self, mask: T | None, *, sinks: bool) -> Chain:
        fields: dict[str, Any] = {"m2": 1, "m3": 1, "scale": 0.7, "sinks": self.random(N2), "slopes": self.random(N2)}
        if mask is not None:
            table = self.random(N1, self.n, scale=2.0)
            table[:, ::3] = -np.inf
            table[0] = -np.inf  # a row that sees nothing
            values = table.astype(np.float16) if mask == T.F16 else table
            fields |= {"mask": values, "s1": values.nbytes // N1}
        return self.add("soft_max", None if mask is None else mask.name, sinks, **({"s1": 0} | fields))


def _elementwise(c: Chain) -> Chain:
    c.row().add("sub").add("div").add("clamp", low=-3.0, high=2.5).add("unary", "GELU").add("leaky_relu", slope=0.3)
    c.add("xielu", negative=0.2, positive=0.7, beta=0.5, eps=-1e-6)
    ids = np.array([1, 2, 0, 9, 0, 1], np.int32)
    c.add("add_id", x=c.random(3, c.n), nb1=4 * c.n, ids=ids, id1=4, id2=12, rows=3)
    c.add("swiglu_oai", alpha=1.7, limit=2.0).add("swiglu_clamp", limit=1.5)
    return c.add("element", "mul", x=c.random(N2, N1, 1)).store()


CHAINS: dict[str, tuple[int, Callable[[Chain], Chain]]] = {
    "residual": (1, lambda c: c.row().add("add").store().add("rms_norm", eps=1e-5).add("mul").store()),
    "in place": (
        1, lambda c: c.row().add("unary", "SILU").add("store", x=c.x).add("rms_norm", eps=1e-5).add("add")
        .add("store", x=c.x),
    ),
    "number of the row": (1, lambda c: c.row().add("element", "mul", x=c.x).add("store", x=c.x)),
    "norm in place": (1, lambda c: c.row().add("norm", eps=1e-5).add("mul").add("store", x=c.x)),
    "norms": (
        1, lambda c: c.row().add("scale", factor=1.5, bias=0.25).add("norm", eps=1e-5).add("mul").store()
        .add("l2_norm", eps=1e-6).store().add("rms_norm", eps=1e-6).store(),
    ),
    "elementwise": (1, _elementwise),
    "soft_max": (1, lambda c: c.row().soft_max(None, sinks=False).store()),
    "soft_max masked": (1, lambda c: c.row().soft_max(T.F16, sinks=True).add("mul").store()),
    "soft_max of f32 masks": (1, lambda c: c.row().soft_max(T.F32, sinks=False).store()),
    "rope": (4, lambda c: c.row().rope("NEOX", c.n, 0).store()),
    "rope in the middle": (8, lambda c: c.row().add("mul").rope("NORMAL", c.n - 4, 2).add("add").store()),
    "key": (
        32, lambda c: c.row().add("rms_norm", eps=1e-5).add("mul").rope("NEOX", c.n, 0)
        .set_rows(T.Q8_0, "heads", wide=True),
    ),
    "value": (1, lambda c: c.row().set_rows(T.F16, "deep", wide=False)),
    "value of fives": (32, lambda c: c.row().add("scale", factor=2.0, bias=0.0).set_rows(T.Q5_1, "flat", wide=True)),
    "embedding": (256, lambda c: c.get_rows(T.Q4_K).add("element", "mul", x=c.random(N2, N1, 1)).store()),
    "embedding of halves": (1, lambda c: c.get_rows(T.F16).store().add("rms_norm", eps=1e-5).store()),
    "embedding of f32": (1, lambda c: c.get_rows(T.F32).add("rms_norm", eps=1e-5).store()),
    "embedding of bytes": (32, lambda c: c.get_rows(T.Q8_0).add("norm", eps=1e-5).store()),
    "copy": (1, lambda c: c.add("load", "BF16", x=c.x.astype(np.float16)).add("keep", "F16", x=c.x.astype(np.float16))),
    "copy to blocks": (
        32, lambda c: c.row().add("sub").add("keep", "IQ4_NL", x=np.zeros(N_ROWS * c.n // 32 * 18, np.uint8))
        .add("mul").quantize(32, "apart"),
    ),
    "gate": (
        256, lambda c: c.row().add("glu", GluOp.SWIGLU.name).store().quantize(256, "groups").quantize(32, "apart"),
    ),
    "norm quantized": (256, lambda c: c.row().add("rms_norm", eps=1e-5).add("mul").quantize(256, "tiles")),
    "quantized twice": (
        32, lambda c: c.row().add("sub").quantize(32, "groups").add("mul").quantize(32, "tiles").store(),
    ),
    "units": (256, lambda c: c.row().add("rms_norm", eps=1e-5).add("mul").quantize(256, "units").add("add").store()),
    "units of blocks of 32": (32, lambda c: c.row().add("sub").quantize(32, "units").add("mul").quantize(32, "units")),
}  # fmt: skip
"""Chains, and the number of elements that their rows are multiples of."""


def is_divisible(make: Callable[[Chain], Chain]) -> bool:
    return rows.is_divisible(tuple(make(Chain(256)).stages))


LENGTHS = (1, 9, 300)
LONG = 2304


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit(PORTABLE)  # its groups of columns are those of a card


def _copies(arrays: dict[str, Array]) -> dict[str, Array]:
    """Copy arrays; those that were the same are the same again."""
    made = {id(array): array.copy() for array in arrays.values()}
    return {name: made[id(array)] for name, array in arrays.items()}


def _check(jit: Jit, chain: Chain, team: Team, *, teams: int = 1, part: int = 0) -> None:
    stages = tuple(chain.stages)
    kernel = rows.rows_kernel(stages)
    expected, found = _copies(chain.arrays), _copies(chain.arrays)
    on_cpu(jit, kernel, expected, chain.numbers, stages=stages)
    in_teams(kernel, found, chain.numbers, team, teams=teams, stages=stages, part=part)
    del expected["scratch"], found["scratch"]
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


def _length(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


GROUPS = chosen((1, 4, 32), (4,))
FEW = ("norms", "soft_max masked", "norm quantized")


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_has_the_bits_of_the_cpu(jit: Jit, name: str, groups: int) -> None:
    multiple, make = CHAINS[name]
    lengths = sorted({_length(n, multiple) for n in LENGTHS})
    team = Team(groups, turns=3, row_bytes=_length(4 * lengths[-1], 64))
    for n in lengths:
        _check(jit, make(Chain(n)), team, teams=3 if groups <= 4 else 1)


@pytest.mark.full
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_any_length_stays_within_shared_memory(jit: Jit, name: str) -> None:
    """The kernel gets exactly the shared memory that a row takes."""
    multiple, make = CHAINS[name]
    for n in sorted({_length(n, multiple) for n in (*LENGTHS, 7, 8)}):
        _check(jit, make(Chain(n)), Team(4, turns=3, row_bytes=_length(4 * n, 64)), teams=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(CHAINS, FEW))
def test_a_long_row(jit: Jit, name: str) -> None:
    _check(jit, CHAINS[name][1](Chain(LONG)), Team(32, turns=8, row_bytes=4 * LONG))


@pytest.mark.full
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_rows_that_do_not_fit_shared_memory_lie_in_scratch(jit: Jit, groups: int) -> None:
    for name in ("residual", "norms", "soft_max masked", "key", "norm quantized", "embedding"):
        multiple, make = CHAINS[name]
        _check(jit, make(Chain(_length(300, multiple))), Team(groups, turns=2), teams=2 if groups <= 4 else 1)


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, (_, make) in CHAINS.items() if is_divisible(make)])
def test_parts_of_rows_are_items_of_their_own(jit: Jit, name: str) -> None:
    multiple, make = CHAINS[name]
    for n in (_length(1, multiple), _length(600, multiple), _length(700, multiple)):
        _check(jit, make(Chain(n)), Team(4, turns=2, row_bytes=2048), teams=2, part=2 * rows.PART)


@pytest.mark.parametrize("block", [32, 256])
def test_units_have_the_numbers_of_columns(jit: Jit, block: int) -> None:
    """Both layouts of one row, quantized by different code."""
    chain = Chain(1024).row().quantize(block, "apart").quantize(block, "units")
    arrays, stages = _copies(chain.arrays), tuple(chain.stages)
    on_cpu(jit, rows.rows_kernel(stages), arrays, chain.numbers, stages=stages)
    columns = arrays["s1_x"].reshape(-1, 256 // block, BYTES_PER_COLUMN[block])
    units = arrays["s2_x"].reshape(-1, UNIT_BYTES)
    quants, rest = columns[:, :, :block].reshape(-1, 256), columns[:, :, block:]
    assert (units[:, :256] == quants).all() and quants.any()
    if block == 256:
        d, of_32, of_16 = np.split(rest[:, 0], [4, 20], axis=1)
        assert (units[:, 256:308] == np.concatenate([of_16, of_32, d], axis=1)).all()
    else:
        d, d_sum, minus_sum = (np.ascontiguousarray(part) for part in np.split(rest, [4, 8], axis=2))
        small = minus_sum.view(np.int32).astype(np.int16).view(np.uint8)
        right = [part.reshape(len(units), -1) for part in (d, d_sum, small)]
        assert (units[:, 256:] == np.concatenate(right, axis=1)).all()
