"""The part of layers that remember a state in place of tokens."""

from __future__ import annotations

import sys

from llamado.models.memory.parts import SNAPSHOTS, FixedPart, SequencePlace
from llamado.models.memory.storage import Storage


class StatePlace(SequencePlace):
    """The states of a sequence: after how many tokens, and in which row. `home` is the first that is written over.

    `wanted` are the numbers of tokens, among those that are about to be read, after which a state is kept, and
    `regular` one after which it is kept anyway, or 0. `sure` of its tokens are the sequence's when they are read,
    whatever becomes of those behind them.
    """

    __slots__ = ("regular", "rows", "sure", "wanted")

    def __init__(self, home: int) -> None:
        super().__init__(home)
        self.rows: dict[int, int] = {}
        self.wanted: list[int] = []
        self.regular = self.sure = 0


class States(FixedPart[StatePlace]):
    """One state of each sequence, SNAPSHOTS earlier ones that it may want to go back to, and one of now and then.

    A batch goes on from the state in one row and leaves its own in another or the same: where it ends at a token that
    the sequence may want to go back to that is a row of its own, which so is a snapshot without a copy. Of a batch
    nothing but its last state is left, so it ends wherever one is to be kept (`stops`).

    Where tokens are drafted a sequence has `n_drafted` rows more, and what is written over is chosen so that the state
    before the first token that may be wrong stays: it is gone back to, and what was right behind it is read again.
    """

    EVERY = 512
    """Tokens after which a state is kept."""

    n_spare = 2
    """What fills a batch up is read from and written to the first; the second is all zeros: nothing was read yet."""

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

    def _passing(self, place: StatePlace) -> list[int]:
        """Rows of states that are written over as the sequence goes on."""
        others = place.home + 2 + SNAPSHOTS
        return [place.home, *range(others, others + self.n_drafted)]

    def kept(self, place: StatePlace) -> list[int]:
        """Numbers of tokens of states that stay."""
        passing = self._passing(place)
        return sorted(known for known, row in place.rows.items() if row not in passing)

    def leaving(self, place: StatePlace, used: int, n: int) -> list[int]:
        regular = place.home + 1 + SNAPSHOTS
        kept = [known for known in self.kept(place) if place.rows[known] != regular]
        coming = sum(used < mark <= used + n for mark in place.marks)
        lost = kept[: max(len(kept) + min(coming, SNAPSHOTS) - SNAPSHOTS, 0)]
        if used in place.marks and place.rows.get(used) in self._passing(place):
            lost.append(used)
        return lost

    def make_ready(self, place: StatePlace, used: int, n: int, storage: Storage, on_trust: int = 0) -> None:
        if not used:
            place.rows = {0: self.n_rows + 1}
        place.sure = used - on_trust
        place.wanted = sorted(mark for mark in place.marks if used < mark <= used + n)[-SNAPSHOTS:]
        regular = (used + n) // self.EVERY * self.EVERY
        place.regular = regular if regular > used and regular not in place.wanted else 0

    def stops(self, place: StatePlace, used: int, n: int) -> list[int]:
        """Numbers of tokens, the last of them all, after which the state of a sequence that reads `n` is kept."""
        return sorted({*place.wanted, *filter(None, (place.regular,)), used + n})

    def step(self, place: StatePlace, used: int, n: int) -> tuple[int, int]:
        """The row that `n` tokens go on from and the one that they write; the sequence has it from now on."""
        last, source = used + n, place.rows[used]
        if last in place.wanted:
            row = self._snapshot_row(place)
        elif last == place.regular:
            row = place.home + 1 + SNAPSHOTS
        else:
            row = self._passing_row(place)
        place.rows = {known: other for known, other in place.rows.items() if known and other != row} | {last: row}
        return source, row

    def _snapshot_row(self, place: StatePlace) -> int:
        """A row for a snapshot: a free one, else that of the fewest tokens."""
        known = {row: n for n, row in place.rows.items()}
        rows = range(place.home + 1, place.home + 1 + SNAPSHOTS)
        return min(rows, key=lambda row: known.get(row, -1))

    def _passing_row(self, place: StatePlace) -> int:
        """A row for a state that is not to stay: a free one, else the last behind tokens that may be wrong."""
        known = {row: n for n, row in place.rows.items()}
        base = max((n for n in place.rows if n <= place.sure), default=0)

        def order(row: int) -> tuple[bool, int]:
            n = known.get(row, -1)
            return n == base, -n if n > base else -sys.maxsize

        return min(self._passing(place), key=order)

    def copy(self, src: StatePlace, dst: StatePlace, n: int, storage: Storage) -> None:
        storage.copy_rows(self.tensors, src.rows[n], dst.home, 1)
        dst.rows = {n: dst.home}

    def tail_rows(self, n: int) -> int:
        return 1

    def tail_reach(self, tail: int, n: int) -> int:
        return tail if tail <= n else 0

    def tail_row(self, place: StatePlace, n: int) -> int:
        return place.rows[n]

    def put_tail(self, place: StatePlace, tail: int) -> int:
        others = {at: row for at, row in place.rows.items() if row != place.home and 0 < at < tail}
        place.rows = others | {tail: place.home}
        return place.home
