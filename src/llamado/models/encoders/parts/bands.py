"""Attention in a band: each position sees those at most some places before or behind it.

Queries are computed in blocks with the keys that they reach. All blocks but those at both ends are alike: they are one
batch with one mask.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import view_4d
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass

_LEAST_BLOCK = 64


class BandPart(NamedTuple):
    """`n_blocks` blocks of `n` queries, from `first` on, of which the first sees `n_keys` from `first_key` on."""

    first: int
    n: int
    n_blocks: int
    first_key: int
    n_keys: int

    def queries(self, x: Tensor) -> Tensor:
        """Return the queries, of [head_dim, heads, n_positions]: [head_dim, heads, n, n_blocks]."""
        return self._blocks(x, self.first, self.n)

    def keys(self, x: Tensor) -> Tensor:
        """Return the keys or values: [head_dim, heads, n_keys, n_blocks]."""
        return self._blocks(x, self.first_key, self.n_keys)

    def _blocks(self, x: Tensor, first: int, n: int) -> Tensor:
        return view_4d(x, x.ne[0], x.ne[1], n, self.n_blocks, x.nb[1], x.nb[2], self.n * x.nb[2], first * x.nb[2])

    def mask(self, reach: int) -> NDArray[np.float16]:
        """Return the mask of a block: float16 [n, n_keys]."""
        distance = np.arange(self.first, self.first + self.n)[:, None] - np.arange(self.n_keys) - self.first_key
        return np.where(np.abs(distance) <= reach, np.float16(0), np.float16(-np.inf))


class BandParts(NamedTuple):
    """The parts of a band, each with its mask."""

    parts: tuple[tuple[BandPart, Tensor], ...]


class Band(NamedTuple):
    """A band of `n` positions, in which each sees those up to `reach` places away."""

    n: int
    reach: int

    @property
    def parts(self) -> list[BandPart]:
        """Blocks at the beginning, those in the middle, and those at the end."""
        block = max(self.reach, _LEAST_BLOCK)
        n_inner = max(0, (self.n - self.reach) // block - 1)  # blocks from the second on that reach no end
        bounds = [(0, min(block, self.n))]
        if n_inner:
            bounds.append((block, block))
        first = block * (1 + n_inner)
        bounds += [(at, min(block, self.n - at)) for at in range(first, self.n, block)]
        found = []
        for at, n in bounds:
            n_blocks = n_inner if at == block and n_inner else 1
            first_key = max(0, at - self.reach)
            found.append(BandPart(at, n, n_blocks, first_key, min(self.n, at + n + self.reach) - first_key))
        return found

    def arrays(self) -> dict[str, NDArray[np.float16]]:
        """Return the arrays of the inputs."""
        return {f"band-{i}": part.mask(self.reach) for i, part in enumerate(self.parts)}

    def of(self, step: EncoderPass) -> BandParts:
        """Return the parts with their masks as inputs of a graph."""
        return BandParts(
            tuple(
                (part, step.input(f"band-{i}", part.n_keys, part.n, type=TensorType.F16))
                for i, part in enumerate(self.parts)
            )
        )
