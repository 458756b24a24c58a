"""Memory part of layers with sliding windows."""

from __future__ import annotations

from typing import NamedTuple

from llamado.models.memory.parts import BLOCK, SNAPSHOTS, FixedPart, SequencePlace, blocks
from llamado.models.memory.pool import align
from llamado.models.memory.storage import Storage


class _Snapshot(NamedTuple):
    """Tokens `first` to `n`, starting at row `row`."""

    n: int
    first: int
    row: int


class WindowPlace(SequencePlace):
    """The last tokens of a sequence: those from `first` on are at row `base` and after, with room for `room`.

    `home` is the start of its run, which its snapshots follow.
    """

    __slots__ = ("base", "first", "room", "snapshots")

    def __init__(self, home: int, room: int) -> None:
        super().__init__(home)
        self.begin(room)

    def begin(self, room: int) -> None:
        self.base, self.first, self.room = self.home, 0, room
        self.snapshots: list[_Snapshot] = []


class Window(FixedPart[WindowPlace]):
    """The last `window` tokens of a sequence and those of a batch, in position order.

    If a run is full, the last tokens are copied to its front, at most every `slack` tokens. Marked windows (see `mark`)
    are saved as snapshots before they are lost.
    """

    def __init__(self, suffix: str, window: int, max_batch: int, slack: int, n_places: int) -> None:
        self.window = window
        self._run = blocks(window + BLOCK + max_batch + slack)
        self._block = blocks(window + BLOCK)
        rows = self._run + SNAPSHOTS * self._block
        # GPU back ends require attention over a multiple of 256 rows.
        super().__init__(suffix, align(n_places * rows), n_places, rows)

    def _place(self, home: int) -> WindowPlace:
        return WindowPlace(home, self._run)

    def _first_kept(self, n: int) -> int:
        """Return the first of `n` tokens that must be kept."""
        return max(0, n - self.window + 1) // BLOCK * BLOCK

    def _covers(self, first: int, n: int) -> bool:
        """Return True if rows from token `first` on include every token that the token after `n` others sees."""
        return first == 0 or first <= n - self.window + 1

    def _find(self, place: WindowPlace, n: int) -> _Snapshot:
        """Return the rows of `n` first tokens that the sequence can rewind to."""
        if self._covers(place.first, n):
            return _Snapshot(n, place.first, place.base)
        return next(s for s in place.snapshots if s.n >= n and self._covers(s.first, n))

    def reach(self, place: WindowPlace, used: int, n: int) -> int:
        n = min(used, n)
        if self._covers(place.first, n):
            return n
        within = (min(n, s.n) for s in place.snapshots if self._covers(s.first, min(n, s.n)))
        return max(within, default=0)

    def rewind(self, place: WindowPlace, n: int) -> None:
        if not n:
            place.marks = []
            place.begin(self._run)
            return
        if not self._covers(place.first, n):
            found = self._find(place, n)
            place.base, place.first, place.room = found.row, found.first, 0
        self.trim(place, n)

    def trim(self, place: WindowPlace, n: int) -> None:
        place.marks = [mark for mark in place.marks if mark <= n]
        cut = (s._replace(n=min(s.n, n)) for s in place.snapshots)
        place.snapshots = [s for s in cut if self._covers(s.first, s.n)]

    def room(self, place: WindowPlace, first: int) -> int:
        return place.first + place.room - first

    def expiring(self, place: WindowPlace, used: int, n: int) -> list[int]:
        if used + n - place.first <= place.room:
            return []
        least = self._first_kept(used)
        kept = {s.n for s in place.snapshots}
        kept |= {mark for mark in place.marks if mark <= used and place.first <= self._first_kept(mark) < least}
        return sorted(kept)[: max(len(kept) - SNAPSHOTS, 0)]

    def make_ready(self, place: WindowPlace, used: int, n: int, storage: Storage, n_unverified: int = 0) -> None:
        if used + n - place.first <= place.room:
            return
        least = self._first_kept(used)
        for mark in place.marks:
            if mark <= used and place.first <= self._first_kept(mark) < least:
                self._snapshot(place, mark, storage)
        if used > least:
            storage.copy_rows(self.tensors, place.base + least - place.first, place.home, used - least)
        place.base, place.first, place.room = place.home, least, self._run
        if used + n - least > self._run:
            raise ValueError(f"a batch of {n} tokens in a window's run of {self._run} rows")

    def _snapshot(self, place: WindowPlace, n: int, storage: Storage) -> None:
        if any(s.n == n for s in place.snapshots):
            return
        blocks_ = [place.home + self._run + i * self._block for i in range(SNAPSHOTS)]
        taken = {s.row for s in place.snapshots}
        free = [row for row in blocks_ if row not in taken and row != place.base]
        if not free:
            oldest = min((s for s in place.snapshots if s.row != place.base), key=lambda s: s.n)
            place.snapshots.remove(oldest)
            free = [oldest.row]
        first = self._first_kept(n)
        storage.copy_rows(self.tensors, place.base + first - place.first, free[0], n - first)
        place.snapshots.append(_Snapshot(n, first, free[0]))

    def copy(self, src: WindowPlace, dst: WindowPlace, n: int, storage: Storage) -> None:
        found = self._find(src, n)
        first = self._first_kept(n)
        storage.copy_rows(self.tensors, found.row + first - found.first, dst.home, n - first)
        dst.base, dst.first, dst.room = dst.home, first, self._run

    def tail_rows(self, n: int) -> int:
        return n - self._first_kept(n)

    def tail_reach(self, tail: int, n: int) -> int:
        n = min(tail, n)
        return n if self._covers(self._first_kept(tail), n) else 0

    def tail_row(self, place: WindowPlace, n: int) -> int:
        found = self._find(place, n)
        return found.row + self._first_kept(n) - found.first

    def reserve_tail(self, place: WindowPlace, tail: int) -> int:
        place.base, place.first, place.room = place.home, self._first_kept(tail), self._run
        return place.home
