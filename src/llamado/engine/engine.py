"""The engine: many requests, one thread, one forward pass after the other.

Each step evaluates the next token of every slot that is generating and, in the same batch, a piece of the prompts that
are being read. What a request answers never depends on the others (law 1), so everything here is free to choose what is
fastest: which slot, which cells, how much of a prompt, in which order.
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
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine import samplers
from llamado.engine.adapters import DefaultScales
from llamado.engine.drafting import MOST, Cost
from llamado.engine.errands import Calls, CellsGone, Errand, Job, fail_all, piece_cells
from llamado.engine.errors import (
    ComputeFailed,
    ConstraintFailed,
    ContextExceeded,
    EngineClosed,
    InvalidRequest,
    NoRoom,
    QueueFull,
    Unavailable,
)
from llamado.engine.forward import Cells, Forward, Scales
from llamado.engine.kvpool import KVPool, Run
from llamado.engine.request import (
    RANDOM_SEEDS,
    Counters,
    Done,
    EngineSnapshot,
    Event,
    Failed,
    Fault,
    Progress,
    Request,
    Result,
    Sampling,
    StopType,
    Token,
    TokenProb,
    TokenProbs,
)
from llamado.engine.sampling import Sampler, TopK, log_softmax_top, top_k_numpy
from llamado.engine.slotfile import SlotFile
from llamado.engine.slots import Slot, Task, choose_slot
from llamado.engine.statistics import Statistics
from llamado.engine.stored import ReadCost, Store
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

# Copying a token's K and V costs microseconds, evaluating it up to milliseconds; below this many tokens the extra call
# is not worth it.
MIN_COPY = 16
# Sequences that lose fewer tokens than this are not kept in memory.
MIN_STORE = 64
# Cells that are read to learn what reading costs: few, lest a slow link stop everything, and more where the few took no
# longer than this. After how many sequences that were not worth it this is tried again.
_PROBE_FEW, _PROBE_MORE, _PROBE_SECONDS, _PROBE_AGAIN = 8, 32, 0.1, 16
# Cells a sequence gets beyond those it needs now, at most, so that it seldom has to move.
HEADROOM = 1024
# How long a step should take at most while some slot is generating.
STEP_SECONDS = 0.15
# Prompt tokens that such a step takes at least; the pace of fewer says nothing.
_PACE_UNIT = 16
# Where nothing can be done until a slot is saved or restored, the engine looks again after this long.
_LOOK_AGAIN = 0.05
# Requests whose ends tell the pace, and the most seconds somebody is told to wait.
_PACE_REQUESTS, _LONGEST_WAIT = 64, 60
# Pauses between attempts to get a lost device back, in seconds: they grow with the time it has been away, of which a
# device that is there again loses no more than this share by waiting for the next attempt.
_FIRST_PAUSE, _LONGEST_PAUSE, _PAUSE_SHARE = 0.1, 5.0, 0.25


class _Share(NamedTuple):
    """What one slot has in a batch."""

    slot: Slot
    task: Task
    run: Run
    n: int
    row: int | None
    """Its (first) row of the logits."""
    draft: list[int]
    """Tokens evaluated behind the last one of the sequence, each with a row of its own."""
    n_moves: int
    """How often cells had been moved when it was started."""


class _Flight(NamedTuple):
    """A batch on its way."""

    rows: Future[NDArray[np.float32]]
    shares: list[_Share]
    n_tokens: int
    n_prompt: int
    began: float


class Vocabulary(samplers.Vocabulary, Protocol):
    """What the engine asks of a tokenizer."""

    @property
    def eog(self) -> frozenset[int]: ...

    add_bos: bool
    """Whether texts begin with a token of their own, which stays when a full context is shifted."""

    def piece(self, token: int, *, special: bool = False) -> bytes: ...


class Engine:
    """Answers requests on one thread of its own; all methods may be called from any thread.

    `n_ctx`: most tokens of one sequence. `n_batch`: most tokens in one step (never more than `forward.max_batch`).
    `prefill_chunk`: most tokens in a step while some slot is generating; fewer where a step of that many would take
    longer than STEP_SECONDS, so that a long prompt delays the others' tokens by little. `cont_batching` off: prompts
    wait until no slot is generating. `top_k`: a faster kernel.

    `lora`: scales of the model's adapters for requests that name none (see `set_lora`). Requests with other scales take
    turns, never share a forward pass, and never reuse each other's cells.

    `drafting`: tokens that probably come next are evaluated along (see drafting.py).

    `context_shift`: an answer that fills the context drops the older half of it and goes on (see Request.n_keep),
    instead of ending. `cache_ram`: MiB of memory for sequences that no slot holds any more (-1: no limit, 0: none); see
    stored.py. `max_queue`: most requests that wait for a slot.

    Cells are reused where prompts begin alike, and only there: moving those of a piece further on in another prompt
    (llama-server's `n_cache_reuse`) would change answers.

    When a device is lost the engine pauses until it is back, or `failover` seconds later until its layers are elsewhere
    (None: never); then every sequence is read again and goes on where it was. Requests that wait for a slot meanwhile
    fail with Unavailable after `wait` seconds.
    """

    def __init__(
        self,
        forward: Forward,
        tokenizer: Vocabulary,
        *,
        n_slots: int = 1,
        n_ctx: int | None = None,
        n_batch: int = 2048,
        prefill_chunk: int = 256,
        cont_batching: bool = True,
        slot_prompt_similarity: float = 0.1,
        context_shift: bool = False,
        cache_ram: int = 0,
        max_queue: int = 1024,
        top_k: TopK = top_k_numpy,
        lora: Sequence[float] = (),
        drafting: bool = False,
        failover: float | None = None,
        wait: float = 30.0,
    ) -> None:
        n_ctx = forward.n_cells if n_ctx is None else n_ctx
        if not 0 < n_ctx <= forward.n_cells:
            raise ValueError(f"a sequence of {n_ctx} tokens does not fit the pool of {forward.n_cells} cells")
        if n_slots < 1:
            raise ValueError(f"at least one slot is needed, not {n_slots}")
        self.n_ctx = n_ctx
        self._forward = forward
        self._tokenizer = tokenizer
        self._top_k = top_k
        self._similarity = slot_prompt_similarity
        self._cont_batching = cont_batching
        self._context_shift = context_shift and n_ctx > 2  # of two tokens there is none to drop
        self._max_queue = max_queue
        self._max_batch = max(1, min(n_batch, forward.max_batch))
        self._busy_batch = max(1, min(prefill_chunk, self._max_batch))
        self._slots = [Slot(i, n_ctx) for i in range(n_slots)]
        self._pool = KVPool(forward.n_cells, self._move_cells)
        self._n_moves = 0
        self._turn = 0
        self._n_generating = 0
        self._flights: deque[_Flight] = deque()
        self._lora = DefaultScales(lora)
        self._served: dict[Scales, int] = {}  # number of the last batch of slots with these scales, or when they came
        self._n_launched = 0
        self._cost = Cost() if drafting else None
        self._failover, self._wait = failover, wait
        self._fault: Fault | None = None
        self._void: DeviceLost | None = None  # the loss that the engine itself came across

        self._batch_tokens = np.zeros(self._max_batch, np.int32)
        self._batch_positions = np.zeros(self._max_batch, np.int32)
        self._batch_starts = np.zeros(self._max_batch, np.int64)

        self._wake = threading.Condition()
        self._inbox: deque[Task] = deque()
        self._tasks: dict[int, Task] = {}
        self._next_id = 0
        self._closing = False
        self._deadline = math.inf
        self._waiting: list[Task] = []  # of the engine thread alone
        self._errands: deque[Errand] = deque()
        self._calls = Calls(self._wake)
        self._jobs: list[Job] = []
        self._ends: deque[float] = deque(maxlen=_PACE_REQUESTS)  # when the last requests were over
        self._idle_since: float | None = time.monotonic()

        self._piece = piece_cells(forward.cell_bytes)
        limit = None if cache_ram < 0 else cache_ram << 20
        self._store = Store(limit, forward.cell_bytes, self._piece) if cache_ram else None
        self._read_cost: ReadCost | None = None
        self._n_passed = 0
        self._stats = Statistics()

        self._n_prompt = self._n_cached = self._n_predicted = self._n_steps = 0
        self._n_decode = self._n_busy = self._n_tokens_max = 0
        self._prompt_seconds = self._predicted_seconds = 0.0
        self._prompt_pace = 0.0  # tokens of prompts per second, lately
        self._snapshot = self._take_snapshot()
        self._prepared = False  # whether the forward has used all the spare time it wants
        self._thread = threading.Thread(target=self._work, name="llamado-engine", daemon=True)
        forward.watch(self._notice)
        self._thread.start()

    # -- called from any thread --------------------------------------------------------------------------------------

    def submit(self, request: Request, emit: Callable[[Event], None]) -> int:
        """Queue a request; returns its task id.

        `emit` is called on the engine thread, in order, and must be quick: Token and Progress events, then one Done or
        Failed. Raises InvalidRequest, ContextExceeded, QueueFull or EngineClosed; nothing is emitted then.
        """
        request.validate()
        self._check_queue()
        if len(request.prompt) >= self.n_ctx:
            raise ContextExceeded(len(request.prompt), self.n_ctx)
        if min(request.prompt) < 0 or max(request.prompt) >= self._forward.n_vocab:
            raise InvalidRequest("Prompt contains invalid tokens")
        if request.id_slot >= len(self._slots):
            raise InvalidRequest(f"Invalid slot ID {request.id_slot}: there are {len(self._slots)} slots")
        scales = self._lora.of(request.lora) if request.lora else self._lora.now
        seed = request.sampling.seed
        if seed is None or seed in RANDOM_SEEDS:
            seed = secrets.randbits(32)
        sampler = Sampler(
            request.sampling,
            seed=seed,
            n_vocab=self._forward.n_vocab,
            eog=self._tokenizer.eog,
            top_k=self._top_k,
            vocabulary=self._tokenizer,
            matcher=None if request.constraint is None else request.constraint.start(),
        )
        sampler.start(request.prompt)
        with self._wake:
            if self._closing:
                raise EngineClosed("the server is shutting down and takes no more requests")
            task = Task(self._next_id, request, emit, sampler=sampler, seed=seed, scales=scales)
            self._next_id += 1
            self._tasks[task.id] = task
            self._inbox.append(task)
            self._wake.notify()
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

    def _check_queue(self) -> None:
        """Raises QueueFull."""
        n_waiting = len(self._tasks) - len(self._slots)
        if n_waiting < self._max_queue:
            return
        # Those who are told to come back come back together: half of the queue should be gone by then.
        ends = self._ends
        seconds = (time.monotonic() - ends[0]) * max(1, self._max_queue) / (2 * len(ends)) if ends else 1.0
        raise QueueFull(max(0, n_waiting), min(max(math.ceil(seconds), 1), _LONGEST_WAIT))

    def save_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Write a slot's sequence and its cells to a file, once no request has the slot.

        The future fails with SlotNotSaved, Unavailable or EngineClosed. Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_errand(Errand("save", id_slot, path))

    def restore_slot(self, id_slot: int, path: Path) -> Future[SlotFile]:
        """Give a slot the sequence of a file, once no request has the slot; it goes on with the same bits.

        The future fails with SlotFileError (the slot is as before), NoRoom, Unavailable or EngineClosed. Raises
        InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_errand(Errand("restore", id_slot, path))

    def erase_slot(self, id_slot: int) -> Future[int]:
        """Forget a slot's sequence, once no request has the slot; how many tokens that were.

        Raises InvalidRequest, QueueFull, EngineClosed.
        """
        return self._send_errand(Errand("erase", id_slot))

    def _send_errand(self, errand: Errand) -> Future[Any]:
        if not 0 <= errand.id_slot < len(self._slots):
            raise InvalidRequest("Invalid slot ID")
        if len(self._errands) >= max(1, self._max_queue):
            raise QueueFull(len(self._errands), 1)
        with self._wake:
            if self._closing:
                raise EngineClosed("the server is shutting down and takes no more requests")
            self._errands.append(errand)
            self._wake.notify()
        return errand.future

    def cancel(self, task_id: int) -> None:
        """Drop a request: its slot is free at the next step, and no more events come (one may be under way).

        A task that is over or unknown is ignored.
        """
        with self._wake:
            task = self._tasks.get(task_id)
            if task is not None:
                task.cancelled = True
                self._wake.notify()

    def snapshot(self) -> EngineSnapshot:
        """The state after the last step; never blocks."""
        return self._snapshot

    def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, go on with those accepted for up to `timeout` seconds, then end the rest.

        Those that are cut off get Failed(EngineClosed). Returns when the engine thread has ended, which takes at most
        one forward pass longer than the timeout.
        """
        with self._wake:
            self._closing = True
            self._deadline = min(self._deadline, time.monotonic() + timeout)
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
            for job in self._jobs:
                job.join()

    def _notice(self) -> None:
        """A device was lost, perhaps while there was nothing to do."""
        with self._wake:
            self._wake.notify()

    # -- the engine thread -------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            lost = self._gone()
            if lost is not None and not self._closing:
                self._pause(lost)
            with self._wake:
                idle = not (self._closing or self._calls or self._is_busy())
                if idle and self._prepared and self._gone() is None:
                    self._snapshot = self._take_snapshot()
                    self._wake.wait()
                self._waiting.extend(self._inbox)
                self._inbox.clear()
                closing, deadline = self._closing, self._deadline
            if idle:
                self._prepared = self._prepared or not self._prepare()
                continue
            if closing:
                idle = not self._is_busy() and not any(slot.held for slot in self._slots)
                if idle or time.monotonic() >= deadline or self._gone() is not None:
                    self._end_all(EngineClosed("the server was shut down before the answer was finished"))
                    return
            try:
                lost = self._calls.run()
                if lost is not None:
                    self._void = lost
                elif not self._step():
                    self._look_again()
            except Exception as error:
                # Nothing is known about the cells after a failure outside the forward pass.
                log.exception("engine step failed")
                self._end_all(_named(error))
                self._pool = KVPool(self._forward.n_cells, self._move_cells)
                for slot in self._slots:
                    slot.run = None
                    slot.length = 0
            self._snapshot = self._take_snapshot()

    def _is_busy(self) -> bool:
        """Whether there is anything to do besides what jobs ask for."""
        return bool(self._inbox or self._waiting or self._errands or any(slot.task for slot in self._slots))

    def _look_again(self) -> None:
        """Wait for news: all that is to be done waits for a slot that is held."""
        with self._wake:
            if not (self._inbox or self._calls or self._gone()) and any(slot.held for slot in self._slots):
                self._wake.wait(_LOOK_AGAIN)

    def _gone(self) -> DeviceLost | None:
        """The device that is gone, whether the forward pass has noticed it yet or only one of its batches."""
        return self._forward.lost() or self._void

    def _prepare(self) -> bool:
        """Have the forward pass use spare time; False when nothing is left to do."""
        try:
            return self._forward.prepare_ahead()
        except DeviceLost as error:
            self._void = error
        except Exception:
            log.exception("getting ready for later batches failed")
        return False

    def _step(self) -> bool:
        """Start as many batches as it pays to have on their way, and see the first of them to its end.

        False where there was nothing to do.
        """
        changed = False
        launched = len(self._flights)
        while len(self._flights) < self._forward.depth:
            changed = self._drop_cancelled()
            changed |= self._start_errands()
            changed |= self._admit()
            if changed:
                self._snapshot = self._take_snapshot()
            try:
                slots, counts = self._plan()
            except DeviceLost as error:  # of copying cells
                self._void = error
                return True
            if not slots:
                break
            try:
                self._launch(slots, counts)
            except Exception as error:
                self._lose(slots, error)
                return True
        if not self._flights:
            return changed
        while launched < len(self._flights):
            self._get_ready(self._flights[launched])
            launched += 1
        self._land(self._flights.popleft())
        return True

    def _get_ready(self, flight: _Flight) -> None:
        """While a batch is computed: find out which tokens may come next where that is limited."""
        for share in flight.shares:
            slot, task = share.slot, share.task
            if task.request.constraint is None or slot.task is not task:
                continue
            try:
                task.sampler.get_ready()
            except Exception as error:
                self._end(slot, _unmatched(error))

    def _start_errands(self) -> bool:
        """Do what is to be done with slots that are free by now."""
        changed = False
        for _ in range(len(self._errands)):
            errand = self._errands.popleft()
            slot = self._slots[errand.id_slot]
            if not slot.idle:
                self._errands.append(errand)
                continue
            if not errand.future.set_running_or_notify_cancel():
                continue
            changed = True
            if errand.kind == "erase":
                n_erased = slot.length
                self._drop_cells(slot)
                errand.future.set_result(n_erased)
                continue
            slot.held = True
            job = Job(
                errand,
                _Hold(self, slot),
                self._calls,
                self._forward.cell_kind,
                n_ctx=self.n_ctx,
                n_vocab=self._forward.n_vocab,
                n_adapters=self._lora.n_adapters,
                sound=self._forward.sound_cells,
            )
            self._jobs = [*(job for job in self._jobs if job.is_alive()), job]
            job.start()
        return changed

    def _launch(self, slots: list[Slot], counts: list[int]) -> None:
        n = 0
        tokens, positions, starts = self._batch_tokens, self._batch_positions, self._batch_starts
        shares: list[_Share] = []
        outputs: list[int] = []
        n_prompt = 0
        room = self._max_batch - sum(counts)
        for slot, count in zip(slots, counts, strict=True):
            run, task = slot.run, slot.task
            assert run is not None and task is not None
            used = run.used
            if count == 1:
                tokens[n] = slot.tokens[used]
                positions[n] = used
            else:
                tokens[n : n + count] = slot.tokens[used : used + count]
                positions[n : n + count] = np.arange(used, used + count, dtype=np.int32)
            draft = self._draft(slot, room) if room > 0 and used + 1 == slot.length and task.generated else []
            if draft:
                last = used + 1 + len(draft)
                tokens[n + 1 : n + 1 + len(draft)] = draft
                positions[n + 1 : n + 1 + len(draft)] = np.arange(used + 1, last, dtype=np.int32)
                room -= len(draft)
            rows = count + len(draft)
            starts[n : n + rows] = run.start
            n += rows
            row = None
            if used + count == slot.length:
                row = len(outputs)
                outputs.extend(range(n - 1 - len(draft), n))
            shares.append(_Share(slot, task, run, count, row, draft, self._n_moves))
            if not task.generated:
                n_prompt += count
        self._stats.batch_tokens.add(n)
        began = time.perf_counter()
        scales = slots[0].scales
        rows_out = np.array(outputs, np.int32)
        logits = self._forward.start(tokens[:n], positions[:n], starts[:n], rows_out, scales=scales)
        self._n_launched += 1
        self._served[scales] = self._n_launched
        # Batches are worked on in order, so for whatever is planned from here on these cells are filled.
        for share in shares:
            share.run.used += share.n
            share.run.need = max(share.run.need, share.run.used + len(share.draft))
            self._n_tokens_max = max(self._n_tokens_max, share.run.used)
        self._flights.append(_Flight(logits, shares, n, n_prompt, began))

    def _draft(self, slot: Slot, room: int) -> list[int]:
        """Tokens that probably follow, as many as there is room for and as are worth their time."""
        if self._cost is None:
            return []
        task, run = slot.task, slot.run
        assert task is not None and run is not None
        most = min(MOST, room, run.capacity - slot.length, self.n_ctx - slot.length - 1)
        if task.budget >= 0:
            most = min(most, task.budget - 1)
        if most <= 0:
            return []
        return task.drafter.propose(slot.tokens, slot.length, most, self._cost.least_gain(self._n_generating))

    def _land(self, flight: _Flight) -> None:
        try:
            rows = flight.rows.result()
        except Exception as error:
            for slot, task, run, *_ in flight.shares:
                if slot.run is run and slot.task is not task:  # the request is gone, but not its cells
                    self._drop_cells(slot)
            self._lose([share.slot for share in flight.shares if share.slot.task is share.task], error)
            return
        now = time.perf_counter()
        self._n_decode += 1
        self._n_busy += sum(slot.task is not None for slot in self._slots)
        if flight.n_prompt:
            self._n_prompt += flight.n_prompt
            self._prompt_seconds += now - flight.began
            if flight.n_prompt >= _PACE_UNIT:
                pace = flight.n_prompt / max(now - flight.began, 1e-9)
                self._prompt_pace = 0.7 * self._prompt_pace + 0.3 * pace if self._prompt_pace else pace
        for slot, task, run, n, *_ in flight.shares:
            if slot.task is task and not task.generated:
                task.n_processed += n
                if task.request.return_progress:
                    elapsed = round(1e3 * (now - task.t_start))
                    self._emit(task, Progress(task.n_prompt, task.n_cached, run.used, elapsed))
        n_yielded = 0
        for share in flight.shares:
            if share.row is not None and share.slot.task is share.task and not share.task.cancelled:
                try:
                    n_yielded += self._continue(share, rows)
                except Exception as error:
                    if not isinstance(error, LlamadoError):
                        log.exception("sampling of task %d failed", share.task.id)
                    limited = share.task.request.constraint is not None
                    self._end(share.slot, _unmatched(error) if limited else _named(error))
        if self._cost is not None and not flight.n_prompt:
            self._cost.note(self._n_generating, flight.n_tokens, now - flight.began, n_yielded, now)

    def _continue(self, share: _Share, rows: NDArray[np.float32]) -> int:
        """A sequence was evaluated to its end, perhaps beyond: its next token, and those after it that were drafted.

        Returns how many tokens it got.
        """
        slot, task, run, _, row, draft, n_moves = share
        assert row is not None
        accepted = 0
        for drafted in (*draft, None):
            length = slot.length
            token = self._advance(slot, task, rows[row + accepted])
            if token is None:
                break
            if token != drafted or slot.length <= length:  # shifted: what was drafted stands elsewhere now
                break
            accepted += 1
            # Its cell is filled already, unless it was left behind by a move, which takes only what counts as used.
            if slot.run is run and n_moves == self._n_moves:
                run.used += 1
        if draft:
            task.drafter.learn(len(draft), accepted)
            task.n_drafted += len(draft)
            task.n_accepted += accepted
            self._stats.drafted(len(draft), accepted)
        return accepted + 1

    def _lose(self, slots: list[Slot], error: Exception) -> None:
        """A batch failed: with a device everybody's cells are gone, and nobody's answer; else those answers are."""
        if isinstance(error, DeviceLost):
            self._void = error
            return
        log.error("a forward pass failed", exc_info=error)
        named = _named(error)
        for slot in slots:
            self._drop_cells(slot)
            self._end(slot, named)
        if self._flights:
            # They may have been started with cells, or copies of cells, that were never filled.
            self._forget_cells()

    def _pause(self, lost: DeviceLost) -> None:
        """A device is gone: forget all cells, get going again, and let every answer go on where it was."""
        log.error("%s; answers wait until it is back", lost)
        self._fault = Fault(lost.device, lost.why, time.time())
        self._forget_cells()
        self._snapshot = self._take_snapshot()
        began = time.monotonic()
        while not self._closing:
            late = self._failover is not None and time.monotonic() - began >= self._failover
            attempt = _Attempt(self._forward, elsewhere=late)
            self._idle_until(lambda attempt=attempt: not attempt.is_alive(), began)  # type: ignore[misc]
            if attempt.is_alive():
                return  # closing; what it waits for is not ours to wait for
            if attempt.error is None:
                log.warning("all devices are there again after %.1f s", time.monotonic() - began)
                break
            if isinstance(attempt.error, DeviceLost):
                self._fault = self._fault._replace(device=attempt.error.device, why=attempt.error.why)
            else:
                self._fault = self._fault._replace(why=str(attempt.error))
            self._snapshot = self._take_snapshot()
            now = time.monotonic()
            until = now + min(max(_FIRST_PAUSE, _PAUSE_SHARE * (now - began)), _LONGEST_PAUSE)
            if self._failover is not None and not late:
                until = min(until, began + self._failover)
            self._idle_until(lambda until=until: time.monotonic() >= until, began)  # type: ignore[misc]
        self._fault = self._void = None
        self._prepared = False
        self._snapshot = self._take_snapshot()

    def _forget_cells(self) -> None:
        """Every sequence is to be read again, and what is on its way does not count."""
        for flight in self._flights:
            flight.rows.cancel()
        self._flights.clear()
        for slot in self._slots:
            slot.leader = None
            self._drop_cells(slot)

    def _idle_until(self, over: Callable[[], bool], began: float) -> None:
        """Turn down or forget requests as they come of age or are cancelled, until `over` or the engine closes.

        `began`: when the device was lost; what requests waited before, for others to be done, does not count.
        """
        while not over() and not self._closing:
            with self._wake:
                self._wake.wait(0.02)
                self._waiting.extend(self._inbox)
                self._inbox.clear()
            self._drop_cancelled()
            now = time.monotonic()
            assert self._fault is not None
            for task in [task for task in self._waiting if now - max(task.t_submit, began) >= self._wait]:
                self._waiting.remove(task)
                self._tasks.pop(task.id, None)
                self._emit(task, Failed(Unavailable(self._fault.message)))
            late = [errand for errand in self._errands if now - max(errand.t_submit, began) >= self._wait]
            for errand in late:
                self._errands.remove(errand)
            fail_all(deque(late), Unavailable(self._fault.message))
            if now - began >= self._wait:
                self._calls.fail(Unavailable(self._fault.message))
            self._snapshot = self._take_snapshot()

    def _drop_cancelled(self) -> bool:
        changed = False
        for slot in self._slots:
            if slot.task is not None and slot.task.cancelled:
                self._release(slot)
                changed = True
        if any(task.cancelled for task in self._waiting):
            for task in self._waiting:
                if task.cancelled:
                    self._tasks.pop(task.id, None)
            self._waiting = [task for task in self._waiting if not task.cancelled]
            changed = True
        return changed

    def _admit(self) -> bool:
        """Give waiting requests their slots in order; one that asked for a busy slot lets others pass."""
        if not self._waiting:
            return False
        left = []
        free = sum(slot.idle for slot in self._slots)
        for task in self._waiting:
            slot = None
            if free:
                prompt = np.array(task.request.prompt, np.int32)
                slot = choose_slot(self._slots, task, prompt, self._similarity)
            if slot is None:
                left.append(task)
            else:
                free -= 1
                self._begin(slot, task, prompt)
        changed = len(left) < len(self._waiting)
        self._waiting = left
        return changed

    def _begin(self, slot: Slot, task: Task, prompt: NDArray[np.int32]) -> None:
        n_keep = 0
        if task.request.cache_prompt:
            # The last token is always evaluated: its logits are not kept.
            scales = task.scales
            n_keep = min(slot.common_prefix(prompt, scales), prompt.size - 1)
            longest = n_keep + MIN_COPY - 1
            if self._store is not None:
                found = self._store.find(prompt[:-1], longest + 1, scales)
                longest = max(longest, 0 if found is None else found[1])
            for other in self._slots:
                if other is slot or (other.task is None and other.run is None):
                    continue
                shared = min(other.common_prefix(prompt, scales, other.length), prompt.size - 1)
                if shared > longest:
                    longest = shared
                    slot.leader = other, other.last_task
        self._keep(slot, n_keep)
        slot.begin(task, prompt, n_keep)
        self._stats.queue.add(task.t_start - task.t_arrival)
        self._n_cached += n_keep

    def _keep(self, slot: Slot, n_same: int = 0) -> None:
        """A slot loses its sequence but for `n_same` tokens: put it into memory where that is worth its time."""
        store, run = self._store, slot.run
        if store is None or run is None or run.used - n_same < MIN_STORE:
            return
        tokens = slot.tokens[: run.used]
        scales = slot.scales
        others = (other for other in self._slots if other is not slot)
        held = any(other.common_prefix(tokens, scales) == tokens.size for other in others)
        if held or store.holds(tokens, scales):
            return
        try:
            if self._reading_pays(run):
                store.put(tokens, lambda start, n: self._read_cells(run.start + start, n), scales)
        except DeviceLost as error:
            self._void = error
        except Exception:
            log.exception("a sequence could not be kept")

    def _read_cells(self, start: int, n: int) -> Cells:
        began = time.perf_counter()
        cells = self._forward.read_cells(start, n)
        if self._read_cost is not None:
            self._read_cost.note(n, time.perf_counter() - began)
        return cells

    def _reading_pays(self, run: Run) -> bool:
        """Whether getting a run's cells from the devices and putting them back is quicker than computing them again.

        Over a slow link it is not. What reading takes is measured; where that was too much, now and then again.
        """
        if self._read_cost is None:
            began = time.perf_counter()
            self._forward.read_cells(run.start, _PROBE_FEW)
            few = time.perf_counter() - began
            more = few * _PROBE_MORE / _PROBE_FEW
            if few <= _PROBE_SECONDS:
                self._forward.read_cells(run.start, _PROBE_MORE)
                more = time.perf_counter() - began - few
            self._read_cost = ReadCost(_PROBE_FEW, few, _PROBE_MORE, more)
        if 2 * self._read_cost.seconds(run.used, self._piece) * self._prompt_pace <= run.used:
            self._n_passed = 0
            return True
        self._n_passed += 1
        if self._n_passed % _PROBE_AGAIN == 0:
            self._read_cost = None
        return False

    def _recall(self, slot: Slot) -> None:
        """Take from memory what the slot's sequence begins with, instead of computing it."""
        slot.recall = False
        task, run = slot.task, slot.run
        assert task is not None and run is not None
        # The last token is always evaluated: its logits are not kept.
        wanted = slot.tokens[: slot.length - 1]
        store = self._store
        found = store.find(wanted, run.used + MIN_COPY, slot.scales) if store is not None else None
        if found is None:
            return
        stored, shared = found
        for at, n, cells in stored.pieces(run.used, shared):
            self._forward.write_cells(run.start + at, n, cells)
        if not task.generated:
            task.n_cached += shared - run.used
            self._n_cached += shared - run.used
        run.used = shared

    def _plan(self) -> tuple[list[Slot], list[int]]:
        """Slots of the next batch and how many tokens of each, decoding ones first."""
        active = [slot for slot in self._slots if slot.task is not None]
        if len(active) > 1:
            active.sort(key=_age)
        groups: dict[Scales, list[Slot]] = {}
        for slot in active:
            groups.setdefault(slot.scales, []).append(slot)
        self._served = {scales: self._served.get(scales, self._n_launched) for scales in groups}
        if len(groups) < 2:
            return self._plan_group(active)
        # They take turns: who had a batch longest ago is next. One that has all of its tokens on their way, or has to
        # wait for room, lets the others pass.
        busy = sum(slot.task is not None and bool(slot.task.generated) for slot in active)
        for scales in sorted(groups, key=self._served.__getitem__):
            slots, counts = self._plan_group(groups[scales], n_groups=len(groups), n_generating=busy)
            if slots:
                return slots, counts
        return [], []

    def _plan_group(
        self, active: list[Slot], *, n_groups: int = 1, n_generating: int = 0
    ) -> tuple[list[Slot], list[int]]:
        """As `_plan`, for slots that may share a batch, oldest first.

        `n_groups`, `n_generating`: how many groups of such slots there are, and slots in them that generate.
        """
        slots: list[Slot] = []
        reading: list[Slot] = []
        n_flying = 0
        for slot in active:
            task = slot.task
            assert task is not None
            if slot.run is not None and slot.run.used == slot.length:  # all of it is on its way
                n_flying += bool(task.generated)
                continue
            if slot.run is None or not task.generated or slot.length - slot.run.used > 1:
                reading.append(slot)
            elif slot.length <= slot.run.capacity:
                slot.run.need = slot.length
                slots.append(slot)
            elif self._make_room(slot):
                slots.append(slot)
        # Making room for one may have taken the cells of another.
        slots = [slot for slot in slots if slot.run is not None]
        if len(slots) > self._max_batch:
            self._turn = (self._turn + self._max_batch) % len(slots)
            slots = (slots[self._turn :] + slots[: self._turn])[: self._max_batch]
        self._n_generating = len(slots) + n_flying
        n_generating = max(n_generating, self._n_generating)
        share = -(-self._n_generating * n_groups // self._forward.depth)
        if len(slots) > share > 0:
            # Groups, so that every device has one to work on; who waited longest goes first.
            slots = sorted(slots, key=lambda slot: slot.task.t_last if slot.task is not None else 0.0)[:share]
        counts = [1] * len(slots)
        if not reading or (n_generating and not self._cont_batching):
            return slots, counts
        room = min(self._max_batch, max(self._forward.chunk, len(slots) + 1))
        if n_generating:
            # Even with more slots generating than the smaller batch holds, prompts must move on.
            room = min(room, max(self._busy_tokens(), len(slots) + 1))
        room -= len(slots)
        for slot in reading:
            if room <= 0:
                break
            if slot.leader is not None and not self._leader_done(slot):
                continue
            if slot.run is None or slot.run.need < slot.length:
                got_room = self._make_room(slot)
                if any(other.run is None for other in slots):
                    keep = [i for i, other in enumerate(slots) if other.run is not None]
                    slots = [slots[i] for i in keep]
                    counts = [counts[i] for i in keep]
                if not got_room:
                    break  # the younger ones would only take what this one waits for
            if slot.leader is not None:
                self._copy_prefix(slot)
            if slot.recall:
                self._recall(slot)
            count = min(slot.pending, room)
            slots.append(slot)
            counts.append(count)
            room -= count
        return slots, counts

    def _busy_tokens(self) -> int:
        """Most tokens of a step that delays generating slots: as many as prompts were read in STEP_SECONDS lately."""
        pace = int(self._prompt_pace * STEP_SECONDS) // _PACE_UNIT * _PACE_UNIT
        return min(self._busy_batch, max(pace, _PACE_UNIT)) if pace else self._busy_batch

    def _leader_done(self, slot: Slot) -> bool:
        """Whether the beginning that is to be copied is there, or will not come."""
        assert slot.leader is not None
        leader, task = slot.leader
        if leader.task is not task or leader.run is None:
            return True
        wanted = min(leader.common_prefix(slot.tokens[: slot.length], slot.scales, leader.length), slot.length - 1)
        return leader.run.used >= wanted

    def _copy_prefix(self, slot: Slot) -> None:
        assert slot.leader is not None and slot.run is not None and slot.task is not None
        leader, _ = slot.leader
        slot.leader = None
        shared = min(leader.common_prefix(slot.tokens[: slot.length], slot.scales), slot.length - 1)
        used = slot.run.used
        n = shared - used
        if leader.run is not None and n >= MIN_COPY:
            self._forward.copy_cells(leader.run.start + used, slot.run.start + used, n)
            slot.run.used = shared
            slot.task.n_cached += n
            self._n_cached += n

    def _make_room(self, slot: Slot) -> bool:
        """Cells for all tokens of the slot's sequence, taken from idle slots and, if need be, from younger requests.

        A request that loses its cells keeps its tokens, and reads them again when there is room: it is late, but its
        answer is the same. The oldest request always gets room, so all get done.
        """
        task = slot.task
        assert task is not None
        need = slot.length
        ahead = HEADROOM if task.budget < 0 else min(task.budget, HEADROOM)
        want = min(need + ahead, self.n_ctx)
        while True:
            if slot.run is None:
                slot.run = self._pool.allocate(need, want)
                if slot.run is not None:
                    return True
            elif self._pool.grow(slot.run, need, want):
                return True
            leader = slot.leader[0] if slot.leader is not None else None
            idle = [other for other in self._slots if other.idle and other.run is not None]
            if idle:
                victim = min(idle, key=lambda other: (other is leader, other.t_last_used))
            else:
                younger = [other for other in self._slots if other.run is not None and _age(other) > task.id]
                if not younger:
                    return False
                victim = max(younger, key=_age)
            self._keep(victim)
            self._drop_cells(victim)

    def _move_cells(self, src: int, dst: int, n: int) -> None:
        self._n_moves += 1
        self._forward.copy_cells(src, dst, n)

    def _empty(self, slot: Slot, n: int, scales: Scales) -> None:
        """Room for `n` tokens in place of an idle slot's sequence. Raises NoRoom."""
        self._keep(slot)
        self._drop_cells(slot)
        slot.scales = scales
        if not n:
            return
        while (run := self._pool.allocate(n)) is None:
            idle = [other for other in self._slots if other.idle and other.run is not None]
            if not idle:
                raise NoRoom(f"there is no room for {n} tokens beside the answers that are being written")
            victim = min(idle, key=lambda other: other.t_last_used)
            self._keep(victim)
            self._drop_cells(victim)
        slot.run = run

    def _rebuild(self, slot: Slot, tokens: NDArray[np.int32]) -> Future[None]:
        """Have the cells of a held slot computed again."""
        done: Future[None] = Future()

        def emit(event: Event) -> None:
            if isinstance(event, Done):
                done.set_result(None)
            elif isinstance(event, Failed):
                done.set_exception(event.error)

        request = Request(prompt=tokens.tolist(), n_predict=0)
        sampler = Sampler(Sampling(), seed=0, n_vocab=self._forward.n_vocab)
        with self._wake:
            task = Task(self._next_id, request, emit, sampler=sampler, seed=0, scales=slot.scales)
            self._next_id += 1
            self._tasks[task.id] = task
        self._begin(slot, task, tokens)
        return done

    def _let_go(self, slot: Slot) -> None:
        """A held slot is free again; any thread."""
        with self._wake:
            slot.t_last_used = time.perf_counter()
            slot.held = False
            self._wake.notify()

    def _drop_cells(self, slot: Slot) -> None:
        if slot.run is not None:
            self._pool.free(slot.run)
            slot.run = None
        slot.recall = slot.task is not None and slot.task.request.cache_prompt
        if slot.task is None:
            slot.length = 0

    def _advance(self, slot: Slot, task: Task, row: NDArray[np.float32]) -> int | None:
        """Choose the token at the end of a sequence from its logits; None where the answer is over with it."""
        request = task.request
        now = time.perf_counter()
        if task.generated:
            self._stats.inter_token.add(now - task.t_last)
        else:
            task.t_first = now
            self._stats.first_token.add(now - task.t_arrival)
            if request.n_predict == 0:
                self._finish(slot, task, "limit")
                return None
        # Its place in the whole answer, also where the context was shifted: no random number is used twice.
        token = task.sampler.sample(row, task.n_prompt + len(task.generated))
        probs = self._probs(task, row, token) if request.n_probs else None
        task.sampler.accept(token)
        task.generated.append(token)
        task.t_last = now
        self._n_predicted += 1

        answer = task.answer
        begin = answer.length
        text = answer.push(self._tokenizer.piece(token, special=request.special or token in request.preserved))
        if probs is not None:
            task.probs.append(probs)
            task.probs_at.append(begin)

        stop: StopType = "none"
        full = slot.length + 1 >= self.n_ctx
        if token in self._tokenizer.eog:
            stop = "eos"
        elif answer.stopping_word:
            stop = "word"
        elif answer.outdented or request.n_predict == len(task.generated):
            stop = "limit"
        elif full and not self._context_shift:
            stop, task.truncated = "limit", True
        elif 0 < request.t_max_predict_ms < 1e3 * (now - task.t_first) and "\n" in text:
            stop = "limit"
        if stop != "none":
            text += answer.finish()

        timings = task.timings() if request.timings_per_token or stop != "none" else None
        index = len(task.generated) - 1
        self._emit(task, Token(text, [token], None if probs is None else [probs], index, timings))
        if stop != "none":
            self._finish(slot, task, stop)
            return None
        if full:
            self._shift(slot, task)
        slot.append(token)
        return token

    def _shift(self, slot: Slot, task: Task) -> None:
        """The context is full: drop some of it, by llama-server's rule for how much."""
        request = task.request
        n_keep = task.n_prompt if request.n_keep < 0 else request.n_keep
        n_keep = max(0, min(n_keep + self._tokenizer.add_bos, self.n_ctx - 4))
        n_left = slot.length - n_keep
        n_discard = min(request.n_discard or n_left // 2, n_left - 1)
        log.info("task %d: context full, %d of %d tokens dropped behind %d", task.id, n_discard, slot.length, n_keep)
        slot.shift(n_keep, n_discard)
        task.drafter.forget()
        task.truncated = True

    def _probs(self, task: Task, row: NDArray[np.float32], token: int) -> TokenProbs:
        request = task.request
        if request.post_sampling_probs:
            own, top = task.sampler.candidates(request.n_probs, token)
            pairs = [(i, p, math.log(p) if p > 0 else -math.inf) for i, p in [(token, own), *top]]
        else:
            own, top = log_softmax_top(row, request.n_probs, token, self._top_k)
            pairs = [(i, math.exp(logp), logp) for i, logp in [(token, own), *top]]
        named = [TokenProb(i, self._tokenizer.piece(i, special=request.special), p, logp) for i, p, logp in pairs]
        return TokenProbs(named[0], tuple(named[1:]))

    def _finish(self, slot: Slot, task: Task, stop: StopType) -> None:
        content = task.answer.content
        probs = task.probs
        if stop == "word":
            probs = [item for item, at in zip(task.probs, task.probs_at, strict=True) if at < len(content)]
        timings = task.timings()
        self._predicted_seconds += 1e-3 * timings.predicted_ms
        self._n_steps += max(0, len(task.generated) - 1)
        result = Result(
            content=content,
            tokens=task.generated,
            probs=probs,
            stop_type=stop,
            stopping_word=task.answer.stopping_word,
            truncated=task.truncated,
            n_prompt=task.n_prompt,
            n_cached=task.n_cached,
            n_predicted=len(task.generated),
            n_tokens_cached=slot.used,
            has_new_line=task.answer.has_new_line,
            timings=timings,
            id_slot=slot.id,
            id_task=task.id,
            seed=task.seed,
            request=task.request,
        )
        self._release(slot)
        self._emit(task, Done(result))

    def _release(self, slot: Slot) -> None:
        if slot.task is not None:
            self._tasks.pop(slot.task.id, None)
            self._ends.append(time.monotonic())
        slot.release()

    def _end(self, slot: Slot, error: LlamadoError) -> None:
        task = slot.task
        assert task is not None
        self._release(slot)
        self._emit(task, Failed(error))

    def _end_all(self, error: LlamadoError) -> None:
        for slot in self._slots:
            if slot.task is not None:
                self._end(slot, error)
        with self._wake:
            waiting = [*self._waiting, *self._inbox]
            self._inbox.clear()
        self._waiting = []
        for task in waiting:
            self._tasks.pop(task.id, None)
            self._emit(task, Failed(error))
        fail_all(self._errands, error)
        self._calls.fail(error, for_good=self._closing)
        self._snapshot = self._take_snapshot()

    def _emit(self, task: Task, event: Event) -> None:
        if task.cancelled:
            return
        try:
            task.emit(event)
        except Exception:
            # Whoever asked cannot be told any more.
            log.exception("the receiver of task %d failed; the task is dropped", task.id)
            task.cancelled = True

    def _take_snapshot(self) -> EngineSnapshot:
        n_used = sum(run.used for run in self._pool.runs)
        stats = self._stats
        counters = Counters(
            self._n_prompt,
            self._prompt_seconds,
            self._n_cached,
            self._n_predicted,
            self._n_steps,
            self._predicted_seconds,
            self._n_decode,
            self._n_busy,
            self._n_tokens_max,
            stats.n_drafts,
            stats.n_drafted,
            stats.n_accepted,
            tuple(stats.accepted_at),
            stats.first_token.histogram(),
            stats.inter_token.histogram(),
            stats.queue.histogram(),
            stats.batch_tokens.histogram(),
        )
        slots = tuple(slot.snapshot() for slot in self._slots)
        n_busy = sum(slot.is_processing for slot in slots)
        n_deferred = len(self._waiting) + len(self._inbox) + len(self._errands)
        if n_busy or n_deferred or any(slot.held for slot in self._slots):
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        return EngineSnapshot(
            slots,
            counters,
            n_busy,
            n_deferred,
            n_used,
            self._pool.n_cells,
            self._fault,
            self._idle_since,
            len(self._store) if self._store is not None else 0,
            self._store.nbytes if self._store is not None else 0,
        )


class _Hold:
    """A slot that is held, for the job that holds it; see Held."""

    def __init__(self, engine: Engine, slot: Slot) -> None:
        self._engine, self._slot = engine, slot

    def tokens(self) -> NDArray[np.int32]:
        return self._slot.tokens[: self._slot.used].copy()

    def scales(self) -> Scales:
        return self._slot.scales

    def rebuild(self, tokens: NDArray[np.int32]) -> Future[None]:
        return self._engine._rebuild(self._slot, tokens)

    def read(self, start: int, n: int) -> Cells:
        run = self._slot.run
        if run is None or run.used < start + n:
            raise CellsGone("the cells of the slot were lost with a device")
        return self._engine._forward.read_cells(run.start + start, n)

    def make_room(self, n: int, scales: Scales) -> None:
        self._engine._empty(self._slot, n, scales)

    def write(self, tokens: NDArray[np.int32], cells: Cells) -> None:
        run, slot = self._slot.run, self._slot
        if run is None:
            raise CellsGone("the cells of the slot were lost with a device")
        used = run.used
        self._engine._forward.write_cells(run.start + used, tokens.size, cells)
        slot.tokens[used : used + tokens.size] = tokens
        run.used = slot.length = used + tokens.size

    def release(self) -> None:
        self._engine._let_go(self._slot)


class _Attempt(threading.Thread):
    """One attempt of a forward pass to get its devices back, on a thread of its own: it may take long."""

    def __init__(self, forward: Forward, *, elsewhere: bool) -> None:
        super().__init__(name="llamado-restore", daemon=True)
        self._forward, self._elsewhere = forward, elsewhere
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._forward.restore(self._elsewhere)
        except Exception as error:
            if not isinstance(error, LlamadoError):
                log.exception("restoring failed")
            self.error = error


def _age(slot: Slot) -> int:
    """Task id of a slot's request: lower came first; -1 for an idle slot."""
    return slot.task.id if slot.task is not None else -1


def _unmatched(error: Exception) -> LlamadoError:
    if isinstance(error, LlamadoError):
        return error
    failed = ConstraintFailed(f"what limits the answer's tokens failed: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _named(error: Exception) -> LlamadoError:
    if isinstance(error, LlamadoError):
        return error
    named = ComputeFailed(f"the forward pass failed: {type(error).__name__}: {error}")
    named.__cause__ = error
    return named
