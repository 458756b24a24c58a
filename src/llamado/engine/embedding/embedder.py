"""Embeddings of texts: many texts in one batch, computed on a thread of its own.

Any thread submits a request of one or many texts and gets a future. Texts of waiting requests alternate, so that a
request of a thousand texts does not delay one of a single text. A text's vectors have the same bits in any batch: each
text has cells of its own in the model's memory.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.embedding.pooling import Vectors, pool, required_rows
from llamado.engine.errors import (
    ComputeFailed,
    ContextExceeded,
    EngineClosed,
    InputExceedsContext,
    InputTooLarge,
    InvalidRequest,
    QueueFull,
)
from llamado.engine.forward.contract import Recovery, Scales
from llamado.engine.request import Counters, EngineSnapshot
from llamado.errors import LlamadoError
from llamado.models.batch import Batch
from llamado.models.hparams import Pooling
from llamado.models.memory import Memory, Span, align

log = logging.getLogger(__name__)

_MOST_BYTES = 512 * 2**20
"""Most memory of the texts of all requests and their vectors."""
_MOST_AT_ONCE = 64 * 2**20
"""Most memory of one request: as JSON, vectors take several times that."""
_MOST_REQUESTS = 1024
_RETRY_AFTER = 1


class EmbeddingForward(Protocol):
    """Computes the vectors of tokens; a part of ModelRunner's interface."""

    n_vocab: int
    max_batch: int
    width: int

    @property
    def memory(self) -> Memory: ...

    @property
    def recovery(self) -> Recovery: ...

    def submit(self, batch: Batch, scales: Scales = ()) -> Future[NDArray[np.float32]]: ...

    def start(
        self, tokens: NDArray[np.int32], spans: Sequence[Span], outputs: NDArray[np.int32], *, scales: Scales = ()
    ) -> Future[NDArray[np.float32]]: ...


class Embedding(NamedTuple):
    """The vectors of one text: F32 [1, width], or without pooling [n_tokens, width]; not normalized."""

    vectors: Vectors
    n_tokens: int


class _Request:
    """Texts that were submitted together; `next` is the first one that is in no batch yet."""

    __slots__ = ("done", "future", "left", "next", "size", "texts")

    def __init__(self, texts: Sequence[NDArray[np.int32]], size: int) -> None:
        self.texts = texts
        self.size = size
        self.next = 0
        self.left = len(texts)
        self.done: list[Embedding | None] = [None] * len(texts)
        self.future: Future[list[Embedding]] = Future()


class _Text(NamedTuple):
    """One text in a batch: its request, its number there, and its tokens."""

    request: _Request
    number: int
    tokens: NDArray[np.int32]


def cells_for(max_batch: int, n_ctx: int) -> int:
    """Return the number of cells of an embedder: enough for a batch of short texts, and for one text of the longest
    length.
    """
    return max(4 * max_batch, align(n_ctx))


class Embedder:
    """Computes vectors with `forward`, whose rows are hidden states, or scores with Pooling.RANK.

    `n_ctx`: most tokens of a text. A text must also fit into one batch, unless only its last token counts and no token
    sees later ones. `scales`: returns the scales of the model's adapters for a batch.
    """

    def __init__(
        self,
        forward: EmbeddingForward,
        *,
        pooling: Pooling,
        causal: bool,
        n_ctx: int,
        max_requests: int = _MOST_REQUESTS,
        scales: Callable[[], Scales] = lambda: (),
    ) -> None:
        self.forward = forward
        self._scales = scales
        self.pooling = pooling
        self.causal = causal
        self.n_ctx = n_ctx
        self._divisible = causal and pooling in (Pooling.LAST, Pooling.RANK)
        self._max_requests = max_requests
        self._turn = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._bytes = 0
        self._open = 0
        self._closed = False
        self._at_work = 0
        self._counters = Counters()
        self._thread = threading.Thread(target=self._run, name="llamado-embedder", daemon=True)
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------------------------------

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[list[Embedding]]:
        """Submit texts, given as tokens; the result has their vectors in order. Cancelling the future skips what is not
        computed yet.

        Raises InvalidRequest, InputTooLarge or ContextExceeded for a text that cannot be computed, QueueFull and
        EngineClosed; the future fails with ComputeFailed or EngineClosed.
        """
        n_tokens = 0
        for tokens in texts:
            self._check(tokens)
            n_tokens += len(tokens)
        n_vectors = n_tokens if self.pooling is Pooling.NONE else len(texts)
        size = 8 * n_tokens + 4 * self.forward.width * n_vectors
        if size > _MOST_AT_ONCE:
            raise InvalidRequest(
                f"{len(texts)} texts of {n_tokens} tokens take {size >> 20} MiB of memory; send fewer at a time "
                f"(at most {_MOST_AT_ONCE >> 20} MiB)"
            )
        request = _Request([np.array(tokens, np.int32) for tokens in texts], size)
        with self._turn:
            if self._closed:
                raise EngineClosed("the server is shutting down")
            if self._open >= self._max_requests or self._bytes + size > _MOST_BYTES:
                raise QueueFull(self._open, _RETRY_AFTER)
            if not texts:
                request.future.set_result([])
                return request.future
            self._open += 1
            self._bytes += size
            self._waiting.append(request)
            self._turn.notify()
        request.future.add_done_callback(lambda _: self._forget(request))
        return request.future

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text."""
        return self.n_ctx - 1 if self._divisible else min(self.forward.max_batch, self.n_ctx)

    def _check(self, tokens: Sequence[int]) -> None:
        n = len(tokens)
        if not n:
            raise InvalidRequest("Input content cannot be empty")
        if min(tokens) < 0 or max(tokens) >= self.forward.n_vocab:
            raise InvalidRequest(f"Input contains a token outside the vocabulary of {self.forward.n_vocab}")
        if self._divisible:
            if n >= self.n_ctx:
                raise ContextExceeded(n, self.n_ctx)
            return
        if n > self.forward.max_batch:
            raise InputTooLarge(n, self.forward.max_batch)
        if n > self.n_ctx:
            raise InputExceedsContext(n, self.n_ctx)

    def _forget(self, request: _Request) -> None:
        """Release a request that is done or was cancelled."""
        with self._turn:
            self._open -= 1
            self._bytes -= request.size
            with suppress(ValueError):
                self._waiting.remove(request)

    def snapshot(self) -> EngineSnapshot:
        """Counters in the engine's terms: texts are prompts, and a forward pass is a decode step."""
        with self._turn:
            at_work = min(self._at_work, self._open)
            return EngineSnapshot((), self._counters, at_work, self._open - at_work, 0, self.forward.memory.n_cells)

    def close(self, timeout: float = 0.0) -> None:
        """Accept no more requests; those that are not done after `timeout` seconds fail with EngineClosed."""
        deadline = time.monotonic() + timeout
        with self._turn:
            self._closed = True
            while self._open and (left := deadline - time.monotonic()) > 0:
                self._turn.wait(min(left, 0.05))
            waiting, self._waiting = list(self._waiting), deque()
            self._turn.notify_all()
        for request in waiting:
            _fail(request, EngineClosed("the server is shutting down"))
        self._thread.join(max(1.0, timeout))

    # -- the embedder's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._turn:
                self._at_work = 0
                while not self._waiting and not self._closed:
                    self._turn.wait()
                if not self._waiting:
                    return
                batch = self._next_batch()
                self._at_work = len({id(text.request) for text in batch})
            began = time.perf_counter()
            try:
                self._compute_again_if_lost(batch)
            except Exception as error:
                known = isinstance(error, LlamadoError)
                if not known:
                    log.exception("a batch of %d texts failed", len(batch))
                why = str(error) if known else f"{type(error).__name__}: {error}"
                for text in batch:
                    _fail(text.request, ComputeFailed(f"the vectors could not be computed: {why}"))
                continue
            self._count(batch, time.perf_counter() - began)

    def _next_batch(self) -> list[_Text]:
        """Return texts for the next batch, one of each request in turn, as many as fit."""
        batch: list[_Text] = []
        lengths: list[int] = []
        while self._waiting:
            request = self._waiting[0]
            lengths.append(len(request.texts[request.next]))
            fits = sum(lengths) <= self.forward.max_batch and self.forward.memory.can_pack(lengths)
            if batch and not fits:
                break
            batch.append(_Text(request, request.next, request.texts[request.next]))
            request.next += 1
            self._waiting.popleft()
            if request.next < len(request.texts):
                self._waiting.append(request)
        return batch

    def _compute_again_if_lost(self, batch: list[_Text]) -> None:
        """Compute a batch; if a device is lost, reconnect it or move its layers, and compute the batch once more."""
        try:
            self._compute(batch)
        except DeviceLost as lost:
            log.error("%s; its texts are computed again", lost.as_logged())
            self.forward.recovery.restore(False)
            self._compute(batch)

    def _compute(self, batch: list[_Text]) -> None:
        long = len(batch[0].tokens) > self.forward.max_batch
        if len(batch) == 1 and (long or self.forward.memory.has_states):
            self._finish(batch[0], self._divided(batch[0].tokens))
            return
        lengths = [len(text.tokens) for text in batch]
        placed = self.forward.memory.pack(lengths)
        wanted, spans, first = [], [], 0
        for n in lengths:
            start, stop = required_rows(self.pooling, n, self.causal)
            wanted.append(np.arange(first + start, first + stop, dtype=np.int32))
            spans.append(stop - start)
            first += n
        tokens = np.concatenate([text.tokens for text in batch])
        given = Batch(placed.positions, np.concatenate(wanted), placed.rows, tokens)
        rows = self.forward.submit(given, self._scales()).result()
        at = 0
        for text, n in zip(batch, spans, strict=True):
            self._finish(text, pool(rows[at : at + n], self.pooling))
            at += n

    def _divided(self, tokens: NDArray[np.int32]) -> Vectors:
        """Return the vectors of a text that is read like a prompt, in as many batches as necessary: because it is
        longer than one, or layers have a state.
        """
        step, n, scales = self.forward.max_batch, len(tokens), self._scales()
        memory, found = self.forward.memory, []
        start, stop = required_rows(self.pooling, n, self.causal)
        handle = memory.allocate(n)
        if handle is None:
            raise InputExceedsContext(n, memory.n_cells)
        try:
            for first in range(0, n, step):
                part = tokens[first : first + step]
                outputs = np.arange(max(start, first), min(stop, first + len(part)), dtype=np.int32) - first
                before = tokens[max(first - memory.n_before, 0) : first].tolist()
                spans = [Span(handle, first, len(part), before=before)]
                rows = self.forward.start(part, spans, outputs, scales=scales).result()
                handle.used += len(part)
                found.append(rows.copy())
        finally:
            memory.free(handle)
        return pool(np.concatenate(found), self.pooling)

    def _finish(self, text: _Text, vectors: Vectors) -> None:
        request = text.request
        request.done[text.number] = Embedding(vectors, len(text.tokens))
        request.left -= 1
        if not request.left:
            with suppress(InvalidStateError):  # it was cancelled
                request.future.set_result([embedding for embedding in request.done if embedding is not None])

    def _count(self, batch: list[_Text], seconds: float) -> None:
        lengths = [len(text.tokens) for text in batch]
        with self._turn:
            c = self._counters
            self._counters = c._replace(
                prompt_tokens_total=c.prompt_tokens_total + sum(lengths),
                prompt_seconds_total=c.prompt_seconds_total + seconds,
                n_decode_total=c.n_decode_total + 1,
                n_busy_slots_total=c.n_busy_slots_total + len(batch),
                n_tokens_max=max(c.n_tokens_max, *lengths),
            )


def _fail(request: _Request, error: LlamadoError) -> None:
    with suppress(InvalidStateError):
        request.future.set_exception(error)
