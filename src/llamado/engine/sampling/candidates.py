"""Candidate tokens of a sampler chain, which each sampler reduces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.drawing import Drawing
from llamado.engine.errors import ComputeFailed

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
Ids = NDArray[np.integer[Any]]
Places = NDArray[np.integer[Any]]

Top = tuple[I32, F32]
"""Ids and logits of the largest logits of a row, in descending order, equal logits by lower id."""

Found = Top | int | None
"""The largest logits of a row, or the token drawn from them; None for a row with NaN or +inf."""


class WantedOfRow(NamedTuple):
    """A request for one row of logits: its `k` largest (k ≤ MOST_WANTED), or one token drawn from them."""

    row: F32
    k: int
    drawing: Drawing | None = None


class RowFinder(Protocol):
    """Finds the largest logits of rows. It may ignore drawings and return the largest logits instead."""

    def __call__(
        self, rows: Sequence[F32], ks: Sequence[int], drawings: Sequence[Drawing | None] = ()
    ) -> Sequence[Found]: ...


MOST_WANTED = 1024

# Logits are clamped to this, except -inf, so that differences of logits are numbers.
HUGE = float(np.finfo(np.float32).max)

# Most candidates that are kept sorted.
_FEW = 1024


def top_rows_numpy(rows: Sequence[F32], ks: Sequence[int], drawings: Sequence[Drawing | None] = ()) -> list[Top | None]:
    """A RowFinder in numpy, which does not draw."""
    return [top_k(row, k) if float(row.max()) < math.inf else None for row, k in zip(rows, ks, strict=True)]


def top_k(logits: F32, k: int) -> Top:
    """Return the k largest: about 0.15 ms for k = 40 of 262,144."""
    n = logits.size
    k = min(k, n)
    ids: NDArray[np.intp] | None = None
    # Any k values of the row bound the k-th largest from below. So the k-th largest of a sample lets one comparison
    # drop most of the row.
    stride = n // max(8 * k, 2048)
    if stride >= 4:
        sample = np.sort(logits[::stride])
        bound = sample[-k]
        ids = np.flatnonzero(logits >= bound)
        if ids.size < k:  # NaN among the logits
            ids = None
    values = logits if ids is None else logits[ids]
    if values.size > k:
        kth = np.partition(values, values.size - k)[values.size - k]
        above = np.flatnonzero(values > kth)
        level = np.flatnonzero(values == kth)[: k - above.size]
        chosen = np.sort(np.concatenate((above, level)))
        values = values[chosen]
        ids = chosen if ids is None else ids[chosen]
    elif ids is None:
        ids = np.arange(n)
    # Ids ascend here, so a stable sort breaks ties by lower id.
    order = np.argsort(-values, kind="stable")
    return ids[order].astype(np.int32), values[order]


def log_softmax_top(logits: F32, n: int, token: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probability of `token` and the `n` most likely `(id, log-probability)` over all logits of
    a row.
    """
    high = float(logits.max())
    log_total = high + math.log(float(np.exp(logits - np.float32(high)).sum(dtype=np.float64)))
    ids, values = top_k(logits, n)
    top = [(int(i), float(v) - log_total) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]
    return float(logits[token]) - log_total, top


def shortest_head(key: F32, weights: F32, target: float, *, beyond: bool, min_count: int) -> NDArray[np.intp]:
    """Return the positions, ascending, of the shortest head of `key` in ascending order whose weights reach `target`.

    `beyond`: the sum must exceed the target. Equal keys count by lower position. `key` is 0 or more. Only the bucket
    that contains the target is sorted: sorting a whole vocabulary takes ten times as long.
    """
    n_buckets = 4096
    # Weights fall like exp(-key) or lie around an entropy of at most ln(n): 32 covers all relevant mass, and the last
    # bucket takes the rest.
    bucket = np.minimum(key * np.float32(n_buckets / 32), np.float32(n_buckets - 1)).astype(np.intp)
    mass = np.cumsum(np.bincount(bucket, weights, n_buckets))
    count = np.cumsum(np.bincount(bucket, minlength=n_buckets))
    last = max(int(mass.searchsorted(target, side="right" if beyond else "left")), int(count.searchsorted(min_count)))
    if last >= n_buckets:
        return np.arange(key.size)
    inside = np.flatnonzero(bucket == last)
    inside = inside[np.argsort(key[inside], kind="stable")]
    before, n_before = (float(mass[last - 1]), int(count[last - 1])) if last else (0.0, 0)
    running = before + np.cumsum(weights[inside], dtype=np.float64)
    n = int(running.searchsorted(target, side="right" if beyond else "left")) + 1
    keep = bucket < last
    keep[inside[: max(n, min_count - n_before)]] = True
    return np.flatnonzero(keep)


class Candidates:
    """Tokens and their logits: *wide* or *few*.

    Wide: float32 logits in order of id; `ids` is None while no token is cut. Few: float64 logits in descending order,
    equal ones by lower id.
    """

    def __init__(self) -> None:
        self.ids: Ids | None = None
        self.logits: NDArray[np.floating[Any]] = np.empty(0)
        self.few = False
        self.hidden = 0
        """Candidates of logit -inf that are not stored: llama.cpp keeps masked tokens and counts them."""
        self.mask: NDArray[np.uint32] | None = None
        """The tokens that the constraint allows, also while others are still candidates."""
        self._row: F32 | None = None
        self._masked: F32 | None = None
        self._patches: list[tuple[Ids, F32]] = []
        self._banned: list[tuple[int, np.float32]] = []

    # -- the row -----------------------------------------------------------------------------------------------------

    def begin(self, row: F32, mask: NDArray[np.uint32] | None) -> None:
        """Take all tokens of a row, which is changed in place until `restore`; a read-only row is copied."""
        self.logits = self._row = row if row.flags.writeable else row.copy()
        self.ids = None
        self.few = False
        self.hidden = 0
        self.mask = mask
        self._patches.clear()
        self._banned.clear()

    def restore(self) -> None:
        """Restore the original logits of the row."""
        while self._patches:
            ids, saved = self._patches.pop()
            assert self._row is not None
            self._row[ids] = saved
        while self._banned:
            token, own = self._banned.pop()
            assert self._row is not None
            self._row[token] = own
        self._row = None

    @property
    def size(self) -> int:
        """Number of candidates in llama.cpp's terms, including those of probability 0."""
        return self.logits.size + self.hidden

    def id_at(self, place: int) -> int:
        return place if self.ids is None else int(self.ids[place])

    def allows(self, token: int) -> bool:
        """Return True if the constraint allows a token."""
        mask = self.mask
        return mask is None or (token >> 5 < mask.size and bool(int(mask[token >> 5]) >> (token & 31) & 1))

    # -- changing logits ---------------------------------------------------------------------------------------------

    def ban(self, tokens: Iterable[int]) -> None:
        """Set some tokens of a whole row to logit -inf. Raises ComputeFailed if one of their logits is NaN or +inf."""
        logits = self.logits
        for token in tokens:
            own = logits[token]
            if not own < math.inf:
                raise no_numbers()
            self._banned.append((token, own))
            logits[token] = -math.inf

    def change(self, tokens: Ids, new: Callable[[F64, Any], F64]) -> None:
        """Set the logits of some tokens, each listed once, as far as they are candidates.

        `new(logits, which)`: returns the new logits of `tokens[which]`.
        """
        if self.ids is None:
            own = self.logits[tokens]
            if not float(own.max()) < math.inf:
                raise no_numbers()
            changed = np.minimum(new(own.astype(np.float64), slice(None)), HUGE).astype(np.float32)
            if self.logits is self._row:
                # in place: copying a large vocabulary would cost more than sampling it
                self._patches.append((tokens, own))
            self.logits[tokens] = changed
            return
        _, among, which = np.intersect1d(self.ids, tokens, assume_unique=True, return_indices=True)
        if not among.size:
            return
        changed = np.minimum(new(self.logits[among].astype(np.float64), which), HUGE)
        self.logits = self.logits.copy()
        self.logits[among] = changed
        if self.few:
            order = np.lexsort((self.ids, -self.logits))
            self.ids, self.logits = self.ids[order], self.logits[order]

    # -- cutting -----------------------------------------------------------------------------------------------------

    def keep(self, places: Places, *, min_keep: int = 0, hide: bool = False) -> None:
        """Keep only these positions, ascending. The others are dropped, or with `hide` count as masked."""
        if hide:
            self.hidden += self.logits.size - places.size
        else:
            self.hidden = min(self.hidden, max(0, min_keep - places.size))
        if self.few:
            assert self.ids is not None
            self.ids, self.logits = self.ids[places], self.logits[places]
            return
        self.ids = places if self.ids is None else self.ids[places]
        self.logits = self.logits[places]
        if places.size <= _FEW:
            order = np.argsort(-self.logits, kind="stable")
            self.ids, self.logits, self.few = self.ids[order], self.logits[order].astype(np.float64), True

    def keep_top(self, k: int) -> None:
        """Keep the k largest, sorted."""
        if self.few:
            self.cut(k)
            return
        self.hidden = min(self.hidden, max(0, k - self.logits.size))
        places, logits = top_k(self.logits.astype(np.float32, copy=False), k)
        self.take(places, logits)

    def take(self, places: Places, logits: F32) -> None:
        """Keep only these positions, given in descending order of their logits."""
        self.ids = places if self.ids is None else self.ids[places]
        self.logits, self.few = logits.astype(np.float64), True

    def cut(self, n: int) -> None:
        """Keep the n largest of few candidates."""
        if n < self.logits.size:
            assert self.ids is not None
            self.ids, self.logits, self.hidden = self.ids[:n], self.logits[:n], 0
        elif self.hidden:
            self.hidden = min(self.hidden, n - self.logits.size)

    def drop_top(self, n: int) -> None:
        """Drop the n largest."""
        if self.few:
            assert self.ids is not None
            self.ids, self.logits = self.ids[n:], self.logits[n:]
            return
        places, _ = top_k(self.logits.astype(np.float32, copy=False), n)
        rest = np.ones(self.logits.size, np.bool_)
        rest[places] = False
        hidden = self.hidden
        self.keep(np.flatnonzero(rest))
        self.hidden = hidden

    # -- the constraint ----------------------------------------------------------------------------------------------

    def only(self, ids: NDArray[np.intp]) -> None:
        """Reduce a whole row to these tokens, ascending; the others count as masked.

        The result stays wide for any number of tokens, so that the draw uses the same order as with a masked row.
        """
        self.hidden = self.logits.size - ids.size
        self.ids, self.logits = ids, self.logits[ids]

    def only_allowed(self) -> None:
        """Set all tokens that the mask forbids to logit -inf."""
        assert self.mask is not None
        words, n = self.mask, self.logits.size
        masked = self._masked
        if masked is None or masked.size != 32 * words.size:
            masked = self._masked = np.empty(32 * words.size, np.float32)
        # Each byte of the mask selects eight addends, 0 or -inf: a third of the time of a boolean vector.
        np.take(_ADDENDS, words.view(np.uint8), axis=0, out=masked.reshape(-1, 8), mode="clip")
        if masked.size >= n:
            self.logits = np.add(self.logits, masked[:n], out=masked[:n])
        else:
            beyond = np.full(n - masked.size, -np.inf, np.float32)
            self.logits = np.concatenate((self.logits[: masked.size] + masked, beyond))

    def keep_top_allowed(self, k: int, top: Top) -> bool:
        """Combine `only_allowed` and `keep_top` if at least k of the largest, `top`, are allowed. Otherwise change
        nothing and return False.
        """
        assert self.mask is not None
        words = self.mask
        if 32 * words.size < self.logits.size:
            return False
        ids, logits = top
        allowed = np.flatnonzero(words[ids >> 5] >> (ids & 31).astype(np.uint32) & 1)[:k]
        if allowed.size < k:
            return False
        self.take(ids[allowed], logits[allowed])
        return True


def no_numbers() -> ComputeFailed:
    """Return the error for logits that are NaN or +inf."""
    return ComputeFailed("the model gave logits that are not numbers; its file may be damaged")


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDENDS = np.where(_BITS == 1, np.float32(0), np.float32(-np.inf))
