"""The engine: many requests on one thread, one forward pass after the other.

Each step evaluates the next token of every generating slot and, in the same batch, a piece of the prompts being read. A
request's answer never depends on the others (invariant 1), so the engine is free to choose whatever is fastest: slots,
cells, pieces of prompts, and their order.

This file has the thread and its loop. The parts are in scheduler/: queue.py (waiting and rejected requests), batch.py
(the next batch), prefix.py (cells of sequences), output.py (from logits to the next token), outage.py (lost devices),
slot_io.py (saving and restoring slots), statistics.py (metrics).
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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.devices.split.placement import SplitOptions
from llamado.engine.cache.disk_cache import DiskCache
from llamado.engine.cache.slot_file import SlotFile
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.errors import ContextExceeded, EngineClosed, InvalidRequest, compute_failed, constraint_failed
from llamado.engine.forward.contract import ActivatedScales, Forward, Scales
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.media.spans import Spans, check_batches, check_prompt, span_at, text_tokens
from llamado.engine.media.stage import MediaStage
from llamado.engine.options import EngineOptions
from llamado.engine.request import EngineSnapshot, Event, Request
from llamado.engine.sampling.candidates import Found, RowFinder, top_rows_numpy
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import RANDOM_SEED
from llamado.engine.sampling.rng import seed_key
from llamado.engine.scheduler.batch import BatchShare, Planner
from llamado.engine.scheduler.outage import OutageHandler
from llamado.engine.scheduler.output import EngineVocabulary, OutputProcessor
from llamado.engine.scheduler.prefix import SequenceCache
from llamado.engine.scheduler.queue import CallQueue, Queue, SlotTask
from llamado.engine.scheduler.slot_io import Job, SlotHold
from llamado.engine.scheduler.slots import Slot, Task, choose_slot
from llamado.engine.scheduler.statistics import Statistics
from llamado.errors import LlamadoError
from llamado.models.memory import Span

log = logging.getLogger(__name__)

# seconds between checks if everything waits for a slot that is saved or restored
_CHECK_SECONDS = 0.05
# most seconds by which the lengths of answers in a snapshot lag behind
_PUBLISH_SECONDS = 0.1
_OPTIONS = EngineOptions()
_MOST_SPECULATIVE = 16
"""Most batches in flight while windows of draft tokens are sent behind them."""


class _InFlightBatch(NamedTuple):
    """A batch in flight."""

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
        """True if it consists of drafts behind a wrong token."""
        return all(not share.n and share.epoch != share.task.ahead.epoch for share in self.shares)


class EngineParts(NamedTuple):
    """Replaceable parts of an engine: `media` encodes the media of prompts, `top_rows` finds the largest logits."""

    media: MediaStage | None = None
    """None: prompts have text only."""
    top_rows: RowFinder = top_rows_numpy


class Engine:
    """Answers requests on one thread of its own; all methods may be called from any thread.

    `options`: those of loading are ignored; n_ctx 0: as many tokens as the memory has. `scales`: scales of the model's
    adapters for requests without their own (see `set_lora`). Requests with different scales alternate, never share a
    forward pass, and never reuse each other's cells. `drafts`: sources of draft tokens (see drafts/), for this engine
    only; None: no drafts.

    Cells are reused only for common prefixes: moving the cells of a later piece to another prompt (llama-server's
    `n_cache_reuse`) would change answers.

    When a device is lost, the engine pauses until it is back, or `split.failover` seconds later until its layers are on
    other devices (None: never). Then every sequence is read again and continues at its last token. The same happens
    when the device comes back and gets its layers again. Requests that wait for a slot meanwhile fail with Unavailable
    after `split.request_wait` seconds.

    Unless the forward pass leaves a core to the receivers of events, the engine's thread leaves its own core to them
    (see `submit`).
    """

    def __init__(
        self,
        forward: Forward,
        tokenizer: EngineVocabulary,
        options: EngineOptions = _OPTIONS,
        *,
        scales: DefaultScales | None = None,
        drafts: DraftManager | None = None,
        parts: EngineParts = EngineParts(),  # noqa: B008
    ) -> None:
        media, top_rows = parts
        n_cells = forward.memory.n_cells
        n_ctx = options.n_ctx_slot or n_cells
        if not 0 < n_ctx <= n_cells:
            raise ValueError(f"a sequence of {n_ctx} tokens does not fit the pool of {n_cells} cells")
        if options.n_slots < 1:
            raise ValueError(f"at least one slot is needed, not {options.n_slots}")
        self.n_ctx = n_ctx
        self._forward = forward
        self._tokenizer = tokenizer
        self._sampler_setup = SamplerSetup(forward.n_vocab, tokenizer.eog, tokenizer, top_rows)
        self._leaves_core = not options.leaves_core
        self._similarity = options.slot_prompt_similarity
        self._lora = DefaultScales() if scales is None else scales
        self._slots = [Slot(i, n_ctx) for i in range(options.n_slots)]
        if not forward.memory.supports_drafts:
            drafts = None
        self._drafts = drafts
        self._stats = Statistics(drafts)
        self._queue = Queue(self._slots, options.max_queue)
        self._calls = CallQueue(self._queue.wake)
        self._jobs: list[Job] = []
        self._outages = OutageHandler(forward.recovery, self._queue, self._calls, options.split or SplitOptions())
        self._sequence_cache = SequenceCache(
            forward, self._queue, self._stats, options, tokenizer.control, self._outages.note
        )
        self._media = media if media is not None else MediaStage()
        self._planner = Planner(forward, self._sequence_cache, self._stats, options, drafts, self._media)
        self._output_processor = OutputProcessor(
            tokenizer, self._queue, self._stats, options, top_rows, self._sequence_cache.shift
        )
        self._in_flight: deque[_InFlightBatch] = deque()
        self._idle_since: float | None = time.monotonic()
        self._publish()
        self._prepared = False  # True once the forward has used all the idle time it needs
        self._busy_since: float | None = None  # when the running step began; None: no step, or it waits
        self._thread = threading.Thread(target=self._work, name="llamado-engine", daemon=True)
        forward.recovery.watch(self._queue.notify)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(
        self, request: Request, emit: Callable[[Event], None], *, flush: Callable[[], None] | None = None
    ) -> int:
        """Queue a request; return its task id.

        `emit` is called on the engine thread, in order, and must be quick: Token and Progress events, then one Done or
        Failure, while the step after theirs is computed, if there is one. The snapshot includes the end by then.
        `flush` may wait, a moment at most, until the emitted events are handled. If the forward pass uses all cores, it
        is called after the events, once a step, while other threads compute and do this thread's share. Receivers of
        events then have this thread's core, and take none from a thread in the middle of its work, for which all others
        would wait.

        Raises InvalidRequest, ContextExceeded, QueueFull or EngineClosed; nothing is emitted then.
        """
        params = request.params
        request.validate()
        self._queue.check()
        if len(request.prompt) >= self.n_ctx:
            raise ContextExceeded(len(request.prompt), self.n_ctx)
        check_prompt(request.prompt, request.media, self._forward.n_vocab)
        if request.media:
            self._check_media(request.media)
        if params.id_slot >= len(self._slots):
            raise InvalidRequest(f"Invalid slot ID {params.id_slot}: there are {len(self._slots)} slots")
        scales = _outside_chunks(self._lora.for_prompt(params.lora, request.prompt), request.media)
        seed = params.sampling.seed
        if seed is None or seed == RANDOM_SEED:
            seed = secrets.randbits(32)
        sampler = Sampler(
            params.sampling,
            self._sampler_setup,
            seed=seed_key(seed),
            matcher=None if request.constraint is None else request.constraint.start(),
            processor=request.processor,
            weights=bool(params.n_probs and params.post_sampling_probs),
        )
        sampler.start(text_tokens(request.prompt) if request.media else request.prompt)
        task = Task(request, emit, flush, sampler=sampler, seed=seed, scales=scales)
        self._queue.add(task)
        return task.id

    def _check_media(self, spans: Spans) -> None:
        """Raise InvalidRequest if the engine cannot take these chunks."""
        if not self._media.takes_media:
            raise InvalidRequest("this model was loaded without a projector for media (--mmproj)")
        check_batches(spans, self._planner.max_batch)
        if self._forward.memory.has_states and not all(span.chunk.causal for span in spans):
            raise InvalidRequest("recurrent layers read tokens in order, which this projector's media do not allow")

    @property
    def lora(self) -> tuple[float, ...]:
        """Scales of all adapters, in float32, for requests without their own."""
        return self._lora.each

    def set_lora(self, scales: Mapping[int, float]) -> None:
        """Set `lora`: adapters by number; those that are not listed get 0, unknown numbers are ignored.

        Applies to requests that are submitted from now on. Raises InvalidRequest.
        """
        self._lora.set(scales)

    def save_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Write a slot's sequence and its cells to a file, once no request has the slot.

        The future fails with SlotNotSaved, Unavailable or EngineClosed. Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("save", id_slot, path))

    def restore_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Give a slot the sequence of a file, once no request has the slot; it continues with the same bits.

        The future fails with SlotFileError (the slot is unchanged), NoRoom, Unavailable or EngineClosed. Raises
        InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("restore", id_slot, path))

    def erase_slot(self, id_slot: int) -> Future[int]:
        """Drop a slot's sequence, once no request has the slot; the result is its number of tokens.

        Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_slot_task(SlotTask("erase", id_slot))

    def _send_slot_task(self, slot_task: SlotTask) -> Future[Any]:
        if not 0 <= slot_task.id_slot < len(self._slots):
            raise InvalidRequest("Invalid slot ID")
        self._queue.add_slot_task(slot_task)
        return slot_task.future

    @property
    def disk(self) -> DiskCache | None:
        """The prompt cache on disk."""
        return self._sequence_cache.disk

    def use_prompt_memory(self, limit: int | None, folder: Path | None = None, folder_limit: int = 0) -> None:
        """Keep prompts that no slot holds in so many bytes of memory (None: no limit, 0: not at all), and in a folder.

        Waits until no step is under way. Raises DiskCacheUnusable, Unavailable or EngineClosed.
        """
        cache = self._sequence_cache
        disk = None if folder is None else cache.open_disk(folder, folder_limit)
        self.between_steps(lambda: cache.use_memory(limit, disk), forget=False)

    def between_steps(self, work: Callable[[], None], *, forget: bool) -> None:
        """Run `work` on the engine's thread between two steps, and wait for it. With `forget`, all cells are dropped.

        Answers continue at their last token. Raises the error of `work`, Unavailable or EngineClosed.
        """

        def run() -> None:
            self._busy_since = None  # `work` may take long, which is no hang
            if forget:
                self._forget_cells()
            self._prepared = False
            work()

        self._calls.call(run)

    def cancel(self, task_id: int) -> None:
        """Drop a request: its slot is free at the next step, and no more events come (one may be under way).

        A task that is over or unknown is ignored.
        """
        self._queue.cancel(task_id)

    def snapshot(self) -> EngineSnapshot:
        """Return the state after the last step; answers may be longer by the last tenth of a second. Never blocks."""
        return self._snapshot

    def stalled(self) -> float:
        """Return the seconds that the running step has taken; 0 if there is none or a device is waited for; infinity if
        the engine's thread has died.
        """
        if not self._thread.is_alive() and not self._queue.closing:
            return math.inf
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float = 0.0) -> None:
        """Accept no more requests, continue those accepted for up to `timeout` seconds, then end the rest.

        Those that are cut off get Failure(EngineClosed). Returns when the engine thread has ended, which takes at most
        one forward pass longer than the timeout.
        """
        self._queue.close(timeout)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for job in self._jobs:
                job.join()

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        queue, outages = self._queue, self._outages
        while True:
            self._busy_since = None
            lost = outages.current_loss()
            if lost is not None or outages.returned or not any(slot.task for slot in self._slots):
                queue.deliver()  # no batch will be launched soon
            if lost is not None and not queue.closing:
                outages.pause(lost, self._forget_cells, self._publish)
                self._prepared = False
                self._publish()
            elif outages.returned and not queue.closing:
                outages.move_back(self._forget_cells)
                self._prepared = False
                self._publish()
            with queue.wake:
                idle = not (queue.closing or self._calls or self._is_busy())
                if idle and self._prepared and outages.current_loss() is None and not outages.returned:
                    self._publish()
                    queue.wake.wait()
                queue.receive()
                closing, deadline = queue.closing, queue.deadline
            if idle:
                self._prepared = self._prepared or not self._prepare()
                continue
            self._busy_since = time.monotonic()
            if closing:
                idle = not self._is_busy() and not any(slot.held for slot in self._slots)
                if idle or time.monotonic() >= deadline or outages.current_loss() is not None:
                    self._fail_all(EngineClosed("the server was shut down before the answer was finished"))
                    self._sequence_cache.save()
                    self._sequence_cache.reset()  # another engine may have the forward pass next
                    return
            alike, n_over = False, queue.n_over
            try:
                if self._calls:
                    queue.deliver()
                    lost = self._calls.run()
                    if lost is not None:
                        outages.note(lost)
                elif self._step():
                    alike = queue.n_over == n_over and self._busy_since < self._published + _PUBLISH_SECONDS
                else:
                    self._wait_for_changes()
            except Exception as error:
                # the state of the cells is unknown after a failure outside the forward pass
                log.exception("engine step failed")
                self._fail_all(compute_failed(error))
                self._sequence_cache.reset()
            if not alike:
                self._publish()

    def _is_busy(self) -> bool:
        """True if there is work besides the calls of jobs."""
        return not self._queue.is_empty or any(slot.task for slot in self._slots)

    def _wait_for_changes(self) -> None:
        """Wait for changes, because all work waits for a held slot."""
        queue = self._queue
        with queue.wake:
            if queue.has_arrivals or self._calls or self._outages.current_loss():
                return
            if self._media.is_busy:
                return
            loads = [slot.load for slot in self._slots if slot.load is not None]
            if any(slot.held for slot in self._slots) or (loads and not any(load.has_pieces for load in loads)):
                queue.wake.wait(_CHECK_SECONDS)

    def _prepare(self) -> bool:
        """Let the forward pass use idle time; return False when nothing is left to do."""
        try:
            return self._forward.prepare_ahead()
        except DeviceLost as error:
            self._outages.note(error)
        except Exception:
            log.exception("preparing later batches failed")
        return False

    def _step(self) -> bool:
        """Start as many batches as are worth having in flight, and complete the first of them.

        Returns False if there was nothing to do.
        """
        changed = False
        if not self._forward.launches or (self._drafts is not None and self._drafts.takes_long):
            self._queue.deliver()  # the first part takes long
        launched = len(self._in_flight)
        if self._media.is_busy:
            self._encode()
            changed = True
        while (enough := len(self._in_flight) >= self._forward.depth) is False or self._can_draft_more():
            if not enough:
                changed |= self._queue.drop_cancelled()
                self._drop_encodings()
                self._sequence_cache.cancel_stale_reads()
                changed |= self._start_slot_tasks()
                changed |= self._admit()
                if changed:
                    self._publish()
            try:
                slots, counts = self._planner.plan_draft_only() if enough else self._planner.plan()
            except DeviceLost as error:  # from copying cells
                self._outages.note(error)
                return True
            if not slots:
                break
            try:
                if not self._launch(slots, counts):
                    break
            except Exception as error:
                self._fail_batch(slots, error)
                return True
        self._queue.deliver(wait=self._leaves_core and self._forward.launches)  # while the batch is computed
        if not self._in_flight:
            return changed
        while launched < len(self._in_flight):
            self._query_constraints(self._in_flight[launched])
            launched += 1
        self._complete(self._in_flight.popleft())
        return True

    def _encode(self) -> None:
        """Compute a segment of the media that requests wait for."""
        self._drop_encodings()
        failed = self._media.advance()
        if failed is None:
            return
        log.error("%s", failed.error)
        for slot in self._slots:
            if any(slot.task is one for one in failed.requesters):
                self._queue.fail(slot, failed.error)

    def _drop_encodings(self) -> None:
        """Drop encodings whose requests are over."""
        if self._media.is_busy:
            self._media.retain([slot.task for slot in self._slots if slot.task is not None])

    def _can_draft_more(self) -> bool:
        """Return True if more may be drafted until the next batch is done."""
        drafting = self._drafts is not None and len(self._in_flight) < _MOST_SPECULATIVE
        return drafting and not self._in_flight[0].rows.done()

    def _query_constraints(self, flight: _InFlightBatch) -> None:
        """While a batch is computed, query the constraints for its next tokens."""
        for share in flight.shares:
            slot, task = share.slot, share.task
            if task.request.constraint is None or slot.task is not task:
                continue
            try:
                task.sampler.query_constraint()
            except Exception as error:
                self._queue.fail(slot, constraint_failed(error))

    def _start_slot_tasks(self) -> bool:
        """Start the slot tasks whose slots are free now."""
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
            self._sequence_cache.settle(slot)
            if slot_task.kind == "erase":
                n_erased = slot.length
                self._sequence_cache.drop(slot)
                slot_task.future.set_result(n_erased)
                continue
            held = SlotHold(slot, self._forward, self._sequence_cache, self._queue)
            job = Job(slot_task, held, self._calls, self._lora.n_adapters)
            self._jobs = [*(job for job in self._jobs if job.is_alive()), job]
            job.start()
        return changed

    def _launch(self, slots: list[Slot], counts: list[int]) -> bool:
        """Start a batch; return False if it is empty: only drafts were requested, and none found."""
        tokens, spans, outputs, group, shares, n_prompt, embeddings = batch = self._planner.fill(slots, counts)
        if not tokens.size:
            return False
        self._stats.batch_tokens.add(tokens.size)
        began = time.perf_counter()
        for _, task, handle, *_ in shares:
            if task.params.return_progress and not task.generated and handle.used == task.n_cached:
                # nothing is computed yet: report the cached part of the prompt
                task.queue_progress(handle.used, began)
        features, more = None, {}
        width = 0 if self._drafts is None else self._drafts.features_width
        if width:
            features = more["features"] = np.empty((tokens.size, width), np.float32)
        if embeddings is not None:
            more["embeddings"] = embeddings
        rows = self._forward.start(tokens, spans, outputs, scales=group.scales, **more)  # type: ignore[arg-type]
        self._planner.started(batch)
        self._planner.overlaps = not rows.done()
        self._in_flight.append(_InFlightBatch(rows, shares, spans, features, tokens.size, n_prompt, began))
        return True

    def _complete(self, flight: _InFlightBatch) -> None:
        try:
            rows = flight.rows.result()
        except Exception as error:
            for slot, task, handle, *_ in flight.shares:
                if slot.handle is handle and slot.task is not task:  # the request is gone, but not its cells
                    self._sequence_cache.drop(slot)
            self._fail_batch([share.slot for share in flight.shares if share.slot.task is share.task], error)
            return
        now = time.perf_counter()
        self._stats.evaluated(flight.n_prompt, now - flight.began, sum(slot.task is not None for slot in self._slots))
        for share in flight.shares:
            slot, task, handle, n, *_ = share
            if slot.task is task and not task.generated:
                task.n_processed += n
                if slot.handle is handle:
                    self._output_processor.note_prompt(task, share.end - n, rows[share.prompt_rows])
                if task.params.return_progress:
                    task.queue_progress(handle.used, now)
        n_yielded = 0
        valid = [self._is_valid(share) for share in flight.shares] if flight.features is not None else []
        ready = [share for share in flight.shares if share.row is not None and not share.stale]
        ready = [share for share in ready if not share.task.cancelled]
        found = self._output_processor.find([share.task for share in ready], [rows[share.row or 0] for share in ready])
        for share, first in zip(ready, found, strict=True):
            if not share.task.cancelled:
                try:
                    n_yielded += self._continue(share, rows, first)
                except Exception as error:
                    if not isinstance(error, LlamadoError):
                        log.exception("sampling of task %d failed", share.task.id)
                    limited = share.task.request.constraint is not None
                    self._queue.fail(share.slot, constraint_failed(error) if limited else compute_failed(error))
        self._feed_features(flight, valid)
        if self._drafts is not None and not flight.n_prompt:
            n, overlaps = self._planner.n_generating, self._planner.overlaps
            self._drafts.note(n, flight.n_tokens, now - flight.began, n_yielded, now, overlaps=overlaps)
        # drafts behind a wrong token are useless
        if self._in_flight:
            self._in_flight = deque(flight for flight in self._in_flight if not flight.stale)

    @staticmethod
    def _is_valid(share: BatchShare) -> bool:
        """Return True if its first tokens are those of the slot's present sequence."""
        slot = share.slot
        return slot.task is share.task and slot.handle is share.handle and (share.row is None or not share.stale)

    def _feed_features(self, flight: _InFlightBatch, valid: Sequence[bool]) -> None:
        """Feed the hidden states of accepted tokens to the draft head."""
        if self._drafts is None or flight.features is None:
            return
        at = 0
        for share, span, known in zip(flight.shares, flight.spans, valid, strict=True):
            slot, task = share.slot, share.task
            first = span.first
            n = min(share.n, slot.length - first)
            if known and not slot.spans and n >= 0 and (task.draft_state is not None or slot.task is task):
                for token in share.draft[: slot.length - first - n]:
                    if slot.tokens[first + n] != token:
                        break
                    n += 1
                if task.draft_state is None:
                    task.draft_state = self._drafts.follow(task.ahead, task.sampler.guess())
                self._drafts.add_states(
                    task.draft_state, slot.tokens[: slot.length], first, flight.features[at : at + n]
                )
            at += span.n

    def _continue(self, share: BatchShare, rows: NDArray[np.float32], first: Found) -> int:
        """Choose the next token of a sequence evaluated to its end, and check the draft tokens behind it.

        `first`: the result for its first row. Returns the number of new tokens.
        """
        slot, task, handle, row, ahead = share.slot, share.task, share.handle, share.row, share.task.ahead
        assert row is not None
        n = 0
        for n in range(1, len(share.draft) + bool(share.n) + 1):
            n_pending, epoch = len(ahead), ahead.epoch
            token = self._output_processor.advance(slot, task, rows[row + n - 1], first if n == 1 else None)
            if token is None or not n_pending or ahead.epoch != epoch:
                break
            # The drafted token is right. Its cell is filled, or will be before it is read, unless a move left it
            # behind, because moves copy only used cells.
            if slot.handle is not handle or share.n_moves != self._sequence_cache.memory.n_moves:
                slot.discard_drafts()
                break
            handle.used += 1
        if self._drafts is not None and task.draft_state is not None:
            self._drafts.learn(task.draft_state)
        self._sequence_cache.settle(slot)
        return n

    def _fail_batch(self, slots: list[Slot], error: Exception) -> None:
        """Handle a failed batch. Losing a device invalidates every KV cell but fails no request; any other error fails
        the requests of this batch.
        """
        if isinstance(error, DeviceLost):
            self._outages.note(error)
            return
        log.error("a forward pass failed", exc_info=error)
        named = compute_failed(error)
        for slot in slots:
            self._sequence_cache.drop(slot)
            self._queue.fail(slot, named)
        if self._in_flight:
            # later batches may use cells, or copies of cells, that were never filled
            self._forget_cells()

    def _forget_cells(self) -> None:
        """Drop all cells and batches in flight; every sequence is read again."""
        for flight in self._in_flight:
            flight.rows.cancel()
        self._in_flight.clear()
        self._sequence_cache.forget()

    def _admit(self) -> bool:
        """Give waiting requests their slots in order; a request for a busy slot lets others pass."""
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
                self._sequence_cache.begin(slot, task, prompt)
        self._queue.waiting = left
        return len(left) < len(waiting)

    def _fail_all(self, error: LlamadoError) -> None:
        self._queue.fail_all(error)
        self._calls.fail(error, for_good=self._queue.closing)
        self._publish()
        self._queue.deliver()

    def _publish(self) -> None:
        """Publish a new snapshot."""
        self._snapshot = self._take_snapshot()
        self._published = time.monotonic()

    def _take_snapshot(self) -> EngineSnapshot:
        memory, store, disk = self._sequence_cache.memory, self._sequence_cache.store, self._sequence_cache.disk
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
            self._outages.fault,
            self._idle_since,
            len(store) if store is not None else 0,
            store.nbytes + store.reserved if store is not None else 0,
            disk.counters if disk is not None else None,
            tuple(self._forward.recovery.away()),
            memory.n_shared,
            store.n_tokens if store is not None else 0,
            store.entries if store is not None else (),
        )


def _outside_chunks(scales: Scales, spans: Spans) -> Scales:
    """Return the scales of adapters so that none begins to apply within a chunk, but behind it."""
    span = span_at(spans, scales.start) if isinstance(scales, ActivatedScales) else None
    if span is None or not isinstance(scales, ActivatedScales) or span.start == scales.start:
        return scales
    return ActivatedScales(tuple(scales), span.stop)
