"""Statistics of an importance matrix: moments of each tensor's column means, and its distance to the previous layer.

The numbers and their order are llama-imatrix's (`imatrix.stats_schema`; tools/imatrix/imatrix.cpp,
`compute_vector_statistics` and `compute_tensor_statistics`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SCHEMA = (
    *("sum_sq", "mean", "elements", "std_deviation", "skewness", "kurtosis", "gain", "h_norm", "l2_dist", "cossim"),
    *("pearson", "covariance"),
)
_LAYER = re.compile(r"blk\.(\d+)")


class TensorSums(NamedTuple):
    """Sums of squares and plain sums (None if absent), float32[experts, columns], and counts, int64[experts]."""

    squares: NDArray[np.floating]
    counts: NDArray[np.integer]
    plain: NDArray[np.floating] | None = None


class TensorStatistics(NamedTuple):
    """Fields as in SCHEMA; NaN if there is no tensor to compare with."""

    sum_sq: float
    mean: float
    elements: int
    std_deviation: float
    skewness: float
    kurtosis: float
    gain: float
    h_norm: float
    l2_dist: float
    cossim: float
    pearson: float
    covariance: float


def statistics(entries: Mapping[str, TensorSums]) -> dict[str, TensorStatistics]:
    """Return the statistics of each tensor by name."""
    found = {name: _own_statistics(sums) for name, sums in entries.items()}
    for name, sums in entries.items():
        before = _previous_layer(name, entries)
        if before is not None:
            found[name] = _with_comparison(found[name], sums, found[before], entries[before])
    return found


def _means(sums: TensorSums, *, plain: bool) -> NDArray[np.float64]:
    """Return the means of the columns of all experts with a count."""
    table = sums.plain if plain else sums.squares
    assert table is not None
    rows = np.asarray(table, np.float64).reshape(len(sums.counts), -1)
    some = sums.counts > 0
    return (rows[some] / sums.counts[some, None]).reshape(-1)


def _own_statistics(sums: TensorSums) -> TensorStatistics:
    energy = _means(sums, plain=False)
    values = energy if sums.plain is None else _means(sums, plain=True)
    nan = float("nan")
    n = values.size
    if not n:
        return TensorStatistics(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    apart = values - values.mean()
    second = float((apart**2).mean()) if n > 1 else 0.0
    deviation = float(np.sqrt(np.float32(second)))
    skewness = kurtosis = 0.0
    if deviation > 1e-10:
        skewness = float((apart**3).mean()) / (second * second**0.5)
        kurtosis = float((apart**4).mean()) / second**2 - 3
    share = np.maximum(energy, 0) / (energy[energy > 0].sum() or 1)
    share = share[share > 1e-10]
    entropy = float(-(share * np.log2(share)).sum())
    spread = 100 * entropy / float(np.log2(n)) if n > 1 else nan
    return TensorStatistics(
        float(energy.sum()), float(values.mean()), n, deviation, skewness, kurtosis, nan, spread, nan, nan, nan, nan
    )


def _previous_layer(name: str, entries: Mapping[str, TensorSums]) -> str | None:
    """Return the same tensor of the nearest earlier layer that has one."""
    match = _LAYER.match(name)
    if match is None:
        return None
    for layer in range(int(match[1]) - 1, -1, -1):
        other = f"blk.{layer}{name[match.end() :]}"
        if other in entries:
            return other
    return None


def _with_comparison(
    of: TensorStatistics, sums: TensorSums, before: TensorStatistics, others: TensorSums
) -> TensorStatistics:
    plain = sums.plain is not None and others.plain is not None
    a, b = _means(sums, plain=plain), _means(others, plain=plain)
    if not a.size or a.size != b.size:
        return of
    nan = float("nan")
    sizes = float(a @ a), float(b @ b)
    cosine = nan if not any(sizes) else 0.0
    if all(sizes):
        cosine = float(np.clip(a @ b / (sizes[0] ** 0.5 * sizes[1] ** 0.5), -1, 1))
    da, db = a - a.mean(), b - b.mean()
    spreads = float(da @ da), float(db @ db)
    pearson = nan if not any(spreads) else 0.0
    if all(spreads):
        pearson = float(np.clip(da @ db / (spreads[0] ** 0.5 * spreads[1] ** 0.5), -1, 1))
    if before.sum_sq > 1e-10:
        gain = (of.sum_sq / of.elements) ** 0.5 / (before.sum_sq / before.elements) ** 0.5
    else:
        gain = 1.0 if of.sum_sq <= 1e-10 else nan
    return of._replace(
        gain=gain,
        l2_dist=float(np.sqrt(((a - b) ** 2).sum())),
        cossim=cosine,
        pearson=pearson,
        covariance=float(da @ db) / a.size if a.size > 1 else of.covariance,
    )
