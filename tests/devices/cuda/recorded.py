"""Kernels that graphs need on a card: recorded by a device that compiles graphs and runs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from running import new
from tiny import TINY, make

from cuda.fake_libcuda import FakeCard, FakeLibrary
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import Driver
from llamado.devices.cuda.jit import Variant
from llamado.devices.cuda.kernel import Image
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.ggml import Graph, Tensor
from llamado.ggml import graph as g
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import ARCHITECTURES, Output, load_model
from llamado.models.batch import Batch
from llamado.models.encoder import Encoder
from llamado.models.memory import Span


class RecordedImages:
    """Images that are never made; `variants` has the kernels, by symbol."""

    stored, identity = False, "recorded"

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}

    def trace(self, kernel: Any, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        self.variants[symbol] = Variant(kernel, dict(parameters), threads)
        return Image(symbol.encode(), 64)

    def compile(self, image: Image) -> Image:
        return image


class Recorder:
    """Records the kernels of graphs and of whole models, for a card of some compute capability."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self._images = RecordedImages()
        self._library = FakeLibrary(lambda *_: None, [FakeCard(capability=capability, total_bytes=1 << 29)])
        self._device = self._open()

    def _open(self) -> CudaDevice:
        return CudaDevice(Driver(self._library).open(0), self._images)

    @property
    def variants(self) -> dict[str, Variant]:
        """All kernels so far, by symbol."""
        return self._images.variants

    def graph(self, *results: Tensor) -> None:
        """Record the kernels of a graph; its leaves are placed."""
        graph = Graph()
        for number, result in enumerate(results):
            graph.output(str(number), result)
        for tensor in (*graph.leafs, *(s for node in graph.nodes for s in node.src if s is not None)):
            root = tensor.root()[0]
            if not root.src and root.buffer is None:
                self._device.place([root])
        self._device.prepare(graph)
        self._device.drop_graphs([graph])

    def model(self, name: str, folder: Path, wtype: str = "F32") -> None:
        """Record the kernels of a small model: part of a prompt, some tokens, one token, and several sequences."""
        path = make(TINY[name], folder / f"{name}-{wtype}.gguf", wtype=wtype)
        is_encoder = issubclass(ARCHITECTURES[TINY[name].architecture].load(), Encoder)
        with GGUFFile.open(path) as file:
            more: dict[str, Any] = {"whole": True, "output": Output.HIDDEN} if is_encoder else {"n_sequences": 3}
            options = RunnerOptions(n_cells=512, max_batch=64, **more)
            runner = ModelRunner(file, load_model(file), [self._open()], options)
            if is_encoder:
                placed = runner.memory.pack([30, 20])
                tokens = np.full(50, 5, np.int32)
                runner.submit(Batch(placed.positions, np.arange(50), placed.rows, tokens)).result(60)
            else:
                handles = [handle for handle in (runner.memory.allocate(100) for _ in range(3)) if handle is not None]
                for sizes in ((33,), (5,), (1,), (1, 1, 1)[: len(handles)]):
                    spans = [
                        Span(handle, handle.used, n, before=[5] * handle.used)
                        for handle, n in zip(handles, sizes, strict=False)
                    ]
                    n_tokens = sum(sizes)
                    outputs = np.array([n_tokens - 1], np.int32)
                    runner.start(np.full(n_tokens, 5, np.int32), spans, outputs).result(60)
                    for handle, n in zip(handles, sizes, strict=False):
                        handle.used += n
            runner.close()


def operations(types: Iterable[T]) -> Iterator[Tensor]:
    """Operations whose kernels depend on types and sizes beyond those of the small models."""
    for type in types:
        w = new(512, 64, type=type)
        for columns in (1, 2, 3, 4, 8, 9, 64):
            yield g.mul_mat(w, new(512, columns))
        yield g.get_rows(w, new(3, type=T.I32))
        yield g.mul_mat_id(new(512, 64, 4, type=type), new(512, 1, 3), new(2, 3, type=T.I32))
    for head in (64, 80, 96, 128, 256):
        for cache in (T.F16, T.Q8_0, T.Q4_0):
            if head % 32 == 0 or cache == T.F16:
                k = new(head, 512, 2, type=cache)
                for tokens in (1, 8, 64):
                    q, mask = new(head, tokens, 8), new(512, tokens, type=T.F16)
                    yield g.flash_attn_ext(q, k, k, mask, head**-0.5)
