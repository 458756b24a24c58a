"""A forward pass without a model, whose logits show every mistake in the bookkeeping of cells.

Each cell holds a state made from its token, its position and the states of all cells its token saw, as the K and V of a
deep layer are. Logits are a hash of all states the last token sees. So a wrong cell, a stale one, a token that was
skipped or a neighbour's cell changes every later logit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.engine import Engine
from llamado.engine.forward.contract import CellKind, Cells, Scales
from llamado.engine.request import Away, Done, EngineSnapshot, Event, Failed, Progress, Request, Result, Token
from llamado.gguf.types import TensorType

U64 = np.uint64


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


class FakeForward:
    """Implements Forward; `before` is called in each run with the number of tokens."""

    def __init__(self, n_cells: int = 4096, *, n_vocab: int = 97, max_batch: int = 64) -> None:
        self.n_vocab = n_vocab
        self.n_cells = n_cells
        self.max_batch = max_batch
        self.cell_bytes = 8
        self.cells = np.zeros(n_cells, U64)
        self.sizes: list[int] = []
        self.scales: list[Scales] = []
        self.copies: list[tuple[int, int, int]] = []
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.model = b"m" * 32
        self.before: Callable[[int], None] | None = None
        self._vocab = np.arange(1, n_vocab + 1, dtype=U64) * U64(0x9E3779B97F4A7C15)

    depth = 1

    @property
    def chunk(self) -> int:
        return self.max_batch

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

    def start(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
        *,
        scales: Scales = (),
    ) -> Future[NDArray[np.float32]]:
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(self.run(tokens, positions, starts, outputs, scales))
        return future

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
        scales: Scales = (),
    ) -> NDArray[np.float32]:
        n = tokens.size
        assert 0 < n <= self.max_batch and positions.size == starts.size == n
        assert tokens.dtype == positions.dtype == outputs.dtype == np.int32 and starts.dtype == np.int64
        assert np.all(np.diff(outputs) > 0) and (outputs.size == 0 or outputs[-1] < n)
        cells = starts + positions
        assert len(set(cells.tolist())) == n, "two tokens of one batch in one cell"
        assert cells.min() >= 0 and cells.max() < self.n_cells
        if self.before is not None:
            self.before(n)
        self.sizes.append(n)
        rows = np.empty((outputs.size, self.n_vocab), np.float32)
        place = {int(o): i for i, o in enumerate(outputs)}
        salt = sum((i + 1) << 40 ^ int(1e6 * scale) << 8 for i, scale in enumerate(scales) if scale)
        self.scales.append(scales)
        with np.errstate(over="ignore"):
            for i in range(n):
                start, position = int(starts[i]), int(positions[i])
                seen = self.cells[start : start + position]
                # XOR and sum of all states seen, each stirred with its position
                state = np.array([int(tokens[i]) * 1_000_003 + position + 1 + salt], U64)
                if position:
                    stirred = mix(seen + np.arange(position, dtype=U64) * U64(0x2545F4914F6CDD1D))
                    state += stirred.sum(dtype=U64)
                state = mix(state)
                self.cells[start + position] = state[0]
                if i in place:
                    rows[place[i]] = (mix(self._vocab ^ state[0]) >> U64(40)).astype(np.float32) / np.float32(1 << 22)
        return rows

    def prepare_ahead(self) -> bool:
        return False

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        assert n > 0 and min(src, dst) >= 0 and max(src, dst) + n <= self.n_cells
        self.copies.append((src, dst, n))
        self.cells[dst : dst + n] = self.cells[src : src + n].copy()

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        return CellKind(self.model, TensorType.F32, TensorType.F32, ((4, 4),), scales)

    def read_cells(self, start: int, n: int) -> Cells:
        assert n > 0 and start >= 0 and start + n <= self.n_cells
        self.reads.append((start, n))
        return self.cells[start : start + n].copy().view(np.uint8)

    def write_cells(self, start: int, n: int, cells: Cells) -> None:
        assert n > 0 and start >= 0 and start + n <= self.n_cells and cells.size >= 8 * n
        self.writes.append((start, n))
        self.cells[start : start + n] = np.frombuffer(cells.tobytes(), U64)[:n]

    def sound_cells(self, cells: Cells, n: int) -> bool:
        return cells.size == 8 * n


class FakeTokenizer:
    """Token i is the byte i + 32 (so text is ASCII), or what `pieces` says; token 0 ends the answer."""

    def __init__(self, pieces: dict[int, bytes] | None = None, eog: Sequence[int] = (0,)) -> None:
        self.pieces = pieces or {}
        self.eog = frozenset(eog)
        self.add_bos = False

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
        if isinstance(event, (Done, Failed)):
            self.over.set()
        if self.on_event is not None:
            self.on_event(event)

    def wait(self, timeout: float = 60.0) -> Client:
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
    """The snapshot after the last request's end; Done comes a moment before it."""
    end = time.monotonic() + 30
    while (snapshot := engine.snapshot()).requests_processing or snapshot.requests_deferred:
        assert time.monotonic() < end, "slots leaked"
        time.sleep(0.001)
    return snapshot


def eventually(check: Callable[[], bool]) -> bool:
    """Whether something becomes true."""
    end = time.monotonic() + 30
    while not check():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True
