"""Compilation for a device that is not the CPU: its buffers, constants, products and name."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import pytest
from running import new

from llamado.devices.compile.compiler import Compiler, OperationEmitters, products_and_attention
from llamado.devices.compile.emitter import Emitter, Target
from llamado.devices.compile.program import Constant, Operation, Place
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.lowerings import PORTABLE
from llamado.devices.device import DeviceError
from llamado.devices.kernel import Kernel
from llamado.ggml import Graph, Op, Tensor, UnaryOp
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


@dataclass
class CardBuffer:
    """Memory that this process cannot touch."""

    size: int
    address: int = 1 << 40


CARD = Target("CARD0", PORTABLE, 2, CardBuffer)


def on_card(*ne: int, type: T = T.F32, name: str = "") -> Tensor:
    tensor = new(*ne, type=type, name=name)
    tensor.buffer, tensor.offset = CardBuffer(tensor.nbytes + 512), 512
    return tensor


def compiled(result: Tensor, target: Target = CARD) -> list[Operation]:
    graph = Graph()
    graph.output("y", result)
    return Compiler(graph, target).compile()


def test_operations_address_the_buffers_of_the_target() -> None:
    x = on_card(8, 4)
    (operation,) = compiled(g.silu(x))
    assert Place(None, (1 << 40) + 512) in operation.fields.values()


def test_tensors_in_buffers_of_another_device_are_rejected(best: CpuDevice) -> None:
    x = new(8, name="far")
    x.buffer = best.alloc(x.nbytes)
    with pytest.raises(DeviceError, match="tensor far lies on another device"):
        compiled(g.silu(x))


def test_the_end_of_a_buffer_is_checked() -> None:
    x = on_card(8, name="long")
    x.offset += 1
    with pytest.raises(DeviceError, match="tensor long ends at byte 545 of a buffer of 544"):
        compiled(g.silu(x))


def test_errors_of_unsupported_operations_name_the_device() -> None:
    y = g.silu(on_card(8))
    y.op = Op.CONV_3D
    with pytest.raises(DeviceError, match="the CARD0 device does not have this operation"):
        compiled(y)
    y = g.silu(on_card(8))
    y.op_params = struct.pack("<i60x", UnaryOp.EXPM1)
    with pytest.raises(DeviceError, match="the CARD0 device has no function EXPM1"):
        compiled(y)


def test_constants_have_no_address_yet() -> None:
    """A product of several matrices numbers them."""
    product = g.mul_mat(on_card(32, 8, 3, type=T.Q8_0), on_card(32, 1, 3))
    (place,) = [operation.fields["ids"] for operation in compiled(product) if "ids" in operation.fields]
    assert isinstance(place, Place) and isinstance(place.base, Constant)
    assert place.offset == 0 and place.base.values.tolist() == [0, 1, 2]


def test_a_device_emits_products_in_its_own_way() -> None:
    """The emitter of this target gets each product; the shared compiler emits everything else."""
    own = Kernel("card_product", ("y",), lambda *_: None)

    def emitters(out: Emitter) -> OperationEmitters:
        def multiply(node: Tensor) -> None:
            out.emit(own, {}, {"y": out.place(node)}, [], [out.span(node)])

        return {**products_and_attention(out), Op.MUL_MAT: multiply}

    graph = Graph()
    w, x = on_card(32, 8, type=T.Q8_0), on_card(32, 4)
    graph.output("y", g.silu(g.mul_mat(w, x)))
    names = [operation.kernel.name for operation in Compiler(graph, CARD, emitters).compile()]
    assert names == ["card_product", "rows"]
