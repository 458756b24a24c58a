"""A model's memory: its tensors, the sequences in them, and what a batch reads and writes there.

llama.cpp's concept `llama_memory_i`. A sequence is a `Handle`: who holds it knows how many of the sequence's tokens
were read (`used`), the memory where they lie. What a sequence can go back to depends on what the layers remember:
all tokens (to any of them), a window (while it is still there, or to a snapshot) or a state (to snapshots alone).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import new_tensor
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import MemoryRows
from llamado.models.errors import UnsupportedModel
from llamado.models.memory.layers import KeysValues, Latent, LayerMemory
from llamado.models.memory.parts import (
    SPARE,
    Bytes,
    NoStorage,
    RowSpan,
    StatePlace,
    States,
    Storage,
    Tokens,
    Window,
    WindowPlace,
    blocks,
)
from llamado.models.memory.pool import Run, align

KV_TYPES = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0)
"""Types a cache can have. ggml's GPU back ends want F16 or Q8_0."""

SLACK = 256
"""Tokens more than a window and a batch that a sequence has room for, so that windows are seldom copied."""

_HUGE_BF16 = 0x7149  # 1e30: the product of a number of a cache with one of a query stays a float32 up to there


class Kept(NamedTuple):
    """What a graph needs to know of a layer's memory."""

    number: int
    """Of its part: `Placed.rows` has one entry for each."""
    part: Tokens | Window | States
    tensors: tuple[Tensor, ...]
    """K and V; one latent row; or the states."""
    window: int


class Handle:
    """A sequence in a memory; `used` of its tokens were read."""

    __slots__ = ("places", "run")

    def __init__(self, run: Run, places: list[WindowPlace | StatePlace]) -> None:
        self.run = run
        self.places = places

    @property
    def used(self) -> int:
        return self.run.used

    @used.setter
    def used(self, n: int) -> None:
        self.run.used = n

    @property
    def need(self) -> int:
        """Tokens that it must have room for, which others cannot have."""
        return self.run.need

    @need.setter
    def need(self, n: int) -> None:
        self.run.need = n

    @property
    def capacity(self) -> int:
        """Tokens that it has room for."""
        return self.run.capacity

    def __repr__(self) -> str:
        return f"Handle({self.run})"


class Span(NamedTuple):
    """The next `n` tokens of a sequence in a batch: those from position `first` on."""

    handle: Handle
    first: int
    n: int


class Placed(NamedTuple):
    """A batch in a memory: the position of each token, and where it is in each part."""

    positions: NDArray[np.int32]
    rows: tuple[MemoryRows, ...]


class Memory:
    """What `layers` remember of up to `n_sequences` sequences with `n_cells` tokens in all.

    `max_batch`: most tokens of a batch. `type_k`, `type_v`: of the caches. `causal`: whether tokens see only those
    before them. Windows have memory of their own where that is less than that of all tokens; `whole` keeps all
    (llama.cpp's --swa-full). Raises UnsupportedModel for types that do not fit.
    """

    def __init__(
        self,
        layers: Sequence[LayerMemory],
        n_cells: int,
        *,
        n_sequences: int = 1,
        max_batch: int = 512,
        type_k: TensorType = TensorType.F16,
        type_v: TensorType = TensorType.F16,
        causal: bool = True,
        whole: bool = False,
        slack: int = SLACK,
    ) -> None:
        self.n_cells = align(n_cells)
        self.n_moves = 0
        """How often tokens were moved."""
        self._causal = causal
        self._storage: Storage = NoStorage()
        self.types = type_k, type_v
        self._tokens = Tokens(self.n_cells, self._move)
        self._windows: dict[int, Window] = {}
        self._states: States | None = None
        kept = [self._add(layer, memory, n_sequences, max_batch, slack, whole) for layer, memory in enumerate(layers)]
        self._others: list[Window | States] = [*self._windows.values()]
        if self._states is not None:
            self._others.append(self._states)
        self.parts: tuple[Tokens | Window | States, ...] = (
            *((self._tokens,) if self._tokens.layers else ()),
            *self._others,
        )
        self._kept = [Kept(self.parts.index(part), part, tensors, window) for part, tensors, window in kept]

    # -- layers ------------------------------------------------------------------------------------------------------

    def _add(
        self, layer: int, memory: LayerMemory, n: int, max_batch: int, slack: int, whole: bool
    ) -> tuple[Tokens | Window | States, tuple[Tensor, ...], int]:
        part: Tokens | Window | States
        window = 0
        if isinstance(memory, KeysValues):
            window = memory.window
            part = self._window(window, n, max_batch, slack) if window and not whole else self._tokens
            named = (("k", memory.k, self.types[0]), ("v", memory.v, self.types[1]))
        elif isinstance(memory, Latent):
            part, named = self._tokens, (("k", memory.n, self.types[0]),)  # type: ignore[assignment]
        else:
            if self._states is None:
                self._states = States("_s", n)
            part = self._states
            named = tuple((f"s{i}", width, TensorType.F32) for i, width in enumerate(memory.widths))  # type: ignore
        tensors = tuple(
            new_tensor(type, width, part.n_rows + SPARE, name=f"cache_{name}_l{layer}") for name, width, type in named
        )
        part.layers[layer] = tensors
        return part, tensors, window

    def _window(self, window: int, n: int, max_batch: int, slack: int) -> Tokens | Window:
        part = self._windows.get(window)
        if part is None:
            suffix = f"_swa{len(self._windows) or ''}"
            part = Window(suffix, window, max_batch, slack, n)
            if part.n_rows >= self.n_cells:
                return self._tokens
            self._windows[window] = part
        return part

    def __getitem__(self, layer: int) -> Kept:
        return self._kept[layer]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, by layers."""
        return tuple(tensor for kept in self._kept for tensor in kept.tensors)

    @property
    def layer_of(self) -> dict[str, int]:
        """The layer of each tensor, by name."""
        return {tensor.name: layer for layer, kept in enumerate(self._kept) for tensor in kept.tensors}

    def layer_bytes(self, layer: int) -> int:
        """What a layer takes, for all sequences."""
        _, part, tensors, _ = self._kept[layer]
        return part.n_rows * sum(tensor.nb[1] for tensor in tensors)

    def read_bytes(self, layer: int, n: int) -> int:
        """What a token reads of a layer's memory in a sequence of `n` tokens."""
        _, part, tensors, window = self._kept[layer]
        rows = 1 if isinstance(part, States) else min(n, window) if window else n
        return rows * sum(tensor.nb[1] for tensor in tensors)

    def mask_rows(self, n: int) -> int:
        """Rows that the masks of a graph have for a token, all of them together, where the first `n` are in use."""
        masks = {(kept.number, kept.window) for kept in self._kept if not isinstance(kept.part, States)}
        return sum(min(n, self.parts[number].n_rows) for number, _ in masks)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the layers that keep all tokens: those of `read` and `write`."""
        return self._tokens.row_bytes

    @property
    def has_tails(self) -> bool:
        """Whether there are layers that do not keep all tokens."""
        return bool(self._others)

    @property
    def drafts(self) -> bool:
        """Whether a sequence can go back behind tokens that it has just read: states cannot."""
        return self._states is None

    @property
    def kind(self) -> str:
        """What the bytes of sequences in memories mean; they are of use only in those of the same kind."""
        return "; ".join(
            f"{kept.part.suffix or 'all'} {kept.window}: " + " ".join(f"{t.type.name} {t.ne[0]}" for t in kept.tensors)
            for kept in self._kept
        )

    def attach(self, storage: Storage) -> None:
        """The tensors have a place, where `storage` moves their rows."""
        self._storage = storage

    # -- sequences ---------------------------------------------------------------------------------------------------

    @property
    def n_used(self) -> int:
        """Tokens of all sequences."""
        return sum(run.used for run in self._tokens.pool.runs)

    def allocate(self, need: int, want: int = 0) -> Handle | None:
        """A sequence with room for `need` tokens, up to `want` where that is free; None where there is no room."""
        places: list[WindowPlace | StatePlace] = []
        for part in self._others:
            place = part.allocate()
            if place is None:
                break
            places.append(place)
        run = self._tokens.pool.allocate(need, want) if len(places) == len(self._others) else None
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
        n = min(n, handle.used)
        while True:
            found = n
            for part, place in zip(self._others, handle.places, strict=True):
                found = part.reach(place, handle.used, found)  # type: ignore[arg-type]
            if found == n:
                return n
            n = found

    def rewind(self, handle: Handle, n: int) -> bool:
        """Go back to the first `n` tokens; whether that was possible. Nothing is moved yet."""
        if self.reach(handle, n) != n:
            return False
        for part, place in zip(self._others, handle.places, strict=True):
            part.rewind(place, n)  # type: ignore[arg-type]
        self._tokens.rewind(handle.run, n)
        return True

    def copy(self, src: Handle, dst: Handle, n: int) -> bool:
        """Give `dst` the first `n` tokens of `src`, of which it has some; whether that was possible."""
        if self.reach(src, n) != n:
            return False
        known = dst.used
        if n <= known:
            return True
        for part, of_src, of_dst in zip(self._others, src.places, dst.places, strict=True):
            part.copy(of_src, of_dst, known, n, self._storage)  # type: ignore[arg-type]
        self._tokens.copy(src.run, dst.run, known, n, self._storage)
        return True

    def _move(self, src: int, dst: int, n: int) -> None:
        self.n_moves += 1
        if self._tokens.layers:
            self._storage.copy_rows(self._tokens.tensors, src, dst, n)

    # -- batches -----------------------------------------------------------------------------------------------------

    def place(self, spans: Sequence[Span]) -> Placed:
        """Where the tokens of a batch lie, and what they see; windows are moved along where they have no room.

        Raises ValueError where a sequence has no room for its tokens, and DeviceLost.
        """
        n = sum(span.n for span in spans)
        positions = np.empty(n, np.int32)
        arrays = [tuple(np.empty(n, np.int64) for _ in range(3)) for _ in self.parts]
        at = 0
        for handle, first, count in spans:
            if first != handle.used or count < 1:
                raise ValueError(f"{count} tokens from position {first} of a sequence that has {handle.used}")
            end = at + count
            positions[at:end] = first if count == 1 else np.arange(first, first + count)
            run = handle.run
            self._tokens.make_ready(run, first, count, self._storage)
            filled = iter(arrays)
            if self._tokens.layers:
                _fill(next(filled), at, end, run.start, first, self._causal)
            for part, place in zip(self._others, handle.places, strict=True):
                part.make_ready(place, first, count, self._storage)  # type: ignore[arg-type]
                written, firsts, lasts = next(filled)
                if isinstance(place, WindowPlace):
                    _fill((written, firsts, lasts), at, end, place.base, first - place.first, self._causal)
                else:
                    assert isinstance(part, States)
                    firsts[at:end], written[at:end] = part.step(place, first, count)
                    lasts[at:end] = 0  # no attention
            at = end
        return Placed(positions, self._rows(arrays))

    def nowhere(self) -> Placed:
        """A batch of no tokens."""
        return Placed(np.empty(0, np.int32), self._rows([(np.empty(0, np.int64),) * 3 for _ in self.parts]))

    def pack(self, lengths: Sequence[int]) -> Placed:
        """A batch of whole sequences of which nothing is kept, in a memory that holds no other."""
        arrays = tuple(np.empty(sum(lengths), np.int64) for _ in range(3))
        start = at = 0
        for n in lengths:
            _fill(arrays, at, at + n, start, 0, self._causal)
            start, at = start + blocks(n), at + n
        if start > self.n_cells or self._others:
            raise ValueError(f"texts of {list(lengths)} tokens in a memory of {self.n_cells}")
        positions = np.concatenate([np.arange(n, dtype=np.int32) for n in lengths])
        return Placed(positions, self._rows([arrays]))

    def packs(self, lengths: Sequence[int]) -> bool:
        """Whether `pack` has room for sequences of these lengths."""
        return sum(map(blocks, lengths)) <= self.n_cells

    def _rows(self, arrays: Sequence[tuple[NDArray[np.int64], ...]]) -> tuple[MemoryRows, ...]:
        found = zip(arrays, self.parts, strict=True)
        return tuple(MemoryRows(written, first, last, part.n_rows) for (written, first, last), part in found)

    # -- bytes -------------------------------------------------------------------------------------------------------

    def read(self, handle: Handle, first: int, n: int) -> Bytes:
        """The bytes of `n` tokens from position `first` on, in the layers that keep all tokens. Raises DeviceLost."""
        spans = [RowSpan(t, handle.run.start + first, n) for t in self._tokens.tensors]
        return self._storage.read_rows(spans) if spans else np.empty(0, np.uint8)

    def write(self, handle: Handle, n: int, data: Bytes, skip: int = 0) -> None:
        """Goes on with `n` tokens of which `read` gave these bytes, perhaps among more, behind the first `skip`.

        `write_tail` goes first where `tail_bytes` says that there is one. Raises DeviceLost.
        """
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
            self._storage.write_rows([RowSpan(t, handle.run.start + handle.used, n) for t in tensors], pieces)
        handle.used += n

    def tails(self, handle: Handle) -> list[int]:
        """Numbers of first tokens to which `read_tail` gives what the other layers have: all, and those before."""
        if not self._others:
            return [handle.used]
        known = {mark for place in handle.places for mark in place.marks if mark < handle.used}
        for place in handle.places:
            if isinstance(place, StatePlace):
                known |= set(place.rows)
        return sorted(n for n in known | {handle.used} if n and self.reach(handle, n) == n)

    def tail_bytes(self, n: int) -> int:
        """Bytes that layers which do not keep all tokens have of a sequence of `n` tokens."""
        return sum(part.tail_rows(n) * part.row_bytes for part in self._others) if n else 0

    def tail_reach(self, tail: int, n: int) -> int:
        """To how many tokens, at most `n`, one can go with the tail of a sequence of `tail` tokens."""
        n = min(tail, n)
        while True:
            found = n
            for part in self._others:
                found = part.tail_reach(tail, found)
            if found == n:
                return n
            n = found

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
        self._storage.write_rows(spans, _cut(data, (span.n * span.tensor.nb[1] for span in spans)))

    def sound(self, data: Bytes, n: int) -> bool:
        """Whether bytes from elsewhere can be those of `n` tokens: numbers, and such that no sum overflows."""
        if data.size != n * self.token_bytes:
            return False
        return _all_sound(self._tokens.tensors, [n] * len(self._tokens.tensors), data)

    def sound_tail(self, data: Bytes, n: int) -> bool:
        """As `sound`, of the tail of a sequence of `n` tokens."""
        if data.size != self.tail_bytes(n):
            return False
        pairs = [(t, part.tail_rows(n)) for part in self._others for t in part.tensors] if n else []
        return _all_sound([t for t, _ in pairs], [rows for _, rows in pairs], data)


def check_types(head_dim: int, types: Iterable[TensorType]) -> None:
    """Raises UnsupportedModel for types of a cache that are not known, or of which heads are not whole blocks."""
    for type in types:
        if type not in KV_TYPES:
            raise UnsupportedModel(f"a cache of type {type.name}; known are {', '.join(t.name for t in KV_TYPES)}")
        if head_dim % type.block_size:
            raise UnsupportedModel(f"a {type.name} cache needs heads of whole blocks, not of {head_dim} elements")


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


def _cut(data: Bytes, sizes: Iterable[int]) -> list[Bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return pieces


def _all_sound(tensors: Sequence[Tensor], rows: Sequence[int], data: Bytes) -> bool:
    pieces = _cut(data, (n * tensor.nb[1] for tensor, n in zip(tensors, rows, strict=True)))
    return all(_sound(piece, tensor.type) for piece, tensor in zip(pieces, tensors, strict=True))


def _sound(data: Bytes, type: TensorType) -> bool:
    """Whether all numbers of a cache's type are finite, and far from where products of them are not."""
    match type:
        case TensorType.F16:
            return not bool(np.any((data.view(np.uint16) & 0x7C00) == 0x7C00))
        case TensorType.Q8_0:  # blocks of a scale in f16 and 32 bytes
            scales = data.reshape(-1, 34)[:, :2].copy().view(np.uint16)
            return not bool(np.any((scales & 0x7C00) == 0x7C00))
        case TensorType.BF16:
            return not bool(np.any((data.view(np.uint16) & 0x7FFF) >= _HUGE_BF16))
        case _:
            return not bool(np.any((data.view(np.uint32) & 0x7FFF_FFFF) >= _HUGE_BF16 << 16))
