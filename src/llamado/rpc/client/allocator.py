"""Placement of activations in the compute buffer of a ggml worker, which does not place them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamado.devices.device import DeviceError
from llamado.devices.first_fit import Lifetime, place
from llamado.ggml.graph import Graph
from llamado.ggml.ops import TensorFlag
from llamado.ggml.tensor import Tensor

_LINGER = 4
"""Operations for which memory is not reused after its last use.

Back ends fuse neighbors, and a fused operation reads the first one's sources while it writes the last one's result.
"""
_OUTPUT = int(TensorFlag.OUTPUT)


class Plan(NamedTuple):
    """Size of the compute buffer in bytes, and the offset of each activation that owns memory."""

    size: int
    offsets: dict[Tensor, int]


def activations(graph: Graph) -> dict[Tensor, tuple[int, int]]:
    """Return the tensors that need memory, with the first and last operation that uses them or a view of them.

    Raises DeviceError for data without memory: a tensor that no operation of the graph computes.
    """
    lives: dict[Tensor, tuple[int, int]] = {}
    step = 0
    for node in graph.nodes:
        if node.view_src is None and node.buffer is None:
            lives[node] = (step, step)
        for tensor in (*node.src, node):
            root = None if tensor is None else tensor.root()[0]
            if root is None or root.buffer is not None:
                continue
            if root not in lives:
                raise DeviceError(f"tensor {root.name or '?'} has neither memory nor an operation that computes it")
            lives[root] = (lives[root][0], step)
        step += not node.is_noop
    return {root: (first, step if root.flags & _OUTPUT else last) for root, (first, last) in lives.items()}


def plan(graph: Graph, size_of: Callable[[Tensor], int], alignment: int) -> Plan:
    """Return offsets at which tensors that are needed at the same time do not overlap."""
    lives = activations(graph)
    size, offsets = place(
        [Lifetime(first, last, size_of(tensor)) for tensor, (first, last) in lives.items()],
        alignment=alignment,
        linger=_LINGER,
    )
    return Plan(size, dict(zip(lives, offsets, strict=True)))
