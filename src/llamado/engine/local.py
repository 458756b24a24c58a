"""A whole model on one device: the Forward that the engine drives.

Weights stay where the file's mapping has them. Inputs, the KV cache and the logits have fixed places, so that a graph
built once per shape is run again with new contents. Shapes are few: larger batches are filled up with tokens that see
nothing and are seen by none (their keys go to a spare cell), and attention gets the cache in few sizes; it looks only
at the cells a token may see, so the size costs nothing but the mask.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.device import CpuDevice, OperationTime
from llamado.devices.cpu.memory import CpuBuffer, view_of
from llamado.engine.forward import ForwardError
from llamado.ggml.graph import Graph
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import BatchShape, Model

_PAD = 256
_REACH = 1024
"""Cells that attention is given at least; where more are in use 8,192, then powers of two."""
_SPARE = 32  # cells behind the pool: the first takes what the filling tokens write
_GRAPHS_KEPT = 128
_HIDDEN = 0xFC00  # f16 −inf

Progress = Callable[[str, int, int], None]


class LocalForward:
    """Runs `model` (read from `file`) on `device` with a pool of `n_cells` KV cells and batches of up to
    `max_batch` tokens. `mlock` keeps the weights in RAM; a warning says so where the system refuses.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        device: CpuDevice,
        *,
        n_cells: int,
        max_batch: int = 512,
        type_k: TensorType = TensorType.F16,
        type_v: TensorType = TensorType.F16,
        mlock: bool = False,
    ) -> None:
        hp = model.hparams
        self.file, self.model, self.device = file, model, device
        self.n_vocab = hp.n_vocab
        self.n_cells = -(-n_cells // _PAD) * _PAD
        self.max_batch = max_batch
        self._n_swa = hp.n_swa
        shards = [device.adopt(file.shard_data(i)) for i in range(file.n_shards)]
        if mlock:
            all(shard.lock() for shard in shards)  # the first that is refused says why
        for name, tensor in model.weights.items():
            info = file.tensors[name]
            tensor.buffer, tensor.offset = shards[info.shard], info.offset
        self._kv = model.kv_tensors(self.n_cells + _SPARE, type_k, type_v)
        cache = device.alloc(sum(t.nbytes + 64 for t in (*self._kv.k, *self._kv.v)))
        at = 0
        for tensor in (*self._kv.k, *self._kv.v):
            tensor.buffer, tensor.offset = cache, at
            at += -(-tensor.nbytes // 64) * 64
        self._inputs: dict[str, CpuBuffer] = {
            name: device.alloc(size)
            for name, size in {
                "tokens": 4 * max_batch,
                "positions": 4 * max_batch,
                "cells": 8 * max_batch,
                "out_rows": 4 * max_batch,
                "mask": 2 * self.n_cells * max_batch,
                "mask_swa": 2 * self.n_cells * max_batch,
            }.items()
        }
        self._logits = device.alloc(4 * self.n_vocab * max_batch)
        self._graphs: OrderedDict[BatchShape, Graph] = OrderedDict()
        self._ahead: list[BatchShape] = []

    def _graph(self, shape: BatchShape) -> Graph:
        """The graph for a shape, built and bound to its inputs once."""
        graph = self._graphs.get(shape)
        if graph is None:
            graph = self._graphs[shape] = self.model.build(shape, self._kv)
            for name, tensor in graph.inputs.items():
                tensor.buffer = self._inputs[name]
            for tensor in graph.outputs.values():
                tensor.buffer = self._logits
            if len(self._graphs) > _GRAPHS_KEPT:
                self._graphs.popitem(last=False)
        else:
            self._graphs.move_to_end(shape)
        return graph

    def warm_up(self, batch_sizes: list[int], progress: Progress | None = None) -> None:
        """Compiles the kernels for these batch sizes (from the disk cache where they are there).

        What else requests are likely to need is left to `prepare_ahead`.
        """
        # the largest first: it sets the size of the device's working memory
        sizes = sorted({n for n in batch_sizes if n <= self.max_batch}, reverse=True)
        shapes = [self._shape(n, min(n, 8), 1) for n in sizes]
        for i, shape in enumerate(shapes):
            if progress is not None:
                progress("compiling kernels", i, len(shapes))
            self.device.prepare(self._graph(shape))
        sizes = [n for n in (*range(12, 33, 4), *range(40, 257, 8), *range(288, 513, 32)) if n <= self.max_batch]
        few = [n for n in batch_sizes if n <= 8]
        self._ahead = [self._shape(n, 1, 1) for n in sizes]
        self._ahead += [self._shape(n, n, _REACH + 1) for n in few] + [self._shape(n, 1, _REACH + 1) for n in sizes]

    def prepare_ahead(self) -> bool:
        """Compiles the program of one more shape that requests are likely to need."""
        while self._ahead:
            shape = self._ahead.pop(0)
            if shape not in self._graphs:
                self.device.prepare(self._graph(shape))
                return True
        return False

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
    ) -> NDArray[np.float32]:
        """Logits f32[len(outputs), n_vocab] of a batch (see Forward.run)."""
        n, n_out = len(tokens), len(outputs)
        if not 0 < n <= self.max_batch:
            raise ForwardError(f"a batch of {n} tokens; the device takes 1 to {self.max_batch}")
        cells = starts + positions
        used = int(cells.max()) + 1
        if used > self.n_cells or int(starts.min()) < 0 or int(positions.min()) < 0:
            raise ForwardError(f"a token at KV cell {used - 1} of a cache of {self.n_cells}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.n_vocab:
            raise ForwardError(f"a token outside the vocabulary of {self.n_vocab}")
        if n_out and (n_out > n or int(outputs.min()) < 0 or int(outputs.max()) >= n):
            raise ForwardError(f"an output that is no row of a batch of {n}")
        shape = self._shape(n, n_out, used)
        filling = shape.n_tokens - n
        graph = self._graph(shape)
        self._fill("tokens", tokens, filling, 0)
        self._fill("positions", positions, filling, 0)
        self._fill("cells", cells, filling, self.n_cells)
        self._fill("out_rows", outputs, shape.n_outputs - n_out, 0)
        self._fill_mask("mask", starts, cells, shape)
        if self._n_swa:
            self._fill_mask("mask_swa", np.maximum(starts, cells - self._n_swa + 1), cells, shape)
        self.device.submit(graph)
        return self._logits.memory[: 4 * n_out * self.n_vocab].view(np.float32).reshape(n_out, self.n_vocab)

    def profile(self, n: int, start: int = 0) -> list[OperationTime]:
        """Times of each operation for `n` tokens of one sequence from position `start` on, the last with logits."""
        positions = np.arange(start, start + n, dtype=np.int32)
        self.run(np.zeros(n, np.int32), positions, np.zeros(n, np.int64), np.array([n - 1], np.int32))
        return self.device.profile(self._graph(self._shape(n, 1, start + n)))

    def _shape(self, n: int, n_out: int, used: int) -> BatchShape:
        """The shape that serves a batch: a few sizes, so that graphs are found again."""
        step = 1 if n <= 8 else 4 if n <= 32 else 8 if n <= 256 else 32
        n_tokens = min(-(-n // step) * step, self.max_batch)
        n_outputs = n_out if n_out <= 2 or n <= 8 else min(n_tokens, 1 << (n_out - 1).bit_length())
        reach = _REACH if used <= _REACH else max(8 * _REACH, 1 << (used - 1).bit_length())
        return BatchShape(n_tokens, n_outputs, min(reach, self.n_cells))

    def _fill(self, name: str, values: NDArray[np.int32] | NDArray[np.int64], filling: int, filler: int) -> None:
        n = len(values)
        memory = self._inputs[name].memory[: (n + filling) * values.itemsize].view(values.dtype)
        memory[:n] = values
        memory[n:] = filler

    def _fill_mask(self, name: str, first: NDArray[np.int64], last: NDArray[np.int64], shape: BatchShape) -> None:
        size = shape.n_tokens * shape.n_kv
        mask = self._inputs[name].memory[: 2 * size].view(np.uint16).reshape(shape.n_tokens, shape.n_kv)
        mask.fill(_HIDDEN)
        for row, start, stop in zip(mask, first.tolist(), last.tolist(), strict=False):
            row[start : stop + 1] = 0

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        """Copies n cells of all layers from `src` to `dst`; the ranges may overlap."""
        if min(src, dst, n) < 0 or max(src, dst) + n > self.n_cells:
            raise ForwardError(f"copy of {n} KV cells from {src} to {dst} of {self.n_cells}")
        for cache in (*self._kv.k, *self._kv.v):
            row = cache.nb[1]
            rows = view_of(cache).reshape(-1, row)
            rows[dst : dst + n] = rows[src : src + n]

    def close(self) -> None:
        """Ends the device's threads and lets go of the memory."""
        self.device.close()
