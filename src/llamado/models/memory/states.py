"""Memory part of layers with recurrent state."""

from __future__ import annotations

import sys

from llamado.models.memory.parts import SNAPSHOTS, FixedPart, SequencePlace
from llamado.models.memory.storage import Storage


class StatePlace(SequencePlace):
    """Recurrent states of a sequence: `rows` maps token counts to rows. `home` is the first row that is overwritten.

    `wanted`: the token counts within the next tokens after which a state is kept; `regular`: one after which a state is
    kept periodically, or 0. The first `sure` tokens are verified: they stay even if later ones are rejected.
    """

    __slots__ = ("regular", "rows", "sure", "wanted")

    def __init__(self, home: int) -> None:
        super().__init__(home)
        self.rows: dict[int, int] = {}
        self.wanted: list[int] = []
        self.regular = self.sure = 0


class States(FixedPart[StatePlace]):
    """One state per sequence, SNAPSHOTS earlier ones to rewind to, and one periodic one.

    A batch continues from the state in one row and stores its own in another or the same row. If it ends at a marked
    token count, that is a row of its own and thus a snapshot without a copy. Only the last state of a batch remains, so
    a batch ends wherever one is to be kept (`stops`).

    With draft tokens, a sequence has `n_drafted` more rows. The row to overwrite is chosen so that the state before the
    first unverified token stays: the sequence rewinds to it, and accepted tokens after it are read again.
    """

    EVERY = 512
    """Number of tokens between periodic states."""

    n_spare = 2
    """Spare rows: padding reads from and writes to the first; the second is all zeros, the initial state."""

    def __init__(self, suffix: str, n_places: int, n_drafted: int = 0) -> None:
        self.n_drafted = n_drafted
        rows = 2 + SNAPSHOTS + n_drafted
        super().__init__(suffix, n_places * rows, n_places, rows)

    def _place(self, home: int) -> StatePlace:
        return StatePlace(home)

    def reach(self, place: StatePlace, used: int, n: int) -> int:
        return max((known for known in place.rows if known <= n), default=0)

    def rewind(self, place: StatePlace, n: int) -> None:
        self.trim(place, n)

    def trim(self, place: StatePlace, n: int) -> None:
        place.marks = [mark for mark in place.marks if mark <= n]
        place.rows = {known: row for known, row in place.rows.items() if 0 < known <= n}

    def room(self, place: StatePlace, first: int) -> int:
        return sys.maxsize if self.n_drafted else 0

    def _temporary_rows(self, place: StatePlace) -> list[int]:
        """Return the rows of states that are overwritten as the sequence continues."""
        others = place.home + 2 + SNAPSHOTS
        return [place.home, *range(others, others + self.n_drafted)]

    def snapshots(self, place: StatePlace) -> list[int]:
        """Return the token counts of states that are not overwritten."""
        passing = self._temporary_rows(place)
        return sorted(known for known, row in place.rows.items() if row not in passing)

    def expiring(self, place: StatePlace, used: int, n: int) -> list[int]:
        regular = place.home + 1 + SNAPSHOTS
        kept = [known for known in self.snapshots(place) if place.rows[known] != regular]
        coming = sum(used < mark <= used + n for mark in place.marks)
        lost = kept[: max(len(kept) + min(coming, SNAPSHOTS) - SNAPSHOTS, 0)]
        if used in place.marks and place.rows.get(used) in self._temporary_rows(place):
            lost.append(used)
        return lost

    def make_ready(self, place: StatePlace, used: int, n: int, storage: Storage, n_unverified: int = 0) -> None:
        if not used:
            place.rows = {0: self.n_rows + 1}
        place.sure = used - n_unverified
        place.wanted = sorted(mark for mark in place.marks if used < mark <= used + n)[-SNAPSHOTS:]
        regular = (used + n) // self.EVERY * self.EVERY
        place.regular = regular if regular > used and regular not in place.wanted else 0

    def stops(self, place: StatePlace, used: int, n: int) -> list[int]:
        """Return the token counts at which reading `n` tokens stops to keep a state; the last is the end."""
        return sorted({*place.wanted, *filter(None, (place.regular,)), used + n})

    def step(self, place: StatePlace, used: int, n: int) -> tuple[int, int]:
        """Return the row that `n` tokens continue from and the row they write, and record the latter."""
        last, source = used + n, place.rows[used]
        if last in place.wanted:
            row = self._snapshot_row(place)
        elif last == place.regular:
            row = place.home + 1 + SNAPSHOTS
        else:
            row = self._temporary_row(place)
        place.rows = {known: other for known, other in place.rows.items() if known and other != row} | {last: row}
        return source, row

    def _snapshot_row(self, place: StatePlace) -> int:
        """Return a row for a snapshot: a free one, else that with the fewest tokens."""
        known = {row: n for n, row in place.rows.items()}
        rows = range(place.home + 1, place.home + 1 + SNAPSHOTS)
        return min(rows, key=lambda row: known.get(row, -1))

    def _temporary_row(self, place: StatePlace) -> int:
        """Return a row for a temporary state: a free one, else the last one after unverified tokens."""
        known = {row: n for n, row in place.rows.items()}
        base = max((n for n in place.rows if n <= place.sure), default=0)

        def order(row: int) -> tuple[bool, int]:
            n = known.get(row, -1)
            return n == base, -n if n > base else -sys.maxsize

        return min(self._temporary_rows(place), key=order)

    def copy(self, src: StatePlace, dst: StatePlace, n: int, storage: Storage) -> None:
        storage.copy_rows(self.tensors, src.rows[n], dst.home, 1)
        dst.rows = {n: dst.home}

    def tail_rows(self, n: int) -> int:
        return 1

    def tail_reach(self, tail: int, n: int) -> int:
        return tail if tail <= n else 0

    def tail_row(self, place: StatePlace, n: int) -> int:
        return place.rows[n]

    def reserve_tail(self, place: StatePlace, tail: int) -> int:
        others = {at: row for at, row in place.rows.items() if row != place.home and 0 < at < tail}
        place.rows = others | {tail: place.home}
        return place.home
