"""The compiler: what it may not reorder, and how it says no."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import ReferenceDevice
from running import Array, Case, new, values, weight_bytes

from llamado.devices.compile.compiler import Compiler
from llamado.devices.cpu.device import CpuDevice, cpu_target
from llamado.devices.device import DeviceError
from llamado.ggml import GluOp, Graph, Op, RopeMode, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

# --- order ------------------------------------------------------------------------------------------------------------


def test_a_cache_is_written_after_earlier_reads(device: CpuDevice) -> None:
    """x → silu → cpy'd over its neighbor's operand: graph order decides, not what could be fused."""
    cache, x = new(16, 4), new(16, 4)
    graph_order = Graph()
    a = g.silu(x)
    seen = g.add(new_y := new(16, 4), cache)  # reads the cache as it was
    graph_order.expand(a)
    graph_order.expand(seen)
    ids = new(4, type=T.I32)
    stored = g.set_rows(cache, a, ids)
    data = {cache: values(16, 4), x: values(16, 4, seed=1), new_y: values(16, 4, seed=2), ids: [3, 2, 1, 0]}
    case = Case({"seen": seen, "stored": stored, "a": a}, data)
    case.graph = graph_order
    graph_order.output("seen", seen)
    graph_order.output("stored", stored)
    graph_order.output("a", a)
    case.check(device)


def test_a_copied_operand_is_complete_before_use(device: CpuDevice) -> None:
    cache, x, y = new(16, 4), new(16, 4), new(16, 4)
    graph = Graph()
    a = graph.expand(g.rms_norm(x, 1e-5))
    copied = graph.expand(g.cpy(y, cache))
    end = g.mul(a, copied)
    case = Case({"end": end}, {cache: values(16, 4), x: values(16, 4, seed=1), y: values(16, 4, seed=2)})
    case.graph = graph
    graph.output("end", end)
    case.check(device)


def test_a_change_in_place_is_seen_by_later_products_only(device: CpuDevice) -> None:
    """Quantized activations of a tensor are not those of what it becomes."""
    x, w = new(64, 5), new(64, 8, type=T.Q8_0)
    a = g.scale(x, 1.0)
    first = g.mul_mat(w, a)
    doubled = g.cpy(g.scale(a, 2.0), a)  # in the memory of a
    second = g.mul_mat(w, doubled)
    case = Case({"first": first, "second": second}, {x: values(64, 5), w: weight_bytes(T.Q8_0, 64, 8)})
    found = case.run(device)
    np.testing.assert_allclose(found["second"], 2 * found["first"], rtol=1e-6)


STEPS: dict[str, Callable[[list[Tensor], list[Tensor]], Tensor]] = {
    "silu": lambda x, w: g.silu(x[0]),
    "norm": lambda x, w: g.rms_norm(x[0], 1e-5),
    "scale": lambda x, w: g.scale(x[0], 0.7, 0.1),
    "add": lambda x, w: g.add(x[0], x[1]),
    "sub": lambda x, w: g.sub(x[0], x[1]),
    "weigh": lambda x, w: g.mul(x[0], w[0]),
    "gate": lambda x, w: g.glu_split(x[0], x[1], GluOp.SWIGLU),
    "rows": lambda x, w: g.get_rows(x[0], w[1]),
    "product": lambda x, w: g.mul_mat(w[2], x[0]),
    "copy": lambda x, w: g.cont(g.permute(x[0], 0, 2, 1, 3), *x[0].ne),
    "row": lambda x, w: g.mul(x[0], g.view_2d(x[1], x[1].ne[0], 1, x[1].nb[1], 2 * x[1].nb[1])),
    "store": lambda x, w: g.set_rows(w[3], x[0], w[1]),
    "cached": lambda x, w: g.add(x[0], w[3]),
    "into": lambda x, w: g.cpy(x[0], x[1]),
    "soft": lambda x, w: g.soft_max_ext(x[0], x[1] if x[1].view_src is None else None, 0.8),
    "halves": lambda x, w: g.cast(g.scale(g.cast(x[0], T.F16), 1.0), T.F32),
    "sum": lambda x, w: g.add(x[0], g.sum_rows(x[1])),
    "repeated": lambda x, w: g.add(x[0], g.view_2d(x[1], 16, 3, x[1].nb[1])),
}


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=14
    ),
    places=st.lists(st.integers(0, 3), min_size=14, max_size=14),
    aliased=st.booleans(),
)
def test_any_graph_on_any_memory(
    best: CpuDevice, plan: list[tuple[str, int, int]], places: list[int], aliased: bool
) -> None:
    """Random graphs; with `aliased`, results lie in memory given to them and used again once its last reader is past,
    as graphs that come over the wire do.
    """
    n, rows = 32, 6
    weights = [new(n), new(rows, type=T.I32), new(n, n), new(n, rows)]
    data: dict[Tensor, Array] = {
        weights[0]: values(n, seed=1),
        weights[1]: np.array([3, 0, 5, 1, 4, 2]),
        weights[2]: values(n, n, seed=2, scale=0.2),
        weights[3]: values(n, rows, seed=3),
    }
    graph, made = Graph(), [new(n, rows), new(n, rows)]
    data |= {made[0]: values(n, rows, seed=4), made[1]: values(n, rows, seed=5)}
    for name, i, j in plan:
        x = [made[-1 - i % len(made)], made[-1 - j % len(made)]]
        if name == "into" and (x[1].op is Op.NONE or x[0].root()[0] is x[1].root()[0]):
            continue
        if name == "store" and x[0].root()[0] is weights[3]:
            continue  # a cache's rows into itself: the order is undefined
        made.append(graph.expand(STEPS[name](x, weights)))
    # the last three that are not overwritten
    written = [t.view_src for t in made if t.op is Op.CPY]
    ends = [t for t in made if t.op is not Op.NONE and t.view_src is None and t not in written][-3:]
    if not ends:
        return
    case = Case({}, data)
    case.graph, case.outputs = graph, {str(i): t for i, t in enumerate(ends)}
    if aliased:
        alias(graph, ends, places, best)
    else:
        graph.outputs = dict(case.outputs)
    with np.errstate(all="ignore"):
        found, expected, rounded = run(case, best), case.expected(), case.expected(np.float32)
    for name, right in expected.items():
        # what rounding alone can change, or f32 cannot hold, says nothing
        if np.abs(right).max() < 1e6 and np.allclose(rounded[name], right, rtol=1e-4, atol=1e-5 * np.abs(right).max()):
            np.testing.assert_allclose(found[name], right, rtol=1e-3, atol=1e-4 * np.abs(right).max(), err_msg=name)


def alias(graph: Graph, ends: list[Tensor], places: list[int], device: CpuDevice) -> None:
    """Give every result memory, at small offsets, reusing memory after its last use."""
    last = {t: len(graph.nodes) for t in ends}
    for i, node in enumerate(graph.nodes):
        for source in node.src:
            if source is not None:
                root = source.root()[0]
                last[root] = max(last.get(root, 0), i)
        last[node.root()[0]] = max(last.get(node.root()[0], 0), i)
    size = 32 * 6 * 4
    arena = device.alloc(1 << 16)
    live: list[tuple[int, int, int]] = []  # start, stop, last use
    for i, node in enumerate(graph.nodes):
        if node.view_src is not None:
            continue
        # what is read for the last time here is still in use: only row for row could it be written over
        live = [place for place in live if place[2] >= i]
        start = 128 * places[i % len(places)]
        while any(start < stop and begin < start + node.nbytes for begin, stop, _ in live):
            start += 128
        assert node.nbytes <= size
        node.buffer, node.offset = arena, start
        live.append((start, start + node.nbytes, last[node]))


def run(case: Case, device: CpuDevice) -> dict[str, Array]:
    case.bind(device)
    device.submit(case.graph)
    seen = ReferenceDevice(np.float32)
    for tensor in case.outputs.values():
        seen.bind(tensor, np.array(device.read(tensor, 0, tensor.nbytes).result()))
    return {name: seen.get(tensor) for name, tensor in case.outputs.items()}


# --- refusals ---------------------------------------------------------------------------------------------------------


def bound(device: CpuDevice, *ne: int, type: T = T.F32, name: str = "") -> Tensor:
    tensor = new(*ne, type=type, name=name)
    tensor.buffer = device.alloc(tensor.nbytes)
    return tensor


def refuse(device: CpuDevice, result: Tensor, *words: str) -> None:
    result.name = result.name or "culprit"
    graph = Graph()
    graph.output("result", result)
    with pytest.raises(DeviceError) as caught:
        device.prepare(graph)
    for word in (result.op.name, result.name, *words):
        assert word in str(caught.value), caught.value


def test_errors_name_the_operation_and_the_tensor(best: CpuDevice) -> None:
    x = bound(best, 32, 4)
    refuse(best, g.group_norm(x, 2, 1e-5), "does not have")
    refuse(best, g.unary(x, UnaryOp.ELU), "ELU")
    refuse(best, g.unary(g.silu(x), UnaryOp.EXPM1, "later"), "EXPM1")
    refuse(best, g.add(bound(best, 32, 4, type=T.I32), bound(best, 32, 4, type=T.I32)), "I32")
    refuse(best, g.mul_mat(bound(best, 256, 8, type=T.Q8_K), bound(best, 256, 1)), "Q8_K")
    refuse(best, g.get_rows(bound(best, 256, 4, type=T.Q8_K), bound(best, 2, type=T.I32)), "Q8_K")
    refuse(best, g.set_rows(bound(best, 256, 4, type=T.Q4_K), bound(best, 256, 4), bound(best, 4, type=T.I32)), "Q4_K")
    refuse(best, g.cast(bound(best, 256, 4), T.Q6_K), "Q6_K")
    rope = g.rope_ext(bound(best, 8, 1, 4), bound(best, 4, type=T.I32), None, 8, RopeMode.NEOX, 0, 1e4, 1, 0, 1, 32, 1)
    rope.op_params = struct.pack("<5i", 0, 8, 77, 0, 0) + rope.op_params[20:]
    refuse(best, rope, "77")
    odd = g.unary(x, UnaryOp.SILU)
    odd.op_params = struct.pack("<i60x", 99)
    refuse(best, odd, "99")
    q, k = bound(best, 256, 4, 2), bound(best, 256, 8, 2, type=T.Q8_K)
    refuse(best, g.flash_attn_ext(q, k, k, None, 1.0), "Q8_K")
    refuse(best, g.flash_attn_ext(bound(best, 20, 4, 2), *[bound(best, 20, 8, 2)] * 2, None, 1.0), "20")


def test_sources_that_do_not_fit_are_found(best: CpuDevice) -> None:
    """Only graphs of other programs have them; our own builder rejects them."""
    x, y, ids = bound(best, 32, 4), bound(best, 32, 4), bound(best, 4, type=T.I32)
    w = bound(best, 32, 8, type=T.Q8_0)
    for node, sources in (
        (g.silu(x), (bound(best, 16, 4),)),
        (g.silu(x), ()),
        (g.silu(x), (None,)),
        (g.add(x, y), (bound(best, 64, 4), y)),
        (g.get_rows(x, ids), (bound(best, 16, 4), ids)),
        (g.get_rows(x, ids), (x, bound(best, 2, type=T.I32))),
        (g.get_rows(x, ids), (x, bound(best, 4, type=T.F32))),
        (g.set_rows(x, y, ids), (y, bound(best, 3, type=T.I64), x)),
        (g.mul_mat(w, x), (w, bound(best, 64, 4))),
        (g.mul_mat(w, x), (w, bound(best, 32, 3))),
        (g.glu_split(x, y, GluOp.SWIGLU), (x, bound(best, 32, 3))),
    ):
        node.src = sources
        refuse(best, node, "do not fit")


def test_tensors_without_memory_or_outside_it(best: CpuDevice) -> None:
    refuse(best, g.silu(new(8, name="input")), "input", "no memory")
    x = bound(best, 8, 4, name="small")
    x.offset = 1 << 13
    refuse(best, g.silu(x), "small", "ends at byte")
    y = bound(best, 8, 4)
    view = g.view_2d(y, 8, 4, y.nb[1])
    view.view_offs = 4096
    refuse(best, g.silu(view), "ends at byte")
    a = g.silu(y)
    outside = g.view_2d(a, 8, 4, a.nb[1])
    outside.view_offs = 1 << 40
    refuse(best, g.mul_mat(bound(best, 8, 8), outside), "outside")


def test_a_graph_is_compiled_once(best: CpuDevice) -> None:
    graph = Graph()
    graph.output("y", g.silu(bound(best, 8)))
    first = best.prepare(graph)
    best.submit(graph)
    assert best._programs.get(graph) is first
    assert len(Compiler(graph, cpu_target(best.jit.lowering, 2)).compile()) == 1


def test_products_of_few_columns_ask_for_the_next_weights(best: CpuDevice) -> None:
    """The last one for the first one's, which the next run begins with; one of many columns asks for none."""
    w = [bound(best, 256, 64, type=type) for type in (T.Q4_K, T.Q8_0, T.Q6_K)]
    x, wide = bound(best, 256, 3), bound(best, 256, 40)
    graph = Graph()
    for i, product in enumerate((g.mul_mat(w[0], x), g.mul_mat(w[0], wide), g.mul_mat(w[1], x), g.mul_mat(w[2], x))):
        graph.output(f"y{i}", product)
    products = [o.fields for o in Compiler(graph, cpu_target(best.jit.lowering, 2)).compile() if "w" in o.fields]
    few = [fields for fields in products if "next" in fields]
    assert [f["next"] for f in few] == [f["w"] for f in (*few[1:], few[0])] and (len(products), len(few)) == (4, 3)
    for fields, weight in zip(few, (*w[1:], w[0]), strict=True):
        assert fields["next_panels"] * fields["next_panel_bytes"] == weight.nbytes


def test_views_that_are_not_listed_read_all_the_same(device: CpuDevice) -> None:
    """A result that only such a view reads must be in memory, although the chain holds it in registers."""
    x, y = new(16, 4), new(16, 4)
    a = g.silu(x)
    b = g.scale(a, 2.0)
    end = g.add(b, g.view_2d(a, 16, 4, a.nb[1]))
    case = Case({"end": end, "also": g.mul(end, y)}, {x: values(16, 4), y: values(16, 4, seed=1)})
    case.graph.nodes = [node for node in case.graph.nodes if node.op is not Op.VIEW]
    right = Case({"end": g.add(b, a)}, case.data).expected()["end"]
    assert np.allclose(case.run(device)["end"], right, rtol=1e-5)
