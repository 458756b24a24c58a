"""Attention over a cache, as models lay it out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from running import Array, Case, new, values

from llamado.devices.device import Device
from llamado.ggml import Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T


def causal(n_tokens: int, n_kv: int, first: int = 0, start: int = 0, window: int = 0) -> Array:
    """Masks of the tokens from position `first` of a sequence whose cells begin at `start`."""
    cell, own = np.arange(n_kv), (start + first + np.arange(n_tokens))[:, None]
    sees = (cell >= start) & (cell <= own) & (cell > own - (window or n_kv))
    return np.where(sees, 0.0, -np.inf).astype(np.float32)


@dataclass
class Attention:
    """One attention over a cache as models lay it out: rows of all heads."""

    head: int
    n_heads: int
    n_heads_kv: int
    n_kv: int
    type_k: T = T.F16
    type_v: T = T.F16
    softcap: float = 0.0
    head_v: int = 0
    max_bias: float = 0.0
    sinks: Array | None = None
    latent: bool = False
    """Latent attention: a value is the beginning of its key's row."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.head_v = self.head_v or self.head
        self.keys = values(self.head * self.n_heads_kv, self.n_kv, seed=self.seed + 1)
        self.values = values(self.head_v * self.n_heads_kv, self.n_kv, seed=self.seed + 2)

    def case(self, q: Array, mask: Array | None) -> Case:
        """Queries (token, head, element) with a mask (token, cell), or one for each head (head, token, cell)."""
        n = len(q)
        heads = new(self.head, self.n_heads, n)
        k = new(self.head * self.n_heads_kv, self.n_kv, type=self.type_k)
        data: dict[Tensor, Array] = {heads: q, k: self.keys}
        if self.latent:
            v = k
        else:
            v = new(self.head_v * self.n_heads_kv, self.n_kv, type=self.type_v)
            data[v] = self.values
        sinks = None
        if self.sinks is not None:
            sinks = new(self.n_heads)
            data[sinks] = self.sinks
        m = None
        if mask is not None:
            m = new(self.n_kv, n, *mask.shape[:-2], type=T.F16)
            data[m] = mask
        out = g.flash_attn_ext(
            g.permute(heads, 0, 2, 1, 3), self._heads(k, self.head), self._heads(v, self.head_v), m,
            self.head**-0.5, self.max_bias, self.softcap, sinks=sinks,
        )  # fmt: skip
        return Case({"out": out}, data)

    def _heads(self, cache: Tensor, head: int) -> Tensor:
        view = g.view_4d(
            cache, head, self.n_heads_kv, self.n_kv, 1, cache.nb[1] // self.n_heads_kv, cache.nb[1], cache.nb[2]
        )
        return g.permute(view, 0, 2, 1, 3)

    def queries(self, n: int) -> Array:
        return values(self.head, self.n_heads, n, seed=self.seed)

    def check(self, device: Device, mask: Array | None, n: int) -> None:
        self.case(self.queries(n), mask).check(device, rtol=1e-4, atol=2e-5)

    def run(self, device: Device, q: Array, mask: Array | None) -> Array:
        return self.case(q, mask).run(device)["out"][0]
