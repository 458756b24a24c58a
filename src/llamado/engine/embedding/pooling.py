"""Pooling: from the vectors of a text's tokens to the vector of the text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamado.models.hparams import Pooling

Vectors = NDArray[np.float32]


def required_rows(pooling: Pooling, n_tokens: int, causal: bool) -> tuple[int, int]:
    """Return the range of tokens of a text of `n_tokens` that a pooling needs: first, and last + 1."""
    match pooling:
        case Pooling.NONE | Pooling.MEAN:
            return 0, n_tokens
        case Pooling.LAST:
            return n_tokens - 1, n_tokens
        case Pooling.RANK if causal:  # only the last token sees the whole text
            return n_tokens - 1, n_tokens
        case _:
            return 0, 1


def pool(rows: Vectors, pooling: Pooling) -> Vectors:
    """Return [1, width], or with Pooling.NONE [n_tokens, width], from the rows of `required_rows`; always a copy."""
    if pooling is Pooling.MEAN:
        return np.asarray(rows.mean(axis=0, dtype=np.float64, keepdims=True), np.float32)
    return rows.copy()


def normalize(vectors: Vectors, kind: int) -> Vectors:
    """Divide each row by its norm: -1 no change, 0 so that the maximum is 32760 (16-bit integers), 2 Euclidean, any
    other p the p-norm (1: sum of absolutes). A row of length 0 becomes zeros. Like llama.cpp's `embd_normalize`.
    """
    if kind == -1:
        return vectors
    sizes = np.abs(vectors.astype(np.float64))
    with np.errstate(all="ignore"):  # p may be any integer
        if kind == 0:
            norms = sizes.max(axis=1) / 32760.0
        elif kind == 2:
            norms = np.sqrt((sizes * sizes).sum(axis=1))
        else:
            norms = np.power(np.power(sizes, float(kind)).sum(axis=1), 1.0 / kind)
        factors = np.where(norms > 0, 1.0 / norms, 0.0).astype(np.float32)
        return np.asarray(vectors * factors[:, None], np.float32)
