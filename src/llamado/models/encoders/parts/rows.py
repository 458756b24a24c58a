"""Rows of hidden states: merging neighbors, adding learned rows, and putting rows in order."""

from __future__ import annotations

from llamado.ggml.graph import cast, concat, cont, mean, permute, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

LAYOUT = "layout"
"""Name of an input: the row of each embedding among those of the patches and of the learned rows behind them."""


def merge_by_channel(x: Tensor, n: int) -> Tensor:
    """Return each `n` consecutive rows as one, with the `n` values of a channel side by side: F32 [n · ne0, ne1 / n]
    (the order of torch.nn.functional.unfold).
    """
    groups = permute(reshape(x, x.ne[0], n, x.ne[1] // n), 1, 0, 2, 3)
    return reshape(cont(groups), n * x.ne[0], x.ne[1] // n)


def merge_rows(x: Tensor, n: int) -> Tensor:
    """Return each `n` consecutive rows as one, side by side: F32 [n · ne0, ne1 / n]."""
    return reshape(x, n * x.ne[0], x.ne[1] // n)


def with_rows(x: Tensor, *rows: Tensor) -> Tensor:
    """Return the rows of x and, behind them, those of each of `rows`: F32 [ne0, more]."""
    for row in rows:
        x = concat(x, as_f32(reshape(row, x.ne[0], row.nelements // x.ne[0])), 1)
    return x


def as_f32(x: Tensor) -> Tensor:
    """Return x, converted to F32 if it has another type."""
    return x if x.type is TensorType.F32 else cast(x, TensorType.F32)


def mean_of_groups(x: Tensor, n: int) -> Tensor:
    """Return the means of each `n` consecutive rows: F32 [ne0, ne1 / n]."""
    groups = permute(reshape(x, x.ne[0], n, x.ne[1] // n), 1, 0, 2, 3)
    return reshape(mean(cont(groups)), x.ne[0], x.ne[1] // n)
