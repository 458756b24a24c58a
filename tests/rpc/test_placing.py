"""Placement of activations: tensors that live at the same time never overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_gemma3, make_llama

from llamado.devices.device import DeviceError
from llamado.ggml import Graph, TensorFlag
from llamado.ggml import graph as g
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, load_model
from llamado.models.memory import MemoryOptions
from llamado.rpc.client.allocator import activations, plan
from llamado.rpc.client.encode import in_order, wire_graph


def bind(*tensors: Tensor) -> None:
    for tensor in tensors:
        tensor.buffer = object()


def check(graph: Graph, alignment: int = 32) -> int:
    """Run a plan with a number per byte: each operation must read the bytes written for it."""
    size, offsets = plan(graph, lambda t: t.nbytes, alignment)
    memory = np.zeros(size, np.int64)
    marks: dict[Tensor, int] = {}
    for step, node in enumerate(graph.nodes, 1):
        for source in (*node.src, node):
            root = source.root()[0] if source is not None else None
            if root in offsets and root is not node:
                assert root is not None
                at = offsets[root]
                assert len({*memory[at : at + root.nbytes].tolist()}) <= 1
                assert memory[at] == marks[root]
        if node in offsets:
            marks[node] = step
            at = offsets[node]
            assert at % alignment == 0 and at + node.nbytes <= size
            memory[at : at + node.nbytes] = step
    for output in graph.outputs.values():
        root = output.root()[0]
        if root in offsets:
            assert memory[offsets[root]] == marks[root]
    return size


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 200)), min_size=1, max_size=60))
def test_live_activations_are_not_overwritten(steps: list[tuple[int, int, int]]) -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 4)
    bind(x)
    values = [x]
    for a, b, repeat in steps:
        source, other = values[-1 - a % len(values)], values[-1 - b % len(values)]
        if repeat % 5 == 0 and source.ne[0] > 4:
            values.append(g.view_1d(source, 4, 16))
        elif source.ne == other.ne:
            values.append(g.add(source, other))
        else:
            values.append(g.repeat(g.view_1d(source, 4), g.new_tensor(T.F32, 4 * repeat)))
        graph.expand(values[-1])
    graph.output("y", g.scale(values[-1], 2.0))
    check(graph)


def test_memory_is_reused() -> None:
    graph = Graph()
    y = x = graph.input("x", T.F32, 1000)
    bind(x)
    for _ in range(100):
        y = g.add(y, x)
    graph.expand(y)
    assert check(graph) <= 8 * 4032


def test_outputs_are_kept() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 100)
    bind(x)
    first = graph.output("first", g.scale(x, 2.0))
    y = x
    for _ in range(30):
        y = g.add(y, x)
    graph.output("last", y)
    lives = activations(graph)
    assert lives[first][1] == 31 and first.flags & TensorFlag.OUTPUT
    check(graph)


def test_bound_tensors_are_not_placed() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 100)
    y = graph.output("y", g.scale(x, 2.0))
    bind(x, y)
    assert plan(graph, lambda t: t.nbytes, 32) == (0, {})


def test_views_keep_their_source_alive() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 100)
    bind(x)
    shown = g.view_1d(graph.expand(g.scale(x, 2.0)), 10, 40)
    y = x
    for _ in range(20):
        y = g.add(y, x)
    graph.expand(y)
    graph.expand(g.scale(shown, 3.0))
    assert activations(graph)[shown.root()[0]][1] == 21
    check(graph)


def test_data_without_memory_is_an_error() -> None:
    graph = Graph()
    graph.expand(g.scale(graph.input("lonely", T.F32, 100), 2.0))
    with pytest.raises(DeviceError, match="lonely"):
        activations(graph)
    view = Graph()
    view.nodes.append(g.view_1d(g.new_tensor(T.F32, 4, name="unseen"), 2))
    with pytest.raises(DeviceError, match="unseen"):
        activations(view)


def test_sizes_may_be_larger_than_the_tensors() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 10)
    bind(x)
    graph.expand(g.add(g.scale(x, 2.0), g.scale(x, 3.0)))
    size, offsets = plan(graph, lambda t: 1000, 128)
    assert sorted(offsets.values()) == [0, 1024, 2048] and size == 3072


@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_models(make: type, tmp_path: Path) -> None:
    with GGUFFile.open(make(tmp_path / "m.gguf")) as file:
        model = load_model(file)
        kv = model.memory(MemoryOptions(n_cells=256))
        graph = model.build(BatchShape(16, 4, 256), kv)
        bind(*model.weights.values(), *kv.tensors, *graph.inputs.values())
        size = check(graph)
        assert size < sum(t.nbytes for t in activations(graph)) / 2


# --- as it travels ----------------------------------------------------------------------------------------------------


def test_tensors_follow_their_sources() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 8)
    cast = g.cast(g.view_1d(g.scale(x, 2.0), 4), T.F16)  # names itself as a source
    graph.output("y", cast)
    order = in_order(graph)
    assert order[0] is x and len(order) == 4
    place = {t: i for i, t in enumerate(order)}
    for tensor in order:
        for before in (*tensor.src, tensor.view_src):
            assert before is None or before is tensor or place[before] < place[tensor]


def test_a_deep_graph() -> None:
    graph = Graph()
    y = x = graph.input("x", T.F32, 1)
    for _ in range(5000):
        y = g.view_1d(g.scale(y, 1.0), 1)
    graph.nodes.append(y)
    assert len(in_order(graph)) == 10_001 and in_order(graph)[0] is x


def test_strides_that_do_not_fit_the_wire_are_rejected() -> None:
    graph = Graph()
    wide = g.new_tensor(T.F32, 1 << 20, 1 << 12, 2, name="wide")  # 16 GiB from one matrix to the next
    graph.expand(g.view_1d(wide, 4))
    with pytest.raises(DeviceError, match="wide"):
        wire_graph(0, graph, lambda t: (0, 0))
    one = Graph()
    one.expand(g.view_1d(g.new_tensor(T.F32, 1 << 20, 1 << 12), 4))  # such a stride, but nothing steps over it
    assert len(wire_graph(0, one, lambda t: (1, 2)).tensors) == 2


def test_long_names_keep_their_closing_zero() -> None:
    graph = Graph()
    graph.expand(g.scale(g.new_tensor(T.F32, 1, name="n" * 100), 2.0))
    assert [len(t["name"]) for t in wire_graph(0, graph, lambda t: (0, 0)).tensors] == [63, 0]
