"""Where sequences lie in the rows of layers that are alike: all tokens here, those of a window in window.py, or one
state in states.py.

A part is a group of layers whose rows are found in the same way. Each sequence has a place in each part; what is in a
place, and to which earlier token the sequence can go back there, the part alone knows.
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
"""Rows of a sequence begin at multiples of it: attention works on blocks of so many, and their order makes the bits."""
SPARE = 32
"""Rows behind those of tokens; the first takes what the tokens that fill a batch up write."""

SNAPSHOTS = 2
"""Earlier states of each sequence, or windows, that are kept beside the last one."""
_MARKS = 64
"""Numbers of tokens that a sequence may want to go back to, at most."""


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
