"""A model whose weights, cache and inputs are all on one device, and its logits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from reference import attention_masks

from llamado.devices.device import Device
from llamado.ggml import Graph
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, load_model
from llamado.models.memory import MemoryOptions

Array = np.ndarray[Any, Any]


class RemoteModel:
    """A model on one device. Graphs are kept by shape."""

    def __init__(self, path: Path, device: Device, n_cells: int = 256) -> None:
        self.device, self.n_cells = device, n_cells
        self.file = GGUFFile.open(path)
        self.model = load_model(self.file)
        self.kv = self.model.memory(MemoryOptions(n_cells=n_cells, whole=True))
        self.graphs: dict[BatchShape, Graph] = {}
        device.load([(tensor, self.file.data(name)) for name, tensor in self.model.weights.items()])
        device.place([*self.kv.tensors])

    def logits(self, tokens: Sequence[int], first: int = 0) -> Array:
        """Return the logits of all tokens of one sequence. The first is at position `first`."""
        n = len(tokens)
        positions = range(first, first + n)
        shape = BatchShape(n, n, self.n_cells)
        if shape not in self.graphs:
            graph = self.graphs[shape] = self.model.build(shape, self.kv)
            self.device.place([*graph.inputs.values()])
            self.device.place([*graph.outputs.values()])
        graph = self.graphs[shape]
        values: dict[str, Any] = {
            "tokens": tokens,
            "positions": positions,
            "cells": positions,
            "out_rows": range(n),
            **attention_masks(self.model, positions, [0] * n, self.n_cells),
        }
        types = {T.I32: np.int32, T.I64: np.int64, T.F16: np.float16}
        for name, tensor in graph.inputs.items():
            self.device.write(tensor, np.array(values[name], types[tensor.type]))
        self.device.submit(graph)
        out = graph.outputs["logits"]
        return self.device.read(out, 0, out.nbytes).result(60).view(np.float32).reshape(n, -1)


def assert_close(found: Array, right: Array, tolerance: float) -> None:
    np.testing.assert_allclose(found, right, rtol=tolerance, atol=tolerance * np.abs(right).max())
