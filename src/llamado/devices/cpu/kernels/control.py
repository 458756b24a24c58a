"""Program execution by a thread team: the loop over the operations, the barriers between them, and the wait for the
next program.

A program is an array of (kernel address, fields address, barrier before it: 0 or 1). Operations without a barrier
between them touch no common memory, so a thread that finds no work left in one continues with the next. Every operation
has counters of its own, one per thread, which divide its work.

Threads that wait for each other poll a word that one of them writes. If many threads poll one word, writing it takes as
long as notifying each of them. So threads form groups (`GROUP`): the last thread of a group to arrive counts for it
among the groups, and the last thread of all notifies each group through a word of its own.

Thread 0 is the caller, which may have other work first: it launches the program and joins later. Until then the other
threads do its share of the work, as they do for any late thread, and thread 1 arrives at the barriers for it.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.simd import GROUP, I32, I64, Code, Value, Work, groups_of

# byte offsets in the block the threads share, each on its own cache line
GENERATION, PROGRAM, LENGTH, COUNTERS, THREADS, ARRIVED, FINISHED, SLEEPERS, TEAM, COUNTER_STEP, TIMES = (
    64 * i for i in range(11)
)
# 1 while thread 1 stands in for thread 0; 1 once thread 0 has come; the barrier (the first is 1) and the operation from
# which thread 0 takes part
_ABSENT, _PRESENT, _ENTRY, _ENTRY_AT, _GROUPS = (64 * i for i in range(11, 16))
# of each group from _GROUPS on: the number of arrivals, and the last barrier the group was released from
_GROUP_BYTES, _RELEASED = 128, 64


def state_words(n_threads: int) -> int:
    """Words (i64) of the block that `n_threads` threads share."""
    return (_GROUPS + _GROUP_BYTES * groups_of(n_threads)) // 8


FUTEX = {"x86_64": 202, "aarch64": 98, "arm64": 98}.get(platform.machine()) if sys.platform == "linux" else None
WAIT, WAKE = 128, 129  # private to the process
# A thread without a program polls this often for the next one, 20 to 50 µs, then this often with yields of its core in
# between, one to two milliseconds in all: longer than the gap between two steps of several sequences. Then it sleeps;
# waking it costs the launching thread as much as a dozen system calls.
_POLLS, _YIELDS = 1000, 5000


def _pause(c: Code) -> None:
    if platform.machine() in ("x86_64", "AMD64"):
        c.intrinsic("llvm.x86.sse2.pause", None, [])


def _run(c: Code, state: Value, thread: Value, threads: Value, entry: Value | None = None) -> None:
    """Run the program of `state` as one of its threads; with an `entry`, as thread 0 from that barrier on."""
    program, length, counters = (c.load(I64, state + at) for at in (PROGRAM, LENGTH, COUNTERS))
    step = c.load(I64, state + COUNTER_STEP)
    times = c.load(I64, state + TIMES)
    barriers = c.var(c.i64(0) if entry is None else entry - 1)
    first = c.i64(0) if entry is None else c.load(I64, state + _ENTRY_AT)
    is_substitute = c.var((thread.equals(1) & c.load(I64, state + _ABSENT).differs(0)).zext(I64))
    with c.range(first, length) as i:
        op = program + i * 24
        stamps = times + (i * threads + thread) * 24
        _stamp(c, times, stamps)
        with c.when(c.load(I64, op + 16).differs(0)):
            barriers.value = barriers.value + 1
            with c.when(is_substitute.value.differs(0)):
                here = c.atomic_load(state + _PRESENT)
                with c.when(here.differs(0)):
                    is_substitute.value = c.i64(0)
                    _open_barrier(c, state, barriers.value, i)
                with c.when(here.equals(0)):
                    c.atomic_add(
                        state + _GROUPS, 1
                    )  # never the last arrival, because this thread itself arrives after it
            _barrier(c, state, thread, threads, barriers.value)
        _stamp(c, times, stamps + 8)
        c.call_address(c.load(I64, op), [c.load(I64, op + 8), thread, threads, counters + i * 8, step])
        _stamp(c, times, stamps + 16)
    with c.when(is_substitute.value.differs(0)):
        _open_barrier(c, state, barriers.value + 1, length)


def _open_barrier(c: Code, state: Value, barrier: Value, operation: Value) -> None:
    c.store(state + _ENTRY_AT, operation)
    c.atomic_store(state + _ENTRY, barrier)


def _stamp(c: Code, times: Value, at: Value) -> None:
    """Store the cycle counter (on ARM the time) if times are requested (TIMES is not 0)."""
    with c.when(times.differs(0)):
        c.store(at, c.clock())


def _barrier(c: Code, state: Value, thread: Value, threads: Value, number: Value) -> None:
    """Wait until all threads have arrived at the barrier of this number; the program's first is 1."""
    groups, group = groups_of(threads), thread // GROUP
    own = state + group * _GROUP_BYTES + _GROUPS
    due = number * c.min(threads - group * GROUP, GROUP)
    arrived = c.atomic_add(own, 1) + 1
    with c.when(groups.equals(1)):
        _spin_until(c, lambda: c.atomic_load(own) >= due)
    with c.when(groups > 1):
        with c.when(arrived.equals(due)):
            last = (c.atomic_add(state + ARRIVED, 1) + 1).equals(number * groups)
            with c.when(last), c.range(0, groups) as other:
                c.atomic_store(state + other * _GROUP_BYTES + (_GROUPS + _RELEASED), number)
        _spin_until(c, lambda: c.atomic_load(own + _RELEASED) >= number)


def _spin_until(c: Code, done: Callable[[], Value]) -> None:
    """Poll a condition that another running thread is about to make true; yield the core if it takes long."""
    spins = c.var(c.i64(0))
    with c.loop() as loop:
        c.leave(loop, done())
        _pause(c)
        spins.value = spins.value + 1
        with c.when(spins.value > 200):
            c.intrinsic("sched_yield", I32, [])


def _start(c: Code, state: Value, absent: Value) -> None:
    """Start the program of `state` on all threads except the caller's."""
    n, team = c.load(I64, state + THREADS), c.load(I64, state + TEAM)
    c.atomic_store(state + ARRIVED, c.i64(0))
    with c.range(0, groups_of(n)) as group:
        for word in (0, _RELEASED):
            c.atomic_store(state + group * _GROUP_BYTES + (_GROUPS + word), c.i64(0))
    c.atomic_store(state + FINISHED, c.i64(0))
    c.store(state + _ABSENT, absent)
    c.store(state + _PRESENT, c.i64(0))
    c.store(state + _ENTRY, c.i64(0))
    with c.when(team > 1):
        c.atomic_add(state + GENERATION, 1)
        if FUTEX is not None:
            with c.when(c.atomic_load(state + SLEEPERS) > 0):
                _futex(c, state + GENERATION, WAKE, c.i64(1 << 20))


def _wait(c: Code, state: Value) -> None:
    """Wait until all other threads are done."""
    team = c.load(I64, state + TEAM)
    _spin_until(c, lambda: c.atomic_load(state + FINISHED) >= team - 1)


@kernel("state")
def dispatch(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Run the program of `state` on all threads, with the caller as thread 0; return when all are done."""
    _start(c, a.state, c.i64(0))
    _run(c, a.state, c.i64(0), c.load(I64, a.state + THREADS))
    _wait(c, a.state)


@kernel("state")
def launch(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Start the program of `state` on all other threads and return; `join` must follow."""
    _start(c, a.state, c.i64(1))


@kernel("state")
def join(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Join the launched program as thread 0; return when all are done."""
    n = c.load(I64, a.state + THREADS)
    entry = c.var(c.i64(1))
    with c.when(n.equals(1)):  # no other thread stands in for it
        c.store(a.state + _ENTRY_AT, c.i64(0))
    with c.when(n > 1):
        c.atomic_store(a.state + _PRESENT, c.i64(1))
        _spin_until(c, lambda: c.atomic_load(a.state + _ENTRY) > 0)
        entry.value = c.atomic_load(a.state + _ENTRY)
    _run(c, a.state, c.i64(0), n, entry.value)
    _wait(c, a.state)


@kernel("state")
def work(c: Code, a: SimpleNamespace, work: Work) -> None:
    """Main loop of thread `thread` ≥ 1: wait for a program (poll, then sleep) and run it, until the program is 0."""
    seen = c.var(c.i64(0))
    with c.loop() as life:
        spins = c.var(c.i64(0))
        with c.loop() as waiting:
            c.leave(waiting, c.atomic_load(a.state + GENERATION).differs(seen.value))
            _pause(c)
            spins.value = spins.value + 1
            with c.when(spins.value > _POLLS):
                c.intrinsic("sched_yield", I32, [])
            with c.when(spins.value > _POLLS + _YIELDS):
                if FUTEX is None:
                    c.intrinsic("usleep", I32, [c.const(I32, 200)])
                else:
                    c.atomic_add(a.state + SLEEPERS, 1)
                    _futex(c, a.state + GENERATION, WAIT, seen.value)
                    c.atomic_add(a.state + SLEEPERS, -1)
        seen.value = c.atomic_load(a.state + GENERATION)
        c.leave(life, c.load(I64, a.state + PROGRAM).equals(0))
        n = c.load(I64, a.state + THREADS)
        with c.when(work.thread < n):
            _run(c, a.state, work.thread, n)
        # threads that this program did not use report, too, so that none of them can take the next program for this one
        c.atomic_add(a.state + FINISHED, 1)


def _futex(c: Code, address: Value, operation: int, value: Value) -> None:
    zero = c.i64(0)
    c.intrinsic("syscall", I64, [c.i64(FUTEX or 0), address, c.i64(operation), value, zero, zero, zero])
