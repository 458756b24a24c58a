"""Where activations lie in the compute buffer of a worker that does not place them itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import TensorFlag
from llamado.ggml.tensor import Tensor

_LINGER = 4
"""Operations for which memory is left alone after its last use: back ends fuse neighbours, and a fused operation reads
the first one's sources while it writes the last one's result."""
_OUTPUT = int(TensorFlag.OUTPUT)


class Plan(NamedTuple):
    """Bytes the compute buffer needs, and the offset in it of each activation that owns memory."""

    size: int
    offsets: dict[Tensor, int]


def activations(graph: Graph) -> dict[Tensor, tuple[int, int]]:
    """The tensors that need memory, and the first and last operation that touches them or a view of them.

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
    """Offsets such that tensors that are needed at the same time do not overlap, first fit."""
    lives = activations(graph)
    order = sorted(lives, key=lambda t: lives[t][0])
    ends = sorted(lives, key=lambda t: lives[t][1])
    sizes = {t: -(-max(size_of(t), 1) // alignment) * alignment for t in order}
    offsets: dict[Tensor, int] = {}
    gaps: list[tuple[int, int]] = []  # (offset, size), ascending, never touching
    top = freed = 0
    for tensor in order:
        while lives[ends[freed]][1] + _LINGER < lives[tensor][0]:
            _give(gaps, offsets[ends[freed]], sizes[ends[freed]])
            freed += 1
        size = sizes[tensor]
        for i, (at, room) in enumerate(gaps):
            if room >= size:
                gaps[i : i + 1] = [(at + size, room - size)] if room > size else []
                offsets[tensor] = at
                break
        else:
            if gaps and sum(gaps[-1]) == top:  # grow the gap at the end
                top = gaps.pop()[0]
            offsets[tensor] = top
            top += size
    return Plan(max((offsets[t] + sizes[t] for t in order), default=0), offsets)


def _give(gaps: list[tuple[int, int]], at: int, size: int) -> None:
    """Puts a gap back, merged with its neighbours."""
    i = next((i for i, gap in enumerate(gaps) if gap[0] > at), len(gaps))
    if i < len(gaps) and at + size == gaps[i][0]:
        size += gaps.pop(i)[1]
    if i and sum(gaps[i - 1]) == at:
        i -= 1
        before = gaps.pop(i)
        at, size = before[0], size + before[1]
    gaps.insert(i, (at, size))
