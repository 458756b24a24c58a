"""Slots: the places where requests are worked on, and what is known of the tokens in their KV cells."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from llamado.engine.cache.disk_cache import Load
from llamado.engine.cache.snapshots import Snapshots
from llamado.engine.drafts.ahead import Ahead
from llamado.engine.drafts.drafts import Followed
from llamado.engine.forward.contract import Activated, Scales, alike, scales_at
from llamado.engine.request import Event, Progress, Request, SlotSnapshot, Timings, TokenProbs
from llamado.engine.sampling.chain import Sampler
from llamado.engine.sampling.rng import Seed
from llamado.engine.scheduler.stop_text import AnswerText
from llamado.models.memory import Handle

log = logging.getLogger(__name__)

_ROWS = 32
"""Tokens of a prompt in a batch of which each gets logits: those of a large batch take gigabytes."""
_MUCH = 64
"""Tokens of a sequence that are worth a slot of their own."""


class Task:
    """A request on its way from `submit` to its last event."""

    __slots__ = (
        "ahead", "answer", "cancelled", "emit", "followed", "generated", "id", "n_cached", "n_processed", "n_prompt",
        "outbox", "probs", "probs_at", "prompt_probs", "request", "sampler", "scales", "seed", "t_arrival", "t_first",
        "t_last", "t_start", "t_submit", "taken", "truncated",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        request: Request,
        emit: Callable[[Event], None],
        taken: Callable[[], None] | None,
        *,
        sampler: Sampler,
        seed: Seed,
        outbox: list[tuple[Task, Event]],
        scales: Scales = (),
    ) -> None:
        """`outbox`: where events wait until there is time to tell them."""
        self.outbox = outbox
        self.id = id
        self.request = request
        self.emit = emit
        self.taken = taken
        self.sampler = sampler
        self.seed = seed
        self.scales = scales
        self.answer = AnswerText(request.stop, request.n_indent)
        self.cancelled = False
        self.generated: list[int] = []
        self.probs: list[TokenProbs] = []
        self.prompt_probs: dict[int, TokenProbs] = {}
        """By their places in the prompt."""
        self.probs_at: list[int] = []
        """Where in the text each of `probs` begins."""
        self.ahead = Ahead()
        self.followed: Followed | None = None
        """What sources of drafts know of it; None before the first is asked."""
        self.n_prompt = len(request.prompt)
        self.n_cached = 0
        self.n_processed = 0
        self.t_start = self.t_first = self.t_last = 0.0
        self.t_submit = time.monotonic()
        self.t_arrival = time.perf_counter()
        self.truncated = False
        """Whether part of the sequence was dropped to make room."""

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the logits of all tokens that are evaluated next are wanted."""
        wants = self.request.prompt_probs or self.request.on_prompt_row is not None
        return wants and not self.generated

    @property
    def budget(self) -> int:
        """Tokens still to generate, -1 without a limit."""
        n = self.request.n_predict
        return n if n < 0 else max(0, n - len(self.generated))

    def tell(self, event: Event) -> None:
        """Have an event handed to whoever asked, once there is time (Queue.hand_over)."""
        self.outbox.append((self, event))

    def tell_progress(self, processed: int, now: float) -> None:
        """Have the progress of the prompt handed over: `processed` tokens of it are in the cache."""
        timings = None
        if self.request.timings_per_token:
            timings = self.timings()._replace(prompt_ms=1e3 * (now - self.t_start))
        elapsed = round(1e3 * (now - self.t_start))
        self.tell(Progress(self.n_prompt, self.n_cached, processed, elapsed, timings))

    def hand_over(self, event: Event) -> None:
        """Hand an event to whoever asked."""
        if self.cancelled:
            return
        try:
            self.emit(event)
        except Exception:
            # Whoever asked cannot be told any more.
            log.exception("the receiver of task %d failed; the task is dropped", self.id)
            self.cancelled = True

    def timings(self) -> Timings:
        """As llama-server measures them: the prompt's time ends with the first token."""
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


class Slot:
    """A place for one request at a time, and the sequence it leaves behind for later requests to continue.

    `tokens[:length]` is the sequence, `tokens[:used]` the part of it that the memory has under `handle`. So
    `length - used` tokens are to be evaluated: 1 while decoding, more while a prompt (or a sequence that the memory
    lost) is read. `scales`: how strong adapters are in what it has; that of other scales is of no use to it.
    """

    __slots__ = (
        "branch", "handle", "held", "id", "last_task", "leader", "length", "load", "n_ctx", "recall", "scales",
        "snapshots", "t_last_used", "task", "tokens",
    )  # fmt: skip

    def __init__(self, id: int, n_ctx: int) -> None:
        self.id = id
        self.n_ctx = n_ctx
        self.tokens: NDArray[np.int32] = np.zeros(n_ctx, np.int32)
        self.length = 0
        self.handle: Handle | None = None
        self.scales: Scales = ()
        self.branch = 0
        """After how many tokens its prompt left another one."""
        self.snapshots = Snapshots()
        """Of its sequence."""
        self.task: Task | None = None
        self.last_task: Task | None = None
        self.leader: tuple[Slot, Task | None] | None = None
        """A slot, and its request, that holds or is reading the same beginning of a prompt: it will be shared."""
        self.load: Load | None = None
        """What is read from disk of its sequence, and nothing goes on before."""
        self.held = False
        """Whether it is being saved or restored: no request may have it then."""
        self.recall = False
        """Whether the sequence's cells may be among those kept in memory, where nobody has looked yet."""
        self.t_last_used = 0.0

    @property
    def idle(self) -> bool:
        """Whether a request may have it."""
        return self.task is None and not self.held

    @property
    def age(self) -> int:
        """Task id of its request: lower came first; -1 where it has none."""
        return self.task.id if self.task is not None else -1

    @property
    def used(self) -> int:
        return self.handle.used if self.handle is not None else 0

    @property
    def pending(self) -> int:
        return self.length - self.used

    @property
    def scales_now(self) -> Scales:
        """Those that its next token is computed with."""
        return scales_at(self.scales, self.used)

    @property
    def together(self) -> int:
        """How many of the pending tokens may be in one batch: those with the same scales as the first of them."""
        used, most = self.used, self.length
        if isinstance(self.scales, Activated) and used < self.scales.start:
            most = min(most, self.scales.start)
        if self.task is not None and self.task.wants_prompt_rows:
            most = min(most, used + _ROWS)
        return most - used

    def common_prefix(self, prompt: NDArray[np.int32], scales: Scales, length: int | None = None) -> int:
        """How many first tokens of the prompt are in the cells (or in the first `length` tokens of the sequence).

        Those alone that are computed with the same scales.
        """
        n = alike(scales, self.scales, min(self.used if length is None else length, prompt.size))
        differing = np.flatnonzero(self.tokens[:n] != prompt[:n])
        return int(differing[0]) if differing.size else n

    def begin(self, task: Task, prompt: NDArray[np.int32]) -> None:
        """Start on a request, for which the sequence's cells were taken back to what is of use."""
        self.task = self.last_task = task
        self.scales = task.scales
        self.tokens[: prompt.size] = prompt
        self.length = prompt.size
        self.recall = task.request.cache_prompt
        task.n_cached = self.used
        task.t_start = time.perf_counter()

    def append(self, token: int) -> None:
        self.tokens[self.length] = token
        self.length += 1

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drop `n_discard` tokens behind the first `n_keep`.

        Those behind them get other positions, so their cells are made anew: K turned by the difference would not be the
        bits that these tokens have by themselves.
        """
        self.untrust()
        if self.task is not None and self.task.followed is not None:
            self.task.followed.forget()
        if isinstance(self.scales, Activated) and self.scales.start > n_keep:
            start = max(n_keep, self.scales.start - n_discard)
            self.scales = Activated(self.scales, start) if start else tuple(self.scales)
        self.tokens[n_keep : self.length - n_discard] = self.tokens[n_keep + n_discard : self.length].copy()
        self.length -= n_discard

    def untrust(self) -> None:
        """What was drafted behind the sequence, and is on its way, does not count."""
        if self.task is not None:
            self.task.ahead.drop()

    def release(self) -> None:
        """The request is over; what is in the cells stays."""
        self.untrust()
        if self.task is not None and self.task.followed is not None:
            said = [] if self.task.truncated else self.tokens[: self.length].tolist()
            self.task.followed.end(said, self.task.n_prompt)
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
    """The slot for a request; None while it must wait.

    As llama-server chooses: the idle slot whose cells share the longest beginning with the prompt, where that is more
    than `similarity` of the prompt; else the one idle for longest. But where taking the most similar slot would throw
    away more than half of what it holds, the slot idle for longest is taken, and where it would throw away much and
    there is a slot that holds nothing, that one; the common beginning is shared.
    """
    idle = [slot for slot in slots if slot.idle]
    if task.request.id_slot >= 0:
        return next((slot for slot in idle if slot.id == task.request.id_slot), None)
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
