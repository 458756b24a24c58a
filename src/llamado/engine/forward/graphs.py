"""The graphs of a model by the shape of batches: few shapes, each built once and run again with new contents.

Larger batches are filled up with tokens that see nothing and are seen by none, and attention gets the cache in few
sizes; it looks only at the cells a token may see, so the size costs nothing but the mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from llamado.devices.device import Device
from llamado.engine.forward.contract import Scales
from llamado.engine.forward.device_tensors import CutGraph, DeviceTensors, Progress
from llamado.engine.options import COMPILING
from llamado.models.batch import BatchShape, Output

PAD = 256
"""The sizes of caches and of masks are multiples of it."""
_REACH = 1024
"""Cells that attention is given at least; where more are in use 8,192, then powers of two."""
_GRAPHS_KEPT = 128
_READY = 8
"""Sequences that generate a token each for which there are graphs before the first request."""
FEW = 16
"""Such sequences up to which every number of them has a shape of its own: each column of so few costs time."""
_SIZES: tuple[int, ...] = (*range(1, 9), *(n << shift for shift in range(2, 20) for n in (3, 4)))
"""Of batches on several devices: every new shape has to be sent and compiled."""


class Graphs:
    """Finds the graph that serves a batch of up to `max_batch` tokens and a cache of `n_cells`, and gets graphs ready
    before they are needed.

    `n_states`: sequences of which layers remember states, 0 where none does. `largest`: shapes that need all the memory
    there is to be. `features`: see BatchShape; `takes`: see Model.
    """

    def __init__(
        self,
        tensors: DeviceTensors,
        devices: Sequence[Device],
        max_batch: int,
        n_cells: int,
        output: Output,
        n_adapters: int,
        n_states: int,
        features: tuple[int, ...] = (),
        takes: tuple[int, ...] = (0,),
    ) -> None:
        self._tensors, self._devices = tensors, devices
        self._max_batch, self._n_cells, self._output = max_batch, n_cells, output
        self._features, self._takes = features, takes
        self._graphs: OrderedDict[BatchShape, CutGraph] = OrderedDict()
        self._ahead: list[BatchShape] = []
        self._n_states = min(n_states, max_batch)
        largest = BatchShape(max_batch, max_batch, n_cells, output, n_seqs=int(n_states > 0), features=features)
        self.largest = [replace(largest, hidden_width=width) for width in takes]
        if self._n_states > 1:
            many = self.shape(self._n_states, self._n_states, n_cells, n_seqs=self._n_states)
            self.largest.append(replace(many, n_kv=n_cells))
        if n_adapters:
            self.largest.append(replace(self.largest[0], scales=(1.0,) * n_adapters))

    def shape(
        self,
        n: int,
        n_out: int,
        used: int,
        scales: Scales = (),
        embeddings: bool = False,
        n_seqs: int = 0,
        given: int = 0,
        stage: int = 0,
    ) -> BatchShape:
        """The shape that serves a batch of `n` tokens and `n_out` outputs that sees the first `used` cells.

        `n_seqs`: see BatchShape; one sequence's tokens must be as many as `fit` gives.
        """
        n_tokens, n_outputs, reach = self._sizes(n, n_out, used)
        n_seqs = n_tokens if n_seqs == n else n_seqs
        reach = min(reach, self._n_cells)
        return BatchShape(
            n_tokens, n_outputs, reach, self._output, scales, embeddings, n_seqs, self._features, given, stage
        )

    def fit(self, n: int) -> int:
        """The greatest size of a batch up to `n`: a token that filled it up would change the state of its sequence."""
        if n >= self._max_batch:
            return self._max_batch
        if self._tensors.placement is not None:
            return next(size for size in reversed(_SIZES) if size <= n)
        step = _step(n)
        return n // step * step

    def _shapes(self, n: int, n_out: int, used: int, scales: Scales = ()) -> list[BatchShape]:
        """Those that serve `n` tokens: of one sequence, and of as many."""
        if not self._n_states:
            return [self.shape(n, n_out, used, scales, given=given) for given in self._takes]
        found = [self.shape(self.fit(n), min(n_out, self.fit(n)), used, scales, n_seqs=1)]
        if 1 < n <= self._n_states:
            found.append(self.shape(n, n_out, used, scales, n_seqs=n))
        return found

    def _sizes(self, n: int, n_out: int, used: int) -> tuple[int, int, int]:
        """Tokens, outputs and cells of the shape that serves a batch."""
        if self._tensors.placement is not None:
            n_tokens = min(next(size for size in _SIZES if size >= n), self._max_batch)
            n_outputs = n_out if n_out <= 1 else n_tokens if n_tokens <= 64 or 2 * n_out > n else min(64, n_tokens)
            reach = max(PAD, 1 << (used - 1).bit_length())  # masks are sent, too
            return n_tokens, max(n_out, n_outputs), reach
        step = 1 if n_out == n <= FEW and self._output is Output.LOGITS else _step(n)
        n_tokens = min(-(-n // step) * step, self._max_batch)
        n_outputs = n_out if n_out <= 2 or step == 1 else min(n_tokens, 1 << (n_out - 1).bit_length())
        reach = _REACH if used <= _REACH else max(8 * _REACH, 1 << (used - 1).bit_length())
        return n_tokens, n_outputs, reach

    def get(self, shape: BatchShape) -> CutGraph:
        """The graph for a shape, built and bound once."""
        graph = self._graphs.get(shape)
        if graph is not None:
            self._graphs.move_to_end(shape)
            return graph
        graph = self._graphs[shape] = self._tensors.cut(shape)
        self._tensors.bind(graph.parts)
        if len(self._graphs) > _GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return graph

    def clear(self) -> None:
        """Tensors lie elsewhere now."""
        self._graphs.clear()

    def prepare(self, shape: BatchShape) -> None:
        """Has devices compile what they need for a shape."""
        for part in self.get(shape).parts:
            self._devices[part.device].prepare(part.graph)

    def warm_up(self, batch_sizes: list[int], progress: Progress | None, scales: Scales) -> None:
        """Prepares these batch sizes, and notes what else requests are likely to need for `next_ahead`."""
        # the largest first: it sets the size of a device's working memory
        now = {n for n in batch_sizes if n <= _READY or n > FEW or n == self._max_batch}
        sizes = sorted({n for n in now if n <= self._max_batch}, reverse=True)
        shapes = [shape for n in sizes for shape in self._shapes(n, min(n, 8), 1, scales)]
        for i, shape in enumerate(shapes):
            if progress is not None:
                progress(COMPILING, i, len(shapes))
            self.prepare(shape)
        if self._tensors.placement is not None:
            sizes = [n for n in _SIZES if n <= self._max_batch]
            reaches = [n for n in (PAD, 2 * PAD) if n <= self._n_cells]
            ahead = [shape for reach in reaches for n in sizes if n <= 32 for shape in self._shapes(n, n, reach)]
            ahead += [shape for reach in reaches for n in sizes for shape in self._shapes(n, 1, reach)]
        else:
            sizes = [n for n in (*range(12, 33, 4), *range(40, 257, 8), *range(288, 513, 32)) if n <= self._max_batch]
            few = [n for n in batch_sizes if n <= FEW]
            ahead = [shape for n in sizes for shape in self._shapes(n, 1, 1)]
            ahead += [shape for n in few if n > _READY for shape in self._shapes(n, n, 1)]
            ahead += [shape for n in few for shape in self._shapes(n, n, _REACH + 1)]
            ahead += [shape for n in sizes for shape in self._shapes(n, 1, _REACH + 1)]
        self._ahead = [replace(shape, scales=scales) for shape in ahead]

    def next_ahead(self) -> BatchShape | None:
        """The next shape that requests are likely to need and for which there is no graph yet."""
        while self._ahead:
            shape = self._ahead.pop(0)
            if shape not in self._graphs:
                return shape
        return None


def _step(n: int) -> int:
    """Sizes of batches of about `n` tokens on this machine are multiples of it."""
    return 1 if n <= 8 else 4 if n <= 32 else 8 if n <= 256 else 32
