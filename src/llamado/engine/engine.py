"""The engine: many requests, one thread, one forward pass after the other.

Each step evaluates the next token of every slot that is generating and, in the same batch, a piece of the prompts that
are being read. What a request answers never depends on the others (law 1), so everything here is free to choose what is
fastest: which slot, which cells, how much of a prompt, in which order.

Here is the thread and its loop. Its parts are in scheduler/: queue.py (who waits, who is turned down), batch.py (what
goes into the next batch), prefix.py (whose cells are where), output.py (from logits to the next token), recovery.py
(when a device is gone), slot_io.py (slots that are saved and restored), statistics.py (what is counted).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.cache.disk_cache import DiskCache
from llamado.engine.cache.slot_file import SlotFile
from llamado.engine.drafts.drafts import Drafts
from llamado.engine.errors import ContextExceeded, EngineClosed, InvalidRequest, compute_failed, constraint_failed
from llamado.engine.forward.contract import Forward
from llamado.engine.forward.lora_scales import DefaultScales
from llamado.engine.request import EngineSnapshot, Event, Request
from llamado.engine.sampling.candidates import Found, RowFinder, top_rows_numpy
from llamado.engine.sampling.chain import Sampler
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import seed_key
from llamado.engine.scheduler.batch import BatchShare, Planner
from llamado.engine.scheduler.output import Answering, EngineVocabulary
from llamado.engine.scheduler.prefix import Sequences, SnapshotOptions
from llamado.engine.scheduler.queue import CallQueue, Queue, SlotTask
from llamado.engine.scheduler.recovery import Recovery
from llamado.engine.scheduler.slot_io import Job, SlotHold
from llamado.engine.scheduler.slots import Slot, choose_slot
from llamado.engine.scheduler.statistics import Statistics
from llamado.errors import LlamadoError
from llamado.models.memory import Span

log = logging.getLogger(__name__)

# Where nothing can be done until a slot is saved or restored, the engine looks again after this long.
_LOOK_AGAIN = 0.05
# Where answers only get longer, those who look see how long they were at most so many seconds before.
_SHOW_AGAIN = 0.1
_SNAPSHOTS = SnapshotOptions()
_MOST_ON_TRUST = 16
"""Batches on their way while windows of drafted tokens are sent behind them."""


class _Flight(NamedTuple):
    """A batch on its way."""

    rows: Future[NDArray[np.float32]]
    shares: list[BatchShare]
    spans: list[Span]
    features: NDArray[np.float32] | None
    """Hidden states of its tokens."""
    n_tokens: int
    n_prompt: int
    began: float

    @property
    def stale(self) -> bool:
        """Whether all of it is drafts behind a token that was wrong."""
        return all(not share.n and share.epoch != share.task.ahead.epoch for share in self.shares)


class Engine:
    """Answers requests on one thread of its own; all methods may be called from any thread.

    `n_ctx`: most tokens of one sequence. `n_batch`: most tokens in one step (never more than `forward.max_batch`).
    `prefill_chunk`: most tokens in a step while some slot is generating; fewer where a step of that many would take
    longer than STEP_SECONDS, so that a long prompt delays the others' tokens by little. `cont_batching` off: prompts
    wait until no slot is generating. `top_rows`: a faster kernel.

    `lora`: scales of the model's adapters for requests that name none (see `set_lora`), `invocations`: the tokens with
    which activated ones begin to work (see DefaultScales). Requests with other scales take
    turns, never share a forward pass, and never reuse each other's cells.

    `drafts`: sources of tokens that probably come next, which are evaluated along (see drafts/); nobody else may have
    them. None: there are none.

    `context_shift`: an answer that fills the context drops the older half of it and goes on (see Request.n_keep),
    instead of ending. `cache_ram`: MiB of memory for sequences that no slot holds any more (-1: no limit, 0: none); see
    cache/prompt_cache.py. `idle_slots`: what happens to idle slots when a request starts: their sequences are copied
    into that memory ("keep"), or moved there ("clear"); None: nothing before room is needed. `snapshots`: where
    sequences can go back to in models that do not remember all tokens; they lie in that memory, too. `disk`: where what
    that memory has no room for goes, and what it holds when the engine ends. `max_queue`: most requests that wait for a
    slot.

    Cells are reused where prompts begin alike, and only there: moving those of a piece further on in another prompt
    (llama-server's `n_cache_reuse`) would change answers.

    When a device is lost the engine pauses until it is back, or `failover` seconds later until its layers are elsewhere
    (None: never); then every sequence is read again and goes on where it was, and so it is when the device comes back
    and has its layers again. Requests that wait for a slot meanwhile
    fail with Unavailable after `wait` seconds.

    `spare_core`: whether the forward pass leaves a core to those who deal with events; otherwise the engine's thread
    leaves its own to them (see `submit`).
    """

    def __init__(
        self,
        forward: Forward,
        tokenizer: EngineVocabulary,
        *,
        n_slots: int = 1,
        n_ctx: int | None = None,
        n_batch: int = 2048,
        prefill_chunk: int = 256,
        cont_batching: bool = True,
        slot_prompt_similarity: float = 0.1,
        context_shift: bool = False,
        cache_ram: int = 0,
        idle_slots: Literal["keep", "clear"] | None = None,
        snapshots: SnapshotOptions = _SNAPSHOTS,
        disk: DiskCache | None = None,
        max_queue: int = 1024,
        top_rows: RowFinder = top_rows_numpy,
        lora: Sequence[float] = (),
        invocations: Sequence[Sequence[int]] = (),
        drafts: Drafts | None = None,
        failover: float | None = None,
        wait: float = 30.0,
        spare_core: bool = True,
    ) -> None:
        n_cells = forward.memory.n_cells
        n_ctx = n_cells if n_ctx is None else n_ctx
        if not 0 < n_ctx <= n_cells:
            raise ValueError(f"a sequence of {n_ctx} tokens does not fit the pool of {n_cells} cells")
        if n_slots < 1:
            raise ValueError(f"at least one slot is needed, not {n_slots}")
        self.n_ctx = n_ctx
        self._forward = forward
        self._tokenizer = tokenizer
        self._top_rows = top_rows
        self._disk = disk
        self._leaves_core = not spare_core
        self._similarity = slot_prompt_similarity
        self._lora = DefaultScales(lora, invocations)
        self._slots = [Slot(i, n_ctx) for i in range(n_slots)]
        if not forward.memory.drafts:
            drafts = None
        self._drafts = drafts
        self._stats = Statistics(drafts)
        self._queue = Queue(self._slots, max_queue)
        self._calls = CallQueue(self._queue.wake)
        self._jobs: list[Job] = []
        self._recovery = Recovery(forward, self._queue, self._calls, failover=failover, wait=wait)
        self._sequences = Sequences(
            forward,
            self._slots,
            self._stats,
            n_ctx=n_ctx,
            cache_ram=cache_ram,
            idle_slots=idle_slots,
            snapshots=snapshots,
            control=tokenizer.control,
            disk=disk,
            notify=self._queue.notify,
            note_loss=self._recovery.note,
        )
        self._planner = Planner(
            forward,
            self._slots,
            self._sequences,
            self._stats,
            n_ctx=n_ctx,
            n_batch=n_batch,
            prefill_chunk=prefill_chunk,
            cont_batching=cont_batching,
            drafts=drafts,
        )
        self._answering = Answering(
            tokenizer,
            self._queue,
            self._stats,
            n_ctx=n_ctx,
            context_shift=context_shift,
            top_rows=top_rows,
            shift=self._sequences.shift,
        )
        self._flights: deque[_Flight] = deque()
        self._idle_since: float | None = time.monotonic()
        self._show()
        self._prepared = False  # whether the forward has used all the spare time it wants
        self._busy_since: float | None = None  # when the step began that is under way; None: nothing is, or it waits
        self._thread = threading.Thread(target=self._work, name="llamado-engine", daemon=True)
        forward.watch(self._queue.notify)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, taken: Callable[[], None] | None = None
    ) -> int:
        """Queue a request; returns its task id.

        `emit` is called on the engine thread, in order, and must be quick: Token and Progress events, then one Done or
        Failed, while the step after theirs is computed where there is one. The snapshot has shown the end by then.
        `taken` may wait, a moment at most, until what was emitted is dealt with: it is called after that, once a step,
        while other threads compute and do this thread's share, where the forward pass has all cores. Whoever deals with
        events then has this thread's core, and takes none from a thread in the middle of its work, for which all others
        would wait.
        Raises InvalidRequest, ContextExceeded, QueueFull or EngineClosed; nothing is emitted then.
        """
        request.validate()
        self._queue.check()
        if len(request.prompt) >= self.n_ctx:
            raise ContextExceeded(len(request.prompt), self.n_ctx)
        if min(request.prompt) < 0 or max(request.prompt) >= self._forward.n_vocab:
            raise InvalidRequest("Prompt contains invalid tokens")
        if request.id_slot >= len(self._slots):
            raise InvalidRequest(f"Invalid slot ID {request.id_slot}: there are {len(self._slots)} slots")
        scales = self._lora.for_prompt(request.lora, request.prompt)
        seed = request.sampling.seed
        if seed is None or seed == RANDOM_SEED:
            seed = secrets.randbits(32)
        sampler = Sampler(
            request.sampling,
            seed=seed_key(seed),
            n_vocab=self._forward.n_vocab,
            eog=self._tokenizer.eog,
            top_rows=self._top_rows,
            vocabulary=self._tokenizer,
            matcher=None if request.constraint is None else request.constraint.start(),
            weights=bool(request.n_probs and request.post_sampling_probs),
        )
        sampler.start(request.prompt)
        task = self._queue.add(request, emit, taken, sampler=sampler, seed=seed, scales=scales)
        return task.id

    @property
    def lora(self) -> tuple[float, ...]:
        """Scales of all adapters, in float32, for requests that name none."""
        return self._lora.each

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Change `lora`: adapters by number, those that are not named get 0, numbers of none are ignored.

        It counts for requests that are submitted from now on. Raises InvalidRequest.
        """
        self._lora.set(scales)

    def save_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Write a slot's sequence and its cells to a file, once no request has the slot.

        The future fails with SlotNotSaved, Unavailable or EngineClosed. Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("save", id_slot, path))

    def restore_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Give a slot the sequence of a file, once no request has the slot; it goes on with the same bits.

        The future fails with SlotFileError (the slot is as before), NoRoom, Unavailable or EngineClosed. Raises
        InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("restore", id_slot, path))

    def erase_slot(self, id_slot: int) -> Future[int]:
        """Forget a slot's sequence, once no request has the slot; how many tokens that were.

        Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("erase", id_slot))

    def _send_slot_task(self, slot_task: SlotTask) -> Future[Any]:
        if not 0 <= slot_task.id_slot < len(self._slots):
            raise InvalidRequest("Invalid slot ID")
        self._queue.add_slot_task(slot_task)
        return slot_task.future

    def between_steps(self, work: Callable[[], None], *, forget: bool) -> None:
        """Have the engine's thread run `work` between two steps, with `forget` all cells forgotten; waits until it did.

        Answers go on where they were. Raises what it raises, Unavailable or EngineClosed.
        """

        def rest() -> None:
            self._busy_since = None  # it may take long, and does not hang
            if forget:
                self._forget_cells()
            self._prepared = False
            work()

        self._calls.call(rest)

    def cancel(self, task_id: int) -> None:
        """Drop a request: its slot is free at the next step, and no more events come (one may be under way).

        A task that is over or unknown is ignored.
        """
        self._queue.cancel(task_id)

    def snapshot(self) -> EngineSnapshot:
        """The state after the last step, but answers may be longer by what came in the last tenth of a second; never
        blocks.
        """
        return self._snapshot

    def stalled(self) -> float:
        """Seconds that the step under way takes already; 0 while there is none or a device is waited for; endless once
        the engine's thread has died.
        """
        if not self._thread.is_alive() and not self._queue.closing:
            return math.inf
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, go on with those accepted for up to `timeout` seconds, then end the rest.

        Those that are cut off get Failed(EngineClosed). Returns when the engine thread has ended, which takes at most
        one forward pass longer than the timeout.
        """
        self._queue.close(timeout)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for job in self._jobs:
                job.join()

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        queue, recovery = self._queue, self._recovery
        while True:
            self._busy_since = None
            lost = recovery.gone()
            if lost is not None or recovery.returned or not any(slot.task for slot in self._slots):
                queue.hand_over()  # no batch will be launched soon
            if lost is not None and not queue.closing:
                recovery.pause(lost, self._forget_cells, self._show)
                self._prepared = False
                self._show()
            elif recovery.returned and not queue.closing:
                recovery.move_back(self._forget_cells)
                self._prepared = False
                self._show()
            with queue.wake:
                idle = not (queue.closing or self._calls or self._is_busy())
                if idle and self._prepared and recovery.gone() is None and not recovery.returned:
                    self._show()
                    queue.wake.wait()
                queue.receive()
                closing, deadline = queue.closing, queue.deadline
            if idle:
                self._prepared = self._prepared or not self._prepare()
                continue
            self._busy_since = time.monotonic()
            if closing:
                idle = not self._is_busy() and not any(slot.held for slot in self._slots)
                if idle or time.monotonic() >= deadline or recovery.gone() is not None:
                    self._end_all(EngineClosed("the server was shut down before the answer was finished"))
                    self._sequences.save()
                    self._sequences.reset()  # another engine may have the forward pass next
                    return
            alike, n_over = False, queue.n_over
            try:
                if self._calls:
                    queue.hand_over()
                    lost = self._calls.run()
                    if lost is not None:
                        recovery.note(lost)
                elif self._step():
                    alike = queue.n_over == n_over and self._busy_since < self._shown + _SHOW_AGAIN
                else:
                    self._look_again()
            except Exception as error:
                # Nothing is known about the cells after a failure outside the forward pass.
                log.exception("engine step failed")
                self._end_all(compute_failed(error))
                self._sequences.reset()
            if not alike:
                self._show()

    def _is_busy(self) -> bool:
        """Whether there is anything to do besides what jobs ask for."""
        return not self._queue.is_empty or any(slot.task for slot in self._slots)

    def _look_again(self) -> None:
        """Wait for news: all that is to be done waits for a slot that is held."""
        queue = self._queue
        with queue.wake:
            if queue.has_news or self._calls or self._recovery.gone():
                return
            loads = [slot.load for slot in self._slots if slot.load is not None]
            if any(slot.held for slot in self._slots) or (loads and not any(load.has_news for load in loads)):
                queue.wake.wait(_LOOK_AGAIN)

    def _prepare(self) -> bool:
        """Have the forward pass use spare time; False when nothing is left to do."""
        try:
            return self._forward.prepare_ahead()
        except DeviceLost as error:
            self._recovery.note(error)
        except Exception:
            log.exception("warm-up of later batches failed")
        return False

    def _step(self) -> bool:
        """Start as many batches as it pays to have on their way, and see the first of them to its end.

        False where there was nothing to do.
        """
        changed = False
        if not self._forward.launches or (self._drafts is not None and self._drafts.takes_long):
            self._queue.hand_over()  # what comes first takes long
        launched = len(self._flights)
        while (enough := len(self._flights) >= self._forward.depth) is False or self._has_time():
            if not enough:
                changed = self._queue.drop_cancelled()
                self._sequences.tidy()
                changed |= self._start_slot_tasks()
                changed |= self._admit()
                if changed:
                    self._show()
            try:
                slots, counts = self._planner.on_trust() if enough else self._planner.plan()
            except DeviceLost as error:  # of copying cells
                self._recovery.note(error)
                return True
            if not slots:
                break
            try:
                if not self._launch(slots, counts):
                    break
            except Exception as error:
                self._lose(slots, error)
                return True
        self._queue.hand_over(wait=self._leaves_core and self._forward.launches)  # while the batch is computed
        if not self._flights:
            return changed
        while launched < len(self._flights):
            self._get_ready(self._flights[launched])
            launched += 1
        self._land(self._flights.popleft())
        return True

    def _has_time(self) -> bool:
        """Whether more may be drafted until the next batch is there."""
        drafting = self._drafts is not None and len(self._flights) < _MOST_ON_TRUST
        return drafting and not self._flights[0].rows.done()

    def _get_ready(self, flight: _Flight) -> None:
        """While a batch is computed: find out which tokens may come next where that is limited."""
        for share in flight.shares:
            slot, task = share.slot, share.task
            if task.request.constraint is None or slot.task is not task:
                continue
            try:
                task.sampler.get_ready()
            except Exception as error:
                self._queue.fail(slot, constraint_failed(error))

    def _start_slot_tasks(self) -> bool:
        """Do what is to be done with slots that are free by now."""
        changed = False
        slot_tasks = self._queue.slot_tasks
        for _ in range(len(slot_tasks)):
            slot_task = slot_tasks.popleft()
            slot = self._slots[slot_task.id_slot]
            if not slot.idle:
                slot_tasks.append(slot_task)
                continue
            if not slot_task.future.set_running_or_notify_cancel():
                continue
            changed = True
            self._sequences.settle(slot)
            if slot_task.kind == "erase":
                n_erased = slot.length
                self._sequences.drop(slot)
                slot_task.future.set_result(n_erased)
                continue
            job = Job(
                slot_task,
                SlotHold(slot, self._forward, self._sequences, self._queue),
                self._calls,
                self._forward.cell_kind,
                n_ctx=self.n_ctx,
                n_vocab=self._forward.n_vocab,
                n_adapters=self._lora.n_adapters,
            )
            self._jobs = [*(job for job in self._jobs if job.is_alive()), job]
            job.start()
        return changed

    def _launch(self, slots: list[Slot], counts: list[int]) -> bool:
        """Start a batch; False where there is nothing in it: only drafts were looked for, and none found."""
        tokens, spans, outputs, scales, shares, n_prompt = batch = self._planner.fill(slots, counts)
        if not tokens.size:
            return False
        self._stats.batch_tokens.add(tokens.size)
        began = time.perf_counter()
        for _, task, handle, *_ in shares:
            if task.request.return_progress and not task.generated and handle.used == task.n_cached:
                # Nothing is computed yet: how much of the prompt need not be.
                task.tell_progress(handle.used, began)
        features = None
        width = 0 if self._drafts is None else self._drafts.features_width
        if width:
            features = np.empty((tokens.size, width), np.float32)
            rows = self._forward.start(tokens, spans, outputs, scales=scales, features=features)
        else:
            rows = self._forward.start(tokens, spans, outputs, scales=scales)
        self._planner.started(batch)
        self._planner.overlaps = not rows.done()
        self._flights.append(_Flight(rows, shares, spans, features, tokens.size, n_prompt, began))
        return True

    def _land(self, flight: _Flight) -> None:
        try:
            rows = flight.rows.result()
        except Exception as error:
            for slot, task, handle, *_ in flight.shares:
                if slot.handle is handle and slot.task is not task:  # the request is gone, but not its cells
                    self._sequences.drop(slot)
            self._lose([share.slot for share in flight.shares if share.slot.task is share.task], error)
            return
        now = time.perf_counter()
        self._stats.evaluated(flight.n_prompt, now - flight.began, sum(slot.task is not None for slot in self._slots))
        for share in flight.shares:
            slot, task, handle, n, *_ = share
            if slot.task is task and not task.generated:
                task.n_processed += n
                if slot.handle is handle:
                    self._answering.note_prompt(task, share.end - n, rows[share.prompt_rows])
                if task.request.return_progress:
                    task.tell_progress(handle.used, now)
        n_yielded = 0
        valid = [self._is_valid(share) for share in flight.shares] if flight.features is not None else []
        ready = [share for share in flight.shares if share.row is not None and not share.stale]
        ready = [share for share in ready if not share.task.cancelled]
        found = self._answering.find([share.task for share in ready], [rows[share.row or 0] for share in ready])
        for share, first in zip(ready, found, strict=True):
            if not share.task.cancelled:
                try:
                    n_yielded += self._continue(share, rows, first)
                except Exception as error:
                    if not isinstance(error, LlamadoError):
                        log.exception("sampling of task %d failed", share.task.id)
                    limited = share.task.request.constraint is not None
                    self._queue.fail(share.slot, constraint_failed(error) if limited else compute_failed(error))
        self._show_features(flight, valid)
        if self._drafts is not None and not flight.n_prompt:
            n, overlaps = self._planner.n_generating, self._planner.overlaps
            self._drafts.note(n, flight.n_tokens, now - flight.began, n_yielded, now, overlaps=overlaps)
        # What was drafted behind a wrong token is of no use to anybody.
        if self._flights:
            self._flights = deque(flight for flight in self._flights if not flight.stale)

    @staticmethod
    def _is_valid(share: BatchShare) -> bool:
        """Whether the first of its tokens are those of the sequence that the slot has."""
        slot = share.slot
        return slot.task is share.task and slot.handle is share.handle and (share.row is None or not share.stale)

    def _show_features(self, flight: _Flight, valid: Sequence[bool]) -> None:
        """Lets those who draft from them see hidden states of tokens that turned out to be the sequences'."""
        if self._drafts is None or flight.features is None:
            return
        at = 0
        for share, span, known in zip(flight.shares, flight.spans, valid, strict=True):
            slot, task = share.slot, share.task
            first = span.first
            n = min(share.n, slot.length - first)
            if known and n >= 0 and (task.followed is not None or slot.task is task):
                for token in share.draft[: slot.length - first - n]:
                    if slot.tokens[first + n] != token:
                        break
                    n += 1
                if task.followed is None:
                    task.followed = self._drafts.follow(task.ahead, task.sampler.guess())
                self._drafts.show(task.followed, slot.tokens[: slot.length], first, flight.features[at : at + n])
            at += span.n

    def _continue(self, share: BatchShare, rows: NDArray[np.float32], first: Found) -> int:
        """A sequence was evaluated to its end, perhaps beyond: its next token, and those after it that were drafted.

        `first`: what was found of its first row. Returns how many tokens it got.
        """
        slot, task, handle, row, ahead = share.slot, share.task, share.handle, share.row, share.task.ahead
        assert row is not None
        n = 0
        for n in range(1, len(share.draft) + bool(share.n) + 1):
            trusted, epoch = len(ahead), ahead.epoch
            token = self._answering.advance(slot, task, rows[row + n - 1], first if n == 1 else None)
            if token is None or not trusted or ahead.epoch != epoch:
                break
            # It is what was drafted. Its cell is filled, or will be before it is read, unless it was left behind by a
            # move, which takes only what counts as used.
            if slot.handle is not handle or share.n_moves != self._sequences.memory.n_moves:
                slot.untrust()
                break
            handle.used += 1
        if self._drafts is not None and task.followed is not None:
            self._drafts.learn(task.followed)
        self._sequences.settle(slot)
        return n

    def _lose(self, slots: list[Slot], error: Exception) -> None:
        """A batch failed: with a device everybody's cells are gone, and nobody's answer; else those answers are."""
        if isinstance(error, DeviceLost):
            self._recovery.note(error)
            return
        log.error("a forward pass failed", exc_info=error)
        named = compute_failed(error)
        for slot in slots:
            self._sequences.drop(slot)
            self._queue.fail(slot, named)
        if self._flights:
            # They may have been started with cells, or copies of cells, that were never filled.
            self._forget_cells()

    def _forget_cells(self) -> None:
        """Every sequence is to be read again, and what is on its way does not count."""
        for flight in self._flights:
            flight.rows.cancel()
        self._flights.clear()
        self._sequences.forget()

    def _admit(self) -> bool:
        """Give waiting requests their slots in order; one that asked for a busy slot lets others pass."""
        waiting = self._queue.waiting
        if not waiting:
            return False
        left = []
        free = sum(slot.idle for slot in self._slots)
        for task in waiting:
            slot = None
            if free:
                prompt = np.array(task.request.prompt, np.int32)
                slot = choose_slot(self._slots, task, prompt, self._similarity)
            if slot is None:
                left.append(task)
            else:
                free -= 1
                self._sequences.begin(slot, task, prompt)
        self._queue.waiting = left
        return len(left) < len(waiting)

    def _end_all(self, error: LlamadoError) -> None:
        self._queue.fail_all(error)
        self._calls.fail(error, for_good=self._queue.closing)
        self._show()
        self._queue.hand_over()

    def _show(self) -> None:
        """Let those who look at the engine see how it is now."""
        self._snapshot = self._take_snapshot()
        self._shown = time.monotonic()

    def _take_snapshot(self) -> EngineSnapshot:
        memory, store = self._sequences.memory, self._sequences.store
        slots = tuple(slot.snapshot() for slot in self._slots)
        n_busy = sum(slot.is_processing for slot in slots)
        n_deferred = self._queue.n_deferred
        if n_busy or n_deferred or any(slot.held for slot in self._slots):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        return EngineSnapshot(
            slots,
            self._stats.counters(),
            n_busy,
            n_deferred,
            memory.n_used,
            memory.n_cells,
            self._recovery.fault,
            self._idle_since,
            len(store) if store is not None else 0,
            store.nbytes + store.reserved if store is not None else 0,
            self._disk.counters if self._disk is not None else None,
            tuple(self._forward.away()),
            memory.n_shared,
            store.n_tokens if store is not None else 0,
            store.entries if store is not None else (),
        )
