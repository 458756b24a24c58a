"""Slots and the requests in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.engine.cache.disk_cache import DiskRead
from llamado.engine.cache.snapshots import Snapshots
from llamado.engine.drafts.drafts import DraftState
from llamado.engine.drafts.pending_draft import PendingDraft
from llamado.engine.forward.contract import ActivatedScales, Scales, alike, scales_at
from llamado.engine.media.spans import (
    Spans,
    chunk_positions,
    next_change,
    position_shift,
    shifted,
    span_at,
    text_tokens,
)
from llamado.engine.request import Event, Progress, Request, SlotSnapshot, Timings, TokenProbs
from llamado.engine.sampling.chain import Sampler
from llamado.engine.sampling.rng import Seed
from llamado.engine.scheduler.stop_text import AnswerText
from llamado.media.chunks import MediaSpan
from llamado.models.memory import Handle, Span

_ROWS = 32
"""Prompt tokens in a batch if each gets logits: those of a large batch take gigabytes."""
_MUCH = 64
"""Least tokens of a sequence that deserve a slot of their own."""


class Task:
    """A request from `submit` to its last event."""

    __slots__ = (
        "ahead", "answer", "cancelled", "draft_state", "embeddings", "emit", "flush", "generated", "id", "n_cached",
        "n_processed", "n_prompt", "outbox", "params", "probs", "probs_at", "prompt_probs", "request", "sampler",
        "scales", "seed", "t_arrival", "t_first", "t_last", "t_start", "t_submit", "truncated",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        emit: Callable[[Event], None],
        flush: Callable[[], None] | None = None,
        *,
        sampler: Sampler,
        seed: Seed,
        scales: Scales = (),
    ) -> None:
        self.id = -1
        """Its number in the queue, which sets it."""
        self.outbox: list[tuple[Task, Event]] = []
        """The queue's list of events that wait to be sent."""
        self.request = request
        self.params = request.params
        self.emit = emit
        self.flush = flush
        self.sampler = sampler
        self.seed = seed
        self.scales = scales
        self.answer = AnswerText(self.params.stop, self.params.n_indent)
        self.cancelled = False
        self.generated: list[int] = []
        self.probs: list[TokenProbs] = []
        self.prompt_probs: dict[int, TokenProbs] = {}
        """By position in the prompt."""
        self.probs_at: list[int] = []
        """Position in the text at which each of `probs` begins."""
        self.embeddings: dict[bytes, NDArray[np.float32]] = {}
        """Rows of its encoded media, by digest: kept because lost cells are computed again."""
        self.ahead = PendingDraft()
        self.draft_state: DraftState | None = None
        """Its draft state; None before the first draft."""
        self.n_prompt = len(request.prompt)
        self.n_cached = 0
        self.n_processed = 0
        self.t_start = self.t_first = self.t_last = 0.0
        self.t_submit = time.monotonic()
        self.t_arrival = time.perf_counter()
        self.truncated = False
        """True if part of the sequence was dropped to make room."""

    @property
    def needs_prompt_rows(self) -> bool:
        """True if the logits of all tokens that are evaluated next are needed."""
        needed = self.params.prompt_probs or self.request.on_prompt_row is not None
        return needed and not self.generated

    @property
    def budget(self) -> int:
        """Tokens still to generate, -1 without a limit."""
        n = self.params.n_predict
        return n if n < 0 else max(0, n - len(self.generated))

    def queue_event(self, event: Event) -> None:
        """Queue an event for its receiver (see Queue.deliver)."""
        self.outbox.append((self, event))

    def queue_progress(self, processed: int, now: float) -> None:
        """Queue a Progress event: `processed` tokens of the prompt are in the cache."""
        timings = None
        if self.params.timings_per_token:
            timings = self.timings()._replace(prompt_ms=1e3 * (now - self.t_start))
        elapsed = round(1e3 * (now - self.t_start))
        self.queue_event(Progress(self.n_prompt, self.n_cached, processed, elapsed, timings))

    def timings(self) -> Timings:
        """Return timings as llama-server measures them: the prompt's time ends with the first token."""
        generating = bool(self.generated)
        return Timings(
            cache_n=self.n_cached,
            prompt_n=self.n_processed,
            prompt_ms=1e3 * (self.t_first - self.t_start) if self.t_first else 0.0,
            predicted_n=len(self.generated),
            predicted_ms=max(1e3 * (self.t_last - self.t_first), 1e-3) if generating else 0.0,
            draft_n=self.ahead.n_drafted or None,
            draft_n_accepted=self.ahead.n_accepted if self.ahead.n_drafted else None,
        )


class BatchGroup(NamedTuple):
    """Common properties of the tokens of a batch: adapter scales, and True for embeddings of media instead of text."""

    scales: Scales
    is_media: bool


class Slot:
    """A slot for one request at a time, and the sequence it keeps for later requests to continue.

    `tokens[:length]` is the sequence, `tokens[:used]` the part of it that the memory has under `handle`. So `length -
    used` tokens have to be evaluated: 1 while decoding, more while a prompt (or a sequence that the memory lost) is
    read. `scales`: adapter scales of its cells; cells of other scales are not reused. `spans`: the media among the
    tokens; unknown, and of no use, for a sequence that was restored from a file.
    """

    __slots__ = (
        "branch", "handle", "held", "id", "last_task", "leader", "length", "load", "n_ctx", "recall", "scales",
        "snapshots", "spans", "t_last_used", "task", "tokens",
    )  # fmt: skip

    def __init__(self, id: int, n_ctx: int) -> None:
        self.id = id
        self.n_ctx = n_ctx
        self.tokens: NDArray[np.int32] = np.zeros(n_ctx, np.int32)
        self.length = 0
        self.handle: Handle | None = None
        self.scales: Scales = ()
        self.spans: Spans = ()
        self.branch = 0
        """Length of its prompt's common prefix with another one."""
        self.snapshots = Snapshots()
        """Checkpoints of its sequence."""
        self.task: Task | None = None
        self.last_task: Task | None = None
        self.leader: tuple[Slot, Task | None] | None = None
        """A slot, with its request, that holds or is reading the same prefix, which will be shared."""
        self.load: DiskRead | None = None
        """The read of its sequence from disk, which has to finish first."""
        self.held = False
        """True while it is saved or restored: no request may have it then."""
        self.recall = False
        """True if the prompt cache may have the sequence's cells, and was not searched yet."""
        self.t_last_used = 0.0

    @property
    def idle(self) -> bool:
        """True if a request may have it."""
        return self.task is None and not self.held

    @property
    def age(self) -> int:
        """Task id of its request: lower came first; -1 without a request."""
        return self.task.id if self.task is not None else -1

    @property
    def used(self) -> int:
        return self.handle.used if self.handle is not None else 0

    @property
    def pending(self) -> int:
        return self.length - self.used

    @property
    def scales_now(self) -> Scales:
        """The scales that its next token is computed with."""
        return scales_at(self.scales, self.used)

    @property
    def group(self) -> BatchGroup:
        """The group of batches that its next token belongs to."""
        return BatchGroup(self.scales_now, bool(self.spans) and self.next_span is not None)

    @property
    def next_span(self) -> MediaSpan | None:
        """The chunk that its next token belongs to; None for text."""
        return span_at(self.spans, self.used)

    @property
    def n_batchable(self) -> int:
        """Number of pending tokens that may be in one batch: those of the same group as the first of them."""
        used, most = self.used, self.length
        if isinstance(self.scales, ActivatedScales) and used < self.scales.start:
            most = min(most, self.scales.start)
        if self.spans:
            most = min(most, next_change(self.spans, used) or most)
        if self.task is not None and self.task.needs_prompt_rows and self.next_span is None:
            most = min(most, used + _ROWS)
        return most - used

    @property
    def n_inseparable(self) -> int:
        """Number of pending tokens that must be in one batch: the whole of a chunk whose tokens see each other."""
        span = self.next_span if self.spans else None
        return 1 if span is None or span.chunk.causal else span.chunk.n_tokens

    def span(self, n: int, n_ahead: int, before: Sequence[int] | NDArray[np.int32], *, multi: bool) -> Span:
        """Return `n` tokens behind those in the cells and `n_ahead` drafted ones, as part of a batch.

        `multi`: True if the model has multi-dimensional positions.
        """
        handle, media = self.handle, self.next_span if self.spans else None
        assert handle is not None
        first = handle.used + n_ahead
        if media is None:
            shift = position_shift(self.spans, first) if multi else 0
            return Span(handle, first, n, n_ahead, before, shift=shift)
        positions = chunk_positions(self.spans, media, first, n) if multi else None
        shift = position_shift(self.spans, media.start) if multi else 0
        return Span(handle, first, n, 0, before, not media.chunk.causal, shift, positions)

    def common_prefix(self, prompt: NDArray[np.int32], scales: Scales, length: int | None = None) -> int:
        """Return how many first tokens of the prompt are in the cells (or in the first `length` tokens of the
        sequence).

        Only tokens computed with the same scales count.
        """
        n = alike(scales, self.scales, min(self.used if length is None else length, prompt.size))
        differing = np.flatnonzero(self.tokens[:n] != prompt[:n])
        return int(differing[0]) if differing.size else n

    def begin(self, task: Task, prompt: NDArray[np.int32]) -> None:
        """Start a request, after the sequence's cells were taken back to the common prefix."""
        self.task = self.last_task = task
        self.scales = task.scales
        self.spans = task.request.media
        self.tokens[: prompt.size] = prompt
        self.length = prompt.size
        self.recall = task.params.cache_prompt
        task.n_cached = self.used
        task.t_start = time.perf_counter()

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens behind the first `n_keep`.

        The tokens behind them get new positions, so their cells are computed again: rotated K would not have the bits
        of K computed at these positions.
        """
        self.discard_drafts()
        if self.task is not None and self.task.draft_state is not None:
            self.task.draft_state.forget()
        if isinstance(self.scales, ActivatedScales) and self.scales.start > n_keep:
            start = max(n_keep, self.scales.start - n_discard)
            self.scales = ActivatedScales(self.scales, start) if start else tuple(self.scales)
        self.spans = shifted(self.spans, n_keep, n_discard)
        self.tokens[n_keep : self.length - n_discard] = self.tokens[n_keep + n_discard : self.length].copy()
        self.length -= n_discard

    def discard_drafts(self) -> None:
        """Drop draft tokens in flight."""
        if self.task is not None:
            self.task.ahead.drop()

    def release(self) -> None:
        """End the request; the cells stay."""
        self.discard_drafts()
        if self.task is not None and self.task.draft_state is not None:
            sequence = [] if self.task.truncated else text_tokens(self.tokens[: self.length].tolist())
            n_media = sum(span.chunk.n_tokens for span in self.task.request.media)
            self.task.draft_state.end(sequence, self.task.n_prompt - n_media)
        self.task = None
        self.leader = None
        self.length = self.used
        if self.handle is not None:
            self.handle.need = 0
        self.t_last_used = time.perf_counter()

    def snapshot(self) -> SlotSnapshot:
        task = self.last_task
        busy = self.task is not None
        if task is None:
            return SlotSnapshot(self.id, self.n_ctx, False, -1, None, self.used, 0, 0, False, False, -1, 0)
        return SlotSnapshot(
            self.id, self.n_ctx, busy, task.id, task.request, self.used, task.n_processed, task.n_cached,
            busy, task.answer.has_new_line, task.budget, len(task.generated),
        )  # fmt: skip


def choose_slot(slots: Sequence[Slot], task: Task, prompt: NDArray[np.int32], similarity: float) -> Slot | None:
    """Return the slot for a request; None while it must wait.

    Like llama-server, choose the idle slot whose cells share the longest prefix with the prompt, if that is more than
    `similarity` of the prompt; otherwise the slot that is idle for longest. But if the most similar slot would lose
    more than half of its sequence, take the slot that is idle for longest, and if it would lose much and there is an
    empty slot, take that one; the common prefix is shared then.
    """
    idle = [slot for slot in slots if slot.idle]
    if task.params.id_slot >= 0:
        return next((slot for slot in idle if slot.id == task.params.id_slot), None)
    if not idle:
        return None
    oldest = min(idle, key=lambda slot: (slot.t_last_used, slot.id))
    if similarity <= 0:
        return oldest
    best, longest = oldest, 0
    for slot in idle:
        shared = slot.common_prefix(prompt, task.scales)
        if shared > longest and shared > similarity * prompt.size:
            best, longest = slot, shared
    if best.used - longest >= _MUCH:
        oldest = next((slot for slot in idle if not slot.used), oldest)
        return oldest if not oldest.used or 2 * longest < best.used else best
    return best if 2 * longest >= best.used else oldest
