"""Sequences that no slot holds any more, in this machine's memory: their tokens and the bytes of what is known of them.

A request that begins like one of them gets it back instead of having it computed again: the same bits. A conversation
that comes back and grows takes the place of its shorter self, and of its cells only the new ones are read. Of layers
that do not remember all tokens there are tails: what they have after so many tokens (see Memory.read_tail).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.engine.cache.snapshots import drop, thinned
from llamado.engine.forward.contract import Cells, Scales, alike
from llamado.engine.request import StoredPrompt
from llamado.models.memory import Handle, Memory

# Cells that are read to learn what reading costs: few, lest a slow link stop everything, and more where the few took no
# longer than this. After how many sequences that were not worth it this is tried again.
_PROBE_FEW, _PROBE_MORE, _PROBE_SECONDS, _PROBE_AGAIN = 8, 32, 0.1, 16
_BEGINNING = 48  # tokens by which people know a sequence
_SHOWN = 100  # sequences, at most: each change makes all of them anew
Read = Callable[[int, int], Cells]
"""Cells of a sequence from a position on, so many."""
Tokens = NDArray[np.int32]


_NONE: Mapping[int, Cells] = {}


def _no_tail(n: int) -> Cells:
    return np.empty(0, np.uint8)


def shared(one: Tokens, other: Tokens) -> int:
    """How many first tokens are the same."""
    n = min(one.size, other.size)
    differing = np.flatnonzero(one[:n] != other[:n])
    return int(differing[0]) if differing.size else n


class Stored:
    """A sequence: its tokens, how strong adapters are in its cells, those in pieces, and tails."""

    __slots__ = ("cells", "nbytes", "scales", "tails", "tokens", "used")

    def __init__(
        self, tokens: Tokens, scales: Scales, cells: list[tuple[int, Cells]], tails: dict[int, Cells], nbytes: int
    ) -> None:
        self.tokens = tokens
        self.scales = scales
        self.cells = cells
        """Numbers of cells, and their bytes as `Memory.read` gives them."""
        self.tails = tails
        """By numbers of tokens."""
        self.nbytes = nbytes
        self.used = time.time()

    def shared(self, tokens: Tokens, scales: Scales) -> int:
        """How many first cells are the same."""
        return shared(self.tokens, tokens[: alike(scales, self.scales, tokens.size)])

    def pieces(self, first: int, end: int) -> Iterator[tuple[int, int, Cells]]:
        """What covers the cells `first` to `end`: position, number of cells wanted, bytes (perhaps of more cells).

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
    """What getting cells from devices takes: so much for a call, and so much for each cell.

    From what `few` cells took and what `more` did.
    """

    def __init__(self, few: int, few_seconds: float, more: int, more_seconds: float) -> None:
        self._cell = max(more_seconds - few_seconds, 0.0) / (more - few)
        self._call = max(few_seconds - few * self._cell, 0.0)

    def seconds(self, n: int, piece: int) -> float:
        """What `n` cells take, so many in a call."""
        return -(-n // piece) * self._call + n * self._cell

    def note(self, n: int, seconds: float) -> None:
        """`n` cells took so long: links and loads change."""
        expected = self._call + n * self._cell
        if expected > 0:
            scale = 0.7 + 0.3 * min(seconds / expected, 10.0)
            self._call, self._cell = scale * self._call, scale * self._cell


class ReadRate:
    """How fast bytes come from somewhere, as far as that is known, and whether that beats computing."""

    def __init__(self) -> None:
        self._rate = 0.0
        self._n_passed = 0

    def note(self, n_bytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        rate = n_bytes / max(seconds, 1e-6)
        self._rate = 0.7 * self._rate + 0.3 * rate if self._rate else rate

    def pays(self, n_bytes: int, n: int, pace: float) -> bool:
        """Whether these bytes are there before `n` tokens are computed, at `pace` a second.

        Where nothing is known it is tried, and where it did not pay, now and then again.
        """
        if not self._rate or n_bytes * pace <= n * self._rate:
            return True
        self._n_passed += 1
        if self._n_passed % _PROBE_AGAIN == 0:
            self._rate = 0.0
        return False


class CellReader:
    """Gets cells from the devices, `piece` in a call, and knows what that takes."""

    def __init__(self, memory: Memory, piece: int) -> None:
        self._memory = memory
        self._piece = piece
        self._cost: ReadCost | None = None
        self._n_passed = 0

    def read(self, handle: Handle, start: int, n: int) -> Cells:
        """`n` cells of a sequence from position `start` on; raises DeviceLost."""
        began = time.perf_counter()
        cells = self._memory.read(handle, start, n)
        if self._cost is not None:
            self._cost.note(n, time.perf_counter() - began)
        return cells

    def pays(self, handle: Handle, pace: float) -> bool:
        """Whether getting a sequence's cells and putting them back is quicker than computing them, at `pace` a second.

        Over a slow link it is not. What reading takes is measured; where that was too much, now and then again.
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


class Store:
    """Sequences, the one used last at the end; never more than `limit` bytes in all (None: no limit).

    Half of that may be taken by others (see `reserve`). `most_tails`: of one sequence. `reach`: to how many tokens, at
    most so many, one can go with the tail of so many (see Memory.tail_reach). `tail_bytes`: what that takes. `dropped`
    is called with those that had to make room, and with those that are larger than the limit; None: they are gone.
    """

    def __init__(
        self,
        limit: int | None,
        cell_bytes: int,
        piece: int,
        reach: Callable[[int, int], int] = min,
        tail_bytes: Callable[[int], int] = lambda n: 0,
        most_tails: int = 32,
        dropped: Callable[[Stored], None] | None = None,
    ) -> None:
        self._limit = limit
        self._most_tails = most_tails
        self._dropped = dropped
        self._cell_bytes = cell_bytes
        self._piece = piece
        self._reach = reach
        self._tail_bytes = tail_bytes
        self._kept: list[Stored] = []
        self.nbytes = self.n_tokens = 0
        self._entries: tuple[StoredPrompt, ...] | None = ()
        self.reserved = 0
        """Bytes of the limit that others have."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, tokens: Tokens, least: int, scales: Scales = ()) -> tuple[Stored, int] | None:
        """The sequence of which most first tokens are of use for these, and how many: `least` or more.

        It counts as used now.
        """
        best, longest = None, least - 1
        for stored in reversed(self._kept):
            if stored.tokens.size > longest and (n := self.useful(stored, stored.shared(tokens, scales))) > longest:
                best, longest = stored, n
                if n == tokens.size:
                    break
        if best is None:
            return None
        self._use(best)
        return best, longest

    def useful(self, stored: Stored, n: int) -> int:
        """How many of a sequence's first `n` tokens a tail allows to go on from."""
        return max((self._reach(tail, n) for tail in stored.tails), default=0)

    def tail(self, stored: Stored, n: int) -> int:
        """Of how many tokens the tail is with which one can go on from the first `n`, to which `useful` said yes."""
        return next(tail for tail in sorted(stored.tails) if self._reach(tail, n) == n)

    def holds(self, tokens: Tokens, scales: Scales = ()) -> bool:
        """Whether a sequence begins with these tokens, or is them; it counts as used now."""
        n = tokens.size
        for stored in reversed(self._kept):
            if stored.tokens.size >= n == stored.shared(tokens, scales) == self.useful(stored, n):
                self._use(stored)
                return True
        return False

    def reserve(self, n: int) -> bool:
        """Give others so many bytes more of the limit: sequences used longest ago make room."""
        if self._limit is not None:
            if self.reserved + n > self._limit // 2:
                return False
            self._make_room(n)
        self.reserved += n
        return True

    def release(self, n: int) -> None:
        """Others need so many bytes less."""
        self.reserved -= n

    def _make_room(self, n: int, but: Stored | None = None) -> None:
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
        """Keep a sequence whose cells `read` gives, in place of those that begin it.

        One that is larger than the limit goes to `dropped` at once; returns False if there is no such function.

        `tails`: numbers of tokens of which `read_tail` gives the tails (none: no layer has one), beside those that are
        `at_hand`. Those used longest ago make room before anything is read, so that the limit holds at all times.
        """
        shorter = [stored for stored in self._kept if stored.shared(tokens, scales) == stored.tokens.size]
        base = max(shorter, key=lambda stored: stored.tokens.size, default=None)
        at_hand = {n: tail for n, tail in ({} if base is None else base.tails).items() if tail.size} | dict(at_hand)
        wanted = thinned([*tails, *at_hand] or [tokens.size], self._most_tails)

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
        stored = Stored(tokens.copy(), scales, cells, kept, size)
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
        """Those used last, the last one first; made anew only after a change, as each step asks for them."""
        if self._entries is None:
            self._entries = tuple(
                StoredPrompt(one.tokens.size, one.nbytes, one.used, tuple(one.tokens[:_BEGINNING].tolist()))
                for one in self._kept[: -_SHOWN - 1 : -1]
            )
        return self._entries

    def all(self) -> list[Stored]:
        """The one used last first."""
        return self._kept[::-1]

    def clear(self) -> None:
        self._kept.clear()
        self._entries = None
        self.nbytes = self.n_tokens = 0

    def _use(self, stored: Stored) -> None:
        stored.used, self._entries = time.time(), None
        if self._kept[-1] is not stored:
            self._kept.remove(stored)
            self._kept.append(stored)

    def _drop(self, stored: Stored) -> None:
        self._kept.remove(stored)
        self._entries = None
        self.n_tokens -= stored.tokens.size
        self.nbytes -= stored.nbytes
