"""Shape rules, parameter bytes and node order of the graph functions."""

from __future__ import annotations

import math
from struct import pack

import pytest

from llamado.ggml import GluOp, Graph, Op, PrecType, RopeMode, ShapeError, SortOrder, Tensor, TensorFlag, UnaryOp
from llamado.ggml import graph as g
from llamado.ggml.ops import MAX_SRC, OP_PARAMS_BYTES
from llamado.gguf.types import TensorType as T


def new(*ne: int, type: T = T.F32, name: str = "") -> Tensor:
    return g.new_tensor(type, *ne, name=name)


def params(format: str, *values: float) -> bytes:
    return pack("<" + format, *values).ljust(OP_PARAMS_BYTES, b"\0")


def test_numbers_are_those_of_ggml_0_26() -> None:
    assert len(Op) == 101
    assert (Op.DUP, Op.MUL_MAT, Op.SET_ROWS, Op.ROPE, Op.FLASH_ATTN_EXT) == (1, 29, 42, 48, 74)
    assert (Op.UNARY, Op.GLU) == (91, 100)
    assert (len(UnaryOp), UnaryOp.XIELU, len(GluOp), GluOp.SWIGLU_CLAMP) == (22, 17, 7, 6)


def test_strides_follow_the_type() -> None:
    assert new(576, 5).nb == (4, 2304, 11520, 11520)
    assert new(64, 3, 2, type=T.F16).nb == (2, 128, 384, 768)
    q = new(256, 10, type=T.Q4_K)
    assert (q.nb, q.nbytes) == ((144, 144, 1440, 1440), 1440)
    assert new(64, 7, type=T.Q8_0).nbytes == 7 * 68
    with pytest.raises(ShapeError, match="whole number of Q4_K blocks"):
        new(100, 10, type=T.Q4_K)


def test_tensor_queries() -> None:
    a = new(8, 6, 4)
    view = g.view_2d(a, 4, 6, a.nb[1], offset=16)
    assert (a.nelements, a.nrows, a.nbytes, a.n_dims) == (192, 24, 768, 3)
    assert new(0, 5).nbytes == 0
    assert a.is_contiguous() and not view.is_contiguous() and view.is_contiguous(1)
    assert view.nbytes == 5 * 32 + 16
    assert view.root() == (a, 16)
    assert g.transpose(a).is_transposed()
    # A dimension of 1 may have any stride.
    assert g.permute(new(8, 1, 4), 0, 2, 1, 3).is_contiguous()
    assert view.source(0) is a and view.source(7) is None


@pytest.mark.parametrize(
    ("result", "ne"),
    [
        (g.mul_mat(new(64, 10), new(64, 3)), (10, 3, 1, 1)),
        (g.mul_mat(new(64, 10, 2), new(64, 3, 6, 5)), (10, 3, 6, 5)),
        (g.mul_mat_id(new(64, 10, 8), new(64, 1, 5), new(2, 5, type=T.I32)), (10, 2, 5, 1)),
        (g.get_rows(new(64, 10, 3), new(4, 3, type=T.I32)), (64, 4, 3, 1)),
        (g.concat(new(4, 5, 6), new(4, 2, 6), 1), (4, 7, 6, 1)),
        (g.repeat(new(2, 3), 4, 9, 2), (4, 9, 2, 1)),
        (g.sum_rows(new(4, 5, 6)), (1, 5, 6, 1)),
        (g.repeat_back(new(4, 5, 6), 4, 1, 3), (4, 1, 3, 1)),
        (g.mean(new(4, 5, 6)), (1, 5, 6, 1)),
        (g.sum_all(new(4, 5, 6)), (1, 1, 1, 1)),
        (g.argsort(new(4, 5)), (4, 5, 1, 1)),
        (g.argmax(new(4, 5)), (5, 1, 1, 1)),
        (g.top_k(new(9, 5), 3), (3, 5, 1, 1)),
        (g.argsort_top_k(new(9, 5), 3), (3, 5, 1, 1)),
        (g.glu(new(8, 5), GluOp.SWIGLU), (4, 5, 1, 1)),
        (g.swiglu_split(new(8, 5), new(8, 5)), (8, 5, 1, 1)),
        (g.cont(g.transpose(new(8, 5))), (5, 8, 1, 1)),
        (g.cont(g.transpose(new(8, 5)), 4, 10), (4, 10, 1, 1)),
        (g.permute(new(2, 3, 4, 5), 1, 2, 3, 0), (5, 2, 3, 4)),
        (g.view_1d(new(2, 8), 6, 8), (6, 1, 1, 1)),
        (g.reshape(new(2, 3, 4), 6, 4), (6, 4, 1, 1)),
        (g.soft_max_ext(new(8, 5, 4), new(8, 6, 2, type=T.F16), 1.0), (8, 5, 4, 1)),
        (g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(48, 32, 3), None, 1.0), (48, 9, 5, 1)),
    ],
    ids=lambda value: value.op.name if isinstance(value, Tensor) else None,
)
def test_shapes(result: Tensor, ne: tuple[int, ...]) -> None:
    assert result.ne == ne
    if not result.is_view:
        assert result.is_contiguous()


def test_result_types() -> None:
    q4, ids = new(64, 10, type=T.Q4_0), new(3, type=T.I32)
    assert g.mul_mat(q4, new(64, 3)).type == T.F32
    assert g.get_rows(q4, ids).type == T.F32
    assert g.get_rows(new(64, 10, type=T.I32), ids).type == T.I32
    assert g.argsort(new(4, 5)).type == T.I32
    assert g.dup(new(4, type=T.F16)).type == T.F16
    assert g.cast(new(64), T.Q8_0).type == T.Q8_0
    assert (
        g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3, type=T.F16), new(64, 32, 3, type=T.Q8_0), None, 1.0).type
        == T.F32
    )


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (g.rms_norm(new(4), 1e-5), params("f", 1e-5)),
        (g.norm(new(4), 1e-6), params("f", 1e-6)),
        (g.l2_norm(new(4), 1e-6), params("f", 1e-6)),
        (g.group_norm(new(4, 4, 4), 2, 1e-6), params("if", 2, 1e-6)),
        (g.scale(new(4), 0.25, 3.0), params("ff", 0.25, 3.0)),
        (g.clamp(new(4), -1.0, 2.0), params("ff", -1.0, 2.0)),
        (g.gelu(new(4)), params("i", 8)),
        (g.silu(new(4)), params("i", 10)),
        (g.leaky_relu(new(4), 0.1), params("f", 0.1)),
        (g.xielu(new(4), 30.0, -30.0, 0.5, -1e-6), params("iffff", 17, 30.5, math.log1p(math.exp(-30)), 0.5, -1e-6)),
        (g.swiglu_split(new(4), new(4)), params("ii", 2, 0)),
        (g.geglu_split(new(4), new(4)), params("ii", 1, 0)),
        (g.glu(new(4), GluOp.REGLU, swapped=True), params("ii", 0, 1)),
        (g.swiglu_oai(new(4), new(4), 1.5, 7.0), params("iiff", 3, 0, 1.5, 7.0)),
        (g.concat(new(4), new(4), 0), params("i", 0)),
        (g.argsort(new(4), SortOrder.DESC), params("i", 1)),
        (g.soft_max_ext(new(4), None, 0.5), params("ff", 0.5, 0.0)),
        (g.mul_mat(new(4, 2), new(4, 3)), params("")),
        (g.mul_mat(new(4, 2), new(4, 3), PrecType.F32), params("i", 10)),
        (g.permute(new(2, 3, 4), 0, 2, 1, 3), params("4i", 0, 2, 1, 3)),
        (g.permute(new(2, 3, 4), 1, 0, 3, 2), params("4i", 1, 0, 3, 2)),
        (g.view_1d(new(64), 8, 16), params("Q", 16)),
        (
            g.rope_ext(
                new(64, 9, 5), new(5, type=T.I32), None, 64, RopeMode.NEOX, 8192, 1e5, 0.5, 1.0, 1.25, 32.0, 1.0
            ),
            params("5i6f", 0, 64, 2, 0, 8192, 1e5, 0.5, 1.0, 1.25, 32.0, 1.0),
        ),
        (
            g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(64, 32, 3), None, 0.125, precision=PrecType.F32),
            params("3fi", 0.125, 0.0, 0.0, 10),
        ),
    ],
    ids=lambda value: value.op.name if isinstance(value, Tensor) else None,
)
def test_parameter_bytes(result: Tensor, expected: bytes) -> None:
    assert result.op_params == expected


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: g.mul_mat(new(64, 10, name="w"), new(32, 3)), r"mul_mat: rows of 64 and 32 .*w F32\[64, 10, 1, 1\]"),
        (lambda: g.mul_mat(new(64, 10, 4), new(64, 3, 6)), "dimensions 2 and 3"),
        (lambda: g.mul_mat(g.transpose(new(10, 64)), new(64, 3)), "transposed"),
        (lambda: g.add(new(4, 5), new(3, 5)), "add: whole copies"),
        (lambda: g.reshape(new(4, 5), 3, 7), "20 elements do not fill"),
        (lambda: g.reshape(g.transpose(new(4, 5)), 20), "must be contiguous"),
        (lambda: g.view_1d(new(8), 4, 20), "outside"),
        (lambda: g.view_2d(new(8, 4), 8, 4, 32, 4), "outside"),
        (lambda: g.view_1d(g.view_1d(new(8), 4, 16), 5, 0), "outside"),
        (lambda: g.permute(new(2, 3), 0, 0, 1, 2), "axes"),
        (lambda: g.get_rows(new(4, 5), new(3)), "I32"),
        (lambda: g.get_rows(new(4, 5, 2), new(3, 3, type=T.I32)), "I32"),
        (lambda: g.set_rows(new(4, 5), new(4, 2), new(3, type=T.I64)), "one row number"),
        (lambda: g.set_rows(new(4, 5), new(3, 2), new(2, type=T.I64)), "dimension 0"),
        (lambda: g.set_rows(new(4, 5), new(4, 2, type=T.I32), new(2, type=T.I64)), "F32 or F16"),
        (lambda: g.set_rows(new(4, 5), new(4, 2), new(2)), "I64 or I32"),
        (lambda: g.concat(new(4, 5), new(3, 5), 1), "outside dimension 1"),
        (lambda: g.cpy(new(4), new(5)), "do not fill"),
        (lambda: g.cont(new(4), 5), "do not fill"),
        (lambda: g.cast(new(30), T.Q8_0), "Q8_0 blocks"),
        (lambda: g.repeat(new(4), 6), "whole copies"),
        (lambda: g.soft_max_ext(new(8, 5), new(8, 4, type=T.F16), 1.0), "cover"),
        (lambda: g.soft_max_ext(new(8, 5), None, 1.0, 8.0), "ALiBi"),
        (lambda: g.swiglu_split(new(8, 5), new(8, 4)), "differ"),
        (lambda: g.scale(g.permute(new(8, 5, 2), 0, 2, 1, 3), 2.0), "gaps"),
        (lambda: g.top_k(new(3), 4), "fewer than 4"),
        (lambda: g.flash_attn_ext(new(64, 5, 9), new(64, 32, 2), new(64, 32, 2), None, 1.0), "queries and keys"),
        (lambda: g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(64, 31, 3), None, 1.0), "keys and values"),
        (lambda: g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(64, 32, 3), new(32, 5), 1.0), "F16"),
        (
            lambda: g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(64, 32, 3), new(32, 4, type=T.F16), 1.0),
            "cover",
        ),
        (
            lambda: g.rope_ext(new(64, 9, 5), new(4, type=T.I32), None, 64, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
            "one I32 position for each token",
        ),
        (
            lambda: g.rope_ext(
                new(64, 9, 5), new(5, type=T.I32), None, 48, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0, offset=18
            ),
            "from element 18",
        ),
        (
            lambda: g.rope_ext(new(64, 9, 5), new(5, type=T.I32), new(31), 64, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
            "32 F32 frequency factors",
        ),
        (
            lambda: g.rope_ext(new(64, 9, 5), new(5, type=T.I32), None, 64, 8, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0),
            "mode 8",
        ),
        (lambda: g.new_tensor(T.F32, 1, 2, 3, 4, 5), "1 to 4 dimensions"),
        (lambda: g.new_tensor(T.F32, -1), "1 to 4 dimensions"),
    ],
)
def test_misfits_are_named(wrong: object, says: str) -> None:
    assert callable(wrong)
    with pytest.raises(ShapeError, match=says):
        wrong()


def test_views_of_views_refer_to_the_owner() -> None:
    a = new(8, 6)
    b = g.view_2d(a, 8, 4, a.nb[1], offset=64)
    c = g.view_1d(b, 8, offset=32)
    assert c.src == (b,)
    assert (c.view_src, c.view_offs) == (a, 96)
    assert c.op_params == params("Q", 32)  # the offset as given, not from the owner
    d = g.reshape(c, 4, 2)
    assert (d.view_src, d.view_offs, d.src) == (a, 96, (c,))


def test_writes_are_views_of_their_destination() -> None:
    cache, rows, ids = new(64, 32, type=T.F16), new(64, 3), new(3, type=T.I64)
    written = g.set_rows(cache, rows, ids)
    assert (written.view_src, written.type, written.ne, written.nb) == (cache, T.F16, cache.ne, cache.nb)
    assert written.src == (rows, ids, cache)
    target = g.view_1d(cache, 64, 128)
    copied = g.cpy(new(64), target)
    assert (copied.view_src, copied.view_offs, copied.src[1]) == (cache, 128, target)


def test_optional_sources_have_places() -> None:
    pos = new(5, type=T.I32)
    rope = g.rope_ext(new(64, 9, 5), pos, None, 64, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)
    assert rope.src[1:] == (pos, None)
    attention = g.flash_attn_ext(new(64, 5, 9), new(64, 32, 3), new(64, 32, 3), None, 1.0)
    assert attention.src[3:] == (None, None)
    assert len(attention.src) <= MAX_SRC


def test_order_is_depth_first_sources_left_to_right() -> None:
    x, y, w = new(4, name="x"), new(4, name="y"), new(4, name="w")
    left = g.mul(g.sqr(x), w)
    right = g.sub(y, g.sqr(x))
    top = g.add(left, right)
    graph = Graph()
    assert graph.expand(top) is top
    assert [n.op for n in graph.nodes] == [Op.SQR, Op.MUL, Op.SQR, Op.SUB, Op.ADD]
    assert graph.leafs == [x, w, y]
    assert all(n.flags & TensorFlag.COMPUTE for n in graph.nodes)
    assert not any(leaf.flags & TensorFlag.COMPUTE for leaf in graph.leafs)


def test_expanding_again_adds_only_what_is_new() -> None:
    x = new(4)
    first = g.sqr(x)
    graph = Graph()
    graph.expand(first)
    graph.expand(first)
    graph.expand(g.add(first, x))
    assert [n.op for n in graph.nodes] == [Op.SQR, Op.ADD]
    assert graph.leafs == [x]
    assert graph.use_counts() == {x: 2, first: 1}


def test_a_source_used_twice_comes_once() -> None:
    x = new(4)
    shared = g.sqr(x)
    graph = Graph()
    graph.expand(g.mul(g.add(shared, shared), shared))
    assert [n.op for n in graph.nodes] == [Op.SQR, Op.ADD, Op.MUL]


def test_a_destination_named_by_itself_ends() -> None:
    """CPY made by `cast` has itself as second source, as in ggml."""
    graph = Graph()
    graph.expand(g.cast(new(4), T.F16))
    assert [n.op for n in graph.nodes] == [Op.CPY]


def test_graphs_may_be_deeper_than_pythons_stack() -> None:
    x = new(4)
    for _ in range(5000):
        x = g.sqr(x)
    graph = Graph()
    graph.expand(x)
    assert len(graph.nodes) == 5000


def test_inputs_and_outputs_are_named() -> None:
    graph = Graph()
    x = graph.input("x", T.F32, 4)
    y = graph.output("y", g.sqr(x))
    assert (graph.inputs, graph.outputs) == ({"x": x}, {"y": y})
    assert x.flags == TensorFlag.INPUT
    assert y.flags == TensorFlag.OUTPUT | TensorFlag.COMPUTE


def test_tensors_without_gaps_share_shapes_and_strides() -> None:
    a, b = g.new_tensor(T.F32, 64, 1000), g.new_tensor(T.F32, 64, 1000)
    one, other = g.add(a, b), g.mul(a, b)
    assert one.nb is other.nb and one.ne is other.ne and one.nb == (4, 256, 256000, 256000)
    assert g.add(g.new_tensor(T.F32, 64, 1001), g.new_tensor(T.F32, 64, 1001)).ne == (64, 1001, 1, 1)


def test_a_compact_graph_still_grows() -> None:
    graph = g.Graph()
    a = g.new_tensor(T.F32, 8)
    twice = graph.expand(g.add(a, a))
    graph.compact()
    graph.expand(twice)
    square = graph.expand(g.mul(twice, twice))
    assert graph.nodes == [twice, square] and graph.leafs == [a]
