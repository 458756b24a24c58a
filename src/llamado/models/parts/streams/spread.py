"""Conversion between one row per token and several streams."""

from __future__ import annotations

from llamado.ggml.graph import add, mul, repeat, reshape
from llamado.ggml.tensor import Tensor


def spread(x: Tensor, n: int, name: str = "") -> Tensor:
    """Repeat rows [n_embd, n_tokens] as n streams [n_embd, n, n_tokens]."""
    n_embd, n_tokens = x.ne[:2]
    return repeat(reshape(x, n_embd, 1, n_tokens), n_embd, n, n_tokens, 1, name=name)


def inject_output(streams: Tensor, made: Tensor, parts: Tensor, name: str) -> Tensor:
    """Add `made` [n_embd, n_tokens] to each stream [n_embd, n, n_tokens], weighted by `parts` [n, n_tokens]."""
    _, n, n_tokens, _ = streams.ne
    return add(streams, mul(spread(made, n), reshape(parts, 1, n, n_tokens)), name)
