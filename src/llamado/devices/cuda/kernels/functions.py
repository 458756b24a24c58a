"""Functions of the SIMD language on registers of the SIMT language: the same source, and so the same bits."""

from __future__ import annotations

from llamado.devices.cuda.lanes import GROUPS, LaneCode
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.kernels import maths
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.simd import F32, I64
from llamado.gguf.types import TensorType


class Functions:
    """Elementary functions, and loads of number formats."""

    def __init__(self, c: SimtCode) -> None:
        self._lanes = LaneCode(c, GROUPS, c.i64(0), c.i64(0))

    def exp(self, x: Register) -> Register:
        """eˣ (`maths.exp`)."""
        return self._apply(maths.exp, x)

    def tanh(self, x: Register) -> Register:
        """The hyperbolic tangent (`maths.tanh`)."""
        return self._apply(maths.tanh, x)

    def _apply(self, function: maths.Function, x: Register) -> Register:
        (result,) = function(self._lanes, self._lanes.value(F32, [x])).ir
        register: Register = result
        return register

    def load_eight(self, type_: TensorType, row: Register, index: Register) -> Register:
        """Load eight numbers of a row in global memory as f32, from element `index` on: thread i of each eight
        neighbors gets number i. `index` is a multiple of eight.
        """
        lanes = self._lanes
        (result,) = FORMATS[type_].load(lanes, lanes.value(I64, [row]), lanes.value(I64, [index])).ir
        register: Register = result
        return register


def sum_of_eight(c: SimtCode, x: Register) -> Register:
    """The sum of the registers of eight neighboring threads, in the tree of `simd.Code.sum_lanes`."""
    for distance in (4, 2, 1):
        x = x + c.shuffle_xor(x, distance, 8)
    return x
