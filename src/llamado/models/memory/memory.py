"""Memory of a model: its tensors, the sequences in them, and the rows that a batch reads and writes.

This is llama.cpp's `llama_memory_i`. A sequence is a `Handle`: the caller tracks how many of its tokens were read
(`used`), the memory tracks where they are. How far a sequence can rewind depends on the layers. If they keep all
tokens, it can rewind to any token. In a sliding window, it can rewind while the window is still stored, or to a
snapshot of it. With recurrent state, it can rewind only to snapshots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.models.batch import MemoryRows, PrefixRows
from llamado.models.memory.layout import Layout
from llamado.models.memory.parts import blocks
from llamado.models.memory.pool import KVPool
from llamado.models.memory.run import Run
from llamado.models.memory.sequence import BatchPlacement, Handle, Span
from llamado.models.memory.states import StatePlace, States
from llamado.models.memory.storage import Bytes, NoStorage, RowSpan, Storage
from llamado.models.memory.validation import are_valid, cut
from llamado.models.memory.window import WindowPlace


class Memory(Layout):
    """Sequences in a memory layout, and the rows that batches read and write."""

    n_moves = 0
    """Number of times tokens were moved."""
    n_before = 0
    """Number of tokens before each token of a batch that the model needs (see Span)."""
    _storage: Storage = NoStorage()

    def attach(self, storage: Storage) -> None:
        """Set the storage that moves rows, once the tensors have been allocated."""
        self._storage = storage
        self._tokens.move = self._move

    @property
    def has_tails(self) -> bool:
        """True if some layers do not keep all tokens."""
        return bool(self._others)

    @property
    def has_states(self) -> bool:
        """True if some layers have recurrent state."""
        return self._states is not None

    @property
    def supports_drafts(self) -> bool:
        """True if a sequence can rewind after rejected draft tokens, possibly further (see `rewind_rejected`)."""
        return self._states is None or self._states.n_drafted > 0

    # -- sequences ---------------------------------------------------------------------------------------------------

    @property
    def n_used(self) -> int:
        """Number of cells with tokens."""
        return self._tokens.pool.n_used

    @property
    def n_shared(self) -> int:
        """Number of cells with tokens of more than one sequence."""
        return self._tokens.pool.n_shared

    def allocate(self, need: int, want: int = 0) -> Handle | None:
        """Create a sequence with room for `need` tokens, up to `want` if free; return None if there is no room."""
        return self._begin(lambda pool: pool.allocate(need, want))

    def fork(
        self, src: Handle, n: int, need: int, want: int = 0, tail: tuple[int, Bytes] | None = None
    ) -> Handle | None:
        """Create a sequence that starts with the first `n` tokens of `src`; see `allocate`. Raises DeviceLost.

        `src` must be able to rewind to `n`, or `tail` gives the state: a number of tokens and its bytes, see
        `tail_reach`. Whole blocks of cells are shared; the rest is copied.
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
        """Create a sequence with a place in each part; return None if a part has none."""
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
        """Extend a sequence to room for `need` tokens, up to `want`; return False, changing nothing, if it is full."""
        return self._tokens.pool.grow(handle.run, need, want)

    def free(self, handle: Handle) -> None:
        """Release a sequence."""
        self._tokens.pool.free(handle.run)
        self._give_back(handle.places)
        handle.places = []

    def _give_back(self, places: Sequence[WindowPlace | StatePlace]) -> None:
        for part, place in zip(self._others, places, strict=False):
            part.free(place)  # type: ignore[arg-type]

    def clear(self) -> None:
        """Release all sequences."""
        self._tokens.clear()
        for part in self._others:
            part.clear()

    def mark(self, handle: Handle, n: int) -> None:
        """Request that the sequence can later rewind to its first `n` tokens, which are not read yet."""
        for part, place in zip(self._others, handle.places, strict=True):
            part.mark(place, n)  # type: ignore[arg-type]

    def reach(self, handle: Handle, n: int) -> int:
        """Return the largest number of first tokens, at most `n`, that the sequence can rewind to."""
        places = list(zip(self._others, handle.places, strict=True))

        def limit(n: int) -> int:
            for part, place in places:
                n = part.reach(place, handle.used, n)  # type: ignore[arg-type]
            return n

        return _fixed_point(min(n, handle.used), limit)

    def rewind(self, handle: Handle, n: int) -> bool:
        """Rewind to the first `n` tokens; return False if that is impossible. Raises DeviceLost."""
        if self.reach(handle, n) != n:
            return False
        self._tokens.rewind(handle.run, n)
        for part, place in zip(self._others, handle.places, strict=True):
            part.rewind(place, n)  # type: ignore[arg-type]
        return True

    def rewind_rejected(self, handle: Handle) -> None:
        """Rewind after rejected draft tokens to the last point, at most `used`, that the sequence can continue from.

        Raises DeviceLost.
        """
        if self._states is not None:
            self.rewind(handle, self.reach(handle, handle.used))

    def expiring(self, handle: Handle, n: int) -> list[int]:
        """Return the marked token counts that the sequence can rewind to now, but not after reading `n` more tokens."""
        places = zip(self._others, handle.places, strict=True)
        lost = {m for part, place in places for m in part.expiring(place, handle.used, n)}  # type: ignore[arg-type]
        return sorted(m for m in lost if m and self.reach(handle, m) == m)

    def restore(self, handle: Handle, n: int, tail: int, data: Bytes) -> None:
        """Rewind to the first `n` tokens by restoring the saved tail of `tail` tokens. Raises DeviceLost."""
        for part, place in zip(self._others, handle.places, strict=True):
            part.trim(place, n)  # type: ignore[arg-type]
        self.write_tail(handle, tail, data)
        self._tokens.rewind(handle.run, n)

    def _move(self, src: int, dst: int, n: int) -> None:
        self.n_moves += 1
        if self._tokens.layers:
            self._storage.copy_rows(self._tokens.tensors, src, dst, n)

    def room(self, handle: Handle, first: int, *, in_place: bool) -> int:
        """Return how many tokens from position `first` on the sequence can take before it must `grow`.

        With `in_place`, count only those that fit without moving anything, because the tokens before are unverified.
        """
        n = handle.capacity - first
        if in_place:
            for part, place in zip(self._others, handle.places, strict=True):
                n = min(n, part.room(place, first))  # type: ignore[arg-type]
        return n

    # -- batches -----------------------------------------------------------------------------------------------------

    def place(self, spans: Sequence[Span], fit: Callable[[int], int] = int) -> list[BatchPlacement]:
        """Assign rows to the tokens of a batch; windows without room are moved first.

        If layers have recurrent state, the batch is divided into batches of sequences of equal length, to be evaluated
        in this order: first all spans of one token, then each longer span alone. A longer span is cut so that each
        piece has an allowed size and ends where a state is to be kept. `fit` returns the largest allowed size up to a
        number, at least 1.

        Raises ValueError if a sequence has no room for its tokens, and DeviceLost.
        """
        for handle, first, count, n_unverified, *_ in spans:
            if first != handle.used + n_unverified or count < 1:
                raise ValueError(f"{count} tokens from position {first} of a sequence that has {handle.used}")
            if n_unverified and count > self.room(handle, first, in_place=True):
                raise ValueError(f"there is no room for {count} tokens after {n_unverified} unverified ones")
            self._tokens.make_ready(handle.run, first, count, self._storage)
            for part, place in zip(self._others, handle.places, strict=True):
                part.make_ready(place, first, count, self._storage, n_unverified)  # type: ignore[arg-type]
        if self._states is None:
            return [self._place_spans(spans)]
        ones: list[int] = []
        longer: list[tuple[Span, int]] = []
        at = 0
        for span in spans:
            if span.n == 1:
                ones.append(at)
            else:
                longer += [(piece, at + piece.first - span.first) for piece in self._cut_span(span, fit)]
            at += span.n
        found = []
        if ones:
            placed = self._place_spans([span for span in spans if span.n == 1])
            found.append(placed._replace(tokens=np.array(ones), n_seqs=len(ones)))
        for piece, at in longer:
            found.append(self._place_spans([piece])._replace(tokens=np.arange(at, at + piece.n), n_seqs=1))
        return found

    def _cut_span(self, span: Span, fit: Callable[[int], int]) -> list[Span]:
        """Cut a sequence's span into the pieces that are evaluated one after the other."""
        handle, at = span.handle, span.first
        place = next(place for place in handle.places if isinstance(place, StatePlace))
        assert self._states is not None
        found = []
        for stop in self._states.stops(place, at, span.n):
            while at < stop:
                n, begin = fit(stop - at), at - span.first
                positions = None if span.positions is None else span.positions[:, begin : begin + n]
                found.append(Span(handle, at, n, shift=span.shift, positions=positions))
                at += n
        return found

    def _place_spans(self, spans: Sequence[Span]) -> BatchPlacement:
        """Assign rows to spans that have room."""
        n = sum(span.n for span in spans)
        positions = np.empty(n, np.int32)
        layouts: list[tuple[int, NDArray[np.int32]]] = []
        lengths = [len(spans) if isinstance(part, States) else n for part in self.parts]
        arrays = [tuple(np.empty(length, np.int64) for _ in range(3)) for length in lengths]
        at = 0
        prefixes: list[PrefixRows] = []
        for number, span in enumerate(spans):
            handle, first, count = span.handle, span.first, span.n
            end, causal = at + count, self._causal and not span.bidirectional
            time = first + span.shift
            positions[at:end] = time if count == 1 else np.arange(time, time + count)
            if span.positions is not None:
                layouts.append((at, span.positions))
            filled = iter(arrays)
            if self._tokens.layers:
                *before, last = handle.run.row_ranges()
                prefix = PrefixRows(at, end, tuple(before))
                if before:
                    prefixes.append(prefix)
                _fill(next(filled), at, end, last.row, first - prefix.n, causal)
            for part, place in zip(self._others, handle.places, strict=True):
                written, firsts, lasts = next(filled)
                if isinstance(place, WindowPlace):
                    _fill((written, firsts, lasts), at, end, place.base, first - place.first, causal)
                else:
                    assert isinstance(part, States)
                    firsts[number], written[number] = part.step(place, first, count)
                    lasts[number] = 0  # no attention
            at = end
        rows = self._rows(arrays)
        if prefixes:
            rows = dataclasses.replace(rows[0], prefixes=tuple(prefixes)), *rows[1:]
        return BatchPlacement(_with_layouts(positions, layouts) if layouts else positions, rows)

    def empty(self) -> BatchPlacement:
        """Return a batch without tokens."""
        return BatchPlacement(np.empty(0, np.int32), self._rows([(np.empty(0, np.int64),) * 3 for _ in self.parts]))

    def pack(self, lengths: Sequence[int]) -> BatchPlacement:
        """Return a batch of whole sequences in an otherwise empty memory; nothing of them is kept."""
        arrays = tuple(np.empty(sum(lengths), np.int64) for _ in range(3))
        start = at = 0
        for n in lengths:
            _fill(arrays, at, at + n, start, 0, self._causal)
            start, at = start + blocks(n, self.block), at + n
        if start > self.n_cells or self._others:  # see `can_pack`
            raise ValueError(f"texts of {list(lengths)} tokens in a memory of {self.n_cells}")
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        return BatchPlacement(positions, self._rows([arrays]))

    def can_pack(self, lengths: Sequence[int]) -> bool:
        """Return True if `pack` has room for sequences of these lengths."""
        return not self._others and sum(blocks(n, self.block) for n in lengths) <= self.n_cells

    def _rows(self, arrays: Sequence[tuple[NDArray[np.int64], ...]]) -> tuple[MemoryRows, ...]:
        found = zip(arrays, self.parts, strict=True)
        return tuple(MemoryRows(written, first, last, part.n_rows) for (written, first, last), part in found)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def read(self, handle: Handle, first: int, n: int) -> Bytes:
        """Read `n` tokens from position `first` on in the layers that keep all tokens. Raises DeviceLost."""
        rows = handle.run.rows(first, n)
        spans = [RowSpan(tensor, *row_range) for tensor in self._tokens.tensors for row_range in rows]
        return self._storage.read_rows(spans) if spans else np.empty(0, np.uint8)

    def write(self, handle: Handle, n: int, data: Bytes, skip: int = 0) -> None:
        """Append `n` tokens from bytes that `read` returned, skipping the first `skip` tokens in them.

        Call `write_tail` first if `tail_bytes` is not 0. Raises ValueError if the sequence has no room, and DeviceLost.
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
        """Return the token counts for which `read_tail` is possible: the latest, and those of stored snapshots."""
        if not self._others:
            return [handle.used]
        last = self.reach(handle, handle.used)
        known = {mark for place in handle.places for mark in place.marks if mark < last}
        for place in handle.places:
            if isinstance(place, StatePlace):
                assert self._states is not None
                known |= set(self._states.snapshots(place))
        return sorted(n for n in known | {last} if n and self.reach(handle, n) == n)

    def tail_bytes(self, n: int) -> int:
        """Return the size of a tail: the state after `n` tokens of the layers that do not keep all tokens."""
        return sum(part.tail_rows(n) * part.row_bytes for part in self._others) if n else 0

    def tail_reach(self, tail: int, n: int) -> int:
        """Return how many tokens, at most `n`, a sequence can continue from with the tail of `tail` tokens."""

        def limit(n: int) -> int:
            for part in self._others:
                n = part.tail_reach(tail, n)
            return n

        return _fixed_point(min(tail, n), limit)

    def read_tail(self, handle: Handle, n: int) -> Bytes:
        """Read the tail of the first `n` tokens. Raises DeviceLost."""
        if not self._others or not n:
            return np.empty(0, np.uint8)
        spans: list[RowSpan] = []
        for part, place in zip(self._others, handle.places, strict=True):
            start = part.tail_row(place, n)  # type: ignore[arg-type]
            spans += [RowSpan(t, start, part.tail_rows(n)) for t in part.tensors]
        return self._storage.read_rows(spans)

    def write_tail(self, handle: Handle, tail: int, data: Bytes) -> None:
        """Restore a tail that `read_tail` returned for the first `tail` tokens of this sequence. Raises DeviceLost."""
        if data.size != self.tail_bytes(tail):
            raise ValueError(f"{data.size} bytes for the tail of {tail} tokens")
        if not self._others or not tail:
            return
        spans: list[RowSpan] = []
        for part, place in zip(self._others, handle.places, strict=True):
            start = part.reserve_tail(place, tail)  # type: ignore[arg-type]
            spans += [RowSpan(t, start, part.tail_rows(tail)) for t in part.tensors]
        self._storage.write_rows(spans, cut(data, spans))

    def is_valid(self, data: Bytes, n: int) -> bool:
        """Return True if external bytes are valid for `n` tokens: finite, and small enough that no sum overflows."""
        return are_valid(data, [RowSpan(tensor, 0, n) for tensor in self._tokens.tensors])

    def is_valid_tail(self, data: Bytes, n: int) -> bool:
        """Return True if external bytes are a valid tail of `n` tokens; see `is_valid`."""
        spans = [RowSpan(t, 0, part.tail_rows(n)) for part in self._others for t in part.tensors] if n else []
        return are_valid(data, spans)


def _fixed_point(n: int, limit: Callable[[int], int]) -> int:
    """Return the largest count at most `n` that all parts accept: apply `limit` until it changes nothing."""
    while (found := limit(n)) != n:
        n = found
    return n


def _with_layouts(positions: NDArray[np.int32], layouts: Sequence[tuple[int, NDArray[np.int32]]]) -> NDArray[np.int32]:
    """Return positions of four dimensions: those of `layouts` from the given tokens on, of text for the others."""
    found = np.zeros((4, positions.size), np.int32)
    found[:3] = positions
    for at, layout in layouts:
        found[:, at : at + layout.shape[1]] = layout
    return found


def _fill(rows: tuple[NDArray[np.int64], ...], at: int, end: int, start: int, behind: int, causal: bool) -> None:
    """Fill in written, first and last rows of tokens that follow `behind` others, which start at row `start`."""
    written, firsts, lasts = rows
    cell = start + behind
    if end - at == 1:
        written[at] = lasts[at] = cell
    else:
        written[at:end] = np.arange(cell, cell + end - at)
        lasts[at:end] = written[at:end] if causal else cell + end - at - 1
    firsts[at:end] = start
