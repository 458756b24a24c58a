"""Matrix products of a card, on a fake one: the bits of the CPU device, for every weight type and odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from running import CODEBOOKS, PLAIN, WEIGHTS, Case, each_type, new, values, weight_bytes
from tiers import chosen

from cuda.cards import fake_device
from llamado.devices.compile.compiler import Compiler
from llamado.devices.compile.emitter import Target
from llamado.devices.compile.program import Operation
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cuda.compile.products import card_products
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import CardProperties
from llamado.devices.cuda.kernel import ShapedOperation
from llamado.devices.cuda.lanes import GROUPS
from llamado.devices.cuda.lowerings import nvptx
from llamado.ggml import Graph
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

COLUMNS = (1, 2, 5, 8, 9, 40)
FAST = (T.Q4_0, T.MXFP4, T.Q6_K)
"""Types of the tests that need not run with each."""


@pytest.fixture(scope="module")
def card() -> Iterator[CudaDevice]:
    device = fake_device(total_bytes=64 << 20)
    yield device
    device.close()


@pytest.fixture(scope="module")
def watched() -> Iterator[CudaDevice]:
    """A card whose launches fail if they have races."""
    device = fake_device(watched=True, total_bytes=3 << 20, processors=1)
    yield device
    device.close()


def ids(type: T) -> str:
    return type.name


def odd_length(type: T) -> int:
    """A length of rows that ends with a part of a unit if there can be one."""
    return 768 if type.block_size == 256 else 640


def product(type: T, n: int, rows: int, columns: int, matrices: int = 1, skipped: int = 0) -> Case:
    """A product of matrices whose first `skipped` rows are left out."""
    whole, x = new(n, rows + skipped, matrices, type=type, name="w"), new(n, columns, matrices)
    w = whole
    if skipped:
        w = g.view_2d(whole, n, rows, whole.nb[1], skipped * whole.nb[1])
    raw = weight_bytes(type, n, (rows + skipped) * matrices)
    return Case({"y": g.mul_mat(w, x)}, {whole: raw, x: values(n, columns, matrices, seed=columns)})


def experts(type: T, n: int, rows: int, n_tokens: int, n_used: int, *, each: bool) -> Case:
    """A product of five experts, with columns of each token or of each slot."""
    w, x = new(n, rows, 5, type=type), new(n, n_used if each else 1, n_tokens)
    choices = new(n_used, n_tokens, type=T.I32)
    rng = np.random.default_rng(n_tokens)
    picked = np.array([rng.choice(5, n_used, replace=False) for _ in range(n_tokens)], np.int32)
    data = {w: weight_bytes(type, n, rows * 5), x: values(*x.ne[:3], seed=n_tokens), choices: picked}
    return Case({"y": g.mul_mat_id(w, x, choices)}, data)


def bits(case: Case, device: CpuDevice | CudaDevice) -> bytes:
    for leaf in case.data:
        leaf.buffer = None
    return case.run(device)["y"].tobytes()


def check(case: Case, card: CudaDevice, cpu: CpuDevice, note: object = "") -> None:
    expected = bits(case, cpu)
    assert any(expected)
    assert bits(case, card) == expected, note


@dataclass
class CardBuffer:
    """Memory of a card that is not there."""

    size: int
    address: int = 1 << 40


def operations(graph: Graph, properties: CardProperties) -> list[Operation]:
    """The operations of a graph on a card with these properties."""
    for leaf in dict.fromkeys(s.root()[0] for node in graph.nodes for s in node.src if s is not None):
        if not leaf.src:
            leaf.buffer, leaf.offset = CardBuffer(leaf.nbytes), 0
    target = Target("CARD", GROUPS, 128, CardBuffer, aligned=True)
    return Compiler(graph, target, partial(card_products, properties)).compile()


def of_threads(graph: Graph, properties: CardProperties) -> list[ShapedOperation]:
    """The operations whose kernels are written for threads."""
    return [one for one in operations(graph, properties) if isinstance(one, ShapedOperation)]


def multiplied(type: T, n: int, rows: int, columns: int) -> Graph:
    graph = Graph()
    graph.output("y", g.mul_mat(new(n, rows, type=type, name="w"), new(n, columns)))
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("type", each_type([*WEIGHTS, *CODEBOOKS]))
@pytest.mark.parametrize("columns", chosen(COLUMNS, (2, 9)))
def test_weights_in_blocks(card: CudaDevice, cpu: CpuDevice, type: T, columns: int) -> None:
    check(product(type, odd_length(type), 23, columns), card, cpu)


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen([*WEIGHTS, *CODEBOOKS], FAST, ids))
def test_shapes(card: CudaDevice, cpu: CpuDevice, type: T) -> None:
    """One unit, many units in two stages, rows for several blocks, and addresses that are multiples of little."""
    for n, rows, columns, skipped in ((1, 8, 1, 0), (5, 70, 3, 1), (36, 33, 1, 3), (5, 67, 9, 1), (3, 130, 17, 0)):
        check(product(type, n * type.block_size, rows, columns, skipped=skipped), card, cpu, (n, rows, columns))


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen([*WEIGHTS, *CODEBOOKS], FAST, ids))
def test_several_matrices(card: CudaDevice, cpu: CpuDevice, type: T) -> None:
    for columns in (1, 3, 20):
        check(product(type, odd_length(type), 19, columns, matrices=3), card, cpu, columns)


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen([*WEIGHTS, *CODEBOOKS], FAST, ids))
def test_experts(card: CudaDevice, cpu: CpuDevice, type: T) -> None:
    for n_tokens, n_used, each in ((1, 2, False), (1, 3, True), (2, 2, True), (7, 2, False), (40, 3, True)):
        case = experts(type, odd_length(type), 19, n_tokens, n_used, each=each)
        check(case, card, cpu, (n_tokens, n_used, each))


@pytest.mark.slow
@pytest.mark.parametrize("type", PLAIN, ids=ids)
def test_plain_floats(card: CudaDevice, cpu: CpuDevice, type: T) -> None:
    for n, rows, columns in ((8, 3, 1), (264, 35, 2), (512, 9, 3), (2312, 5, 8), (24, 40, 9), (128, 67, 40)):
        check(product(type, n, rows, columns), card, cpu, (n, rows, columns))


@pytest.mark.parametrize("type", PLAIN, ids=ids)
def test_heads_of_floats(card: CudaDevice, cpu: CpuDevice, type: T) -> None:
    """Permuted matrices that several heads share; the last elements of a row are no whole eight."""
    k, q = new(48, 2, 7, 2, type=type), new(48, 6, 5, 2)
    parts = [g.permute(g.view_4d(t, 44, *t.ne[1:], *t.nb[1:], 0), 0, 2, 1, 3) for t in (k, q)]
    case = Case({"y": g.mul_mat(*parts)}, {k: weight_bytes(type, 48, 28), q: values(48, 6, 5, 2, seed=1)})
    check(case, card, cpu)
    assert [one.kernel.name for one in of_threads(case.graph, card.card.properties)] == ["matmul_float"]


WATCHED: dict[str, Case] = {
    "matmul_few": product(T.Q4_0, 640, 23, 2),
    "matmul_few in two stages": product(T.Q6_K, 33 * 256, 9, 1),
    "matmul_many": product(T.Q4_K, 768, 70, 9),
    "matmul_many of blocks of 32": product(T.Q5_1, 640, 23, 9),
    "experts_few": experts(T.Q8_0, 320, 19, 1, 2, each=False),
    "experts_many": experts(T.Q3_K, 512, 19, 52, 3, each=True),
    "matmul_float": product(T.F16, 1064, 11, 2),
    "matmul_float of many columns": product(T.F32, 264, 35, 40),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(WATCHED, ("matmul_few", "matmul_many", "experts_few", "matmul_float")))
def test_no_races(watched: CudaDevice, card: CudaDevice, cpu: CpuDevice, name: str) -> None:
    case = WATCHED[name]
    check(case, watched, cpu)
    assert [one.kernel.name for one in of_threads(case.graph, card.card.properties)] == [name.split()[0]]


def test_columns_are_quantized_once(card: CudaDevice) -> None:
    y = g.silu(new(512, 3))
    up, gate = new(512, 16, type=T.Q4_K), new(512, 16, type=T.Q6_K)
    graph = Graph()
    graph.output("y", g.mul(g.mul_mat(up, y), g.mul_mat(gate, y)))
    made = operations(graph, card.card.properties)
    stages = [stage for one in made for stage in one.parameters.get("stages", ()) if stage[0] == "quantize"]
    assert stages == [("quantize", 256, "units")]
    assert [one.kernel.name for one in made] == ["rows", "matmul_few", "matmul_few", "rows"]


def test_weights_that_the_graph_writes_are_not_fetched_early(card: CudaDevice) -> None:
    cache, x, numbers = new(64, 16, type=T.Q8_0), new(64, 2), new(2, type=T.I64)
    written = g.set_rows(cache, x, numbers)
    graph = Graph()
    graph.output("y", g.mul_mat(written, x))
    graph.output("z", g.mul_mat(new(64, 16, type=T.Q8_0), x))
    after, constant = of_threads(graph, card.card.properties)
    assert (after.shape.chained, constant.shape.chained) == (False, True)


@pytest.mark.parametrize("shared_kib", [64, 99, 227])
def test_tiles_fit_the_shared_memory(card: CudaDevice, shared_kib: int) -> None:
    properties = card.card.properties._replace(shared_bytes=shared_kib << 10)
    for type in (*WEIGHTS, *CODEBOOKS, *PLAIN):
        for n, columns in ((256, 1), (14336, 1), (14336, 8), (4096, 33), (4096, 512)):
            (one,) = of_threads(multiplied(type, n, 4096, columns), properties)
            assert one.shape.shared_bytes <= properties.shared_bytes, (type, n, columns)
            assert one.shape.threads <= 256


@pytest.mark.slow
@pytest.mark.parametrize("type", chosen([*WEIGHTS, *CODEBOOKS, *PLAIN], (T.Q4_0,), ids))
def test_machine_code_keeps_values_in_registers(card: CudaDevice, type: T) -> None:
    """Rounding follows IEEE 754 on old and new cards; otherwise no PTX is made."""
    for capability, columns in ((75, 40), (90, 1)):
        (one,) = of_threads(multiplied(type, 4096, 4096, columns), card.card.properties)
        kernel, threads = one.kernel, one.shape.threads
        architecture = nvptx.architecture(capability)
        text = nvptx.ptx(kernel.trace, kernel.fields, one.parameters, "product", threads, architecture)
        assert ("cp.async" in text) == (capability >= 80)
        assert ("griddepcontrol.wait" in text) == (one.shape.chained and capability >= 90)
