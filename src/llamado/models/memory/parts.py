"""Where sequences lie in the rows of layers that are alike: all tokens, those of a window, or one state.

A part is a group of layers whose rows are found in the same way. Each sequence has a place in each part; what is in a
place, and to which earlier token the sequence can go back there, the part alone knows.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.tensor import Tensor
from llamado.models.memory.pool import KVPool, Run, align

BLOCK = 32
"""Rows of a sequence begin at multiples of it: attention works on blocks of so many, and their order makes the bits."""
SPARE = 32
"""Rows behind those of tokens; the first takes what the tokens that fill a batch up write."""

SNAPSHOTS = 2
"""Earlier states of each sequence, or windows, that are kept beside the last one."""
_MARKS = 64
"""Numbers of tokens that a sequence may want to go back to, at most."""

Bytes = NDArray[np.uint8]


class RowSpan(NamedTuple):
    """Rows `start` to `start + n` of one of a memory's tensors."""

    tensor: Tensor
    start: int
    n: int


class Storage(Protocol):
    """Moves the bytes of rows, wherever the tensors lie; all of it in order with the batches. Raises DeviceLost."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        """Copies `n` rows of each tensor from row `src` to row `dst`; they may overlap (memmove)."""
        ...

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        """The bytes of these rows, one span behind the other."""
        ...

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        """Puts the bytes of each piece into the rows of its span."""
        ...


class NoStorage:
    """Of a memory whose tensors lie nowhere yet."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        raise RuntimeError("the memory's tensors have no place yet")

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        raise RuntimeError("the memory's tensors have no place yet")

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        raise RuntimeError("the memory's tensors have no place yet")


def blocks(n: int, block: int = BLOCK) -> int:
    """The least multiple of a block that is at least n."""
    return -(-n // block) * block


Place = TypeVar("Place")


class Part(ABC, Generic[Place]):
    """Layers whose rows are found alike; `n_rows` rows in each of their tensors, and `n_spare` ones behind them.

    `suffix`: of the names of its inputs. `layers`: the tensors of each layer.
    """

    n_spare = SPARE

    def __init__(self, suffix: str, n_rows: int) -> None:
        self.suffix = suffix
        self.n_rows = n_rows
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensors in self.layers.values() for tensor in tensors)

    @property
    def row_bytes(self) -> int:
        """Of one row in all layers."""
        return sum(tensor.nb[1] for tensor in self.tensors)

    @abstractmethod
    def clear(self) -> None:
        """No sequence has a place."""

    @abstractmethod
    def reach(self, place: Place, used: int, n: int) -> int:
        """To how many first tokens, at most `n`, a sequence of `used` tokens can go back."""

    @abstractmethod
    def rewind(self, place: Place, n: int) -> None:
        """Goes back to the first `n` tokens, which `reach` allows."""

    @abstractmethod
    def make_ready(self, place: Place, used: int, n: int, storage: Storage, on_trust: int = 0) -> None:
        """Room for `n` tokens more, behind `used` of which the last `on_trust` may turn out to be wrong."""

    @abstractmethod
    def copy(self, src: Place, dst: Place, n: int, storage: Storage) -> None:
        """Gives `dst`, which is new, the first `n` tokens of `src`, to which that can go back."""


class Tokens(Part[Run]):
    """All tokens of a sequence, in runs of cells in the order of their positions (see `pool.py`)."""

    def __init__(self, n_rows: int, block: int) -> None:
        super().__init__("", n_rows)
        self._block = block
        self.move: Callable[[int, int, int], None] | None = None
        """Copies so many cells from one to another."""
        self.clear()

    def clear(self) -> None:
        self.pool = KVPool(self.n_rows, self._move, self._block)

    def _move(self, src: int, dst: int, n: int) -> None:
        if self.move is None:
            raise RuntimeError("the memory's tensors have no place yet")
        self.move(src, dst, n)

    def reach(self, place: Run, used: int, n: int) -> int:
        return min(used, n)

    def rewind(self, place: Run, n: int) -> None:
        self.pool.back(place, n)

    def make_ready(self, place: Run, used: int, n: int, storage: Storage, on_trust: int = 0) -> None:
        if used + n > place.limit:
            raise ValueError(f"{used + n} tokens in runs of {place.limit} cells")

    def copy(self, src: Run, dst: Run, n: int, storage: Storage) -> None:
        row = dst.start
        for start, length in src.rows(dst.first, n - dst.first) if self.layers else ():
            storage.copy_rows(self.tensors, start, row, length)
            row += length
        dst.used = n


class SequencePlace:
    """Where a sequence is in a part whose places begin at fixed rows; `home` is the first of its own.

    `marks`: numbers of tokens that it may want to go back to.
    """

    __slots__ = ("home", "marks")

    def __init__(self, home: int) -> None:
        self.home = home
        self.marks: list[int] = []


Fixed = TypeVar("Fixed", bound=SequencePlace)


class FixedPart(Part[Fixed]):
    """A part with `n_places` places of `rows_of_place` rows each. Of its layers a sequence has a tail: what they need
    to go on from so many tokens.
    """

    def __init__(self, suffix: str, n_rows: int, n_places: int, rows_of_place: int) -> None:
        super().__init__(suffix, n_rows)
        self.rows_of_place = rows_of_place
        self._n_places = n_places
        self.clear()

    def clear(self) -> None:
        self._free = [i * self.rows_of_place for i in range(self._n_places)][::-1]

    def allocate(self) -> Fixed | None:
        """A place for one more sequence; None where all are taken."""
        return self._place(self._free.pop()) if self._free else None

    def free(self, place: Fixed) -> None:
        """The sequence is gone."""
        self._free.append(place.home)

    def mark(self, place: Fixed, n: int) -> None:
        """The sequence may want to go back to `n` tokens."""
        if n not in place.marks:
            place.marks = [*place.marks, n][-_MARKS:]

    @abstractmethod
    def leaving(self, place: Fixed, used: int, n: int) -> list[int]:
        """Numbers of tokens that were marked and are here, and will not be once `n` more than `used` are read."""

    @abstractmethod
    def trim(self, place: Fixed, n: int) -> None:
        """Forgets all earlier points but those of the first `n` tokens."""

    @abstractmethod
    def room(self, place: Fixed, first: int) -> int:
        """How many tokens can be read from position `first` on with nothing moved that was read before."""

    @abstractmethod
    def _place(self, home: int) -> Fixed:
        """A place of which nothing is known."""

    @abstractmethod
    def tail_rows(self, n: int) -> int:
        """Rows that a sequence of `n` tokens needs to go on."""

    @abstractmethod
    def tail_reach(self, tail: int, n: int) -> int:
        """To how many tokens, at most `n`, one can go back with the rows that belong to `tail` tokens."""

    @abstractmethod
    def tail_row(self, place: Fixed, n: int) -> int:
        """Where the rows of a tail begin."""

    @abstractmethod
    def put_tail(self, place: Fixed, tail: int) -> int:
        """Where the rows of a tail go; the sequence has them, whatever it had."""


class _Snapshot(NamedTuple):
    """Tokens `first` to `n` from row `row` on."""

    n: int
    first: int
    row: int


class WindowPlace(SequencePlace):
    """The last tokens of a sequence: those from `first` on lie from row `base` on, where there is room for `room`.

    `home` is where its run begins, behind which its snapshots lie.
    """

    __slots__ = ("base", "first", "room", "snapshots")

    def __init__(self, home: int, room: int) -> None:
        super().__init__(home)
        self.begin(room)

    def begin(self, room: int) -> None:
        self.base, self.first, self.room = self.home, 0, room
        self.snapshots: list[_Snapshot] = []


class Window(FixedPart[WindowPlace]):
    """The last `window` tokens of a sequence and those of a batch, in the order of their positions.

    When a run is full the last tokens are copied to its front, which happens every `slack` tokens at most. Windows that
    a sequence may want to go back to (see `mark`) are put aside before they are lost.
    """

    def __init__(self, suffix: str, window: int, max_batch: int, slack: int, n_places: int) -> None:
        self.window = window
        self._run = blocks(window + BLOCK + max_batch + slack)
        self._block = blocks(window + BLOCK)
        rows = self._run + SNAPSHOTS * self._block
        # GPU back ends want attention over a multiple of 256 rows.
        super().__init__(suffix, align(n_places * rows), n_places, rows)

    def _place(self, home: int) -> WindowPlace:
        return WindowPlace(home, self._run)

    def _least(self, n: int) -> int:
        """The first token that has to be kept of `n`."""
        return max(0, n - self.window + 1) // BLOCK * BLOCK

    def _serves(self, first: int, n: int) -> bool:
        """Whether rows from token `first` on are all that the token behind `n` others sees of them."""
        return first == 0 or first <= n - self.window + 1

    def _find(self, place: WindowPlace, n: int) -> _Snapshot:
        """Where `n` first tokens lie that the sequence can go back to."""
        if self._serves(place.first, n):
            return _Snapshot(n, place.first, place.base)
        return next(s for s in place.snapshots if s.n >= n and self._serves(s.first, n))

    def reach(self, place: WindowPlace, used: int, n: int) -> int:
        n = min(used, n)
        if self._serves(place.first, n):
            return n
        within = (min(n, s.n) for s in place.snapshots if self._serves(s.first, min(n, s.n)))
        return max(within, default=0)

    def rewind(self, place: WindowPlace, n: int) -> None:
        if not n:
            place.marks = []
            place.begin(self._run)
            return
        if not self._serves(place.first, n):
            found = self._find(place, n)
            place.base, place.first, place.room = found.row, found.first, 0
        self.trim(place, n)

    def trim(self, place: WindowPlace, n: int) -> None:
        place.marks = [mark for mark in place.marks if mark <= n]
        cut = (s._replace(n=min(s.n, n)) for s in place.snapshots)
        place.snapshots = [s for s in cut if self._serves(s.first, s.n)]

    def room(self, place: WindowPlace, first: int) -> int:
        return place.first + place.room - first

    def leaving(self, place: WindowPlace, used: int, n: int) -> list[int]:
        if used + n - place.first <= place.room:
            return []
        least = self._least(used)
        kept = {s.n for s in place.snapshots}
        kept |= {mark for mark in place.marks if mark <= used and place.first <= self._least(mark) < least}
        return sorted(kept)[: max(len(kept) - SNAPSHOTS, 0)]

    def make_ready(self, place: WindowPlace, used: int, n: int, storage: Storage, on_trust: int = 0) -> None:
        if used + n - place.first <= place.room:
            return
        least = self._least(used)
        for mark in place.marks:
            if mark <= used and place.first <= self._least(mark) < least:
                self._put_aside(place, mark, storage)
        if used > least:
            storage.copy_rows(self.tensors, place.base + least - place.first, place.home, used - least)
        place.base, place.first, place.room = place.home, least, self._run
        if used + n - least > self._run:
            raise ValueError(f"a batch of {n} tokens in a window's run of {self._run} rows")

    def _put_aside(self, place: WindowPlace, n: int, storage: Storage) -> None:
        if any(s.n == n for s in place.snapshots):
            return
        blocks_ = [place.home + self._run + i * self._block for i in range(SNAPSHOTS)]
        taken = {s.row for s in place.snapshots}
        free = [row for row in blocks_ if row not in taken and row != place.base]
        if not free:
            oldest = min((s for s in place.snapshots if s.row != place.base), key=lambda s: s.n)
            place.snapshots.remove(oldest)
            free = [oldest.row]
        first = self._least(n)
        storage.copy_rows(self.tensors, place.base + first - place.first, free[0], n - first)
        place.snapshots.append(_Snapshot(n, first, free[0]))

    def copy(self, src: WindowPlace, dst: WindowPlace, n: int, storage: Storage) -> None:
        found = self._find(src, n)
        first = self._least(n)
        storage.copy_rows(self.tensors, found.row + first - found.first, dst.home, n - first)
        dst.base, dst.first, dst.room = dst.home, first, self._run

    def tail_rows(self, n: int) -> int:
        return n - self._least(n)

    def tail_reach(self, tail: int, n: int) -> int:
        n = min(tail, n)
        return n if self._serves(self._least(tail), n) else 0

    def tail_row(self, place: WindowPlace, n: int) -> int:
        found = self._find(place, n)
        return found.row + self._least(n) - found.first

    def put_tail(self, place: WindowPlace, tail: int) -> int:
        place.base, place.first, place.room = place.home, self._least(tail), self._run
        return place.home


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
