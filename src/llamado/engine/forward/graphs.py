"""Graphs by batch shape: few shapes, each built once and run again with new contents.

Larger batches are padded with tokens that see nothing and that no token sees, and attention gets the cache in few
sizes; it reads only the cells that a token may see, so the size costs only the mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from llamado.devices.device import Device
from llamado.engine.forward.contract import Scales
from llamado.engine.forward.device_tensors import CutGraph, DeviceTensors, Progress
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.options import COMPILING
from llamado.models.base import Model
from llamado.models.batch import BatchShape, Output
from llamado.models.memory import Memory

PAD = 256
"""Sizes of caches and of masks are multiples of it."""
_REACH = 1024
"""Least number of cells for attention; if more are in use, 8,192, then powers of two."""
_GRAPHS_KEPT = 128
_READY = 8
"""Numbers of generating sequences that have a graph before the first request."""
FEW = 16
"""Most generating sequences with a shape for every number: a padding column costs time."""
_SIZES: tuple[int, ...] = (*range(1, 9), *(n << shift for shift in range(2, 20) for n in (3, 4)))
"""Batch sizes on several devices: every new shape has to be sent and compiled."""


class Graphs:
    """Finds the graph for a batch, and prepares graphs ahead of time. `largest`: shapes that need all memory."""

    def __init__(
        self, tensors: DeviceTensors, devices: Sequence[Device], model: Model, memory: Memory, options: RunnerOptions
    ) -> None:
        self._tensors, self._devices = tensors, devices
        self._max_batch, self._n_cells, self._output = options.max_batch, memory.n_cells, options.output
        self._features, self._takes = options.features, model.hidden_widths
        self._graphs: OrderedDict[BatchShape, CutGraph] = OrderedDict()
        self._ahead: list[BatchShape] = []
        self._n_states = min(options.n_sequences, options.max_batch) if memory.has_states else 0
        n, n_cells, n_adapters = self._max_batch, self._n_cells, len(model.adapters)
        largest = BatchShape(n, n, n_cells, self._output, n_seqs=int(memory.has_states), features=self._features)
        self.largest = [replace(largest, hidden_width=width) for width in self._takes]
        if self._n_states > 1:
            many = self.shape(self._n_states, self._n_states, n_cells, n_seqs=self._n_states)
            self.largest.append(replace(many, n_kv=n_cells))
        if n_adapters:
            self.largest.append(replace(self.largest[0], scales=(1.0,) * n_adapters))
        if options.embeddings:
            self.largest.append(replace(self.largest[0], embeddings=True))
        self._embeddings = options.embeddings

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
        """Return the shape for a batch of `n` tokens and `n_out` outputs that sees the first `used` cells.

        `n_seqs`: see BatchShape; the tokens of one sequence must be a number that `fit` returns.
        """
        n_tokens, n_outputs, reach = self._sizes(n, n_out, used)
        n_seqs = n_tokens if n_seqs == n else n_seqs
        reach = min(reach, self._n_cells)
        return BatchShape(
            n_tokens, n_outputs, reach, self._output, scales, embeddings, n_seqs, self._features, given, stage
        )

    def fit(self, n: int) -> int:
        """Return the largest batch size up to `n` without padding: a padding token would change the state of its
        sequence.
        """
        if n >= self._max_batch:
            return self._max_batch
        if self._tensors.placement is not None:
            return next(size for size in reversed(_SIZES) if size <= n)
        step = _step(n)
        return n // step * step

    def _shapes(self, n: int, n_out: int, used: int, scales: Scales = ()) -> list[BatchShape]:
        """Return the shapes for `n` tokens: of one sequence, and of `n` sequences."""
        if not self._n_states:
            return [self.shape(n, n_out, used, scales, given=given) for given in self._takes]
        found = [self.shape(self.fit(n), min(n_out, self.fit(n)), used, scales, n_seqs=1)]
        if 1 < n <= self._n_states:
            found.append(self.shape(n, n_out, used, scales, n_seqs=n))
        return found

    def _sizes(self, n: int, n_out: int, used: int) -> tuple[int, int, int]:
        """Return the tokens, outputs and cells of the shape for a batch."""
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
        """Return the graph for a shape, built once, and again if its device has dropped the program that was made of
        it: then its operations are no longer there.
        """
        graph = self._graphs.get(shape)
        if graph is not None and graph.parts[0].graph.is_runnable:
            self._graphs.move_to_end(shape)
            return graph
        graph = self.build(shape)
        if self._tensors.in_place:
            (part,) = graph.parts
            self._devices[part.device].prepare(part.graph)
            if part.graph.has_program:
                part.graph.discard_nodes()
        self._graphs[shape] = graph
        if len(self._graphs) > _GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return graph

    def build(self, shape: BatchShape) -> CutGraph:
        """Return a new graph for a shape."""
        graph = self._tensors.cut(shape)
        self._tensors.bind(graph.parts)
        return graph

    def clear(self) -> None:
        """Drop all graphs, because tensors moved."""
        self._graphs.clear()

    def prepare(self, shape: BatchShape) -> None:
        """Let the devices compile a shape."""
        for part in self.get(shape).parts:
            self._devices[part.device].prepare(part.graph)

    def warm_up(self, batch_sizes: list[int], progress: Progress | None, scales: Scales) -> None:
        """Prepare these batch sizes, and list further shapes that requests are likely to need, for `next_ahead`."""
        # largest first: it determines the size of a device's working memory
        now = {n for n in batch_sizes if n <= _READY or n > FEW or n == self._max_batch}
        sizes = sorted({n for n in now if n <= self._max_batch}, reverse=True)
        shapes = [shape for n in sizes for shape in self._shapes(n, min(n, 8), 1, scales)]
        if self._embeddings:
            largest = self._shapes(self._max_batch, 0, 1, scales)
            shapes += [replace(shape, embeddings=True) for shape in largest if shape.n_seqs < 2]
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
        """Return the next shape that requests are likely to need and that has no graph yet."""
        while self._ahead:
            shape = self._ahead.pop(0)
            if shape not in self._graphs:
                return shape
        return None


def _step(n: int) -> int:
    """Return the step of batch sizes around `n` tokens on this machine."""
    return 1 if n <= 8 else 4 if n <= 32 else 8 if n <= 256 else 32
