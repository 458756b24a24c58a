"""The same graphs on this device and on the real ggml's CPU back end, behind its ggml-rpc-server."""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from recurrences import KINDS
from reference import ReferenceDevice
from running import Array, Case, new, turned_by_sections, values, weight_bytes

from llamado.devices.cpu.device import CpuDevice
from llamado.ggml import GluOp, Op, RopeMode, SortOrder, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.ggml.tensor import contiguous_strides
from llamado.gguf.types import TensorType as T
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.transport import ConnectError

pytestmark = pytest.mark.interop

Made = tuple[Tensor, dict[Tensor, Any]]
BLOCKS = (T.Q8_0, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.IQ4_NL)


@pytest.fixture(scope="module")
def peer(peer_bin: Path) -> Iterator[RemoteDevice]:
    port = free_port()
    command = [peer_bin / "ggml-rpc-server", "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(2400):
            try:
                device = connect(f"127.0.0.1:{port}")[0]
                break
            except ConnectError:
                time.sleep(0.05)
        yield device
        device.close()
    finally:
        process.kill()
        process.wait()


def theirs(peer: RemoteDevice, make: Callable[[], Made]) -> Array:
    result, data = make()
    case = Case({"r": result}, data)
    leafs = case.leaf_bytes()
    root = result.root()[0]
    peer.place([*leafs, *([root] if root not in leafs else [])])
    for leaf, memory in leafs.items():
        peer.write(leaf, memory)
    peer.submit(case.graph)
    seen = ReferenceDevice(np.float32)
    seen.bind(root, np.array(peer.read(root, 0, root.nbytes).result(60)))
    return seen.get(result)


def both(peer: RemoteDevice, device: CpuDevice, make: Callable[[], Made]) -> tuple[Array, Array]:
    result, data = make()
    return Case({"r": result}, data).run(device)["r"], theirs(peer, make)


def agree(peer: RemoteDevice, device: CpuDevice, make: Callable[[], Made], rtol: float = 1e-4) -> None:
    """All numbers close, in units of the largest."""
    ours, right = both(peer, device, make)
    assert np.abs(right).max() > 0
    np.testing.assert_allclose(ours, right, rtol=rtol, atol=rtol * np.abs(right).max())


def soft_max(mask_type: T, max_bias: float, sinks: bool) -> Made:
    x, mask, sink = new(40, 6, 6, 2), new(40, 6, 1, 2, type=mask_type), new(6)
    m = np.where(values(*mask.ne, seed=1) > 0, values(*mask.ne, seed=2), -np.inf)
    m[..., 0] = 0.25
    node = g.soft_max_ext(x, mask, 0.3, max_bias)
    node.src = (x, mask, sink) if sinks else (x, mask)
    return node, {x: values(*x.ne, scale=5), mask: m, sink: values(6)} if sinks else {x: values(*x.ne), mask: m}


@pytest.mark.parametrize("mask_type", [T.F32, T.F16], ids=lambda t: t.name)
@pytest.mark.parametrize("max_bias", [0.0, 8.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_soft_max(peer: RemoteDevice, best: CpuDevice, mask_type: T, max_bias: float, sinks: bool) -> None:
    agree(peer, best, lambda: soft_max(mask_type, max_bias, sinks))


def attention_steps(type_k: T, streams: int) -> Made:
    """Return attention without the fused operation: values are stored transposed."""
    head, heads, heads_kv, cells, n, n_kv = 32, 6, 2, 64, 5, 64
    q, mask = new(head, heads, n, streams), new(n_kv, n, 1, streams)
    k, v = new(head * heads_kv, cells, streams, type=type_k), new(cells, head * heads_kv, streams, type=T.F16)
    data: dict[Tensor, Any] = {q: values(*q.ne), mask: np.where(values(*mask.ne, seed=3) > -1, 0.0, -np.inf)}
    data |= {t: weight_bytes(t.type, t.ne[0], t.nrows, seed) for seed, t in enumerate((k, v))}
    keys = g.view_4d(k, head, n_kv, heads_kv, streams, k.nb[1], k.type.row_bytes(head), k.nb[2])
    vals = g.view_4d(v, n_kv, head, heads_kv, streams, v.nb[1], v.nb[1] * head, v.nb[2])
    scores = g.soft_max_ext(g.mul_mat(keys, g.permute(q, 0, 2, 1, 3)), mask, head**-0.5)
    mixed = g.permute(g.mul_mat(vals, scores), 0, 2, 1, 3)
    return g.cont(mixed, head * heads, n * streams), data


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, *BLOCKS], ids=lambda t: t.name)
def test_attention_in_single_steps(peer: RemoteDevice, best: CpuDevice, type: T) -> None:
    """Theirs rounds queries to the keys' type or to eight bits."""
    for streams in (1, 3):
        agree(peer, best, partial(attention_steps, type, streams), 1e-3 if type in (T.F32, T.F16) else 2e-2)


def flash(type: T, n: int) -> Made:
    head, heads, heads_kv, n_kv = 64, 4, 2, 96
    q, mask = new(head, heads, n), new(n_kv, n, type=T.F16)
    k, v = (new(head * heads_kv, n_kv, type=type) for _ in range(2))
    data: dict[Tensor, Any] = {
        q: values(*q.ne),
        mask: np.where(np.arange(n_kv) < 70 + np.arange(n)[:, None], 0, -np.inf),
    }
    data |= {t: weight_bytes(type, t.ne[0], n_kv, seed) for seed, t in enumerate((k, v))}
    view = [g.view_4d(t, head, n_kv, heads_kv, 1, t.nb[1], type.row_bytes(head), t.nb[2]) for t in (k, v)]
    return g.flash_attn_ext(g.permute(q, 0, 2, 1, 3), *view, mask, head**-0.5), data


@pytest.mark.parametrize("type", [T.F32, T.F16, T.BF16, *BLOCKS], ids=lambda t: t.name)
def test_flash_attention(peer: RemoteDevice, best: CpuDevice, type: T) -> None:
    for n in (1, 9):
        agree(peer, best, partial(flash, type, n), 2e-2)


@pytest.mark.parametrize("type", [T.F16, T.BF16, *BLOCKS], ids=lambda t: t.name)
def test_stored_rows_have_the_same_bits(peer: RemoteDevice, best: CpuDevice, type: T) -> None:
    """Rows are equal except for numbers exactly between two levels, and IQ4_NL, where a sum decides."""

    def make() -> Made:
        cache, rows, ids = new(96, 40, type=type), new(96, 31), new(31, type=T.I64)
        return g.set_rows(cache, rows, ids), {rows: values(96, 31), ids: np.arange(31) + 4}

    ours, right = both(peer, best, make)
    assert (ours == right).mean() > (0.9 if type == T.IQ4_NL else 0.999)
    np.testing.assert_allclose(ours, right, atol=0.02 * np.abs(right).max() if type == T.Q8_0 else 1e-2)


def shift(type: T, mode: RopeMode) -> Made:
    cache, by = new(96, 40, type=type), new(40, type=T.I32)
    keys = g.view_3d(cache, 32, 3, 40, type.row_bytes(32), cache.nb[1])
    data: dict[Tensor, Any] = {cache: weight_bytes(type, 96, 40), by: -np.arange(40) % 17}
    rope = (by, None, 32, mode, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)
    if type in (T.F32, T.F16):
        turned = g.rope_ext(keys, *rope)
        turned.view_src, turned.view_offs, turned.nb = keys.view_src, keys.view_offs, keys.nb
        return turned, data
    return g.cpy(g.rope_ext(g.cast(keys, T.F32), *rope), keys), data


@pytest.mark.parametrize("type", [T.F32, T.F16, T.Q8_0, T.Q4_0, T.Q5_1], ids=lambda t: t.name)
@pytest.mark.parametrize("mode", [RopeMode.NORMAL, RopeMode.NEOX])
def test_context_shifts(peer: RemoteDevice, best: CpuDevice, type: T, mode: RopeMode) -> None:
    ours, right = both(peer, best, lambda: shift(type, mode))
    assert np.abs(ours - right).mean() < 1e-3 * np.abs(right).max()
    assert (np.abs(ours - right) < 0.15 * np.abs(right).max()).all()


def x(*ne: int, type: T = T.F32, seed: int = 0) -> tuple[Tensor, dict[Tensor, Any]]:
    tensor = new(*ne, type=type)
    return tensor, {tensor: values(*ne, seed=seed)}


def one(operation: Callable[[Tensor], Tensor], *ne: int, type: T = T.F32) -> Callable[[], Made]:
    def make() -> Made:
        tensor, data = x(*ne, type=type)
        return operation(tensor), data

    return make


def two(operation: Callable[[Tensor, Tensor], Tensor], a: tuple[int, ...], b: tuple[int, ...], type: T = T.F32) -> Any:
    def make() -> Made:
        (left, data), (right, more) = x(*a, type=type), x(*b, type=type, seed=1)
        return operation(left, right), data | more

    return make


def padded(a: Tensor) -> Tensor:
    ne = (a.ne[0] + 3, *a.ne[1:])
    node = Tensor(a.type, ne, contiguous_strides(a.type, ne), Op.PAD, (a,))
    node.op_params = struct.pack("<9i28x", 0, 3, 0, 0, 0, 0, 0, 0, 0)
    return node


def rows_of_many(type: T) -> Made:
    table, ids = new(32, 9, 3, 2, type=type), new(4, 3, 2, type=T.I32)
    numbers = np.random.default_rng(1).integers(0, 9, (2, 3, 4))
    return g.get_rows(table, ids), {table: weight_bytes(type, 32, 54), ids: numbers}


OPERATIONS: dict[str, Callable[[], Made]] = {
    "add repeated": two(g.add, (12, 6, 4), (4, 3, 2)),
    "mul of a turned": two(lambda a, b: g.mul(a, g.cont(g.transpose(b))), (6, 8), (8, 6)),
    "mul of halves": two(g.mul, (16, 5), (16, 1), T.F16),
    "glu in one": one(lambda a: g.glu(a, GluOp.SWIGLU), 64, 5),
    "glu swapped": one(lambda a: g.glu(a, GluOp.GEGLU, True), 64, 5),
    "step": one(lambda a: g.unary(a, UnaryOp.STEP), 64, 3),
    "sqr": one(g.sqr, 33, 2),
    "clamp": one(lambda a: g.clamp(a, -0.5, 0.7), 33, 2),
    "repeat": one(lambda a: g.repeat(a, 10, 6, 4, 1), 5, 3, 4),
    "concat 0": two(lambda a, b: g.concat(a, b, 0), (5, 3, 2), (9, 3, 2)),
    "concat 2": two(lambda a, b: g.concat(a, b, 2), (5, 3, 2), (5, 3, 4)),
    "pad": one(padded, 5, 3, 2),
    "sum": one(g.sum_all, 50, 3, 2),
    "sum_rows": one(g.sum_rows, 50, 3, 2),
    "repeat_back": one(lambda a: g.repeat_back(a, 10, 3, 1, 2), 50, 3, 4, 2),
    "mean": one(g.mean, 50, 3, 2),
    "cumsum": one(g.cumsum, 50, 3, 2),
    "argmax": one(g.argmax, 50, 30),
    "argsort": one(lambda a: g.argsort(a, SortOrder.DESC), 50, 3),
    "permuted": one(lambda a: g.cont(g.permute(a, 2, 0, 1, 3)), 5, 4, 3),
    "other shape": one(lambda a: g.cont(g.permute(a, 0, 2, 1, 3), 20, 3), 5, 3, 4),
    "to halves": one(lambda a: g.cast(g.permute(a, 0, 2, 1, 3), T.F16), 32, 3, 4),
    "to blocks": one(lambda a: g.cast(a, T.Q8_0), 32, 3, 4),
    "l2_norm": one(lambda a: g.l2_norm(a, 1e-6), 50, 3, 2),
    "rope by sections": lambda: turned_by_sections(RopeMode.MROPE),
    "rope by sections in turns": lambda: turned_by_sections(RopeMode.IMROPE),
    "rope of pictures": lambda: turned_by_sections(RopeMode.VISION),
    **KINDS,
    "rows of f32": lambda: rows_of_many(T.F32),
    "rows of q8_0": lambda: rows_of_many(T.Q8_0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(peer: RemoteDevice, best: CpuDevice, name: str) -> None:
    rough = name in ("to blocks", "to halves", "mul of halves", "glu swapped")  # their GELU is a table of halves
    agree(peer, best, OPERATIONS[name], 1e-3 if rough else 1e-5)


def test_top_k_agrees_with_the_reference(peer: RemoteDevice, best: CpuDevice) -> None:
    """In whatever order."""
    ours, right = both(peer, best, one(lambda a: g.top_k(a, 7), 50, 3))
    assert (np.sort(ours) == np.sort(right)).all()
