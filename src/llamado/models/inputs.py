"""Graph inputs: each input describes its tensor and fills it from a batch.

A graph is built for a shape and serves every batch up to that size (llama.cpp's llm_graph_input_i). If a batch has
fewer tokens, inputs pad it: padding tokens see nothing, are not seen, and their outputs are ignored. An architecture
with special needs defines its own Input; no other code has to change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import Batch

Bytes = NDArray[np.uint8]

_HIDDEN = 0xFC00  # f16 −inf
_INTEGERS: dict[TensorType, type[np.integer]] = {TensorType.I32: np.int32, TensorType.I64: np.int64}


class Input(ABC):
    """Graph input of `type` and shape `ne`; `name` is unique within the graph."""

    def __init__(self, name: str, type: TensorType, *ne: int) -> None:
        self.name = name
        self.type = type
        self.ne = ne

    @abstractmethod
    def fill(self, batch: Batch) -> Bytes:
        """Return the tensor's bytes for a batch, in newly allocated memory."""

    def renew(self, batch: Batch, memory: Bytes, held: object) -> object:
        """Update `memory`, the tensor's own, to the contents that `fill` returns; return the state for the next call.

        `held` is the state returned by the last call for an input of this name, of any size; None if the contents of
        `memory` are unknown.
        """
        memory[:] = self.fill(batch)
        return None


class Constant(Input):
    """An input with the same contents for all batches."""

    def renew(self, batch: Batch, memory: Bytes, held: object) -> object:
        if held != self.ne:
            memory[:] = self.fill(batch)
        return self.ne


class _Integers(Input):
    """Integers, padded with one value."""

    @abstractmethod
    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        """Return the integers and the padding value."""

    def fill(self, batch: Batch) -> Bytes:
        whole = np.empty(self.ne[0], _INTEGERS[self.type])
        self._put(batch, whole)
        return whole.view(np.uint8)

    def renew(self, batch: Batch, memory: Bytes, held: object) -> object:
        self._put(batch, memory.view(_INTEGERS[self.type]))
        return None

    def _put(self, batch: Batch, whole: NDArray[np.integer]) -> None:
        values, filler = self._of(batch)
        n = len(values)
        whole[:n] = values
        if n < whole.size:
            whole[n:] = filler


class ForwardGraph(Graph):
    """The graph of a forward pass; `feeds` fill its inputs."""

    __slots__ = ("feeds",)

    def __init__(self) -> None:
        super().__init__()
        self.feeds: list[Input] = []

    def feed(self, input: Input) -> Tensor:
        """Return the tensor of an input, creating it on first use."""
        tensor = self.inputs.get(input.name)
        if tensor is None:
            tensor = self.input(input.name, input.type, *input.ne)
            self.feeds.append(input)
        return tensor


class TokenIds(_Integers):
    """I32 [n_tokens]: the tokens."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__("tokens", TensorType.I32, n_tokens)

    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        if batch.tokens is None:
            raise ValueError("a batch of embeddings for a graph that takes tokens")
        return batch.tokens, 0


class Embeddings(Input):
    """F32 [width, n_tokens]: embeddings that replace tokens (see Model.n_embd_input)."""

    def __init__(self, width: int, n_tokens: int) -> None:
        super().__init__("embeddings", TensorType.F32, width, n_tokens)

    def fill(self, batch: Batch) -> Bytes:
        if batch.embeddings is None:
            raise ValueError("a batch of tokens for a graph that takes embeddings")
        whole = np.zeros((self.ne[1], self.ne[0]), np.float32)
        whole[: batch.n_tokens] = batch.embeddings
        return whole.reshape(-1).view(np.uint8)


class HiddenStates(Input):
    """F32 [width, n_tokens]: the target model's hidden state that comes with each token."""

    def __init__(self, width: int, n_tokens: int) -> None:
        super().__init__("given", TensorType.F32, width, n_tokens)

    def fill(self, batch: Batch) -> Bytes:
        if batch.hidden_states is None:
            raise ValueError("a batch without hidden states for a graph that takes some")
        whole = np.zeros((self.ne[1], self.ne[0]), np.float32)
        whole[: batch.n_tokens] = batch.hidden_states
        return whole.reshape(-1).view(np.uint8)


class Positions(_Integers):
    """I32 [sections × n_tokens]: each token's position in its sequence, one dimension after another.

    M-RoPE has four dimensions: time, height, width and an unused one; a text token is at [p, p, p, 0]
    (llama-batch.cpp).
    """

    def __init__(self, n_tokens: int, sections: int = 1) -> None:
        super().__init__("positions", TensorType.I32, sections * n_tokens)
        self._sections = sections

    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        positions, n = batch.positions, batch.n_tokens
        if positions.ndim == 1 and self._sections == 1:
            return positions, 0
        whole = np.zeros((self._sections, self.ne[0] // self._sections), np.int32)
        if positions.ndim == 1:
            whole[:3, :n] = positions
        else:
            whole[:, :n] = positions
        return whole.reshape(-1), 0


class FixedPairs(Constant):
    """F32 [n_pairs]: divisors of the rotary frequencies: 1, or infinity for pairs that do not rotate."""

    def __init__(self, n_pairs: int, fixed_pairs: tuple[int, ...]) -> None:
        super().__init__("still_pairs", TensorType.F32, n_pairs)
        self._fixed_pairs = fixed_pairs

    def fill(self, batch: Batch) -> Bytes:
        factors = np.ones(self.ne[0], np.float32)
        factors[list(self._fixed_pairs)] = np.inf
        return factors.view(np.uint8)


class RowsWritten(_Integers):
    """I64 [n]: the memory row that each token, or each sequence's state, is written to."""

    def __init__(self, name: str, n: int, part: int = 0) -> None:
        super().__init__(name, TensorType.I64, n)
        self._part = part

    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        rows = batch.memory[self._part]
        return rows.written, rows.spare


class StateRows(_Integers):
    """I32 [n_seqs]: the memory row of the state that each sequence continues from."""

    def __init__(self, name: str, n_seqs: int, part: int = 0) -> None:
        super().__init__(name, TensorType.I32, n_seqs)
        self._part = part

    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        rows = batch.memory[self._part]
        return rows.first, rows.spare


_Interval = tuple[int, int, int]


class _MaskContents(NamedTuple):
    """Contents of a mask: rows of `n_kv` cells, and the visible intervals of each row."""

    n_kv: int
    rows: list[list[_Interval]]


class WindowView(NamedTuple):
    """The part of its sequence that a token sees."""

    window: int = 0
    """Most rows, ending at the token's own; 0: all."""
    chunked: bool = False
    """True: the rows from the last multiple of `window` tokens on instead."""
    symmetric: bool = False
    """True: half the window to each side instead."""


WHOLE = WindowView()


class Mask(Input):
    """F16 [n_kv, n_tokens]: 0 where a token (row) sees a memory row, minus infinity elsewhere.

    With `distances`, visible cells hold minus the distance to the token's own row instead (ALiBi).
    """

    def __init__(
        self,
        name: str,
        n_kv: int,
        n_tokens: int,
        part: int = 0,
        view: WindowView = WHOLE,
        *,
        distances: bool = False,
    ) -> None:
        super().__init__(name, TensorType.F16, n_kv, n_tokens)
        self._part, self._distances = part, distances
        self._window, self._chunked, self._symmetric = view

    def fill(self, batch: Batch) -> Bytes:
        whole = np.empty(2 * self.ne[0] * self.ne[1], np.uint8)
        self.renew(batch, whole, None)
        return whole

    def renew(self, batch: Batch, memory: Bytes, held: object) -> object:
        """Update the mask; if a row only gains one visible cell, only that cell is written."""
        n_kv, n_tokens = self.ne
        cells, seen = memory.view(np.uint16), self._visible(batch)
        seen += [[] for _ in range(n_tokens - len(seen))]
        before = held.rows if isinstance(held, _MaskContents) and held.n_kv == n_kv else []
        at = 0
        for new, old in zip(seen, before, strict=False):
            if len(new) == len(old) == 1 and new[0][0] == old[0][0] and not self._distances:
                (_, end, _), (_, stop, _) = old[0], new[0]
                if stop == end + 1:  # the sequence is one token longer
                    cells[at + end] = 0
                elif stop != end:
                    cells[at + min(end, stop) : at + max(end, stop)] = 0 if stop > end else _HIDDEN
            elif new != old:
                self._change(cells[at : at + n_kv], old, new)
            at += n_kv
        for i in range(len(before), n_tokens):
            row = cells[i * n_kv : (i + 1) * n_kv]
            row[:] = _HIDDEN
            self._show(row, seen[i])
        return _MaskContents(n_kv, [*seen, *before[n_tokens:]])

    def _visible(self, batch: Batch) -> list[list[_Interval]]:
        """Return the row intervals (first, end, row) that each token sees.

        `row` is where the token itself would be if the interval were continued up to it.
        """
        rows = batch.memory[self._part]
        own, firsts, lasts = rows.written.tolist(), rows.first.tolist(), rows.last.tolist()
        origins = firsts if not rows.prefixes else rows.origins.tolist()
        if self._window and self._symmetric:
            half = self._window // 2
            lasts = [min(last, row + half) for last, row in zip(lasts, own, strict=True)]
            least = [max(origin, row - half) for origin, row in zip(origins, own, strict=True)]
        elif self._window:
            reach = self._window - 1
            reaches = (
                [time % self._window for time in _time_positions(batch).tolist()]
                if self._chunked
                else [reach] * len(own)
            )
            least = [max(origin, row - n) for origin, row, n in zip(origins, own, reaches, strict=True)]
        else:
            least = origins
        seen = [
            [(max(low, first), last + 1, row)] for low, first, last, row in zip(least, firsts, lasts, own, strict=True)
        ]
        for prefix in rows.prefixes:
            for i in range(prefix.start, prefix.stop):
                at = firsts[i] - prefix.n
                for row, n in prefix.row_ranges:
                    skip = max(least[i] - at, 0)
                    if skip < n:
                        seen[i].append((row + skip, row + n, own[i] - at + row))
                    at += n
        return seen

    def _show(self, row: NDArray[np.uint16], intervals: Sequence[_Interval]) -> None:
        for begin, end, own in intervals:
            shown = row[begin:end]
            if self._distances:
                cells = np.arange(begin, begin + shown.size)
                shown[:] = (-np.abs(cells - own)).astype(np.float16).view(np.uint16)
            else:
                shown[:] = 0

    def _change(self, row: NDArray[np.uint16], old: Sequence[_Interval], new: Sequence[_Interval]) -> None:
        """Update a row from the visible intervals `old` to `new`: mostly a longer sequence or a moved window."""
        for i in range(max(len(old), len(new))):
            begin, end, _ = old[i] if i < len(old) else (0, 0, 0)
            low, high, _ = new[i] if i < len(new) and not self._distances else (end, end, 0)
            # Hide what the new interval at the same index does not cover.
            if begin < min(low, end):
                row[begin : min(low, end)] = _HIDDEN
            if max(high, begin) < end:
                row[max(high, begin) : end] = _HIDDEN
        for i, (begin, end, own) in enumerate(new):
            low, high, _ = old[i] if i < len(old) and not self._distances else (end, end, 0)
            if begin < min(low, end):
                self._show(row, [(begin, min(low, end), own)])
            if max(high, begin) < end:
                self._show(row, [(max(high, begin), end, own)])


class RelativeBuckets(Input):
    """I32 [n_kv × n_tokens]: the bucket of the distance between each token (row) and each memory row.

    Half of `n_buckets` is for rows after the token's own. Within a half, the first half of the buckets are exact
    distances; the others grow logarithmically up to _FARTHEST (arXiv 1910.10683; llama_relative_position_bucket).
    """

    _FARTHEST = 128

    def __init__(self, n_kv: int, n_tokens: int, n_buckets: int, part: int = 0) -> None:
        super().__init__("relative_buckets", TensorType.I32, n_kv * n_tokens)
        self._n_kv, self._n_tokens, self._part = n_kv, n_tokens, part
        half = n_buckets // 2
        exact = half // 2
        far = np.arange(exact, n_kv).astype(np.float32)
        # Same precision as llama.cpp at each step; otherwise a distance could fall into the next bucket.
        logs = np.log(far / exact, dtype=np.float64).astype(np.float32) * np.float32(half - exact)
        steps = np.floor((exact + logs.astype(np.float64) / np.log(self._FARTHEST / exact)).astype(np.float32))
        self._ahead = np.concatenate([np.arange(min(exact, n_kv)), np.minimum(steps, half - 1)]).astype(np.int32)
        self._half = half

    def fill(self, batch: Batch) -> Bytes:
        rows = batch.memory[self._part]
        own = rows.written
        distance = np.zeros((self._n_tokens, self._n_kv), np.int64)
        distance[: len(own)] = np.arange(self._n_kv) - own[:, None]
        for start, stop, row_ranges in rows.prefixes:
            at = rows.origins[start:stop, None]
            for row, n in row_ranges:
                distance[start:stop, row : row + n] += at - row
                at = at + n
        buckets = self._ahead[np.minimum(np.abs(distance), self._n_kv - 1)] + self._half * (distance > 0)
        return buckets.astype(np.int32).reshape(-1).view(np.uint8)


class AttentionTemperature(Input):
    """F32 [1, 1, n_tokens]: log(⌊(position + offset) / length⌋ + 1) · scale + 1 (llm_graph_input_attn_temp)."""

    def __init__(self, n_tokens: int, scale: float, length: int, offset: float = 0.0) -> None:
        super().__init__("temperature", TensorType.F32, 1, 1, n_tokens)
        self._scale, self._length, self._offset = scale, length, offset

    def fill(self, batch: Batch) -> Bytes:
        f = np.float32
        turns = np.floor((_time_positions(batch).astype(f) + f(self._offset)) / f(self._length))
        whole = np.zeros(self.ne[2], f)
        whole[: batch.n_tokens] = np.log(turns + 1.0) * f(self._scale) + f(1)
        return whole.view(np.uint8)


class OutputRows(_Integers):
    """I32 [n_outputs]: the rows of the batch that are output."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__("out_rows", TensorType.I32, n_outputs)

    def _of(self, batch: Batch) -> tuple[NDArray[np.integer], int]:
        return batch.outputs, 0


class TextShares(Input):
    """F32 [n_tokens, n_outputs]: for each output row, 1 / n at the n tokens of its text, 0 elsewhere."""

    def __init__(self, n_tokens: int, n_outputs: int, part: int = 0) -> None:
        super().__init__("text_shares", TensorType.F32, n_tokens, n_outputs)
        self._part = part

    def fill(self, batch: Batch) -> Bytes:
        rows = batch.memory[self._part]
        whole = np.zeros((self.ne[1], self.ne[0]), np.float32)
        for row, output in zip(whole, batch.outputs, strict=False):
            text = np.flatnonzero((rows.written >= rows.first[output]) & (rows.written <= rows.last[output]))
            row[text] = np.float32(1) / np.float32(len(text))
        return whole.reshape(-1).view(np.uint8)


def _time_positions(batch: Batch) -> NDArray[np.integer]:
    """Return each token's position in time."""
    return batch.positions if batch.positions.ndim == 1 else batch.positions[0]
