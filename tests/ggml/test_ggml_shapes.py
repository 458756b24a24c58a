"""Shape rules, shared by graph builders, the wire and devices."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from llamado.devices.compile.checks import check_node
from llamado.devices.device import DeviceError
from llamado.ggml import GluOp, Op, ShapeError, SortOrder, Tensor, UnaryOp, shapes
from llamado.ggml import graph as g
from llamado.ggml.shapes import check_result
from llamado.ggml.tensor import contiguous_strides
from llamado.gguf.types import TensorType as T


def new(*ne: int, type: T = T.F32) -> Tensor:
    return g.new_tensor(type, *ne)


def made(op: Op, a: Tensor, *ne: int, params: bytes = bytes(64), others: tuple[Tensor, ...] = ()) -> Tensor:
    """A node of an operation that the builder does not have."""
    shape = (*ne, 1, 1, 1)[:4]
    return Tensor(a.type, shape, contiguous_strides(a.type, shape), op, (a, *others), params)


def rope(a: Tensor, pos: Tensor, factors: Tensor | None = None) -> Tensor:
    return g.rope_ext(a, pos, factors, 8, 0, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)


def ids(*ne: int) -> Tensor:
    return new(*ne, type=T.I32)


X = (8, 5, 3)
# Two heads of eight elements; twelve tokens, which are four of each of three sequences.
HEADS = new(8, 2, 12)
DELTA = (*(new(8, 2, 4, 3),) * 3, *(new(1, 2, 4, 3),) * 2, new(8, 8, 2, 3))
SCAN = (new(16, 8, 2, 7), new(8, 2, 4, 3), new(2, 4, 3), new(1, 2), *(new(16, 1, 4, 3),) * 2)
SCORED = (new(16, 1, 9), new(3, 5), new(9, 5, type=T.F16))
# Three streams of five tokens, or what four of them mix by.
STREAMS, MADE, PARTS, MIXING = new(8, 3, 5), new(8, 5), new(3, 5), new(3, 3, 5)
MIXES = (new(24, 5), new(3), new(24))
NODES: dict[Op, Callable[[], Tensor]] = {
    Op.ADD: lambda: g.add(new(*X), new(8, 1)),
    Op.SUB: lambda: g.sub(new(*X), new(8, 5)),
    Op.MUL: lambda: g.mul(new(*X), new(1)),
    Op.DIV: lambda: g.div(new(*X), new(*X)),
    Op.ADD_ID: lambda: g.add_id(new(8, 2, 3), new(8, 4), ids(2, 3)),
    Op.DUP: lambda: g.dup(new(*X)),
    Op.CPY: lambda: g.cast(new(*X), T.F16),
    Op.CONT: lambda: g.cont(g.transpose(new(8, 5))),
    Op.GLU: lambda: g.glu(new(*X), GluOp.SWIGLU),
    Op.MUL_MAT: lambda: g.mul_mat(new(8, 7), new(*X)),
    Op.MUL_MAT_ID: lambda: g.mul_mat_id(new(8, 7, 4), new(8, 2, 3), ids(2, 3)),
    Op.GET_ROWS: lambda: g.get_rows(new(8, 9), ids(4)),
    Op.SET_ROWS: lambda: g.set_rows(new(8, 9), new(8, 4), new(4, type=T.I64)),
    Op.ROPE: lambda: rope(new(*X), ids(3)),
    Op.SOFT_MAX: lambda: g.soft_max_ext(new(*X), new(8, 6, type=T.F16), 1.0),
    Op.FLASH_ATTN_EXT: lambda: g.flash_attn_ext(
        new(64, 5, 4), new(64, 32, 2), new(64, 32, 2), new(32, 5, type=T.F16), 1.0
    ),
    Op.CONCAT: lambda: g.concat(new(*X), new(8, 2, 3), 1),
    Op.REPEAT: lambda: g.repeat(new(2, 3, 4, 5), 4, 3, 4, 5),
    Op.REPEAT_BACK: lambda: g.repeat_back(new(4, 6, 4), 2, 3),
    Op.PAD: lambda: made(Op.PAD, new(*X), 11, 5, 3, params=struct.pack("<8i32x", 1, 2, 0, 0, 0, 0, 0, 0)),
    Op.POOL_2D: lambda: made(Op.POOL_2D, new(*X), 4, 4, 3, params=struct.pack("<7i36x", 0, 2, 2, 2, 1, 0, 0)),
    Op.LIGHTNING_INDEXER: lambda: made(Op.LIGHTNING_INDEXER, new(16, 3, 5), 9, 5, others=SCORED),
    Op.DSV4_HC_PRE: lambda: g.read_streams(STREAMS, PARTS),
    Op.DSV4_HC_POST: lambda: g.add_to_streams(MADE, STREAMS, PARTS, MIXING),
    Op.DSV4_HC_COMB: lambda: g.mix_streams(*MIXES, 1e-6, 3),
    Op.SUM: lambda: g.sum_all(new(*X)),
    Op.SUM_ROWS: lambda: g.sum_rows(new(*X)),
    Op.MEAN: lambda: g.mean(new(*X)),
    Op.ARGMAX: lambda: g.argmax(new(8, 5)),
    Op.ARGSORT: lambda: g.argsort(new(*X), SortOrder.ASC),
    Op.TOP_K: lambda: g.top_k(new(*X), 3),
    Op.NORM: lambda: g.norm(new(*X), 1e-5),
    Op.RMS_NORM: lambda: g.rms_norm(new(*X), 1e-5),
    Op.L2_NORM: lambda: g.l2_norm(new(*X), 1e-5),
    Op.GROUP_NORM: lambda: g.group_norm(new(*X), 1, 1e-5),
    Op.SCALE: lambda: g.scale(new(*X), 2.0),
    Op.UNARY: lambda: g.unary(new(*X), UnaryOp.SILU),
    Op.SQR: lambda: g.sqr(new(*X)),
    Op.SQRT: lambda: g.sqrt(new(*X)),
    Op.LOG: lambda: g.log(new(*X)),
    Op.SIN: lambda: g.sin(new(*X)),
    Op.COS: lambda: g.cos(new(*X)),
    Op.CLAMP: lambda: g.clamp(new(*X), 0.0, 1.0),
    Op.FILL: lambda: g.fill(new(*X), 1.0),
    Op.CUMSUM: lambda: g.cumsum(new(*X)),
    Op.LEAKY_RELU: lambda: g.leaky_relu(new(*X), 0.1),
    Op.DIAG_MASK_INF: lambda: made(Op.DIAG_MASK_INF, new(*X), *X),
    Op.DIAG_MASK_ZERO: lambda: made(Op.DIAG_MASK_ZERO, new(*X), *X),
    Op.GATED_DELTA_NET: lambda: g.gated_delta_net(*DELTA),
    Op.GATED_LINEAR_ATTN: lambda: g.gated_linear_attn(*(HEADS,) * 4, new(128, 3), 1.0),
    Op.RWKV_WKV6: lambda: g.rwkv_wkv6(*(HEADS,) * 3, new(8, 2), HEADS, new(128, 3)),
    Op.RWKV_WKV7: lambda: g.rwkv_wkv7(*(HEADS,) * 6, new(128, 3)),
    Op.SSM_CONV: lambda: g.ssm_conv(new(9, 5, 3), new(4, 5)),
    Op.SSM_SCAN: lambda: g.ssm_scan(*SCAN, ids(3)),
}


def test_every_rule_has_an_example() -> None:
    assert set(NODES) == set(shapes._RULES)


@pytest.mark.parametrize("op", NODES, ids=lambda op: op.name)
def test_what_is_built_is_what_is_checked(op: Op) -> None:
    """The check accepts the built result, and rejects other shapes, other types, and a missing source."""
    node = NODES[op]()
    assert node.op is op
    check_result(node)
    type_, ne = node.type, node.ne
    for axis in (0, 2, 3) if op is Op.SET_ROWS else range(4):  # what rows are written into may have any number
        node.ne = (*ne[:axis], 13 * ne[axis] + 1, *ne[axis + 1 :])  # type: ignore[assignment]
        with pytest.raises(ShapeError, match=op.name):
            check_result(node)
    node.ne = ne
    if op not in (Op.CPY, Op.ADD, Op.SET_ROWS):  # their results have the type that was asked for
        node.type = T.F16 if type_ is not T.F16 else T.F32
        with pytest.raises(ShapeError, match=f"{op.name}: cannot make unnamed .*: the result is {type_.name}"):
            check_result(node)
    node.type, node.src = type_, ()
    with pytest.raises(ShapeError, match=r"needs \d sources"):
        check_result(node)


K, V, MASK = new(64, 32, 2), new(64, 32, 2), new(32, 5, type=T.F16)
# A builder, and sources that it and everybody else refuses.
MISFITS: list[tuple[Op, Callable[..., Tensor], tuple[Tensor, ...]]] = [
    (Op.ADD, g.add, (new(8, 5), new(8, 3))),
    (Op.MUL, g.mul, (new(8, 5), new(3))),
    (Op.GET_ROWS, g.get_rows, (new(8, 9), new(4))),
    (Op.GET_ROWS, g.get_rows, (new(8, 9, 2), ids(4, 3))),
    (Op.CONCAT, lambda a, b: g.concat(a, b, 1), (new(*X), new(7, 2, 3))),
    (Op.MUL_MAT, g.mul_mat, (new(9, 7), new(*X))),
    (Op.MUL_MAT, g.mul_mat, (new(8, 7, 2), new(*X))),
    (Op.MUL_MAT_ID, g.mul_mat_id, (new(8, 7, 4), new(8, 2, 3), new(2, 3))),
    (Op.MUL_MAT_ID, g.mul_mat_id, (new(8, 7, 4), new(8, 2, 3), ids(2, 4))),
    (Op.ADD_ID, g.add_id, (new(8, 2, 3), new(8, 4), ids(2, 4))),
    (Op.ARGMAX, g.argmax, (new(*X),)),
    (Op.CUMSUM, g.cumsum, (new(*X, type=T.F16),)),
    (Op.REPEAT_BACK, lambda a: g.repeat_back(a, 2, 3), (new(8, 2),)),
    (Op.ROPE, rope, (new(*X), ids(4))),
    (Op.ROPE, rope, (new(*X), new(3))),
    (Op.ROPE, rope, (new(*X), ids(3), new(3))),
    (Op.SOFT_MAX, lambda a, mask: g.soft_max_ext(a, mask, 1.0), (new(*X), new(8, 4))),
    (Op.SOFT_MAX, lambda a, mask: g.soft_max_ext(a, mask, 1.0), (new(*X), ids(8, 5))),
    (Op.FLASH_ATTN_EXT, lambda *s: g.flash_attn_ext(*s, 1.0), (new(64, 5, 3), K, V, MASK)),
    (Op.FLASH_ATTN_EXT, lambda *s: g.flash_attn_ext(*s, 1.0), (new(64, 5, 4), K, new(64, 31, 2), MASK)),
    (Op.FLASH_ATTN_EXT, lambda *s: g.flash_attn_ext(*s, 1.0), (new(64, 5, 4), K, V, new(32, 4, type=T.F16))),
    (Op.GATED_DELTA_NET, g.gated_delta_net, (*DELTA[:5], new(8, 8, 2, 2))),
    (Op.GATED_DELTA_NET, g.gated_delta_net, (new(8, 3, 4, 3), *DELTA[1:])),
    (Op.GATED_LINEAR_ATTN, lambda *s: g.gated_linear_attn(*s, 1.0), (*(HEADS,) * 3, new(8, 2, 11), new(128, 3))),
    (Op.RWKV_WKV6, g.rwkv_wkv6, (*(HEADS,) * 3, new(8, 3), HEADS, new(128, 3))),
    (Op.RWKV_WKV7, g.rwkv_wkv7, (*(HEADS,) * 6, new(128, 5))),
    (Op.SSM_CONV, g.ssm_conv, (new(9, 5, 3), new(4, 6))),
    (Op.SSM_CONV, g.ssm_conv, (new(3, 5, 3), new(5, 5))),
    (Op.SSM_SCAN, g.ssm_scan, (*SCAN, new(3))),
    (Op.SSM_SCAN, g.ssm_scan, (*SCAN[:2], new(2, 4, 2), *SCAN[3:], ids(3))),
    (Op.GLU, lambda a, b: g.glu_split(a, b, GluOp.SWIGLU), (new(8, 5), new(8, 4))),
]


@pytest.mark.parametrize("case", range(len(MISFITS)), ids=lambda i: f"{MISFITS[i][0].name}-{i}")
def test_builder_wire_and_device_refuse_for_one_reason(case: int) -> None:
    op, build, sources = MISFITS[case]
    with pytest.raises(ShapeError) as built:
        build(*sources)
    node = NODES[op]()
    node.src = sources
    with pytest.raises(ShapeError) as sent:
        check_result(node)
    with pytest.raises(DeviceError) as compiled:
        check_node(node)
    assert built.value.reason in str(sent.value)
    assert built.value.reason in str(compiled.value)


@pytest.mark.parametrize(
    ("op", "sources", "params"),
    [
        (Op.POOL_2D, (new(*X),), (0, 0, 2, 2, 1, 0, 0)),
        (Op.POOL_2D, (new(*X),), (0, 2, 2, 0, 1, 0, 0)),
        (Op.POOL_2D, (new(*X),), (0, 2, 2, 2, 1, -1, 0)),
        (Op.POOL_2D, (new(*X),), (0, 9, 2, 2, 1, 0, 0)),
        (Op.LIGHTNING_INDEXER, (new(16, 3, 5, type=T.F16), *SCORED), ()),
        (Op.LIGHTNING_INDEXER, (new(8, 3, 5), *SCORED), ()),
        (Op.LIGHTNING_INDEXER, (new(16, 4, 5), *SCORED), ()),
        (Op.LIGHTNING_INDEXER, (new(16, 3, 5), *SCORED[:2], new(8, 5, type=T.F16)), ()),
        (Op.DSV4_HC_PRE, (STREAMS, new(4, 5)), ()),
        (Op.DSV4_HC_PRE, (STREAMS, new(3, 5, type=T.F16)), ()),
        (Op.DSV4_HC_PRE, (STREAMS, PARTS), (0, 1, 0, 0, 0, 0, 0)),
        (Op.DSV4_HC_POST, (new(7, 5), STREAMS, PARTS, MIXING), ()),
        (Op.DSV4_HC_POST, (MADE, STREAMS, new(3, 4), MIXING), ()),
        (Op.DSV4_HC_POST, (MADE, STREAMS, PARTS, new(3, 2, 5)), ()),
        (Op.DSV4_HC_COMB, (new(23, 5), *MIXES[1:]), ()),
        (Op.DSV4_HC_COMB, (MIXES[0], new(2), MIXES[2]), ()),
        (Op.DSV4_HC_COMB, (*MIXES[:2], new(23)), ()),
        (Op.DSV4_HC_COMB, MIXES, (0, 0, 0, 0, 0, 0, 0)),
        (Op.DSV4_HC_COMB, MIXES, (0, 2000, 0, 0, 0, 0, 0)),
    ],
)
def test_what_only_others_build_is_refused(op: Op, sources: tuple[Tensor, ...], params: tuple[int, ...]) -> None:
    node = NODES[op]()
    node.src = sources
    if params:
        node.op_params = struct.pack("<7i36x", *params)
    with pytest.raises(ShapeError):
        check_result(node)
    with pytest.raises(DeviceError):
        check_node(node)


def test_a_head_is_bounded_where_graphs_come_from_elsewhere() -> None:
    wide = shapes.MAX_HEAD + 8
    node = g.flash_attn_ext(new(wide, 1, 1), new(wide, 8, 1), new(wide, 8, 1), None, 1.0)
    with pytest.raises(ShapeError, match="a head has at most"):
        check_result(node)


@pytest.mark.parametrize("sinks", [new(3), new(4, type=T.F16)], ids=["too few", "type"])
def test_sinks_are_one_for_each_head(sinks: Tensor) -> None:
    for node in (g.soft_max_ext(new(8, 5, 4), None, 1.0), NODES[Op.FLASH_ATTN_EXT]()):
        n = 2 if node.op is Op.SOFT_MAX else 4
        node.src = (*node.src[:n], new(4))
        check_result(node)
        node.src = (*node.src[:n], sinks)
        with pytest.raises(ShapeError, match="one F32 sink"):
            check_result(node)


def test_positions_in_four_sections() -> None:
    node = NODES[Op.ROPE]()
    node.op_params = struct.pack("<5i44x", 0, 8, 8, 0, 0)
    with pytest.raises(ShapeError, match="four I32 positions"):
        check_result(node)
    node.src = (node.src[0], ids(12))
    check_result(node)
