"""A forward pass without a model whose logits reveal every mistake in the bookkeeping of KV cells.

Each cell holds a state made from its token, its position and the states of all cells its token attended to, like the
K and V of a deep layer. Logits are a hash of all states the last token attends to. So a wrong cell, a stale one, a
skipped token or a neighbor's cell changes every later logit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from waiting import GUARD, until

from llamado.devices.device import DeviceLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.engine import Engine, EngineParts
from llamado.engine.forward.contract import CellKind, Cells, Forward, Scales
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.media.stage import MediaStage
from llamado.engine.options import EngineOptions
from llamado.engine.request import (
    Away,
    Defaults,
    Done,
    EngineSnapshot,
    Event,
    Failure,
    Progress,
    Request,
    Result,
    Token,
)
from llamado.engine.scheduler.output import EngineVocabulary
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import MemoryRows, PrefixRows
from llamado.models.memory import (
    BatchPlacement,
    Latent,
    LayerMemory,
    Memory,
    MemoryOptions,
    RecurrentState,
    RowSpan,
    Span,
)
from llamado.models.memory.parts import BLOCK
from llamado.models.memory.states import States

U64 = np.uint64

_MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_OF_POSITION = 0x2545F4914F6CDD1D


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash each of the numbers."""
    z = (z ^ (z >> U64(30))) * U64(_FIRST)
    z = (z ^ (z >> U64(27))) * U64(_SECOND)
    return z ^ (z >> U64(31))


def mix_one(z: int) -> int:
    """Hash one number as `mix` does, which takes ten times as long for a single one."""
    z &= _MASK
    z = (z ^ z >> 30) * _FIRST & _MASK
    z = (z ^ z >> 27) * _SECOND & _MASK
    return z ^ z >> 31


class FakeMemory(Memory):
    """Memory that accepts any bytes of the right size as its rows."""

    def is_valid(self, data: Cells, n: int) -> bool:
        return data.size == n * self.token_bytes

    def is_valid_tail(self, data: Cells, n: int) -> bool:
        return data.size == self.tail_bytes(n)


ALL, STATE = Latent(2), RecurrentState((2,))
"""Kinds of layer memory: 8 bytes for each token, or for a sequence; `KeysValues(1, 1, n)` is a window of n tokens."""


class FakeForward:
    """Implements Forward and Storage. Each run calls `before` with the number of tokens."""

    def __init__(
        self,
        n_cells: int = 4096,
        *,
        n_vocab: int = 97,
        max_batch: int = 64,
        layers: Sequence[LayerMemory] = (ALL,),
        **options: Any,
    ) -> None:
        self.n_vocab = n_vocab
        self.max_batch = max_batch
        sizes = MemoryOptions(
            n_cells=n_cells, max_batch=max_batch, type_k=TensorType.F32, type_v=TensorType.F32, **options
        )
        self.memory = FakeMemory(layers, sizes)
        self.memory.attach(self)
        self.rows: dict[str, NDArray[np.uint8]] = {}
        self._states: list[NDArray[np.uint64]] = []
        """The states in the rows of each layer."""
        for layer in range(len(self.memory)):
            self._add_rows(self.memory[layer].tensors)
        self._at = np.arange(self.memory.n_cells, dtype=U64) * U64(_OF_POSITION)
        self.sizes: list[int] = []
        self.scales: list[Scales] = []
        self.embedded: list[bool] = []
        self.copies: list[tuple[int, int, int]] = []
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.model = b"m" * 32
        self.before: Callable[[int], None] | None = None
        self._vocab = np.arange(1, n_vocab + 1, dtype=U64) * U64(0x9E3779B97F4A7C15)

    def _add_rows(self, tensors: Sequence[Tensor]) -> None:
        """Allocate the rows of a layer; its tensors hold parts of the same states."""
        n_rows = tensors[0].ne[1]
        both = np.zeros((n_rows, sum(tensor.nb[1] for tensor in tensors)), np.uint8)
        self._states.append(both.view(U64)[:, 0])
        at = 0
        for tensor in tensors:
            assert tensor.name not in self.rows and tensor.ne[1] == n_rows
            self.rows[tensor.name] = both[:, at : at + tensor.nb[1]]
            at += tensor.nb[1]
        assert at == U64(0).nbytes

    depth = 1
    launches = False
    numerics: str | None = "made up"

    @property
    def chunk(self) -> int:
        return self.max_batch

    @property
    def recovery(self) -> Self:
        return self

    def watch(self, callback: Callable[[], None]) -> None:
        self.watcher = callback

    def lost(self) -> DeviceLost | None:
        return None

    def restore(self, elsewhere: bool) -> None:
        raise AssertionError("nothing was lost")

    def away(self) -> Sequence[Away]:
        return ()

    def call_back(self) -> None:
        raise AssertionError("nothing is away")

    def move_back(self) -> None:
        raise AssertionError("nothing is away")

    def spoil(self, noise: np.random.Generator) -> None:
        """Overwrite all memory with noise; states that no token has used yet stay zero."""
        for rows in self.rows.values():
            rows[:-1] = noise.integers(0, 256, rows[:-1].shape, np.uint8)

    def start(
        self,
        tokens: NDArray[np.int32],
        spans: Sequence[Span],
        outputs: NDArray[np.int32],
        *,
        scales: Scales = (),
        embeddings: NDArray[np.float32] | None = None,
    ) -> Future[NDArray[np.float32]]:
        if embeddings is not None:  # each has the id of the token that it stands for
            assert len(embeddings) == tokens.size and (tokens < 0).all()
            tokens = embeddings[:, 0].astype(np.int32)
        assert (tokens >= 0).all()
        self.embedded.append(embeddings is not None)
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(self.run(tokens, self.memory.place(spans), outputs, scales))
        return future

    def run(
        self,
        tokens: NDArray[np.int32],
        parts: Sequence[BatchPlacement],
        outputs: NDArray[np.int32],
        scales: Scales = (),
    ) -> NDArray[np.float32]:
        if self.before is not None:
            self.before(tokens.size)
        self.sizes.append(tokens.size)
        self.scales.append(scales)
        found = np.empty((outputs.size, self.n_vocab), np.float32)
        for placed in parts:
            if placed.tokens is None:
                found[:] = self._run(tokens, placed, outputs, scales)
                continue
            places = np.flatnonzero(np.isin(outputs, placed.tokens))
            wanted = np.searchsorted(placed.tokens, outputs[places]).astype(np.int32)
            found[places] = self._run(tokens[placed.tokens], placed, wanted, scales)
        return found

    def _run(
        self, tokens: NDArray[np.int32], placed: BatchPlacement, outputs: NDArray[np.int32], scales: Scales
    ) -> NDArray[np.float32]:
        n = tokens.size
        assert 0 < n <= self.max_batch and placed.positions.size == n
        assert tokens.dtype == placed.positions.dtype == outputs.dtype == np.int32
        wanted, positions = outputs.tolist(), placed.positions.tolist()
        assert all(a < b for a, b in itertools.pairwise(wanted)) and (not wanted or wanted[-1] < n)
        for rows in placed.rows:
            assert rows.written.min() >= 0 and rows.written.max() < rows.spare
            for prefix in rows.prefixes:
                ends = [0, *(row + n for row, n in prefix.row_ranges)]
                starts = [*(row for row, _ in prefix.row_ranges), int(rows.first[prefix.start])]
                assert all(end <= start for end, start in zip(ends, starts, strict=True)), "rows ascend"
                assert all(n % BLOCK == row % BLOCK == 0 for row, n in prefix.row_ranges)
        salt = sum((i + 1) << 40 ^ int(1e6 * scale) << 8 for i, scale in enumerate(scales) if scale)
        pairs = zip(tokens.tolist(), positions, strict=True)
        states = [token * 1_000_003 + position + 1 + salt for token, position in pairs]
        for layer in range(len(self.memory)):
            kept = self.memory[layer]
            if isinstance(kept.part, States):
                self._step(self._states[layer], placed.rows[kept.number], positions, placed.n_seqs, states)
            else:
                self._attend(self._states[layer], kept.window, placed.rows[kept.number], positions, states)
        if not wanted:
            return np.empty((0, self.n_vocab), np.float32)
        last = np.array([states[i] for i in wanted], U64)
        return (mix(self._vocab ^ last[:, None]) >> U64(40)).astype(np.float32) / np.float32(1 << 22)

    @staticmethod
    def _step(
        kept: NDArray[np.uint64], rows: MemoryRows, positions: Sequence[int], n_seqs: int, states: list[int]
    ) -> None:
        """Hash a recurrent state into each token's state in `states`, and keep the last of each sequence."""
        length, rest = divmod(len(states), n_seqs)
        assert rest == 0
        for number in range(n_seqs):
            state = int(kept[rows.first[number]])
            for i in range(number * length, (number + 1) * length):
                before = mix_one(state + (positions[i] - 1) * _OF_POSITION)
                states[i] = state = mix_one(states[i] + before)
            kept[rows.written[number]] = state

    def _attend(
        self,
        kept: NDArray[np.uint64],
        window: int,
        rows: MemoryRows,
        positions: Sequence[int],
        states: list[int],
    ) -> None:
        """Hash the states that each token attends to into its own in `states`, and keep that.

        A token adds the states it attends to, each hashed with its position. So the next token of the same sequence
        has the same sum, and the state of this one.
        """
        n = len(states)
        written, first = rows.written.tolist(), rows.first.tolist()
        assert len(set(written)) == n, "two tokens of one batch in one cell"
        below: list[PrefixRows | None] = [None] * n
        for prefix in rows.prefixes:
            below[prefix.start : prefix.stop] = [prefix] * (prefix.stop - prefix.start)
        start = stop = 0
        while start < n:
            end, position, prefix_of = written[start], positions[start], below[start]
            stop = start + 1
            while (
                stop < n
                and first[stop] == first[start]
                and written[stop] - end == positions[stop] - position == stop - start
                and below[stop] is prefix_of
            ):
                stop += 1
            seen = kept[first[start] : end]
            if prefix_of is not None:
                seen = np.concatenate([*(kept[row : row + count] for row, count in prefix_of.row_ranges), seen])
            if window:
                seen = seen[max(seen.size - window + 1, 0) :]
            assert seen.size <= position if window else seen.size == position
            hashed = mix(seen + self._at[position - seen.size : position])
            total = int(hashed.sum())
            in_window = hashed.tolist() if window else []
            for i in range(start, stop):
                states[i] = state = mix_one(states[i] + total)
                if i + 1 < stop:
                    more = mix_one(state + positions[i] * _OF_POSITION)
                    total += more
                    if window:
                        in_window.append(more)
                        if len(in_window) == window:
                            total -= in_window.pop(0)
            kept[end : end + stop - start] = np.array(states[start:stop], U64)
            start = stop

    def prepare_ahead(self) -> bool:
        return False

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        assert n > 0 and min(src, dst) >= 0 and tensors
        self.copies.append((src, dst, n))
        for tensor in tensors:
            assert max(src, dst) + n <= self.memory.rows_of[tensor.name]
            self.rows[tensor.name][dst : dst + n] = self.rows[tensor.name][src : src + n].copy()

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        return CellKind(self.model, self.memory, scales)

    def read_rows(self, spans: Sequence[RowSpan]) -> Cells:
        self._check(spans)
        self.reads.append(spans[0][1:])
        return np.concatenate([self.rows[t.name][start : start + n].reshape(-1) for t, start, n in spans])

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Cells]) -> None:
        self._check(spans)
        self.writes.append(spans[0][1:])
        for (tensor, start, n), data in zip(spans, pieces, strict=True):
            self.rows[tensor.name][start : start + n] = data.reshape(n, -1)

    def _check(self, spans: Sequence[RowSpan]) -> None:
        for tensor, start, n in spans:
            assert n > 0 and start >= 0 and start + n <= self.memory.rows_of[tensor.name]


class FakeTokenizer:
    """Token i is the byte i + 32 (so text is ASCII), or the bytes in `pieces`; token 0 ends the answer."""

    def __init__(self, pieces: dict[int, bytes] | None = None, eog: Sequence[int] = (0,)) -> None:
        self.pieces = pieces or {}
        self.eog = frozenset(eog)
        self.add_bos = False
        self.control = np.empty(0, np.int32)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token in self.eog:
            return b"<end>" if special else b""
        return self.pieces[token] if token in self.pieces else bytes([token + 32])


class Client:
    """Collects the events of one request."""

    def __init__(self, on_event: Callable[[Event], None] | None = None) -> None:
        self.events: list[Event] = []
        self.over = threading.Event()
        self.on_event = on_event
        self.id = -1

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, (Done, Failure)):
            self.over.set()
        if self.on_event is not None:
            self.on_event(event)

    def wait(self, timeout: float = GUARD) -> Client:
        assert self.over.wait(timeout), "the request never ended"
        return self

    @property
    def result(self) -> Result:
        self.wait()
        last = self.events[-1]
        assert isinstance(last, Done), last
        return last.result

    @property
    def tokens(self) -> list[Token]:
        return [event for event in self.events if isinstance(event, Token)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens)


def send(engine: Engine, request: Request, on_event: Callable[[Event], None] | None = None) -> Client:
    client = Client(on_event)
    client.id = engine.submit(request, client)
    return client


def ask(engine: Engine, request: Request) -> Result:
    return send(engine, request).result


def settled(engine: Engine) -> EngineSnapshot:
    """Return the snapshot taken after the last request ended; `Done` is sent shortly before."""

    def at_rest() -> EngineSnapshot | None:
        snapshot = engine.snapshot()
        return None if snapshot.requests_processing or snapshot.requests_deferred else snapshot

    found = until(at_rest, "slots leaked")
    assert found is not None
    return found


def req(prompt: list[int], n_predict: int = 8, **fields: Any) -> Request:
    """Return a request without end tokens; `fields` are those of GenerationParams and Sampling."""
    return Defaults().request(prompt, n_predict=n_predict, **{"seed": 7, "ignore_eos": True, **fields})


def new_engine(
    forward: Forward,
    tokenizer: EngineVocabulary,
    *,
    drafts: DraftManager | None = None,
    media: MediaStage | None = None,
    lora: Sequence[float] = (),
    invocations: Sequence[Sequence[int]] = (),
    failover: float | None = None,
    wait: float = 30.0,
    **options: Any,
) -> Engine:
    """Return an engine with options by name, including those of the split and of the adapters."""
    split = SplitOptions(failover=failover, request_wait=wait)
    scales = DefaultScales(lora, invocations)
    given, parts = EngineOptions(split=split, **options), EngineParts(media)
    return Engine(forward, tokenizer, given, scales=scales, drafts=drafts, parts=parts)
