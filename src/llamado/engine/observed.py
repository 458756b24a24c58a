"""Observed inputs of a model's weights: sums over the rows of a batch, computed in its graph as additional outputs.

Any device can compute them, because they consist of ggml's operations. Inputs of experts are returned row by row, with
the numbers of the experts, and are summed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml import graph as g
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

Read = Callable[[str], NDArray[np.float32]]
"""Return an output of the last batch by name: its numbers (for I32, their bits) in order."""


class RowSums(NamedTuple):
    """Sums over the inputs of a weight in a batch: of squares and plain, float64[matrices, columns], and the number of
    rows of each matrix, int64[matrices].
    """

    squares: NDArray[np.float64]
    plain: NDArray[np.float64]
    rows: NDArray[np.int64]

    def plus(self, other: RowSums | None) -> RowSums:
        """Return the sums of both."""
        if other is None:
            return self
        return RowSums(self.squares + other.squares, self.plain + other.plain, self.rows + other.rows)


class _DenseProduct(NamedTuple):
    name: str
    ne: tuple[int, int, int, int]  # of the weight's input
    n2: int  # the weight's matrices
    n3: int


class _RoutedProduct(NamedTuple):
    name: str
    ids: str
    ne: tuple[int, int, int, int]
    n_used: int
    n_experts: int


class ProductObserver:
    """Adds outputs to graphs (`add`) and computes sums from them (`sums`), for weights whose names `wanted` accepts."""

    def __init__(self, weights: Mapping[str, Tensor], wanted: Callable[[str], bool]) -> None:
        self._weights = {tensor for name, tensor in weights.items() if wanted(name)}
        self._seen: dict[str, _DenseProduct | _RoutedProduct] = {}

    def add(self, graph: Graph) -> None:
        """Add outputs beside every product with a wanted weight. Called for each graph that is built.

        If a graph is divided, sums are computed on the device of the weights: only they are sent.
        """
        self._seen = {}
        done: dict[Tensor, str] = {}
        order: list[Tensor] = []
        n_nodes = len(graph.nodes)
        for node in graph.nodes[:n_nodes]:
            order += graph.nodes[n_nodes:]  # nodes that were added for the node before
            del graph.nodes[n_nodes:]
            order.append(node)
            weight, x = node.source(0), node.source(1)
            if node.op not in (Op.MUL_MAT, Op.MUL_MAT_ID) or weight not in self._weights or x is None:
                continue
            assert weight is not None
            if x.type is not TensorType.F32:
                continue
            name = done.get(x)
            if node.op is Op.MUL_MAT_ID:
                ids = node.source(2)
                assert ids is not None
                name = name or _output(graph, g.cont(x), f"observed {weight.name}")
                ids_name = done.get(ids) or _output(graph, g.cont(ids), f"observed {weight.name} experts")
                done[ids] = ids_name
                self._seen[weight.name] = _RoutedProduct(name, ids_name, x.ne, ids.ne[0], weight.ne[2])
            else:
                if name is None:
                    name = f"observed {weight.name}"
                    one = (x.ne[0], 1, *x.ne[2:])
                    _output(graph, g.repeat_back(g.sqr(x), *one), name)
                    _output(graph, g.repeat_back(x, *one), name + " plain")
                self._seen[weight.name] = _DenseProduct(name, x.ne, weight.ne[2], weight.ne[3])
            done[x] = name
        graph.nodes[:] = order + graph.nodes[n_nodes:]

    def sums(self, read: Read) -> dict[str, RowSums]:
        """Return the sums of the last batch by weight name."""
        return {
            name: _of_experts(read, at) if isinstance(at, _RoutedProduct) else _of_matrix(read, at)
            for name, at in self._seen.items()
        }


def _output(graph: Graph, tensor: Tensor, name: str) -> str:
    tensor.name = name[:63]
    graph.output(name, tensor)
    return name


def _of_matrix(read: Read, at: _DenseProduct) -> RowSums:
    n, rows, n2, n3 = at.ne
    found = []
    for name in (at.name, at.name + " plain"):
        parts = read(name)[: n * n2 * n3].astype(np.float64).reshape(n3, n2, n)
        total = np.zeros((at.n3 * at.n2, n))
        for i3 in range(n3):
            for i2 in range(n2):
                total[i3 % at.n3 * at.n2 + i2 % at.n2] += parts[i3, i2]
        found.append(total)
    return RowSums(found[0], found[1], np.array([rows * n2 * n3 // (at.n2 * at.n3)]))


def _of_experts(read: Read, at: _RoutedProduct) -> RowSums:
    n, each, tokens, _ = at.ne
    x = read(at.name)[: n * each * tokens].reshape(tokens, each, n)
    ids = read(at.ids)[: at.n_used * tokens].view(np.int32).reshape(tokens, at.n_used)
    squares, plain = np.zeros((at.n_experts, n)), np.zeros((at.n_experts, n))
    slots = np.broadcast_to(np.arange(at.n_used) % each, ids.shape)
    for expert in np.unique(ids):
        token, used = np.nonzero(ids == expert)
        rows = x[token, slots[token, used]].astype(np.float64)
        squares[expert], plain[expert] = np.square(rows).sum(0), rows.sum(0)
    return RowSums(squares, plain, np.bincount(ids.reshape(-1), minlength=at.n_experts))
