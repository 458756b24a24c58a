"""The prompt cache in memory: tokens and cells of sequences that no slot holds any more.

A request with the same beginning gets the cells back instead of recomputing them: the same bits. A longer version of a
conversation replaces the shorter one, and only its new cells are read. Layers that do not keep all tokens have tails:
their state after a number of tokens (see Memory.read_tail).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.engine.cache.snapshots import drop, thin_out
from llamado.engine.forward.contract import Cells, Scales, alike
from llamado.engine.media.spans import text_tokens
from llamado.engine.request import StoredPrompt
from llamado.models.memory import Handle, Memory

# Cells that are read to measure the cost of reading: few, because of slow links, and more if the few took at most this
# long; and the number of unprofitable sequences after which reading is tried again.
_PROBE_FEW, _PROBE_MORE, _PROBE_SECONDS, _PROBE_AGAIN = 8, 32, 0.1, 16
_BEGINNING = 48  # first tokens of a sequence whose text people see
_SHOWN = 100  # most sequences that are listed: each change rebuilds the list
Read = Callable[[int, int], Cells]
"""Read `n` cells of a sequence from a position on."""
Tokens = NDArray[np.int32]


_NONE: Mapping[int, Cells] = {}


def _no_tail(n: int) -> Cells:
    return np.empty(0, np.uint8)


def shared(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix in tokens."""
    n = min(one.size, other.size)
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if differing.size else n


class StoredSequence:
    """A sequence: its tokens, the adapter scales of its cells, the cells in pieces, and its tails."""

    __slots__ = ("cells", "nbytes", "scales", "tails", "tokens", "used")

    def __init__(
        self, tokens: Tokens, scales: Scales, cells: list[tuple[int, Cells]], tails: dict[int, Cells], nbytes: int
    ) -> None:
        self.tokens = tokens
        self.scales = scales
        self.cells = cells
        """Number of cells and their bytes from `Memory.read`, for each piece."""
        self.tails = tails
        """Tails by number of tokens."""
        self.nbytes = nbytes
        self.used = time.time()

    def shared(self, tokens: Tokens, scales: Scales) -> int:
        """Return the number of first cells that both have in common."""
        return shared(self.tokens, tokens[: alike(scales, self.scales, tokens.size)])

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, Cells]]:
        """Yield the pieces of the cells `first` to `end`: position, number of wanted cells, bytes (perhaps of more
        cells).

        The first piece may begin before `first`: pieces are not cut at their beginning.
        """
        at = 0
        for n, data in self.cells:
            if at >= end:
                return
            if at + n > first:
                yield at, min(n, end - at), data
            at += n


class ReadCost:
    """Cost of reading cells from devices: seconds per call and per cell.

    Computed from the seconds for `few` cells and for `more`.
    """

    def __init__(self, few: int, few_seconds: float, more: int, more_seconds: float) -> None:
        self._cell = max(more_seconds - few_seconds, 0.0) / (more - few)
        self._call = max(few_seconds - few * self._cell, 0.0)

    def seconds(self, n: int, piece: int) -> float:
        """Return the seconds for `n` cells, `piece` per call."""
        return -(-n // piece) * self._call + n * self._cell

    def note(self, n: int, seconds: float) -> None:
        """Record that `n` cells took `seconds`: links and loads change."""
        expected = self._call + n * self._cell
        if expected > 0:
            scale = 0.7 + 0.3 * min(seconds / expected, 10.0)
            self._call, self._cell = scale * self._call, scale * self._cell


class ReadRate:
    """Measured read rate, and the decision if reading is faster than computing."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._n_passed = 0

    def note(self, n_bytes: int, seconds: float) -> None:
        """Record that `n_bytes` took `seconds`."""
        rate = n_bytes / max(seconds, 1e-6)
        self._rate = 0.7 * self._rate + 0.3 * rate if self._rate else rate

    def pays(self, n_bytes: int, n: int, pace: float) -> bool:
        """Return True if these bytes arrive before `n` tokens are computed at `pace` tokens per second.

        Tries if the rate is unknown, and now and then again after reading did not pay.
        """
        if not self._rate or n_bytes * pace <= n * self._rate:
            return True
        self._n_passed += 1
        if self._n_passed % _PROBE_AGAIN == 0:
            self._rate = 0.0
        return False


class CellReader:
    """Reads cells from the devices, `piece` per call, and measures the cost."""

    def __init__(self, memory: Memory, piece: int) -> None:
        self._memory = memory
        self._piece = piece
        self._cost: ReadCost | None = None
        self._n_passed = 0

    def read(self, handle: Handle, start: int, n: int) -> Cells:
        """Read `n` cells of a sequence from position `start` on; raises DeviceLost."""
        began = time.perf_counter()
        cells = self._memory.read(handle, start, n)
        if self._cost is not None:
            self._cost.note(n, time.perf_counter() - began)
        return cells

    def pays(self, handle: Handle, pace: float) -> bool:
        """Return True if reading a sequence's cells and writing them back is faster than computing them at `pace` per
        second.

        Over a slow link it is not. The cost is measured, and now and then again after reading did not pay.
        """
        n = handle.used
        if self._cost is None:
            began = time.perf_counter()
            self._memory.read(handle, 0, _PROBE_FEW)
            few = time.perf_counter() - began
            more = few * _PROBE_MORE / _PROBE_FEW
            if few <= _PROBE_SECONDS:
                self._memory.read(handle, 0, _PROBE_MORE)
                more = time.perf_counter() - began - few
            self._cost = ReadCost(_PROBE_FEW, few, _PROBE_MORE, more)
        if 2 * self._cost.seconds(n, self._piece) * pace <= n:
            self._n_passed = 0
            return True
        self._n_passed += 1
        if self._n_passed % _PROBE_AGAIN == 0:
            self._cost = None
        return False


class Tails(Protocol):
    """Tails of sequences: the state of layers that do not keep all tokens."""

    def tail_reach(self, tail: int, n: int) -> int:
        """Return the tokens, at most `n`, from which a sequence can continue with the tail of `tail` tokens."""
        ...

    def tail_bytes(self, n: int) -> int:
        """Return the size of the tail of `n` tokens."""
        ...


class _NoTails:
    def tail_reach(self, tail: int, n: int) -> int:
        return min(tail, n)

    def tail_bytes(self, n: int) -> int:
        return 0


NO_TAILS: Tails = _NoTails()
"""Tails of a memory that keeps all tokens."""


class PromptStore:
    """Sequences, most recently used last, with at most `limit` bytes in all (None: no limit).

    Up to half of the limit may be reserved for others (see `reserve`). `most_tails`: of one sequence. `dropped`: called
    with evicted sequences, and with sequences larger than the limit; None: they are discarded.
    """

    def __init__(
        self,
        limit: int | None,
        cell_bytes: int,
        piece: int,
        tails: Tails = NO_TAILS,
        most_tails: int = 32,
        dropped: Callable[[StoredSequence], None] | None = None,
    ) -> None:
        self._limit = limit
        self._most_tails = most_tails
        self._dropped = dropped
        self._cell_bytes = cell_bytes
        self._piece = piece
        self._reach = tails.tail_reach
        self._tail_bytes = tails.tail_bytes
        self._kept: list[StoredSequence] = []
        self.nbytes = self.n_tokens = 0
        self._entries: tuple[StoredPrompt, ...] | None = ()
        self.reserved = 0
        """Bytes of the limit that others have reserved."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(
        self, tokens: Tokens, least: int, scales: Scales = (), reach: Callable[[int, int], int] | None = None
    ) -> tuple[StoredSequence, int] | None:
        """Return the sequence with the longest usable common prefix of at least `least` tokens, and that length.

        The sequence counts as used now. `reach` replaces that of the tails (see `Tails.tail_reach`); it may accept
        fewer prefixes.
        """
        reach = reach or self._reach
        best, longest = None, least - 1
        for stored in reversed(self._kept):
            if (
                stored.tokens.size > longest
                and (n := self.useful(stored, stored.shared(tokens, scales), reach)) > longest
            ):
                best, longest = stored, n
                if n == tokens.size:
                    break
        if best is None:
            return None
        self._use(best)
        return best, longest

    def useful(self, stored: StoredSequence, n: int, reach: Callable[[int, int], int] | None = None) -> int:
        """Return how many of a sequence's first `n` tokens one can continue from with one of its tails."""
        reach = reach or self._reach
        return max((reach(tail, n) for tail in stored.tails), default=0)

    def tail(self, stored: StoredSequence, n: int) -> int:
        """Return the token count of the tail to continue from the first `n` tokens, for an `n` returned by `useful`."""
        return next(tail for tail in sorted(stored.tails) if self._reach(tail, n) == n)

    def holds(self, tokens: Tokens, scales: Scales = ()) -> bool:
        """Return True if a sequence begins with these tokens; it counts as used now."""
        n = tokens.size
        for stored in reversed(self._kept):
            if stored.tokens.size >= n == stored.shared(tokens, scales) == self.useful(stored, n):
                self._use(stored)
                return True
        return False

    def reserve(self, n: int) -> bool:
        """Reserve `n` bytes of the limit for others, and evict least recently used sequences for them."""
        if self._limit is not None:
            if self.reserved + n > self._limit // 2:
                return False
            self._make_room(n)
        self.reserved += n
        return True

    def release(self, n: int) -> None:
        """Release `n` reserved bytes."""
        self.reserved -= n

    def _make_room(self, n: int, but: StoredSequence | None = None) -> None:
        if self._limit is None:
            return
        for stored in [stored for stored in self._kept if stored is not but]:
            if self.nbytes + self.reserved + n <= self._limit:
                return
            self._drop(stored)
            if self._dropped is not None:
                self._dropped(stored)

    def put(
        self,
        tokens: Tokens,
        read: Read,
        scales: Scales = (),
        tails: Sequence[int] = (),
        read_tail: Callable[[int], Cells] = _no_tail,
        at_hand: Mapping[int, Cells] = _NONE,
    ) -> bool:
        """Store a sequence whose cells `read` returns, and replace those that are its prefixes.

        A sequence larger than the limit goes to `dropped` at once; return False if there is no such function.

        `tails`: token counts whose tails `read_tail` returns (none: no layer has one), besides those `at_hand`.
        Eviction happens before anything is read, so that the limit holds at all times.
        """
        shorter = [stored for stored in self._kept if stored.shared(tokens, scales) == stored.tokens.size]
        base = max(shorter, key=lambda stored: stored.tokens.size, default=None)
        at_hand = {n: tail for n, tail in ({} if base is None else base.tails).items() if tail.size} | dict(at_hand)
        wanted = thin_out([*tails, *at_hand] or [tokens.size], self._most_tails)

        def size_of(n: int) -> int:
            return at_hand[n].size if n in at_hand else self._tail_bytes(n)

        size = tokens.size * (self._cell_bytes + tokens.itemsize) + sum(map(size_of, wanted))
        while (large := self._limit is not None and size > self._limit - self.reserved) and len(wanted) > 1:
            size -= size_of(drop(wanted))
        if large and self._dropped is None:
            return False
        for stored in shorter:
            if stored is not base:
                self._drop(stored)
        known = 0
        cells: list[tuple[int, Cells]] = []
        if base is not None:
            known, cells = base.tokens.size, [*base.cells]
        if not large:
            self._make_room(size - (0 if base is None else base.nbytes), but=base)
        for start in range(known, tokens.size, self._piece):
            n = min(self._piece, tokens.size - start)
            cells.append((n, read(start, n)))
        kept = {n: at_hand[n] if n in at_hand else read_tail(n) for n in wanted}
        if base is not None:
            self._drop(base)
        stored = StoredSequence(tokens.copy(), scales, cells, kept, size)
        if large:
            assert self._dropped is not None
            self._dropped(stored)
            return True
        self._kept.append(stored)
        self._entries = None
        self.nbytes += size
        self.n_tokens += tokens.size
        return True

    @property
    def entries(self) -> tuple[StoredPrompt, ...]:
        """The most recently used sequences, newest first. Rebuilt only after a change, because each step reads them."""
        if self._entries is None:
            self._entries = tuple(
                StoredPrompt(
                    one.tokens.size, one.nbytes, one.used, tuple(text_tokens(one.tokens[:_BEGINNING].tolist()))
                )
                for one in self._kept[: -_SHOWN - 1 : -1]
            )
        return self._entries

    def all(self) -> list[StoredSequence]:
        """All sequences, most recently used first."""
        return self._kept[::-1]

    def clear(self) -> None:
        self._kept.clear()
        self._entries = None
        self.nbytes = self.n_tokens = 0

    def _use(self, stored: StoredSequence) -> None:
        stored.used, self._entries = time.time(), None
        if self._kept[-1] is not stored:
            self._kept.remove(stored)
            self._kept.append(stored)

    def _drop(self, stored: StoredSequence) -> None:
        self._kept.remove(stored)
        self._entries = None
        self.n_tokens -= stored.tokens.size
        self.nbytes -= stored.nbytes
