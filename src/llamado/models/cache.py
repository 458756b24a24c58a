"""The key-value cache: a row of keys and one of values for each token, in each layer."""

from __future__ import annotations

from dataclasses import dataclass

from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

KV_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)
"""Types a cache can have. ggml's GPU back ends want F16 or Q8_0."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of all layers: `k[layer]` and `v[layer]` are [elements of a token, n_cells]; a cell is a row."""

    k: tuple[Tensor, ...]
    v: tuple[Tensor, ...]
    n_cells: int
