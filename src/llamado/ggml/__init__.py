"""The tensor graph language shared by the packages above: types, operations, tensors, graphs, shape rules. It computes
nothing.
"""

from llamado.ggml.errors import ShapeError
from llamado.ggml.graph import Graph, new_tensor
from llamado.ggml.ops import GluOp, Op, PrecType, RopeMode, SortOrder, TensorFlag, UnaryOp
from llamado.ggml.tensor import Tensor

__all__ = [
    "GluOp",
    "Graph",
    "Op",
    "PrecType",
    "RopeMode",
    "ShapeError",
    "SortOrder",
    "Tensor",
    "TensorFlag",
    "UnaryOp",
    "new_tensor",
]
