"""A model's memory: its tensors, the sequences in them, and what a batch reads and writes there.

llama.cpp's concept `llama_memory_i`. A sequence is a `Handle`: who holds it knows how many of the sequence's tokens
were read (`used`), the memory where they lie. What a sequence can go back to depends on what the layers remember:
all tokens (to any of them), a window (while it is still there, or to a snapshot) or a state (to snapshots alone).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.models.batch import Beginning, MemoryRows
from llamado.models.memory.layout import Layout
from llamado.models.memory.parts import blocks
from llamado.models.memory.pool import KVPool
from llamado.models.memory.run import Run
from llamado.models.memory.sequence import Handle, Placed, Span
from llamado.models.memory.sound import are_sound, cut
from llamado.models.memory.states import StatePlace, States
from llamado.models.memory.storage import Bytes, NoStorage, RowSpan, Storage
from llamado.models.memory.window import WindowPlace


class Memory(Layout):
    """Sequences in the memory of a layout, and what batches read and write there."""

    n_moves = 0
    """How often tokens were moved."""
    n_before = 0
    """How many tokens before each one of a batch the model looks back at (see Span)."""
    _storage: Storage = NoStorage()

    def attach(self, storage: Storage) -> None:
        """The tensors have a place, where `storage` moves their rows."""
        self._storage = storage
        self._tokens.move = self._move

    @property
    def has_tails(self) -> bool:
        """Whether there are layers that do not keep all tokens."""
        return bool(self._others)

    @property
    def has_states(self) -> bool:
        """Whether there are layers that remember a state."""
        return self._states is not None

    @property
    def drafts(self) -> bool:
        """Whether a sequence can go back behind drafted tokens, perhaps some tokens further (see `settle`)."""
        return self._states is None or self._states.n_drafted > 0

    # -- sequences ---------------------------------------------------------------------------------------------------

    @property
    def n_used(self) -> int:
        """Cells with tokens."""
        return self._tokens.pool.n_used

    @property
    def n_shared(self) -> int:
        """Cells with tokens of more than one sequence."""
        return self._tokens.pool.n_shared

    def allocate(self, need: int, want: int = 0) -> Handle | None:
        """A sequence with room for `need` tokens, up to `want` where that is free; None where there is no room."""
        return self._begin(lambda pool: pool.allocate(need, want))

    def fork(
        self, src: Handle, n: int, need: int, want: int = 0, tail: tuple[int, Bytes] | None = None
    ) -> Handle | None:
        """As `allocate`, a sequence that has the first `n` tokens of `src`, which has to be able to go back there; or
        `tail` says of how many tokens its bytes are, see `tail_reach`. Raises DeviceLost.

        Whole blocks of cells are shared: they are there once. What is left is copied.
        """
        if (self.reach(src, n) if tail is None else self.tail_reach(tail[0], n)) != n:
            raise ValueError(f"the first {n} tokens of a sequence that cannot go back there")
        handle = self._begin(lambda pool: pool.fork(src.run, n, need, want))
        if handle is None:
            return None
        try:
            if tail is not None:
                self.write_tail(handle, *tail)
            elif n:
                for part, of_src, of_new in zip(self._others, src.places, handle.places, strict=True):
                    part.copy(of_src, of_new, n, self._storage)  # type: ignore[arg-type]
            self._tokens.copy(src.run, handle.run, n, self._storage)
        except BaseException:
            self.free(handle)
            raise
        return handle

    def _begin(self, take: Callable[[KVPool], Run | None]) -> Handle | None:
        """A sequence with a place in each part; None where one of them has none."""
        places: list[WindowPlace | StatePlace] = []
        for part in self._others:
            place = part.allocate()
            if place is None:
                break
            places.append(place)
        run = take(self._tokens.pool) if len(places) == len(self._others) else None
        if run is None:
            self._give_back(places)
            return None
        return Handle(run, places)

    def grow(self, handle: Handle, need: int, want: int = 0) -> bool:
        """Let the sequence have room for `need` tokens, up to `want`; False, and all as it was, where there is none."""
        return self._tokens.pool.grow(handle.run, need, want)

    def free(self, handle: Handle) -> None:
        """Forget the sequence."""
        self._tokens.pool.free(handle.run)
        self._give_back(handle.places)
        handle.places = []

    def _give_back(self, places: Sequence[WindowPlace | StatePlace]) -> None:
        for part, place in zip(self._others, places, strict=False):
            part.free(place)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Forget all sequences."""
        self._tokens.clear()
        for part in self._others:
            part.clear()

    def mark(self, handle: Handle, n: int) -> None:
        """The sequence may want to go back to its first `n` tokens later, where they are not read yet."""
        for part, place in zip(self._others, handle.places, strict=True):
            part.mark(place, n)  # type: ignore[arg-type]

    def reach(self, handle: Handle, n: int) -> int:
        """To how many of its first tokens, at most `n`, the sequence can go back."""
        places = list(zip(self._others, handle.places, strict=True))

        def less(n: int) -> int:
            for part, place in places:
                n = part.reach(place, handle.used, n)  # type: ignore[arg-type]
            return n

        return _agreed(min(n, handle.used), less)

    def rewind(self, handle: Handle, n: int) -> bool:
        """Go back to the first `n` tokens; whether that was possible. Raises DeviceLost."""
        if self.reach(handle, n) != n:
            return False
        self._tokens.rewind(handle.run, n)
        for part, place in zip(self._others, handle.places, strict=True):
            part.rewind(place, n)  # type: ignore[arg-type]
        return True

    def settle(self, handle: Handle) -> None:
        """Drafted tokens were wrong: go back to where the sequence can go on from, at most its tokens that are used.
        Raises DeviceLost.
        """
        if self._states is not None:
            self.rewind(handle, self.reach(handle, handle.used))

    def leaving(self, handle: Handle, n: int) -> list[int]:
        """Numbers of first tokens to which it can go back as was marked, and not any more once `n` more are read."""
        places = zip(self._others, handle.places, strict=True)
        lost = {m for part, place in places for m in part.leaving(place, handle.used, n)}  # type: ignore[arg-type]
        return sorted(m for m in lost if m and self.reach(handle, m) == m)

    def go_back(self, handle: Handle, n: int, tail: int, data: Bytes) -> None:
        """Go back to the first `n` tokens with the tail of `tail` ones, which reaches there. Raises DeviceLost."""
        for part, place in zip(self._others, handle.places, strict=True):
            part.trim(place, n)  # type: ignore[arg-type]
        self.write_tail(handle, tail, data)
        self._tokens.rewind(handle.run, n)

    def _move(self, src: int, dst: int, n: int) -> None:
        self.n_moves += 1
        if self._tokens.layers:
            self._storage.copy_rows(self._tokens.tensors, src, dst, n)

    def room(self, handle: Handle, first: int, *, on_trust: bool) -> int:
        """How many tokens the sequence can be given from position `first` on, before it has to `grow`.

        `on_trust`: without moving anything, since tokens before them are on trust.
        """
        n = handle.capacity - first
        if on_trust:
            for part, place in zip(self._others, handle.places, strict=True):
                n = min(n, part.room(place, first))  # type: ignore[arg-type]
        return n

    # -- batches -----------------------------------------------------------------------------------------------------

    def place(self, spans: Sequence[Span], fit: Callable[[int], int] = int) -> list[Placed]:
        """Where the tokens of a batch lie, and what they see; windows are moved along where they have no room.

        Where layers remember states it is divided into batches in which all sequences have as many tokens, to be
        evaluated in this order: one of all spans of one token; each other span by itself, in as many as it takes until
        each has a size that fits and none goes past a state that is to be kept. `fit`: the greatest size up to a
        number, at least 1.

        Raises ValueError where a sequence has no room for its tokens, and DeviceLost.
        """
        for handle, first, count, on_trust, *_ in spans:
            if first != handle.used + on_trust or count < 1:
                raise ValueError(f"{count} tokens from position {first} of a sequence that has {handle.used}")
            if on_trust and count > self.room(handle, first, on_trust=True):
                raise ValueError(f"there is no room for {count} tokens behind {on_trust} that are on trust")
            self._tokens.make_ready(handle.run, first, count, self._storage)
            for part, place in zip(self._others, handle.places, strict=True):
                part.make_ready(place, first, count, self._storage, on_trust)  # type: ignore[arg-type]
        if self._states is None:
            return [self._placed(spans)]
        ones: list[int] = []
        longer: list[tuple[Span, int]] = []
        at = 0
        for span in spans:
            if span.n == 1:
                ones.append(at)
            else:
                longer += [(piece, at + piece.first - span.first) for piece in self._cut(span, fit)]
            at += span.n
        found = []
        if ones:
            placed = self._placed([span for span in spans if span.n == 1])
            found.append(placed._replace(tokens=np.array(ones), n_seqs=len(ones)))
        for piece, at in longer:
            found.append(self._placed([piece])._replace(tokens=np.arange(at, at + piece.n), n_seqs=1))
        return found

    def _cut(self, span: Span, fit: Callable[[int], int]) -> list[Span]:
        """The pieces in which a sequence's tokens are read one after the other."""
        handle, at = span.handle, span.first
        place = next(place for place in handle.places if isinstance(place, StatePlace))
        assert self._states is not None
        found = []
        for stop in self._states.stops(place, at, span.n):
            while at < stop:
                found.append(Span(handle, at, fit(stop - at)))
                at += found[-1].n
        return found

    def _placed(self, spans: Sequence[Span]) -> Placed:
        """Where tokens lie for which there is room."""
        n = sum(span.n for span in spans)
        positions = np.empty(n, np.int32)
        lengths = [len(spans) if isinstance(part, States) else n for part in self.parts]
        arrays = [tuple(np.empty(length, np.int64) for _ in range(3)) for length in lengths]
        at = 0
        beginnings: list[Beginning] = []
        for number, (handle, first, count, *_) in enumerate(spans):
            end = at + count
            positions[at:end] = first if count == 1 else np.arange(first, first + count)
            filled = iter(arrays)
            if self._tokens.layers:
                *before, last = handle.run.stretches()
                beginning = Beginning(at, end, tuple(before))
                if before:
                    beginnings.append(beginning)
                _fill(next(filled), at, end, last.row, first - beginning.n, self._causal)
            for part, place in zip(self._others, handle.places, strict=True):
                written, firsts, lasts = next(filled)
                if isinstance(place, WindowPlace):
                    _fill((written, firsts, lasts), at, end, place.base, first - place.first, self._causal)
                else:
                    assert isinstance(part, States)
                    firsts[number], written[number] = part.step(place, first, count)
                    lasts[number] = 0  # no attention
            at = end
        rows = self._rows(arrays)
        if beginnings:
            rows = dataclasses.replace(rows[0], beginnings=tuple(beginnings)), *rows[1:]
        return Placed(positions, rows)

    def nowhere(self) -> Placed:
        """A batch of no tokens."""
        return Placed(np.empty(0, np.int32), self._rows([(np.empty(0, np.int64),) * 3 for _ in self.parts]))

    def pack(self, lengths: Sequence[int]) -> Placed:
        """A batch of whole sequences of which nothing is kept, in a memory that holds no other."""
        arrays = tuple(np.empty(sum(lengths), np.int64) for _ in range(3))
        start = at = 0
        for n in lengths:
            _fill(arrays, at, at + n, start, 0, self._causal)
            start, at = start + blocks(n, self.block), at + n
        if start > self.n_cells or self._others:  # see `packs`
            raise ValueError(f"texts of {list(lengths)} tokens in a memory of {self.n_cells}")
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        return Placed(positions, self._rows([arrays]))

    def packs(self, lengths: Sequence[int]) -> bool:
        """Whether `pack` has room for sequences of these lengths."""
        return not self._others and sum(blocks(n, self.block) for n in lengths) <= self.n_cells

    def _rows(self, arrays: Sequence[tuple[NDArray[np.int64], ...]]) -> tuple[MemoryRows, ...]:
        found = zip(arrays, self.parts, strict=True)
        return tuple(MemoryRows(written, first, last, part.n_rows) for (written, first, last), part in found)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def read(self, handle: Handle, first: int, n: int) -> Bytes:
        """The bytes of `n` tokens from position `first` on, in the layers that keep all tokens. Raises DeviceLost."""
        rows = handle.run.rows(first, n)
        spans = [RowSpan(tensor, *stretch) for tensor in self._tokens.tensors for stretch in rows]
        return self._storage.read_rows(spans) if spans else np.empty(0, np.uint8)

    def write(self, handle: Handle, n: int, data: Bytes, skip: int = 0) -> None:
        """Goes on with `n` tokens of which `read` gave these bytes, perhaps among more, behind the first `skip`.

        `write_tail` goes first where `tail_bytes` says that there is one. Raises ValueError where the sequence has no
        room for them, and DeviceLost.
        """
        self._tokens.make_ready(handle.run, handle.used, n, self._storage)
        tensors = self._tokens.tensors
        held = data.size // max(self.token_bytes, 1)
        if held * self.token_bytes != data.size or (tensors and skip + n > held):
            raise ValueError(f"{data.size} bytes for {n} tokens of {self.token_bytes}")
        pieces, at = [], 0
        for tensor in tensors:
            row = tensor.nb[1]
            pieces.append(data[at + skip * row : at + (skip + n) * row])
            at += held * row
        if tensors and n:
            row = handle.run.start + handle.run.n_own
            self._storage.write_rows([RowSpan(tensor, row, n) for tensor in tensors], pieces)
        handle.used += n

    def tails(self, handle: Handle) -> list[int]:
        """Numbers of first tokens to which `read_tail` gives what the other layers have: all, and those before."""
        if not self._others:
            return [handle.used]
        last = self.reach(handle, handle.used)
        known = {mark for place in handle.places for mark in place.marks if mark < last}
        for place in handle.places:
            if isinstance(place, StatePlace):
                assert self._states is not None
                known |= set(self._states.kept(place))
        return sorted(n for n in known | {last} if n and self.reach(handle, n) == n)

    def tail_bytes(self, n: int) -> int:
        """Bytes that layers which do not keep all tokens have of a sequence of `n` tokens."""
        return sum(part.tail_rows(n) * part.row_bytes for part in self._others) if n else 0

    def tail_reach(self, tail: int, n: int) -> int:
        """To how many tokens, at most `n`, one can go with the tail of a sequence of `tail` tokens."""

        def less(n: int) -> int:
            for part in self._others:
                n = part.tail_reach(tail, n)
            return n

        return _agreed(min(tail, n), less)

    def read_tail(self, handle: Handle, n: int) -> Bytes:
        """The bytes that layers which do not keep all tokens have of the first `n`. Raises DeviceLost."""
        if not self._others or not n:
            return np.empty(0, np.uint8)
        spans: list[RowSpan] = []
        for part, place in zip(self._others, handle.places, strict=True):
            start = part.tail_row(place, n)  # type: ignore[arg-type]
            spans += [RowSpan(t, start, part.tail_rows(n)) for t in part.tensors]
        return self._storage.read_rows(spans)

    def write_tail(self, handle: Handle, tail: int, data: Bytes) -> None:
        """What `read_tail` gave of a sequence of `tail` tokens that begins with this one. Raises DeviceLost."""
        if data.size != self.tail_bytes(tail):
            raise ValueError(f"{data.size} bytes for the tail of {tail} tokens")
        if not self._others or not tail:
            return
        spans: list[RowSpan] = []
        for part, place in zip(self._others, handle.places, strict=True):
            start = part.put_tail(place, tail)  # type: ignore[arg-type]
            spans += [RowSpan(t, start, part.tail_rows(tail)) for t in part.tensors]
        self._storage.write_rows(spans, cut(data, spans))

    def sound(self, data: Bytes, n: int) -> bool:
        """Whether bytes from elsewhere can be those of `n` tokens: numbers, and such that no sum overflows."""
        return are_sound(data, [RowSpan(tensor, 0, n) for tensor in self._tokens.tensors])

    def sound_tail(self, data: Bytes, n: int) -> bool:
        """As `sound`, of the tail of a sequence of `n` tokens."""
        spans = [RowSpan(t, 0, part.tail_rows(n)) for part in self._others for t in part.tensors] if n else []
        return are_sound(data, spans)


def _agreed(n: int, less: Callable[[int], int]) -> int:
    """The number of tokens at which all parts can be: each in turn takes off what it cannot reach, until none does."""
    while (found := less(n)) != n:
        n = found
    return n


def _fill(rows: tuple[NDArray[np.int64], ...], at: int, end: int, start: int, behind: int, causal: bool) -> None:
    """Rows of tokens that go behind `behind` others, which lie from row `start` on: written, first and last seen."""
    written, firsts, lasts = rows
    cell = start + behind
    if end - at == 1:
        written[at] = lasts[at] = cell
    else:
        written[at:end] = np.arange(cell, cell + end - at)
        lasts[at:end] = written[at:end] if causal else cell + end - at - 1
    firsts[at:end] = start
