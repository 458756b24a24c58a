"""Control vectors: directions added to the hidden state after each layer, read from GGUF files of their own.

File format (common.cpp and llama-adapter.cpp, b11434): a tensor `direction.N`, F32 [n_embd], for each layer N from 1
on; the first layer, 0, has none. Several files add up, each with a scale.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add
from llamado.ggml.role import ModelPart, Role
from llamado.ggml.tensor import Tensor, contiguous_strides
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.errors import InvalidAdapter

_NAME = re.compile(r"direction\.([0-9]{1,9})")


class ControlVector:
    """Directions of a model's layers; `tensors` and `roles` by name, `stamp` identifies the content."""

    def __init__(self, directions: dict[int, NDArray[np.float32]]) -> None:
        """`directions`: float32 [n_embd] by layer."""
        digest = hashlib.sha256()
        for layer in sorted(directions):
            digest.update(f"{layer}\n".encode() + directions[layer].tobytes())
        self.stamp = digest.digest()
        self._data: dict[str, NDArray[np.uint8]] = {}
        self._layers: dict[int, Tensor] = {}
        self.roles: dict[str, tuple[Role, ...]] = {}
        for layer, direction in directions.items():
            # Caches of tensor hashes are keyed by name, so the name must identify the content.
            name, ne = f"direction.{layer}.{self.stamp.hex()[:8]}", (direction.size, 1, 1, 1)
            self._layers[layer] = Tensor(TensorType.F32, ne, contiguous_strides(TensorType.F32, ne), name=name)
            self._data[name] = direction.view(np.uint8)
            self.roles[name] = (Role(ModelPart.LAYER, f"direction.{layer}", layer),)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self._layers.values())

    def data(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of one of its tensors."""
        return self._data[name]

    def apply(self, layer: int, x: Tensor) -> Tensor:
        """Add the layer's direction to the hidden state after it."""
        direction = self._layers.get(layer)
        return x if direction is None else add(x, direction, f"l_out-{layer}")


def load_control(
    n_embd: int,
    n_layer: int,
    files: Sequence[tuple[str | os.PathLike[str], float]],
    layers: tuple[int, int] = (0, 0),
) -> ControlVector:
    """Return the scaled sum of the directions in `files`, for the layers from the first to the last of `layers`.

    As in llama.cpp, a first or last layer of 0 or less means the model's. Raises InvalidAdapter or GgufError.
    """
    first, last = max(layers[0], 1), layers[1] if layers[1] > 0 else n_layer
    total: dict[int, NDArray[np.float32]] = {}
    for path, scale in files:
        with GGUFFile.open(path) as file:
            for layer, direction in _directions(file, n_embd).items():
                scaled = direction * np.float32(scale)
                total[layer] = total[layer] + scaled if layer in total else scaled
    return ControlVector({i: total[i] for i in range(first, min(last + 1, n_layer)) if i in total})


def _directions(file: GGUFFile, n_embd: int) -> dict[int, NDArray[np.float32]]:
    found = {}
    path = Path(file.path)
    for name, info in file.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) == 0:
            raise InvalidAdapter(
                f"{path}: tensor '{name}' is not part of a control vector; expected direction.1, direction.2 …"
            )
        if info.type is not TensorType.F32 or info.ne != (n_embd, 1, 1, 1):
            shape = " × ".join(str(n) for n in info.ne)
            raise InvalidAdapter(
                f"{path}: tensor '{name}' is {info.type.name}, {shape}; directions of this model are F32, {n_embd}"
            )
        found[int(match[1])] = file.data(name).view(np.float32).copy()
    if not found:
        raise InvalidAdapter(f"{path}: the file has no directions")
    return found
