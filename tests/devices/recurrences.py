"""Graphs of linear attention with a state, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from running import Array, new, values

from llamado.ggml import Tensor
from llamado.ggml import graph as g

Made = tuple[Tensor, dict[Tensor, Any]]


def unit(x: Array) -> Array:
    """Rows of length one, as models have them."""
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), np.float32)


def delta(
    size: int = 32, heads: int = 4, keys: int = 2, n: int = 5, seqs: int = 3, gates: int = 1, snapshots: int = 1
) -> Made:
    q, k = new(size, keys, n, seqs), new(size, keys, n, seqs)
    v, decay, beta = new(size, heads, n, seqs), new(gates, heads, n, seqs), new(1, heads, n, seqs)
    state = new(size, size, heads, seqs)
    data = {t: values(*t.ne, seed=i) for i, t in enumerate((q, k, v, decay, beta, state))}
    data |= {q: unit(data[q]), k: unit(data[k]), decay: -np.abs(data[decay]), beta: 1 / (1 + np.exp(data[beta]))}
    return g.gated_delta_net(q, k, v, decay, beta, state, snapshots), data


def linear(kind: str, size: int = 32, heads: int = 3, n: int = 4, seqs: int = 2) -> Made:
    x = [new(size, heads, n * seqs) for _ in range(6)]
    state, bonus = new(size * size * heads, seqs), new(size, heads)
    data = {t: values(*t.ne, seed=i, scale=0.5) for i, t in enumerate((*x, state, bonus))}
    data[x[3]] = 1 / (1 + np.exp(data[x[3]]))  # decays
    match kind:
        case "gla":
            return g.gated_linear_attn(x[0], x[1], x[2], x[3], state, 0.3), data
        case "wkv6":
            return g.rwkv_wkv6(x[0], x[1], x[2], bonus, x[3], state), data
        case _:
            a = unit(data[x[4]])
            return g.rwkv_wkv7(x[0], x[3], x[1], x[2], x[4], x[5], state), data | {x[4]: -a, x[5]: a * 0.5}


KINDS: dict[str, Callable[[], Made]] = {
    "delta": delta,
    "delta, one key head": partial(delta, keys=1, heads=3),
    "delta, a decay for each element": partial(delta, gates=32),
    "delta, wide heads": partial(delta, size=128, heads=2, n=3, seqs=1),
    "delta, states of earlier tokens": partial(delta, snapshots=3),
    **{kind: partial(linear, kind) for kind in ("gla", "wkv6")},
    "wkv7": partial(linear, "wkv7", size=64),  # llama.cpp's reads beyond smaller heads where vectors are wide
}
