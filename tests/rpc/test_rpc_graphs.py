"""Decoding of graphs: real graphs stay what they were, invalid ones are rejected."""

from __future__ import annotations

import lzma
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from wire_client import layout, records

from llamado.devices.cpu.memory import CpuBuffer
from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op, TensorFlag
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType as T
from llamado.rpc import wire
from llamado.rpc.worker import decode as graphs
from llamado.rpc.worker.decode import DecodedGraph, decode, tensor_bytes
from llamado.rpc.worker.memory import Region

CAPTURES = sorted((Path(__file__).parents[1] / "ggml" / "captures").glob("*.xz"))
PTR, BASE = 7, 1 << 33


class NoMemory:
    """A buffer that is never accessed."""

    memory = None

    def __init__(self, size: int) -> None:
        self.size = size

    def free(self) -> None:
        pass


def region(ptr: int, base: int, size: int) -> Region:
    return Region(None, NoMemory(size), ptr, base, size)  # type: ignore[arg-type]


def captured(path: Path) -> tuple[wire.GraphCompute, dict[int, Region]]:
    """Return a graph of llama.cpp's server, and regions as large as its use of each buffer."""
    request = wire.read_graph(lzma.decompress(path.read_bytes()))
    tensors = request.tensors
    found = {}
    for ptr in np.unique(tensors["buffer"]).tolist():
        if ptr:
            mine = tensors[tensors["buffer"] == ptr]
            sizes = [tensor_bytes(wire.WireTensor.unpack(record.tobytes())) for record in mine]
            base = int(mine["data"].min())
            found[ptr] = region(ptr, base, max(d - base + s for d, s in zip(mine["data"].tolist(), sizes, strict=True)))
    return request, found


# --- real graphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.name[:20])
def test_real_graphs_are_what_was_sent(path: Path) -> None:
    """Every computed node: operation, type, shape, strides, parameters, sources, place."""
    request, regions = captured(path)
    graph = decode(request, regions).graph
    records = {int(r["id"]): r for r in request.tensors}
    wanted = [records[i] for i in request.nodes.tolist() if records[i]["flags"] & TensorFlag.COMPUTE]
    assert len(graph.nodes) == len(wanted) > 700
    by_buffer = {id(r.buffer): r for r in regions.values()}
    for node, record in zip(graph.nodes, wanted, strict=True):
        assert node.name == record["name"].decode()
        assert (node.op, node.type) == (record["op"], record["type"])
        assert (list(node.ne), list(node.nb)) == (record["ne"].tolist(), record["nb"].tolist())
        assert node.op_params == record["op_params"].tobytes()
        sources = [records[i] for i in record["src"].tolist() if i]
        assert [s.name for s in node.src if s is not None] == [s["name"].decode() for s in sources]
        for tensor, sent in [(node, record), *zip(node.src, sources, strict=True)]:
            assert tensor is not None
            root, inside = tensor.root()
            if root.buffer is not None:
                assert by_buffer[id(root.buffer)].base + root.offset + inside == sent["data"]


@pytest.mark.parametrize("path", CAPTURES, ids=lambda p: p.name[:20])
def test_real_activations_need_not_be_in_memory(path: Path) -> None:
    """Only writes into the caches and the results that the client reads keep their places."""
    graph = decode(*captured(path)).graph
    stored = [n for n in graph.nodes if not n.is_noop and n.root()[0].buffer is not None]
    results = {n.name for n in stored if n.op is not Op.SET_ROWS}
    assert results <= {"result_norm", "result_output"}
    assert ("result_output" in results) == ("graph_1" not in path.name or "smollm2" in path.name)
    layers = 30 if "smollm2" in path.name else 18
    assert len([n for n in stored if n.op is Op.SET_ROWS]) == 2 * layers


def test_results_with_other_uses_keep_their_place() -> None:
    """A use that is missing in this graph belongs to another part of the program."""
    graph, places = small(more=1)
    middle = graph.nodes[0]
    request = request_of(graph, places)
    assert decoded(request).graph.nodes[0].buffer is None
    changed = edit(request, middle, use_count=2)
    assert decoded(changed).graph.nodes[0].buffer is not None
    changed = edit(request, middle, flags=int(TensorFlag.COMPUTE | TensorFlag.OUTPUT))
    assert decoded(changed).graph.nodes[0].buffer is not None


def test_sources_of_the_last_node_keep_their_place() -> None:
    """A program that stops there to inspect it, as llama-imatrix does at each product, inspects its sources, too."""
    graph, places = small()
    assert all(node.buffer is not None for node in decoded(request_of(graph, places)).graph.nodes)
    graph, places = small(more=3)
    stored = [node.buffer is not None for node in decoded(request_of(graph, places)).graph.nodes]
    assert stored == [False, False, False, True, True]


def test_overlapping_activations_keep_their_places() -> None:
    """Separate places would need more memory than the client has, so ggml's planner is not used."""
    a = g.new_tensor(T.F32, 64, 4, name="a")
    graph = Graph()
    parts = [g.scale(a, float(i)) for i in range(8)]
    total = parts[0]
    for part in parts[1:]:
        total = g.add(total, part)
    graph.output("sum", total)
    places = dict.fromkeys([a, *graph.nodes], 0)
    request = wire.graph_request(0, *records(graph, PTR, BASE, places))
    found = decode(request, {PTR: region(PTR, BASE, 2048)})
    assert all(node.buffer is not None for node in found.graph.nodes)
    found = decode(request, {PTR: region(PTR, BASE, 1 << 20)})
    assert sum(node.buffer is not None for node in found.graph.nodes) == 3  # the last one, and what it reads


def test_nodes_without_the_flag_compute_are_data() -> None:
    graph, places = small()
    request = edit(request_of(graph, places), graph.nodes[0], flags=0)
    found = decoded(request).graph
    assert [n.name for n in found.nodes] == ["result"]
    source = found.nodes[0].src[0]
    assert source is not None and source.op is Op.NONE and source.buffer is not None


def test_unplaced_activations() -> None:
    graph, places = small()
    middle, result = graph.nodes
    places = {t: at for t, at in places.items() if t is not middle}
    found = decoded(request_of(graph, places))
    assert found.graph.nodes[0].buffer is None
    assert found.graph.nodes[1].buffer is not None
    assert result.nbytes


def test_a_view_whose_address_differs_from_its_owners() -> None:
    """The address counts."""
    a = g.new_tensor(T.F32, 64, 4, name="a")
    view = g.view_1d(a, 64, 256, name="v")
    graph = Graph()
    graph.output("r", g.scale(view, 2.0, name="r"))
    places = {a: 0, graph.nodes[-1]: 4096}
    request = request_of(graph, places)
    source = decoded(request).graph.nodes[-1].src[0]
    assert (
        source is not None and source.view_src is not None and (source.view_offs, source.root()[0].offset) == (256, 0)
    )
    moved = decoded(edit(request, view, data=BASE + 512)).graph.nodes[-1].src[0]
    assert moved is not None and moved.view_src is None and moved.offset == 512
    unplaced = decoded(edit(request, view, data=0, buffer=0)).graph.nodes[-1].src[0]
    assert unplaced is not None and unplaced.view_src is not None and unplaced.root() == (unplaced.view_src, 256)


def test_a_result_read_by_a_moved_view_is_stored() -> None:
    graph = Graph()
    a = g.new_tensor(T.F32, 64, 4, name="a")
    middle = g.scale(a, 2.0, name="middle")
    view = g.view_1d(middle, 64, 256, name="v")
    graph.output("r", g.scale(g.scale(view, 2.0), 2.0, name="r"))
    places = {a: 0, middle: 1024, graph.nodes[-2]: 4096, graph.nodes[-1]: 8192}
    request = request_of(graph, places)
    assert decoded(request).graph.nodes[0].buffer is None
    assert decoded(edit(request, view, data=BASE + 1024)).graph.nodes[0].buffer is not None


def test_views_of_memory_on_other_devices() -> None:
    """A cache that stays with the server (-nkvo): its views are nodes, and no operation reads them."""
    graph, places = small()
    cache = g.new_tensor(T.F16, 64, 16, name="cache")
    graph.expand(g.view_2d(cache, 64, 4, 128, name="view"))
    found = decoded(request_of(graph, places))
    assert [n.name for n in found.graph.nodes] == ["middle", "result", "view"]


def test_in_place_writes_stay_views() -> None:
    """SET_ROWS writes into its cache; a cast has its own result as its destination."""
    cache = g.new_tensor(T.F16, 64, 16, name="cache")
    x, ids = g.new_tensor(T.F32, 64, 2, name="x"), g.new_tensor(T.I64, 2, name="ids")
    graph = Graph()
    graph.expand(g.set_rows(cache, x, ids, name="set"))
    graph.output("cast", g.cast(x, T.F16, name="cast"))
    places, _ = layout([cache, x, ids, graph.nodes[-1]])
    found = decoded(request_of(graph, places)).graph
    written = found.nodes[0].view_src
    assert written is not None and written.name == "cache" and written.buffer is not None
    assert found.nodes[1].src[1] is found.nodes[1]


# --- invalid graphs ---------------------------------------------------------------------------------------------------


def small(more: int = 0) -> tuple[Graph, dict[Tensor, int]]:
    """Return a graph: middle = a + b, result = 2 middle, then `more` operations."""
    a, b = g.new_tensor(T.F32, 64, 4, name="a"), g.new_tensor(T.F32, 64, 4, name="b")
    graph = Graph()
    x = g.scale(g.add(a, b, name="middle"), 2.0, name="result")
    for _ in range(more):
        x = g.scale(x, 2.0)
    graph.output("x", x)
    places, _ = layout([a, b, *graph.nodes])
    return graph, places


def request_of(graph: Graph, places: Mapping[Tensor, int]) -> wire.GraphCompute:
    return wire.graph_request(0, *records(graph, PTR, BASE, dict(places)))


def decoded(request: wire.GraphCompute) -> DecodedGraph:
    return decode(request, {PTR: region(PTR, BASE, 1 << 16)})


def edit(request: wire.GraphCompute, tensor: Tensor | str, **fields: Any) -> wire.GraphCompute:
    """Return the request with fields of one tensor changed."""
    name = (tensor if isinstance(tensor, str) else tensor.name).encode()
    changed = request.tensors.copy()
    (at,) = np.flatnonzero(changed["name"] == name)
    for key, value in fields.items():
        changed[at][key] = value
    return wire.graph_request(0, request.nodes, changed)


def id_of(request: wire.GraphCompute, name: str) -> int:
    return int(request.tensors["id"][request.tensors["name"] == name.encode()][0])


def with_nodes(
    request: wire.GraphCompute, change: Callable[[NDArray[np.uint64]], NDArray[np.uint64]]
) -> wire.GraphCompute:
    return wire.graph_request(0, change(request.nodes), request.tensors)


BAD: dict[str, tuple[Callable[[wire.GraphCompute], wire.GraphCompute], str]] = {
    "no nodes": (lambda r: with_nodes(r, lambda n: n[:0]), "graph of 0 nodes"),
    "unknown node": (lambda r: with_nodes(r, lambda n: n + np.uint64(5)), "not among the graph's tensors"),
    "node twice": (lambda r: with_nodes(r, lambda n: np.append(n, n[:1])), "twice"),
    "backwards": (lambda r: with_nodes(r, lambda n: n[::-1]), "result reads middle, which is not computed before"),
    "id twice": (lambda r: edit(r, "a", id=id_of(r, "b")), "two tensors with the id"),
    "id 0": (lambda r: edit(r, "a", id=0), "id 0"),
    "unknown source": (lambda r: edit(r, "middle", src=[99] + [0] * 9), "tensor middle: its source"),
    "unknown owner": (lambda r: edit(r, "a", view_src=99), "tensor a: its view_src"),
    "itself": (lambda r: edit(r, "middle", src=[id_of(r, "middle")] * 2 + [0] * 8), "middle reads middle"),
    "circle": (
        lambda r: edit(r, "middle", src=[id_of(r, "result"), id_of(r, "b")] + [0] * 8),
        "middle reads result, which is not computed before",
    ),
    "circle of views": (lambda r: edit(edit(r, "a", view_src=id_of(r, "b")), "b", view_src=id_of(r, "a")), "circle"),
    "view of itself": (lambda r: edit(r, "a", view_src=id_of(r, "a")), "circle"),
    "type": (lambda r: edit(r, "a", type=4), "tensor a: type 4 is not known"),
    "huge type": (lambda r: edit(r, "a", type=2**32 - 1), "type 4294967295"),
    "operation": (lambda r: edit(r, "middle", op=101), "tensor middle: operation number 101"),
    "broken block": (lambda r: edit(r, "a", type=int(T.Q8_0), ne=(40, 1, 1, 1), nb=(34, 34, 34, 34)), "of blocks"),
    "overlapping elements": (lambda r: edit(r, "a", nb=(2, 256, 1024, 1024)), "2 bytes apart overlap"),
    "no strides": (lambda r: edit(r, "a", ne=(64, 4096, 4, 1), nb=(4, 0, 0, 0)), "over and over"),
    "overlapping result": (lambda r: edit(r, "result", nb=(4, 4, 4, 4)), "result.*overlap"),
    "huge": (lambda r: edit(r, "a", ne=(2**32 - 1,) * 4, nb=(2**32 - 1,) * 4), "larger than any memory"),
    "overflow to nothing": (lambda r: edit(r, "a", ne=(2**31, 2**31, 4, 1), nb=(4, 2**31, 2**31, 1)), "larger than"),
    "another client's buffer": (lambda r: edit(r, "a", buffer=PTR + 1), "tensor a: buffer 0x8 is not one of this"),
    "address without buffer": (lambda r: edit(r, "a", buffer=0), "an address but no buffer"),
    "no memory at all": (lambda r: edit(r, "a", buffer=0, data=0), "a.*no memory"),
    "before the buffer": (lambda r: edit(r, "a", data=BASE - 4), "inside its buffer"),
    "null": (lambda r: edit(r, "a", data=0), "inside its buffer"),
    "last byte outside": (lambda r: edit(r, "a", data=BASE + (1 << 16) - 1023), "inside its buffer"),
    "far outside": (lambda r: edit(r, "a", data=2**64 - 1), "inside its buffer"),
    "stride outside": (lambda r: edit(r, "a", nb=(4, 1 << 16, 1 << 16, 1 << 16)), "inside its buffer"),
    "view outside": (
        lambda r: edit(r, "a", view_src=id_of(r, "b"), view_offs=8, buffer=0, data=0), "outside the tensor"
    ),
    "view far outside": (
        lambda r: edit(r, "a", view_src=id_of(r, "b"), view_offs=2**64 - 64, buffer=0, data=0), "view 1844674"
    ),
    "one source": (lambda r: edit(r, "middle", src=[id_of(r, "a")] + [0] * 9), "ADD.* needs 2 sources"),
    "no source": (lambda r: edit(r, "result", src=[0] * 10), "SCALE.* needs 1 sources"),
    "shapes": (lambda r: edit(r, "middle", ne=(64, 5, 1, 1)), "ADD: cannot make middle"),
    "product": (lambda r: edit(r, "middle", op=int(Op.MUL_MAT), ne=(5, 4, 1, 1), nb=(4, 20, 80, 80)), "MUL_MAT: "),
    "half result of a product": (
        lambda r: edit(r, "middle", op=int(Op.MUL_MAT), type=int(T.F16), ne=(4, 4, 1, 1), nb=(2, 8, 32, 32)),
        "MUL_MAT: cannot make",
    ),
    "too many row numbers": (
        lambda r: edit(edit(r, "b", type=int(T.I32), ne=(4, 1, 1, 1), nb=(4, 16, 16, 16)), "middle",
                       op=int(Op.GET_ROWS), ne=(64, 4, 8, 1)),
        "GET_ROWS: cannot make",
    ),
    "rows into nothing": (
        lambda r: edit(edit(r, "b", type=int(T.I32), ne=(4, 1, 1, 1), nb=(4, 16, 16, 16)), "middle",
                       op=int(Op.SET_ROWS), ne=(64, 4, 1, 1)),
        "SET_ROWS: cannot make",
    ),
    "a view of nothing": (
        lambda r: edit(r, "middle", op=int(Op.VIEW), buffer=0, data=0), "middle: it has no memory, and nothing"
    ),
    "a look through a view of nothing": (
        lambda r: edit(edit(r, "middle", op=int(Op.RESHAPE), src=[id_of(r, "a")] + [0] * 9, view_src=id_of(r, "a"),
                            buffer=0, data=0), "a", buffer=0, data=0), "middle: it has no memory, and nothing"
    ),
    "gaps in an unplaced result": (
        lambda r: edit(r, "middle", nb=(4, 512, 2048, 2048), buffer=0, data=0), "has gaps"
    ),
    "turned further than long": (
        lambda r: edit(edit(r, "b", type=int(T.I32), ne=(1, 1, 1, 1), nb=(4, 4, 4, 4)), "middle", op=int(Op.ROPE),
                       op_params=np.void(struct.pack("<5i6f5i", 0, 128, 0, 0, 0, 1e4, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0))),
        "ROPE: cannot make",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_graphs_are_rejected(case: str) -> None:
    change, message = BAD[case]
    graph, places = small()
    request = request_of(graph, places)
    decoded(request)
    with pytest.raises(wire.WireError, match=message):
        decoded(change(request))


def test_attention_heads_are_bounded() -> None:
    """Every head size needs its own kernel."""
    for head, fits in ((1024, True), (1032, False)):
        q, k = g.new_tensor(T.F32, head, 1, 1), g.new_tensor(T.F16, head, 256, 1)
        v, mask = g.new_tensor(T.F16, head, 256, 1), g.new_tensor(T.F16, 256, 1)
        graph = Graph()
        graph.output("r", g.flash_attn_ext(q, k, v, mask, 1.0))
        for i, tensor in enumerate((q, k, v, mask)):
            tensor.name = str(i)
        places, size = layout([q, k, v, mask, *graph.nodes])
        request = request_of(graph, places)
        regions = {PTR: region(PTR, BASE, size)}
        if fits:
            decode(request, regions)
        else:
            with pytest.raises(wire.WireError, match="FLASH_ATTN_EXT: cannot"):
                decode(request, regions)


def test_views_of_views_of_views() -> None:
    """Too deep for the compiler."""
    a = g.new_tensor(T.F32, 64, name="a")
    x, graph = a, Graph()
    for i in range(graphs.MAX_VIEWS + 1):
        x = g.reshape(x, 64, name=str(i))
    graph.output("r", g.scale(x, 1.0, name="r"))
    with pytest.raises(wire.WireError, match="a view of a view"):
        decoded(request_of(graph, {a: 0, graph.nodes[-1]: 1024}))


def test_too_many_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_NODES", 100)
    a = g.new_tensor(T.F32, 1, name="a")
    graph = Graph()
    for _ in range(101):
        graph.expand(g.scale(a, 1.0))
    with pytest.raises(wire.WireError, match="graph of 101 nodes"):
        decoded(request_of(graph, {a: 0}))


def test_nothing_to_compute() -> None:
    graph = Graph()
    a = g.new_tensor(T.F32, 64, name="a")
    graph.output("v", g.reshape(a, 8, 8, name="v"))
    assert decoded(request_of(graph, {a: 0})).empty


def test_empty_tensors() -> None:
    """Batches without outputs: llama.cpp sends tensors of no rows, also at the end of its buffer."""
    a, b = g.new_tensor(T.F32, 64, 0, name="a"), g.new_tensor(T.F32, 64, 0, name="b")
    graph = Graph()
    graph.output("r", g.add(a, b, name="r"))
    places = {a: 1 << 16, b: 0, graph.nodes[0]: 0}
    assert decoded(request_of(graph, places)).empty


@pytest.mark.slow
@pytest.mark.parametrize("path", CAPTURES[:1], ids=lambda p: p.name[:20])
def test_noise_in_a_real_graph_is_decoded_or_refused(path: Path) -> None:
    """Only WireError is raised, and decoded tensors lie inside their buffers."""
    request, regions = captured(path)
    rng = np.random.default_rng(0)
    payload = np.frombuffer(request.payload, np.uint8)
    refused = 0
    for _ in range(60):
        noisy = payload.copy()
        at = rng.integers(0, len(noisy), rng.integers(1, 4))
        noisy[at] = rng.integers(0, 256, len(at))
        try:
            found = decode(wire.read_graph(noisy.tobytes()), regions)
        except wire.WireError:
            refused += 1
            continue
        by_buffer = {id(r.buffer): r for r in regions.values()}
        for node in found.graph.nodes:
            for tensor in (node, *node.src):
                if tensor is None:
                    continue
                root, inside = tensor.root()
                if root.buffer is not None:
                    assert root.offset + inside >= 0
                    assert root.offset + inside + tensor.nbytes <= by_buffer[id(root.buffer)].size
                else:
                    assert inside >= 0 and inside + tensor.nbytes <= root.nbytes
    assert 10 < refused < 60


def test_tensor_bytes() -> None:
    assert tensor_bytes(wire.WireTensor(1, 0, 0, (3, 2, 1, 1), (4, 100, 200, 200), 0)) == 112
    assert tensor_bytes(wire.WireTensor(1, int(T.Q4_K), 0, (512, 3, 1, 1), (144, 288, 864, 864), 0)) == 864
    assert tensor_bytes(wire.WireTensor(1, 0, 0, (0, 2, 1, 1), (4, 4, 4, 4), 0)) == 0
    with pytest.raises(wire.WireError, match="type 77"):
        tensor_bytes(wire.WireTensor(1, 77, 0, (1, 1, 1, 1), (4, 4, 4, 4), 0, name=b"x"))
    with pytest.raises(wire.WireError, match="100 is no whole number of Q4_K blocks"):
        tensor_bytes(wire.WireTensor(1, int(T.Q4_K), 0, (100, 1, 1, 1), (144, 288, 864, 864), 0, name=b"x"))


def test_names_need_not_be_text() -> None:
    graph, places = small()
    request = request_of(graph, places)
    changed = request.tensors.copy()
    changed["name"][:] = b"\xff\xfe" + b"a" * 62
    found = decode(wire.graph_request(0, request.nodes, changed), {PTR: region(PTR, BASE, 1 << 16)})
    assert len(found.graph.nodes) == 2


def test_a_region_lies_where_its_buffer_is() -> None:
    graph, places = small()
    buffer = CpuBuffer.allocate(1 << 16)
    mine = Region(None, buffer, PTR, BASE, 1 << 16)  # type: ignore[arg-type]
    found = decode(request_of(graph, places), {PTR: mine}).graph
    assert found.nodes[-1].buffer is buffer and found.nodes[-1].offset == places[graph.nodes[-1]]
