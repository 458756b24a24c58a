"""Graphs of operations with a state, for comparisons."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from running import Array, new, values

from llamado.ggml import Tensor
from llamado.ggml import graph as g
from llamado.gguf.types import TensorType as T

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


class Scan:
    """A scan of some sequences, and the numbers it works on."""

    def __init__(
        self,
        lanes: int,
        head_dim: int,
        n_head: int,
        n_group: int,
        n_tokens: int,
        n_seqs: int,
        *,
        per_lane: bool = False,
    ) -> None:
        self.s, self.x = new(lanes, head_dim, n_head, n_seqs + 2), new(head_dim, n_head, n_tokens, n_seqs)
        self.dt, self.a = new(n_head, n_tokens, n_seqs), new(lanes if per_lane else 1, n_head)
        self.b, self.c = (new(lanes, n_group, n_tokens, n_seqs) for _ in range(2))
        self.ids = new(n_seqs, type=T.I32)
        self.data: dict[Tensor, Any] = {
            t: values(*t.ne, seed=i) for i, t in enumerate((self.s, self.x, self.dt, self.a, self.b, self.c))
        }
        self.data[self.dt] = self.data[self.dt] * 8  # ln(1 + e^x) where it is x, too
        self.data[self.a] = -np.abs(self.data[self.a])
        self.data[self.ids] = np.roll(np.arange(n_seqs), 1) + 1

    def node(self, n_states: int = 1) -> Tensor:
        return g.ssm_scan(self.s, self.x, self.dt, self.a, self.b, self.c, self.ids, n_states)


def scan(*sizes: int, n_states: int = 1, **options: bool) -> Made:
    made = Scan(*sizes, **options)
    return made.node(n_states), made.data


def convolution(places: int, channels: int, n: int, seqs: int) -> Made:
    x, kernel = new(places - 1 + n, channels, seqs), new(places, channels)
    return g.ssm_conv(x, kernel), {x: values(*x.ne[:3]), kernel: values(places, channels, seed=1)}


KINDS: dict[str, Callable[[], Made]] = {
    "delta": delta,
    "delta, one key head": partial(delta, keys=1, heads=3),
    "delta, a decay for each element": partial(delta, gates=32),
    "delta, wide heads": partial(delta, size=128, heads=2, n=3, seqs=1),
    "delta, states of earlier tokens": partial(delta, snapshots=3),
    **{kind: partial(linear, kind) for kind in ("gla", "wkv6")},
    "wkv7": partial(linear, "wkv7", size=64),  # llama.cpp's reads beyond smaller heads where vectors are wide
    "convolution": partial(convolution, 4, 40, 21, 2),
    "scan": partial(scan, 128, 16, 6, 2, 37, 2),
    "scan, states of earlier tokens": partial(scan, 32, 5, 3, 1, 7, 1, n_states=3),
    "scan of channels": partial(scan, 16, 1, 24, 1, 37, 2, per_lane=True),
}
