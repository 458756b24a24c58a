"""The tensor language all rooms above share: types, operations, tensors, graphs, shape rules. No arithmetic."""

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
