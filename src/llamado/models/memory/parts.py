"""Memory parts: groups of layers with the same row layout. All tokens here, windows in window.py, states in states.py.

Each sequence has a place in each part. Only the part knows the place's contents, and which earlier tokens the sequence
can rewind to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from llamado.ggml.tensor import Tensor
from llamado.models.memory.pool import KVPool
from llamado.models.memory.run import Run
from llamado.models.memory.storage import Storage

BLOCK = 32
"""Rows of a sequence start at multiples of it: attention works on such blocks, whose order affects the bits."""
SPARE = 32
"""Rows after those of tokens; padding tokens write to the first."""

SNAPSHOTS = 2
"""Snapshots of earlier states or windows kept per sequence."""
_MARKS = 64
"""Maximum number of marked token counts per sequence."""


def blocks(n: int, block: int = BLOCK) -> int:
    """Return n rounded up to a multiple of `block`."""
    return -(-n // block) * block


Place = TypeVar("Place")


class Part(ABC, Generic[Place]):
    """Layers with the same row layout: `n_rows` rows in each of their tensors, followed by `n_spare` spare rows.

    `suffix` is appended to the names of its inputs. `layers` holds the tensors of each layer.
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
        """Return the bytes of one row in all layers."""
        return sum(tensor.nb[1] for tensor in self.tensors)

    @abstractmethod
    def clear(self) -> None:
        """Release all places."""

    @abstractmethod
    def reach(self, place: Place, used: int, n: int) -> int:
        """Return how many first tokens, at most `n`, a sequence of `used` tokens can rewind to."""

    @abstractmethod
    def rewind(self, place: Place, n: int) -> None:
        """Rewind to the first `n` tokens, which `reach` allows."""

    @abstractmethod
    def make_ready(self, place: Place, used: int, n: int, storage: Storage, n_unverified: int = 0) -> None:
        """Make room for `n` tokens after `used`, of which the last `n_unverified` are unverified."""

    @abstractmethod
    def copy(self, src: Place, dst: Place, n: int, storage: Storage) -> None:
        """Copy the first `n` tokens of `src`, which can rewind there, to the new place `dst`."""


class Tokens(Part[Run]):
    """All tokens of a sequence, in runs of cells in position order (see `pool.py`)."""

    def __init__(self, n_rows: int, block: int) -> None:
        super().__init__("", n_rows)
        self._block = block
        self.move: Callable[[int, int, int], None] | None = None
        """Callback: move n cells from one row to another."""
        self.clear()

    def clear(self) -> None:
        self.pool = KVPool(self.n_rows, self._move, self._block)

    def _move(self, src: int, dst: int, n: int) -> None:
        if self.move is None:
            raise RuntimeError("the memory's tensors are not allocated yet")
        self.move(src, dst, n)

    def reach(self, place: Run, used: int, n: int) -> int:
        return min(used, n)

    def rewind(self, place: Run, n: int) -> None:
        self.pool.rewind(place, n)

    def make_ready(self, place: Run, used: int, n: int, storage: Storage, n_unverified: int = 0) -> None:
        if used + n > place.limit:
            raise ValueError(f"{used + n} tokens in runs of {place.limit} cells")

    def copy(self, src: Run, dst: Run, n: int, storage: Storage) -> None:
        row = dst.start
        for start, length in src.rows(dst.first, n - dst.first) if self.layers else ():
            storage.copy_rows(self.tensors, start, row, length)
            row += length
        dst.used = n


class SequencePlace:
    """Place of a sequence in a part with fixed places; `home` is its first row.

    `marks`: token counts that it may have to rewind to.
    """

    __slots__ = ("home", "marks")

    def __init__(self, home: int) -> None:
        self.home = home
        self.marks: list[int] = []


Fixed = TypeVar("Fixed", bound=SequencePlace)


class FixedPart(Part[Fixed]):
    """A part with `n_places` places of `rows_of_place` rows each.

    A sequence's tail is the content of these layers that is needed to continue after a number of tokens.
    """

    def __init__(self, suffix: str, n_rows: int, n_places: int, rows_of_place: int) -> None:
        super().__init__(suffix, n_rows)
        self.rows_of_place = rows_of_place
        self._n_places = n_places
        self.clear()

    def clear(self) -> None:
        self._free = [i * self.rows_of_place for i in range(self._n_places)][::-1]

    def allocate(self) -> Fixed | None:
        """Return a place for one more sequence; None if all are taken."""
        return self._place(self._free.pop()) if self._free else None

    def free(self, place: Fixed) -> None:
        """Release the place of a sequence."""
        self._free.append(place.home)

    def mark(self, place: Fixed, n: int) -> None:
        """Request that the sequence can rewind to `n` tokens."""
        if n not in place.marks:
            place.marks = [*place.marks, n][-_MARKS:]

    @abstractmethod
    def expiring(self, place: Fixed, used: int, n: int) -> list[int]:
        """Return the marked token counts that are stored now, but not after `n` tokens more than `used` are read."""

    @abstractmethod
    def trim(self, place: Fixed, n: int) -> None:
        """Drop snapshots and marks after the first `n` tokens."""

    @abstractmethod
    def room(self, place: Fixed, first: int) -> int:
        """Return how many tokens can be read from position `first` on without moving earlier ones."""

    @abstractmethod
    def _place(self, home: int) -> Fixed:
        """Return a new, empty place."""

    @abstractmethod
    def tail_rows(self, n: int) -> int:
        """Return the number of rows a sequence of `n` tokens needs to continue."""

    @abstractmethod
    def tail_reach(self, tail: int, n: int) -> int:
        """Return how many tokens, at most `n`, the tail of `tail` tokens can rewind to."""

    @abstractmethod
    def tail_row(self, place: Fixed, n: int) -> int:
        """Return the first row of a stored tail."""

    @abstractmethod
    def reserve_tail(self, place: Fixed, tail: int) -> int:
        """Reserve the rows of a tail, replacing the place's contents, and return the first."""
